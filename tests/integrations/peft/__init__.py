"""Tests of `dbuffer.integrations.peft`."""
