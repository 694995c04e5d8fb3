"""Copies of tensors' bytes between memory, GPUs and files."""
