"""Scopes of a run: test files that go to one process together.

Programs with vLLM are forks of a process that has imported it, for 9 s of processor time. Each
process that runs such files has one; so two processes run all of them, side by side. Files whose
tests need four ranks of a trainer share these (`tests/core/publish/conftest.py`). An import of peft
takes 2 s.
"""

from __future__ import annotations

SCOPES = {
    "vLLM": ("tests/integrations/vllm/",),
    "frameworks with vLLM": (
        "tests/core/test_examples.py",
        "tests/core/tools/test_demo.py",
        "tests/integrations/atropos/test_atropos.py",
        "tests/integrations/lightrft/",
        "tests/integrations/torchrl/",
        "tests/integrations/trl/",
        "tests/integrations/verl/",
    ),
    "peft": ("tests/integrations/peft/",),
    "ranks": (
        "tests/core/publish/test_sharded.py",
        "tests/core/publish/test_sharded_deltas.py",
        "tests/core/publish/test_stages.py",
        "tests/core/publish/test_zero3.py",
    ),
}
"""Beginnings of the paths of a scope's files."""


def scope_of(path: str) -> str:
    """Return the name of a file's scope: its path, unless it goes with others."""
    for name, beginnings in SCOPES.items():
        if path.startswith(beginnings):
            return name
    return path
