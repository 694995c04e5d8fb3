"""Tests of `dbuffer.integrations.lightrft`."""
