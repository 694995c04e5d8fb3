"""Tests of `dbuffer.integrations.sglang`."""
