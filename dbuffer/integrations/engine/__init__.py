"""Following a store with an inference engine: what all engines share.

In each of an engine's processes, `endpoint` answers what a follower asks, `rank_receiver` receives,
`ranks` lets them agree, `shape_check` tells whether weights fit a copy without data (`model_copy`),
`plan` makes a switch copies alone; `serving` is what these need of the engine's own model.

Where an engine is driven, `follower` switches it when told to, `background` until told to stop;
`states` is what a follower knows of its engine, `store_view` what the store says to it, `reporting`
what it tells.

Between the two: `protocol` (an engine's calls), `messages` (what travels), `options`; and `server`
for calls over HTTP.
"""
