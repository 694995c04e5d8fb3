"""Tests of `dbuffer.publish`."""
