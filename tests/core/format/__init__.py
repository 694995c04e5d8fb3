"""Tests of `dbuffer.format`."""
