"""Whole programs that train over a store, small enough for two cores.

``python -m dbuffer.examples.NAME``: ``cartpole``, ``grpo`` and ``lora`` need
``pip install '.[examples]'`` in a clone of dbuffer; ``grpo``, ``atropos`` and ``lightrft`` need
vLLM as well. ``sglang_rollouts`` drives an SGLang server. With ``--broken-sync`` new weights are
held back, and an example must fail.
"""
