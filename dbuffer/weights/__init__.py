"""Weights that are published, and the targets of a load: names, sources, targets, checkpoints."""
