"""Tests of `dbuffer.runtime`."""
