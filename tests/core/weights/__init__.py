"""Tests of `dbuffer.weights`."""
