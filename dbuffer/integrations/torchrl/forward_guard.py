"""`ForwardGuard`: lock that prevents a model's forward call from using weights of two versions."""

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
"""Longest time that a pending load, which itself waits for running calls, delays a new call."""
_CALL_CHECK_S = 0.5
"""Interval at which a waiting load checks for forward calls that ended without their hook."""


class ForwardGuard:
    """Lock that keeps loads of a model's weights apart from the model's forward calls.

    The guard does not detect calls that bypass the module: a replayed CUDA graph, or a method other
    than ``forward``.

    Several threads can run forward calls at the same time. A load waits until no call is running.
    Meanwhile, new calls wait too, because otherwise overlapping calls could delay the load forever.
    But a running call may depend on a new call in another thread, and never end without it. So a
    new call waits at most 10 s for a pending load.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: dict[int, list[FrameType]] = {}
        self._num_waiting = 0
        self._num_loading = 0
        self._problem: str | None = None

    def attach(self, model: Any) -> None:
        """Guard a module's forward calls, unless this guard already does. Ignore other objects."""
        if not isinstance(model, nn.Module) or self._is_attached(model):
            return
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        # Run the hook even if forward raises an error: otherwise the call would still count as
        # running, and delay loads.
        model.register_forward_hook(self._after_forward, always_call=True)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Wait until no forward call runs, and prevent new calls inside the `with` block.

        Do not use this inside a forward call: it would wait forever for that call to end.
        """
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
        self._problem = problem

    def accept(self) -> None:
        self._problem = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this guard itself: it must also guard a collector's copy of the policy."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle as a new, empty guard: calls in this process do not concern another process."""
        return type(self), ()

    def _has_calls(self) -> bool:
        running = self._running.items()
        self._running = {thread: calls for thread, calls in running if not _is_over(calls[0])}
        return bool(self._running)

    def _is_attached(self, model: nn.Module) -> bool:
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - torch has no public name
        return any(getattr(hook, "__self__", None) is self for hook in hooks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            calls = self._running.get(thread)
            if calls is not None and not _is_over(calls[0]):
                calls.append(_calling_frame())  # a nested call must not wait for the outer call
                return
            self._condition.wait_for(
                lambda: not (self._num_waiting or self._num_loading), _PATIENCE_S
            )
            self._condition.wait_for(lambda: not self._num_loading)
            if self._problem is not None:
                error = WeightsMismatchError(
                    f"this model refuses to run: {self._problem}; it runs again after the "
                    "next version is loaded"
                )
                error.add_note("the model may hold parts of two versions")
                raise error
            self._running[thread] = [_calling_frame()]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            calls = self._running.get(thread)
            if calls is None:  # `_before_forward` refused the call
                return
            calls.pop()
            if not calls:
                del self._running[thread]
                self._condition.notify_all()


def _is_over(frame: FrameType) -> bool:
    """Whether the call in ``frame`` has ended. Its hook may not have run (KeyboardInterrupt)."""
    try:
        frame.clear()
    except RuntimeError:  # frame.clear() refuses a running frame
        return False
    return True


def _calling_frame() -> FrameType:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented despite its name
    # Skip the frames of this module, and the frames that torch.compiler.disable adds.
    while frame is not None and frame.f_globals["__name__"].startswith((__name__, "torch._dynamo")):
        frame = frame.f_back
    return cast("FrameType", frame)
