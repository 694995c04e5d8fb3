"""Switches by copies alone: known before the pause, and verified to be all that a reload does.

`WeightLoader` loads a rank's versions. Its `prepare` binds the copies of a version while the engine
serves: a `PreparedSwitch`. In the pause, `apply` does a switch that is verified, and `reload` lets
the engine reload, and verifies the switch: a `Mismatch` names the layers with which the reload does
more, and these get an image, or stay with it.

The copies come from a `LoadTrace`, the record of what the model's loaders do: a `CopyOp` for each
part of a parameter. A `CopyPlan` says which layers of the live model are copied to, which get an
`Image` because they pack or quantize their weights, and which stay with the reload. Where only some
elements changed, a `Patch` takes the place of a copy.
"""
