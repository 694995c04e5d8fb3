"""The commands of ``dbuffer``."""
