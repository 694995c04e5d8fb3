"""Extension of vLLM's workers: layers that stay live, and when the rank staged a version.

vLLM imports it in each worker, before the model is loaded.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops

from benchmarks.steps import Marks
from dbuffer.receive.stager import Stager

# Parameters are read where they lie, as on a GPU; vLLM has no public switch.
_custom_ops._supports_onednn = False  # noqa: SLF001
torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001

_MARKS = Marks()
_MARKS.watch(Stager, Stager._stage)  # noqa: SLF001


class LiveWorker:
    """Methods for ``collective_rpc``."""

    def benchmark_marks(self) -> dict[str, tuple[float, float]]:
        """Return when this rank staged the last version."""
        return _MARKS.last
