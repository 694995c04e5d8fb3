"""Tests of the project: documents, examples, types, packaging, benchmarks, and the suite."""
