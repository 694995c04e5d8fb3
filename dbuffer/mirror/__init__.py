"""Mirrors: copies of a remote store in a local one, made once per node."""
