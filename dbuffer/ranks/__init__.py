"""Steps of a publish, which all ranks of a trainer take together."""
