"""Whole programs that train over a store, small enough for two cores.

``python -m dbuffer.examples.cartpole`` and ``python -m dbuffer.examples.grpo`` need
``pip install 'dbuffer[examples]'``; the second one needs vLLM as well.
``python -m dbuffer.examples.sglang_rollouts`` drives an SGLang server.
"""
