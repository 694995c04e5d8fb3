"""Tests of `dbuffer.mirror`."""
