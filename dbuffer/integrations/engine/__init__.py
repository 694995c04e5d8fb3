"""Following a store with an inference engine: what all engines share.

In each of an engine's processes, `endpoint` answers a follower's requests, `rank_receiver`
receives, `rank_channel` lets ranks agree, `shape_check` checks weights against a copy without data
(`meta_model`), `plan` makes a switch copies alone; `engine_rank` is the contract of a rank.

Where an engine is driven, `follower` switches it on demand, `background` until it is closed;
`store_view` is what it reads of the store, `reporting` its metrics and log.

Between the two: `protocol` (an engine's calls), `messages` (requests and answers),
`engine_options`; and `server` for calls over HTTP.
"""
