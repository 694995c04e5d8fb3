"""Measurements between two hosts: `doctor` on the first host sends, `doctor --peer` receives.

The second host (the "peer") makes a directory, and waits for a store in the directory with a
`WeightReceiver`. The first host makes the store, publishes versions, and removes the directory,
which ends the peer. A delay is the time, on the first host's clock, from the end of a publish until
the peer's acknowledgement is visible.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dbuffer import errors
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import TICK_S
from dbuffer.tools.doctor.probes import (
    POLLING,
    PREFIX,
    Finding,
    Outcome,
    existing,
    finding,
    remove_tree,
    scratch,
)

if TYPE_CHECKING:
    from dbuffer.receive.receiver import WeightReceiver

WAIT_S = 600.0
"""Longest time that a peer waits for the first host."""

_NUM_VERSIONS = 20
_NUM_VALUES = 1 << 16
_RECEIVER = "peer"


def wait_for_host(path: Path) -> int:
    """Receive the first host's versions as its peer; return the number of versions received."""
    from dbuffer.receive.receiver import WeightReceiver  # imports torch, which takes seconds

    base = existing(path)
    with (
        scratch(base, "peer") as place,
        WeightReceiver(
            place / "store",
            receiver_id=_RECEIVER,
            poll_interval_s=TIMING.look_s,
            verify=True,
            # Don't check the store's owner: the user may have another id on the first host. This is
            # safe, because only the user can access the directory.
            allow_shared_store=True,
        ) as receiver,
    ):
        filesystem.show_new_names(base)
        if receiver.wait_for_version(None, WAIT_S) is None:
            raise errors.WaitTimeoutError(
                f"no 'dbuffer doctor {path}' began on another host in {WAIT_S:g} s"
            )
        try:
            return _receive(receiver)
        finally:
            receiver.close()
            _wait_until_removed(place)


def _receive(receiver: WeightReceiver) -> int:
    version, num_seen = None, 0
    while True:
        try:
            with receiver.open(version, timeout_s=8 * TIMING.peer_answer_s) as snapshot:
                version, num_seen = snapshot.version, num_seen + 1
        # The first host has finished, and removes the store file by file. Which of these errors is
        # raised depends on the files that are left.
        except (errors.StoreNotFoundError, errors.VersionRegressedError):
            return num_seen
        except errors.WaitTimeoutError as error:
            raise errors.StoreAccessError(f"the first host no longer publishes: {error}") from error


def _wait_until_removed(place: Path) -> None:
    """Wait, for a limited time, until the first host removes the directory.

    Before the removal, the first host reads the peer's last record in the directory.
    """
    deadline = time.monotonic() + TIMING.peer_answer_s
    while os.path.lexists(place) and time.monotonic() < deadline:
        time.sleep(TIMING.look_s)
        filesystem.refresh(place.parent)


def measure_with_peers(path: Path) -> list[Finding]:
    """Measure the delay, and the difference of the clocks, between this host and each other host.

    These are the hosts where this user runs ``dbuffer doctor --peer`` at ``path``. Each makes a
    directory there. A symbolic link in place of the directory is skipped.
    """
    base, findings = existing(path), list[Finding]()
    filesystem.refresh(base)
    for place in sorted(base.glob(f"{PREFIX}peer-*")):
        with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
            filesystem.check_trust(place)
            if not place.is_symlink():
                findings += _measure(place)
    return findings


def _measure(place: Path) -> list[Finding]:
    import torch

    from dbuffer.publish.sender import WeightSender

    problem, host = None, "another host"
    delays_s, ahead_s = list[float](), list[tuple[float, float]]()
    view = DoubleBuffer(place / "store", allow_shared_store=True)
    try:
        with WeightSender(place / "store", checksum=True, allow_shared_store=True) as sender:
            for _ in range(1 + _NUM_VERSIONS):  # the first version is slow, and is not counted
                time.sleep(TICK_S)
                began_at = time.time()
                version = sender.send({"weight": torch.rand(_NUM_VALUES)}).version
                published_s = time.monotonic()
                sender.wait_applied(version, receivers=_RECEIVER, timeout_s=TIMING.peer_answer_s)
                delays_s.append(time.monotonic() - published_s)
                record = view.receiver(_RECEIVER)
                assert record is not None  # noqa: S101 - the peer has just acknowledged
                host = record.host
                # The peer wrote its record after ``began_at`` and before now. This gives the least
                # and the largest time by which the peer's clock can be ahead.
                ahead_s.append((record.updated_at - time.time(), record.updated_at - began_at))
    except errors.WaitTimeoutError:
        problem = f"a version was not seen within {TIMING.peer_answer_s:g} s"
    except errors.DBufferError as error:
        problem = str(error)
    finally:
        remove_tree(place)  # so that the peer ends
    findings = [finding(f"{host}: versions", _describe_versions(problem, delays_s[1:]))]
    if ahead_s:
        low_s, high_s = max(low for low, _ in ahead_s), min(high for _, high in ahead_s)
        findings.append(finding(f"{host}: clocks", _describe_clocks(low_s, high_s)))
    return findings


def _describe_versions(problem: str | None, delays_s: list[float]) -> Outcome:
    if problem is not None:
        return "broken", problem, "workers there would not get versions published here"
    median_ms, max_ms = 1e3 * statistics.median(delays_s), 1e3 * max(delays_s)
    result = (
        f"{len(delays_s)} versions seen, {median_ms:.1f} ms (median) and {max_ms:.1f} ms (max) "
        "after they were published, with correct checksums"
    )
    if max_ms > 1e3:
        return "adapted", result, f"versions arrive with this delay; {POLLING}"
    return "good", result, POLLING


def _describe_clocks(low_s: float, high_s: float) -> Outcome:
    apart_s, error_s = abs(high_s + low_s) / 2, (high_s - low_s) / 2
    result = f"{apart_s:.3f} s apart, give or take {error_s:.3f} s"
    if low_s > 1 or high_s < -1:
        consequence = "ages in `dbuffer status` are wrong by this; no guarantee depends on clocks"
        return "adapted", result, consequence
    return "good", result, "no guarantee depends on clocks"
