"""Tests of `dbuffer.io`."""
