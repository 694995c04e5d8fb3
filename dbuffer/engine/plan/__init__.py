"""Direct copies in place of the engine's reload, verified to give the same result.

A `LoadTrace` records the writes of a model's loaders. From the trace, a `CopyPlan` decides how a
switch fills each layer: by copies; from an `Image` (the layer's packed or quantized weights, made
beforehand); or by the engine's reload. A `PreparedSwitch` has the copies for one version, or a
`Patch` where few elements changed. A `Verifier` compares the switch with the engine's reload. In
the next plan, layers that differ get an image or are left to the reload.
"""
