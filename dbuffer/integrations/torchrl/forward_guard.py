"""`ForwardGuard`: no forward call of a model sees weights of two versions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn

from dbuffer.errors import WeightsMismatchError


class ForwardGuard:
    """Keeps a model's forward calls and the loading of its weights apart.

    A worker loads weights in a thread while another one runs the policy. Forward calls exclude
    loading, and loading forward calls; forward calls do not exclude each other. Between two forward
    calls of one rollout the weights may change, as with every scheme of TorchRL.

    What it cannot see are calls that bypass the module: a replayed CUDA graph, or a transform that
    is applied by other methods than ``forward``.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._loads = 0
        self._local = threading.local()
        self._problem: str | None = None

    def attach(self, model: Any) -> None:
        """Guard the forward calls of a module; anything else has none. Again does nothing."""
        if not isinstance(model, nn.Module) or self._is_attached(model):
            return
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        # Also when forward raises: the count of running calls must go down again.
        model.register_forward_hook(self._after_forward, always_call=True)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Wait for running forward calls to end, and let none begin.

        The thread that loads must not be in a forward call itself.
        """
        with self._condition:
            self._loads += 1
            try:
                self._condition.wait_for(lambda: not self._running)
            except BaseException:
                self._loads -= 1
                raise
        try:
            yield
        finally:
            with self._condition:
                self._loads -= 1
                self._condition.notify_all()

    def refuse(self, problem: str) -> None:
        """Let forward calls raise: the model's weights are not of one version."""
        self._problem = problem

    def accept(self) -> None:
        """Let forward calls run again: they are."""
        self._problem = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this guard: a collector may copy the guarded policy and run the copy."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle as a new guard: in another process, other threads run the model."""
        return type(self), ()

    def _is_attached(self, model: nn.Module) -> bool:
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to ask
        return any(getattr(hook, "__self__", None) is self for hook in hooks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        depth = getattr(self._local, "depth", 0)
        if not depth:  # a model that calls itself must not wait for itself
            with self._condition:
                self._condition.wait_for(lambda: not self._loads)
                if self._problem is not None:
                    raise WeightsMismatchError(
                        f"this model refuses to run: {self._problem}; it runs again when the "
                        "next version is loaded"
                    )
                self._running += 1
        self._local.depth = depth + 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        depth = getattr(self._local, "depth", 0)
        if not depth:  # it was refused, and has not begun
            return
        self._local.depth = depth - 1
        if depth == 1:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()
