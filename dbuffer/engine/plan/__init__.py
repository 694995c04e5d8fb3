"""Direct copies in place of the engine's reload, verified to give the same result.

A `LoadTrace` records the writes of a model's loaders. From it, a `CopyPlan` says how a switch fills
each layer: by copies, by an `Image` if the layer packs or quantizes its weights, or by the reload.
A `PreparedSwitch` has the copies for one version, or a `Patch` where few elements changed. A
`Verifier` compares the switch with the engine's reload. Layers that differ get an image in the next
plan, or stay with the reload.
"""
