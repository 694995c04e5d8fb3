"""Receivers, which read versions from a store, on demand or in advance."""
