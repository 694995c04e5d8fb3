"""A remote store followed into a local one, once per node."""
