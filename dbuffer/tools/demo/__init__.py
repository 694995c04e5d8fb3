"""Reinforcement learning for real, small enough for two cores, with its weights in a store.

A tiny Qwen3 is trained in this process by policy gradient, on rollouts that a vLLM engine in
another process samples with the newest weights it finds in the store.
"""

from dbuffer.tools.demo.loop import run_demo
from dbuffer.tools.demo.records import DemoError, DemoOptions, DemoResult, Step
from dbuffer.tools.demo.render import show_demo

__all__ = ["DemoError", "DemoOptions", "DemoResult", "Step", "run_demo", "show_demo"]
