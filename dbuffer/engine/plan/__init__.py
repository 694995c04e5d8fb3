"""Direct copies in place of the engine's reload, verified to give the same result.

The steps from a model's loaders to a switch by copies:

1. A `LoadTrace` records the loaders' writes: a `CopyOp` for each part of a parameter.
2. A `CopyPlan` says how a switch fills each layer of the live model: by copies; by an `Image`, if
   the layer packs or quantizes its weights; or by the engine's reload.
3. A `PreparedSwitch` has the copies for one version, made while the engine serves. If only some
   elements of a parameter changed, a `Patch` replaces the copy.
4. A `Verifier` compares the switch with the engine's reload. A `Mismatch` names the layers that the
   reload changes further. The next plan gives these an image, or leaves them to the reload.
"""
