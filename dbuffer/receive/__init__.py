"""Receivers: a snapshot of the newest version, loaded now or staged ahead."""
