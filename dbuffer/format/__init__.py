"""The format on disk: the records of a store, the layout of weights files, and deltas."""
