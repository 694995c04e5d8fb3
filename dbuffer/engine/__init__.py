"""Following a store with an inference engine: the part common to all engines.

`contract` lists the methods that an engine and its ranks must have.

In each of the engine's processes:

* `endpoint` answers a follower's requests;
* `rank_receiver` stages and loads a version, in step with the other ranks (`rank_channel`);
* `rank_model` loads a version into one rank's model. `shape_check` first checks the version against
  a copy of the model without data (`meta_model`). `plan` replaces later reloads by direct copies.

In the process that drives the engine:

* `follower` switches the engine when its caller asks; `background` keeps switching until closed;
* `store_view` reads the store, and `reporting` has the metrics and the log;
* `server` calls an inference server over HTTP.

Both sides use `messages` (requests and answers) and `engine_options`. The docstring of `follower`
lists the steps of a switch, from a version in the store to responses under its label.
"""
