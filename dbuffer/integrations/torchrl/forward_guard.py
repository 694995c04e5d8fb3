"""`ForwardGuard`: no forward call of a model sees weights of two versions."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self, cast

import torch
from torch import nn

from dbuffer.errors import WeightsMismatchError
from dbuffer.runtime.timing import doubling

_PATIENCE_S = 1.0
"""First period in which a waiting load keeps calls out, then lets them in. It doubles."""
_MAX_PATIENCE_S = 10.0
"""Upper bound of that time."""
_CALL_CHECK_S = 0.5
"""Interval at which a load that waits looks for calls that ended without a hook."""


@dataclass(slots=True)
class ForwardCall:
    """A thread's outermost forward call of a guarded model."""

    frame: FrameType
    """Frame of torch that runs the hooks and ``forward``; it ends when the call does."""
    depth: int = 1
    """Number of calls in each other, this one included, by the hooks."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended. Torch runs no hook after a KeyboardInterrupt or SystemExit."""
        try:
            self.frame.clear()
        except RuntimeError:  # it is executing
            return False
        return True


class ForwardGuard:
    """Lock between a model's forward calls and a load of its weights. Calls may run together.

    A worker loads weights in a thread while another one runs the policy. Between two forward calls
    of one rollout the weights may change, as with every scheme of TorchRL. Calls that bypass the
    module are not seen: a replayed CUDA graph, other methods of a transform than ``forward``.

    While a load waits for running calls, no other call begins, or calls without a gap would keep it
    waiting. A running call may itself wait for a call of another thread: after a while calls may
    begin again, for as long.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: dict[int, ForwardCall] = {}
        """Calls that run, by thread."""
        self._loads = 0
        """Loads that run, or wait for calls to end."""
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
            self._keep_calls_out()
        try:
            yield
        finally:
            with self._condition:
                self._end_load()

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

    def _keep_calls_out(self) -> None:
        """Wait until no call runs, and let none begin until :meth:`_end_load`."""
        for patience_s in doubling(_PATIENCE_S, _MAX_PATIENCE_S):
            self._loads += 1
            try:
                if self._wait_for_calls(patience_s):
                    return
            except BaseException:
                self._end_load()
                raise
            self._end_load()
            if self._wait_for_calls(patience_s):
                self._loads += 1
                return

    def _end_load(self) -> None:
        self._loads -= 1
        self._condition.notify_all()

    def _wait_for_calls(self, patience_s: float) -> bool:
        """Wait until no call runs; return whether that was within ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while self._has_calls():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._condition.wait(min(left_s, _CALL_CHECK_S))
        return True

    def _has_calls(self) -> bool:
        self._running = {thread: call for thread, call in self._running.items() if not call.is_over}
        return bool(self._running)

    def _is_attached(self, model: nn.Module) -> bool:
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - there is no public way to ask
        return any(getattr(hook, "__self__", None) is self for hook in hooks)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            call = self._running.get(thread)
            if call is not None and not call.is_over:
                call.depth += 1  # a model that calls itself must not wait for itself
                return
            self._condition.wait_for(lambda: not self._loads)
            if self._problem is not None:
                raise WeightsMismatchError(
                    f"this model refuses to run: {self._problem}; it runs again when the "
                    "next version is loaded"
                )
            self._running[thread] = ForwardCall(_calling_frame())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        thread = threading.get_ident()
        with self._condition:
            call = self._running.get(thread)
            if call is None:  # it was refused, and has not begun
                return
            call.depth -= 1
            if not call.depth:
                del self._running[thread]
                self._condition.notify_all()


def _calling_frame() -> FrameType:
    """Return the frame of torch that calls a hook."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to one
    # torch.compiler.disable has a frame of its own in between.
    while frame is not None and frame.f_globals["__name__"].startswith((__name__, "torch._dynamo")):
        frame = frame.f_back
    return cast("FrameType", frame)
