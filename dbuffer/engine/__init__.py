"""Following a store with an inference engine: what all engines share.

`contract` is what an engine and each of its ranks must offer. In each of an engine's processes,
`endpoint` answers a follower's requests. `rank_receiver` takes and loads a version together with
all ranks, which agree over a `rank_channel`; `rank_model` is what one rank does with its model:
`shape_check` checks a version against a copy without data (`meta_model`, watched by
`load_recorder`), `plan` makes a switch copies alone.

Where an engine is driven, `follower` switches it on demand, `background` until it is closed;
`store_view` is what it reads of the store, `reporting` its metrics and log. Between the two:
`messages` (requests and answers), `weight_label` (the version that an engine has),
`engine_options`; and `server` for calls over HTTP.
"""
