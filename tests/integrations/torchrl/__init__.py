"""Tests of `dbuffer.integrations.torchrl`."""
