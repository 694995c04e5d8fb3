"""Senders, which publish weights: from one process, or from all ranks of a sharded trainer."""
