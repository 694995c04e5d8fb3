"""Tests of `dbuffer.store`."""
