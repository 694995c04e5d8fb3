"""Bytes of tensors, from memory to files and back."""
