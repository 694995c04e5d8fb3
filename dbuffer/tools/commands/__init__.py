"""Commands of ``dbuffer``, such as ``dbuffer publish``."""
