"""The format on disk: the records of a store, where a tensor lies in its file, and deltas."""
