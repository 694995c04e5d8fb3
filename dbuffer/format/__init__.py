"""The format on disk: the records of a store, and where a tensor lies in its file."""
