"""Mirrors, which copy the versions of a remote store into a local store, once per node."""
