"""Command ``dbuffer follow``."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dbuffer
from dbuffer import errors
from dbuffer.format.manifest import is_multiple
from dbuffer.receive.follow_loop import FollowLoop
from dbuffer.runtime import options
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress

if TYPE_CHECKING:
    from dbuffer.receive.reader import Snapshot

logger = logging.getLogger(__name__)


def follow(
    store: shared.StoreArgument,
    count: shared.CountOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Stop with exit code 3 if no version comes for this many seconds.",
            metavar="SECONDS",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(help="Skip versions whose number is not a multiple of N.", metavar="N")
    ] = 1,
    when: Annotated[
        list[str] | None,
        typer.Option(
            help="Skip versions unless their metadata's value of KEY is a multiple of N, as in "
            "step=100.",
            metavar="KEY=N",
        ),
    ] = None,
    as_json: shared.JsonOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Print each new version. The command acknowledges no version, so no sender waits for it."""
    if timeout_s is not None:
        options.seconds("timeout_s", timeout_s)
    options.whole_number("every", every)
    divisors = dict(map(_divisor_in, when or ()))
    takes = functools.partial(is_multiple, every=every, when=divisors)
    version = None
    receiver = dbuffer.WeightReceiver(store, allow_shared_store=allow_shared_store)
    with shared.stopped_by_signals() as stop, receiver:
        final = (errors.WaitTimeoutError,)
        loop = FollowLoop(receiver, "following", logger, forked="follow", final=final, stop=stop)
        try:
            receiver.wait_for_version(None, 0.0)  # fail now if the store cannot be used
            for _ in itertools.count() if count is None else range(count):
                above = "" if version is None else f" above {version}"
                with progress(f"waiting for a version{above} in {store}"):
                    fields = _next(receiver, loop, takes, version, timeout_s, stop)
                if fields is None:
                    return
                version = fields["id"].number
                shared.show(fields, _describe(fields), as_json=as_json)
                receiver.record.remove()
        finally:
            receiver.record.remove()


def _next(
    receiver: dbuffer.WeightReceiver,
    loop: FollowLoop,
    takes: Callable[[int, Mapping[str, Any]], bool],
    newer_than: int | None,
    timeout_s: float | None,
    stop: threading.Event,
) -> dict[str, Any] | None:
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not stop.is_set():
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        with loop.attempt():
            if loop.wait(newer_than, timeout_s=left_s) is not None:
                with receiver.open(newer_than, acknowledge=False) as snapshot:
                    fields = _fields_of(snapshot)
                loop.used()
                if takes(fields["id"].number, fields["metadata"]):
                    return fields
                newer_than = fields["id"].number
            elif not stop.is_set():
                state = DoubleBuffer(receiver.store).state_without_version()
                raise errors.WaitTimeoutError(
                    f"no new version within {timeout_s:g} s in {receiver.store}{state}"
                )
        if loop.has_forked:
            newer_than = None
        if loop.error is not None and time.monotonic() >= deadline:
            raise loop.error
    return None


def _divisor_in(text: str) -> tuple[str, int]:
    key, _, number = text.rpartition("=")
    if not (number.isascii() and number.isdecimal() and int(number)):
        options.refuse("--when", text, "a metadata key and a number above 0, as in step=100")
    return key, int(number)


def _fields_of(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "num_tensors": len(snapshot.specs),
        "num_bytes": sum(spec.num_bytes for spec in snapshot.specs),
        "metadata": snapshot.metadata,
    }


def _describe(fields: dict[str, Any]) -> str:
    size = f"{counted(fields['num_tensors'], 'tensor')}, {format_bytes(fields['num_bytes'])}"
    metadata = f"  {json.dumps(fields['metadata'])}" if fields["metadata"] else ""
    return f"version {fields['id'].number}: {size}{metadata}"
