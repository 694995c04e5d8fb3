"""Receivers, which open a store's versions on demand, or stage them in advance."""
