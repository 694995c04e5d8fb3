"""What is published and what it is loaded into: names, sources, targets, checkpoints."""
