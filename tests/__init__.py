"""Tests of dbuffer; `CONTRIBUTING.md` says which to run."""
