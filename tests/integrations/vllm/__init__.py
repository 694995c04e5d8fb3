"""Tests of `dbuffer.integrations.vllm`."""
