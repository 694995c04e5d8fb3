"""The commands of ``dbuffer``, a module each."""
