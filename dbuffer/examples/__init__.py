"""Whole programs that train over a store, small enough for two cores.

``python -m dbuffer.examples.cartpole``, ``...grpo`` and ``...lora`` need
``pip install 'dbuffer[examples]'``; ``grpo`` needs vLLM as well.
``python -m dbuffer.examples.sglang_rollouts`` drives an SGLang server.
"""
