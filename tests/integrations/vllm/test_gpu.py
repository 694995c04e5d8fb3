"""Real engines on a GPU: what the CPU build of vLLM has not.

Parameters that lie where kernels read them, in captured CUDA graphs and compiled code; deltas that
patch them there; sleep, in which weights are really gone; and next to no free memory.
"""

from __future__ import annotations

import pytest
import torch

from tests.programs.vllm_gpu import CASES
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("case", CASES)
def test_engines_on_a_gpu(tmp_path, case):
    observe("vllm_gpu.py", tmp_path, case)
