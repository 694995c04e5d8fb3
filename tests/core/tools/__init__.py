"""Tests of `dbuffer.tools`."""
