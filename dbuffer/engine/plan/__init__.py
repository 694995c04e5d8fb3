"""Switches by copies alone: known before the pause, and verified to be all that a reload does.

The copies of a version, bound while the engine serves, are a `PreparedSwitch`. The engine's reload
verifies it: a `Mismatch` names the layers that a reload does more to; these get an image, or stay
with the reload.

The copies come from a `LoadTrace`, the record of the model's loaders: a `CopyOp` for each
part of a parameter. A `CopyPlan` says which layers of the live model are copied to, which get an
`Image` because they pack or quantize their weights, and which stay with the reload. If only some
elements changed, a `Patch` takes the place of a copy.
"""
