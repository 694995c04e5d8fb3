"""Tests of `dbuffer.integrations.verl`."""
