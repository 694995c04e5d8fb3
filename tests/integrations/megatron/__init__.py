"""Tests of the lines for Megatron-Core in ``docs/integrations/more.md``."""
