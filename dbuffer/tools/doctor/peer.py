"""Measurements between two hosts: `doctor` on one sends, `doctor --peer` on the other receives.

The peer makes a directory and waits in it, as a `WeightReceiver` of a store that does not exist
yet. The first host sees the directory, makes the store with a `WeightSender`, and publishes
versions. The metadata of the last version marks it. When the peer has acknowledged this version,
the first host removes the directory.

A delay is measured on the first host's clock, from the end of a publish until the peer's
acknowledgement is visible: an upper bound of the time that a worker waits.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dbuffer import errors
from dbuffer.runtime import options
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import TICK_S
from dbuffer.tools.doctor.finding import Finding, Outcome
from dbuffer.tools.doctor.probes import POLLING, PREFIX, existing, remove_tree, scratch

if TYPE_CHECKING:
    from dbuffer.publish.sender import WeightSender
    from dbuffer.receive.receiver import WeightReceiver

_NUM_VERSIONS = 20
_NUM_VALUES = 1 << 16
_RECEIVER = "peer"


# The second host
_LOOK_S = 0.1
"""Interval at which a doctor looks for those of other hosts."""


def wait_for_host(path: Path, *, timeout_s: float) -> int | None:
    """Be the second host; return the number of versions seen, or None if no first host came.

    Raises:
        OptionError: an option is invalid, or nothing of the path exists.
        StoreAccessError: the directory is not writable, or the first host fell silent.
        StoreCorruptError: versions of the first host cannot be read here.
    """
    options.seconds("timeout_s", timeout_s)
    from dbuffer.receive.receiver import WeightReceiver  # and torch, which takes seconds

    base = existing(path)
    with (
        scratch(base, "peer") as place,
        WeightReceiver(
            place / "store",
            receiver_id=_RECEIVER,
            poll_interval_s=TIMING.look_s,
            verify=True,
            # The directory is private; its owner may have another user id on the other host.
            allow_shared_store=True,
        ) as receiver,
    ):
        filesystem.show_new_names(base)
        if receiver.wait_for_version(None, timeout_s) is None:
            return None
        try:
            return _receive(receiver)
        except (errors.StoreNotFoundError, errors.WaitTimeoutError) as error:
            raise errors.StoreAccessError(f"the first host fell silent: {error}") from error
        finally:
            receiver.close()
            _wait_until_removed(place)


def _receive(receiver: WeightReceiver) -> int:
    """Read each version until the last; return how many were seen."""
    version, num_seen, is_last = None, 0, False
    while not is_last:
        with receiver.open(version, timeout_s=8 * TIMING.peer_answer_s) as snapshot:
            version, num_seen = snapshot.version, num_seen + 1
            is_last = snapshot.metadata["is_last"]
    return num_seen


def _wait_until_removed(place: Path) -> None:
    """Keep the acknowledgements until the first host has seen them."""
    deadline = time.monotonic() + TIMING.peer_answer_s
    while os.path.lexists(place) and time.monotonic() < deadline:
        time.sleep(TIMING.look_s)
        filesystem.refresh(place.parent)


# The first host


def measure_with_peers(
    path: Path, *, timeout_s: float = 0.0, allow_shared_store: bool = False
) -> list[Finding]:
    """Be the first host: measure with all peers that wait, or that come within ``timeout_s``.

    Returns:
        Findings about each; empty: no peer came.

    Raises:
        OptionError: an option is invalid, or nothing of the path exists.
    """
    options.seconds("timeout_s", timeout_s)
    base, findings = existing(path), list[Finding]()
    deadline = time.monotonic() + timeout_s
    while True:
        for place in _waiting_peers(base, allow_shared_store=allow_shared_store):
            with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
                (place / "taken").mkdir()  # or another first host has it
                findings += _measure(place)
        if findings or time.monotonic() >= deadline:
            return findings
        time.sleep(_LOOK_S)


def _waiting_peers(base: Path, *, allow_shared_store: bool) -> list[Path]:
    """Return the directories of waiting peers of this user; links are not followed."""
    filesystem.refresh(base)
    places = []
    for path in sorted(base.glob(f"{PREFIX}peer-*")):
        with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
            if not allow_shared_store:
                filesystem.check_trust(path)
            if not path.is_symlink():
                places.append(path)
    return places


def _measure(place: Path) -> list[Finding]:
    """Publish versions to a peer; return whether they come whole and in time, and clocks agree."""
    from dbuffer.publish.sender import WeightSender

    problem, answers, last = None, list[_Answer](), _NUM_VERSIONS + 1
    view = DoubleBuffer(place / "store", allow_shared_store=True)
    try:
        with WeightSender(place / "store", checksum=True, allow_shared_store=True) as sender:
            for number in range(last + 1):
                if problem is None or number == last:  # which ends the peer in any case
                    try:
                        answers.append(_publish(sender, view, is_last=number == last))
                    except errors.DBufferError as error:
                        problem = problem or _described(error)
    except errors.DBufferError as error:
        problem = problem or _described(error)
    finally:
        remove_tree(place)  # tells the peer that the measurements are over
    host = answers[-1].host if answers else "another host"
    delays_s = [answer.delay_s for answer in answers[1:last]]
    findings = [Finding(f"{host}: versions", *_describe_versions(problem, delays_s))]
    if answers:
        low_s, high_s = max(it.low_s for it in answers), min(it.high_s for it in answers)
        findings.append(Finding(f"{host}: clocks", *_describe_clocks(low_s, high_s)))
    return findings


class _Answer(NamedTuple):
    """Acknowledgement of a version by a peer."""

    host: str
    delay_s: float
    low_s: float
    """Lower bound of how far the peer's clock is ahead of this host's."""
    high_s: float
    """Upper bound of that."""


def _publish(sender: WeightSender, view: DoubleBuffer, *, is_last: bool) -> _Answer:
    """Publish a version, and wait until the peer has seen it."""
    import torch

    time.sleep(TICK_S)
    began_at, weights = time.time(), {"weight": torch.rand(_NUM_VALUES)}
    version = sender.send(weights, metadata={"is_last": is_last}).version
    published_s = time.monotonic()
    sender.wait_applied(version, receivers=_RECEIVER, timeout_s=TIMING.peer_answer_s)
    delay_s, record = time.monotonic() - published_s, view.receiver(_RECEIVER)
    assert record is not None  # noqa: S101 - it has just acknowledged
    # The peer wrote the record between then and now.
    low_s, high_s = record.updated_at - time.time(), record.updated_at - began_at
    return _Answer(record.host, delay_s, low_s, high_s)


def _described(error: errors.DBufferError) -> str:
    if isinstance(error, errors.WaitTimeoutError):
        return f"a version was not seen within {TIMING.peer_answer_s:g} s"
    return str(error)


def _describe_versions(problem: str | None, delays_s: list[float]) -> Outcome:
    if problem is not None:
        return "broken", problem, "workers there would not get versions published here"
    median_s, max_s = statistics.median(delays_s), max(delays_s)
    result = (
        f"seen after {_format(median_s)} (median), {_format(max_s)} (max) of {len(delays_s)}, "
        "each whole by its checksums"
    )
    if max_s > 1:
        return "adapted", result, f"versions arrive that late; {POLLING}"
    return "good", result, POLLING


def _describe_clocks(low_s: float, high_s: float) -> Outcome:
    result = (
        f"{_format(abs(high_s + low_s) / 2)} apart, give or take {_format((high_s - low_s) / 2)}"
    )
    if low_s > 1 or high_s < -1:
        ages = "ages in `dbuffer status` and times in `dbuffer log` are off by that"
        return "adapted", result, f"{ages}; no guarantee depends on clocks"
    return "good", result, "no guarantee depends on clocks"


def _format(duration_s: float) -> str:
    return f"{1e3 * duration_s:.1f} ms" if duration_s < 1 else f"{duration_s:.1f} s"
