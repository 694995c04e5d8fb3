"""`PendingPublication`: a version that is being published while the trainer continues."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait

import torch

from dbuffer.errors import ClosedError, InvalidWeightsError, WaitTimeoutError
from dbuffer.publish.publisher import Publication
from dbuffer.runtime import options
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.messages import first_line, listed
from dbuffer.runtime.trouble import without_frames

logger = logging.getLogger(__name__)

_COPIED_BYTES = 1 << 16
"""Largest tensor, in bytes, that is copied before a publish continues in another thread."""


class PendingPublication(ProcessBound):
    """Version that is being published in another thread, as ``send(wait=False)`` returns it.

    Do not change the weights until :meth:`wait` has returned. The sender's next ``send`` and its
    ``close`` also wait for the publication. So does each step of an optimizer that you passed to
    ``guard``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._future: Future[Publication] = Future()
        self._unreported: list[str] = []
        weakref.finalize(self, _log_unreported, self._unreported, os.getpid())

    def begin(self, publish: Callable[[], Publication]) -> None:
        """Publish from a new thread, unless :meth:`cancel` is called first."""

        def run() -> None:
            if not self._future.set_running_or_notify_cancel():
                return
            try:
                publication = publish()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._unreported.append(first_line(error))
                self._future.set_exception(without_frames(error))
            else:
                self._future.set_result(publication)

        threading.Thread(target=run, name="dbuffer-send").start()

    def cancel(self) -> None:
        self._future.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the publish has ended, with success or with an error."""
        self._check_not_forked()
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Publication:
        """Wait until every receiver can see the version. After that you may change the weights.

        Args:
            timeout_s: how long to wait. Default: without limit.

        Raises:
            WaitTimeoutError: the version was not published in time.
            InvalidWeightsError: something changed the weights meanwhile; nothing was published.
            ClosedError: this process is a forked child.
            DBufferError: any error of ``send``.
        """
        self._check_not_forked()
        if timeout_s is not None:
            options.seconds("timeout_s", timeout_s)
        if not wait([self._future], timeout_s).done:
            raise WaitTimeoutError(
                f"weights were not published within {timeout_s:g} s, and still are being read"
            )
        self._unreported.clear()
        return self._future.result()

    def take_unreported_error(self) -> BaseException | None:
        """Wait for the publish to end; return its error, unless the error was reported before."""
        with contextlib.suppress(CancelledError):
            error = self._future.exception()
            if self._unreported:
                self._unreported.clear()
                return error
        return None

    def _check_not_forked(self) -> None:
        # The publishing thread is not in this process, where a lock held in the fork stays locked.
        if self._is_inherited:
            raise ClosedError(
                "this version is being published by the process that sent it, and this is a forked "
                "child of that: wait for it there"
            )


def _log_unreported(unreported: list[str], pid: int) -> None:
    """Log an error that cannot be raised, because the program ends or dropped the sender."""
    if os.getpid() == pid:  # in a forked child; the parent logs it
        for problem in unreported:
            logger.error("weights that were sent with wait=False were not published: %s", problem)


def with_short_copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, with copies of short ones, which a forward pass may write to."""
    return [
        tensor if tensor.requires_grad or tensor.nbytes > _COPIED_BYTES else tensor.detach().clone()
        for tensor in tensors
    ]


def watch_writes(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that raises `InvalidWeightsError` if a tensor was written to meanwhile.

    The function compares autograd's counts of writes. It does not detect writes that bypass
    autograd (``tensor.data``, NumPy, another process) or writes to inference tensors.
    """
    watched = [
        (name, tensor, tensor._version)  # noqa: SLF001 - autograd's own count
        for name, tensor in zip(names, tensors, strict=True)
        if not tensor.is_inference()
    ]

    def require_unchanged() -> None:
        changed = [name for name, tensor, count in watched if tensor._version != count]  # noqa: SLF001
        if changed:
            raise InvalidWeightsError(
                f"{listed(changed)} changed while they were being published, so nothing was: call "
                "wait() on what send(wait=False) returned before optimizer.step(), or "
                "sender.guard(optimizer) once; before the next forward pass, if that writes them"
            )

    return require_unchanged
