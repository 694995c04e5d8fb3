"""Senders: of one process, of all ranks of a sharded trainer, of a model in the store."""
