"""Tests of `dbuffer.ranks`."""
