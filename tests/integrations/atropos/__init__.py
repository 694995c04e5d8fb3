"""Tests of `dbuffer.integrations.atropos`."""
