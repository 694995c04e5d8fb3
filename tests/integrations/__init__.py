"""Tests with the systems that dbuffer plugs into: a folder for each."""
