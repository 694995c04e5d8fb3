"""`ForwardGuard`: no forward call of a model sees weights of two versions."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self, cast

import torch
from torch import nn

from dbuffer.errors import WeightsMismatchError

_PATIENCE_S = 10.0
"""Longest time that a call is kept out by a load that waits for others to end."""
_CALL_CHECK_S = 0.5
"""Interval at which a load that waits looks for calls that ended without a hook."""


class ForwardGuard:
    """Lock between a model's forward calls and a load of its weights. Calls may run together.

    A worker loads weights in a thread while another one runs the policy. Between two forward calls
    of one rollout the weights may change, as with every scheme of TorchRL. Calls that bypass the
    module are not seen: a replayed CUDA graph, other methods of a transform than ``forward``.

    While a load waits for running calls, no other call begins, or calls without a gap would keep it
    waiting. A running call may itself wait for a call of another thread: that begins after a while.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: dict[int, list[FrameType]] = {}
        """By thread: frames of torch that run the thread's calls, outermost first."""
        self._num_waiting = 0
        """Loads that wait for calls to end."""
        self._num_loading = 0
        """Loads that run."""
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
        """Wait for running forward calls to end, and let none begin; not from within one."""
        with self._condition:
            self._num_waiting += 1
            try:
                while self._has_calls():
                    self._condition.wait(_CALL_CHECK_S)
                self._num_loading += 1
            finally:
                self._num_waiting -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._num_loading -= 1
                self._condition.notify_all()

    def refuse(self, problem: str) -> None:
        """Let forward calls raise: the model's weights are not of one version."""
        self._problem = problem

    def accept(self) -> None:
        """Let forward calls run again."""
        self._problem = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this guard: a collector may copy the guarded policy and run the copy."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle as a new guard: in another process, other threads run the model."""
        return type(self), ()

    def _has_calls(self) -> bool:
        running = self._running.items()
        self._running = {thread: calls for thread, calls in running if not _is_over(calls[0])}
        return bool(self._running)

    def _is_attached(self, model: nn.Module) -> bool:
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to ask
        return any(getattr(hook, "__self__", None) is self for hook in hooks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            calls = self._running.get(thread)
            if calls is not None and not _is_over(calls[0]):
                calls.append(_calling_frame())  # a model that calls itself must not wait for itself
                return
            self._condition.wait_for(
                lambda: not (self._num_waiting or self._num_loading), _PATIENCE_S
            )
            self._condition.wait_for(lambda: not self._num_loading)
            if self._problem is not None:
                raise WeightsMismatchError(
                    f"this model refuses to run: {self._problem}; it runs again when the "
                    "next version is loaded"
                )
            self._running[thread] = [_calling_frame()]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            calls = self._running.get(thread)
            if calls is None:  # it was refused, and has not begun
                return
            calls.pop()
            if not calls:
                del self._running[thread]
                self._condition.notify_all()


def _is_over(frame: FrameType) -> bool:
    """Whether a call has ended. Torch runs no hook after a KeyboardInterrupt or SystemExit."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return False
    return True


def _calling_frame() -> FrameType:
    """Return the frame of torch that calls a hook."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to one
    # torch.compiler.disable has a frame of its own in between.
    while frame is not None and frame.f_globals["__name__"].startswith((__name__, "torch._dynamo")):
        frame = frame.f_back
    return cast("FrameType", frame)
