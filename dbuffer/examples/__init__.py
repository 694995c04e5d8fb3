"""Whole programs that train over a store, small enough for two cores.

``python -m dbuffer.examples.NAME``: ``cartpole``, ``grpo`` and ``lora`` need
``pip install '.[examples]'`` in a clone of dbuffer; ``grpo``, ``atropos``, ``lightrft`` and ``trl``
(``'.[examples,trl]'``) need vLLM as well. ``sglang_rollouts`` drives an SGLang server. With
``--broken-sync`` new weights are held back, and an example must fail.
"""

import os

# Quiet, and each process on one core: the engine needs the other. Here, because torch and vLLM
# look at it when they are imported.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)
