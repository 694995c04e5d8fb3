"""Following a store with an inference engine: the part common to all engines.

`contract` lists the methods of an engine and of its ranks. In each of an engine's processes,
`endpoint` answers a follower's requests. `rank_receiver` takes and loads a version together with
the other ranks, over a `rank_channel`. `rank_model` loads one rank's model: `shape_check` checks a
version against a copy without data (`meta_model`), `plan` turns a switch into copies.

Where an engine is driven, `follower` switches it on demand, `background` until it is closed;
`store_view` reads the store, `reporting` has metrics and log. Between the two: `messages` (requests
and answers), `engine_options`; and `server` for calls over HTTP.

`follower` lists the steps of a version's way, from the store to an answer under its label.
"""
