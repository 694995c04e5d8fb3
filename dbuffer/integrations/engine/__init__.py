"""Following a store with an inference engine: what all engines share.

In each of an engine's processes, `endpoint` answers a follower's requests, `rank_receiver`
receives, `rank_channel` lets ranks agree, `shape_check` checks weights against a copy without data
(`model_copy`), `plan` makes a switch copies alone; `engine_rank` is the contract of a rank.

Where an engine is driven, `follower` switches it when told to, `background` until told to stop;
`states` is what a follower knows of its engine, `store_view` what the store says to it, `reporting`
what it tells.

Between the two: `protocol` (an engine's calls), `messages` (requests and answers),
`engine_options`; and `server` for calls over HTTP.
"""
