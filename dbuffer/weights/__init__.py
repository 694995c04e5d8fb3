"""Weights to publish and targets to load into: names, sources, targets, checkpoints."""
