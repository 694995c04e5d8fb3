"""Tests of `dbuffer.receive`."""
