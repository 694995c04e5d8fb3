"""Following a store with an inference engine: the part common to all engines.

In each of the engine's processes, `endpoint` answers a follower's requests. `rank_receiver` stages
a version, and loads it together with the other ranks (`rank_channel`). `rank_model` loads it
into one rank's model. `shape_check` first checks the version against a copy of the model without
data (`meta_model`). The engine loads the first version with its own loaders, which is called a
reload. `plan` fills later versions into the model by direct copies.

In the process that drives the engine, `follower` switches the engine once per call, and
`background` makes these calls in a thread until it is closed. `store_view` reads the store,
`reporting` has metrics and log, and `server` calls an inference server over HTTP.

Both sides use `contract` (the methods of an engine and its ranks, requests and answers) and
`engine_options`. The docstring of `follower` lists the steps of a switch.
"""
