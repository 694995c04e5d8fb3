"""Extension of vLLM's workers that keeps layers live, and notes when a rank stages a version.

vLLM imports this module in each worker, before it loads the model.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops

from benchmarks.steps import Marks
from dbuffer.receive.stager import Stager

# Disable packing: layers then compute with their parameters as loaded. vLLM has no public option.
_custom_ops._supports_onednn = False  # noqa: SLF001
torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001

_MARKS = Marks()
_MARKS.watch(Stager, Stager._stage)  # noqa: SLF001


class LiveWorker:
    """Methods for ``collective_rpc``."""

    def benchmark_marks(self) -> dict[str, tuple[float, float]]:
        """Return when this rank staged the last version."""
        return _MARKS.last
