"""Tests of `dbuffer.integrations.trl`."""
