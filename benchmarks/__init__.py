"""Benchmarks: dbuffer's speed, compared with plain copies and with other transports."""
