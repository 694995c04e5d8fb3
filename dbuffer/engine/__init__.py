"""Following a store with an inference engine: the part common to all engines.

`contract` lists the methods of an engine and of its ranks. In each of an engine's processes,
`endpoint` answers a follower's requests. `rank_receiver` takes and loads a version together with
the other ranks, over a `rank_channel`. `rank_model` loads one rank's model: `shape_check` checks a
version against a copy without data (`meta_model`, watched by `load_recorder`), `plan` turns a
switch into copies.

Where an engine is driven, `follower` switches it on demand, `background` until it is closed;
`store_view` reads the store, `reporting` has metrics and log. Between the two:
`messages` (requests and answers),
`engine_options`; and `server` for calls over HTTP.

A version's way, from the store to an answer under its label:

1. Each rank's stager (`receive.stager`, a thread of its own) sees it, holds it, lets `RankModel`
   check and prepare it, copies or maps it, and says in the rank's record that it is ready.
2. `Follower.sync` waits until all ranks are. The engine serves until here.
3. It pauses the engine, which drops the caches (`Engine.pause`).
4. `RankReceiver.update`, on all ranks: agree on the version, load it, tell each other.
5. The follower reads the outcome from the engine's record, sets the label, and resumes.
6. It lets the record be written (`acknowledge`); the stager attests the version, and lets it go.
"""
