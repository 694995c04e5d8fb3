"""Tests that need no engine: a folder for each package; those here span several."""
