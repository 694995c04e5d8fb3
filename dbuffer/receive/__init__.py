"""Receivers: a snapshot of the newest version, loaded now or made ready in advance."""
