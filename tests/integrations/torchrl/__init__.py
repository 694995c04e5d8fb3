"""Tests of `dbuffer.integrations.torchrl`."""

from __future__ import annotations

from typing import Any


class _Parts:
    """`tests.support.torchrl_parts`, imported at its first use: torchrl takes 9 s.

    Each process of a run imports all test files.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at all globals for marks of its own
            raise AttributeError(name)
        from tests.support import torchrl_parts

        return getattr(torchrl_parts, name)


parts = _Parts()
