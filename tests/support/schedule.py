"""Groups of test files: each group runs in one process, and the slowest groups begin first.

Programs with vLLM are forks of a process that has imported it, for 9 s of processor time. Each
process that runs such files has one; so two processes run all of them, side by side. Files whose
tests need ranks of a trainer share four ranks, or the process that has imported what ranks need
(`tests/core/publish/conftest.py`). An import of peft takes 2 s. Each other file is a group of its
own.
"""

from __future__ import annotations

GROUPS = {
    "lab": ("tests/lab/",),
    "vLLM": ("tests/integrations/vllm/",),
    "frameworks with vLLM": (
        "tests/project/test_examples.py",
        "tests/project/test_demo.py",
        "tests/integrations/atropos/test_atropos.py",
        "tests/integrations/lightrft/",
        "tests/integrations/peft/test_sharded.py",
        "tests/integrations/torchrl/",
        "tests/integrations/trl/",
        "tests/integrations/verl/",
    ),
    "ranks": (
        "tests/core/publish/test_sharded.py",
        "tests/core/publish/test_stages.py",
        "tests/core/publish/test_zero3.py",
        "tests/core/test_random_worlds.py",
    ),
    "peft": ("tests/integrations/peft/",),
}
"""Beginnings of the paths of each group's files, the slowest group first."""

SLOW = (
    "tests/core/mirror/test_bucket.py",
    "tests/core/mirror/test_mirror.py",
    "tests/core/mirror/test_bucket_faults.py",
    "tests/core/test_crash.py",
    "tests/integrations/atropos/test_bridge.py",
    "tests/project/test_types.py",
    "tests/integrations/sglang/test_sglang.py",
    "tests/core/test_damaged_store.py",
    "tests/core/test_import.py",
    "tests/core/test_torn_reads.py",
    "tests/core/mirror/test_worlds.py",
)
"""Files that take 15 s and more, the slowest first."""

_RANKS = {name: rank for rank, name in enumerate([*GROUPS, *SLOW])}


def group_of(path: str) -> str:
    """Return the name of a file's group: its path, unless it goes with others."""
    for name, beginnings in GROUPS.items():
        if path.startswith(beginnings):
            return name
    return path


def rank_of(group: str) -> int:
    """Return the place of a group among those that begin first."""
    return _RANKS.get(group, len(_RANKS))
