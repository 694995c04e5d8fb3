"""Reinforcement learning for real, small enough for two cores, with its weights in a store.

A tiny Qwen3 is trained in this process by policy gradient, on rollouts that a vLLM engine in
another process samples with the newest weights it finds in the store.
"""
