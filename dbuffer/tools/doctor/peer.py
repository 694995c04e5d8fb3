"""Measurements between two hosts: `doctor` on one sends, `doctor --peer` on the other receives.

The peer makes a directory and waits in it, as a `WeightReceiver` of a store that does not exist
yet. The first host sees the directory and makes the store, with a `WeightSender`. The metadata of
each version names its publisher, and marks the last version. Each delay is measured on the first
host's clock, from the end of a publish until the peer's acknowledgement is visible: no two clocks
are compared, and a delay is an upper bound of the time that a worker waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbuffer import errors
from dbuffer.runtime import options
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import MOUNT_VARIABLE, TICK_S
from dbuffer.store.liveness import Process
from dbuffer.store.medium import medium_of
from dbuffer.tools.doctor.probes import POLLING, Finding, OnStep, Outcome, Site, make_finding
from dbuffer.tools.doctor.scratch import PREFIX, remove_stale, remove_tree, scratch

if TYPE_CHECKING:
    from dbuffer.publish.sender import WeightSender
    from dbuffer.receive.receiver import WeightReceiver

_NUM_VERSIONS = 20
_NUM_VALUES = 1 << 16

_RECEIVER = "peer"
_INTRODUCTION = "peer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Measurements with one peer."""

    host: str
    pid: int
    filesystem: str
    """Filesystem type, as the peer sees it."""
    is_network: bool
    is_same_kernel: bool
    delays_ms: tuple[float, ...]
    """Time from the end of each publish until the peer's acknowledgement was visible."""
    is_late: bool
    """Whether a version was not acknowledged within 10 s, which ends the measurements."""
    problem: str | None
    """Reason why the peer could not read a version, which ends the measurements."""
    locks_exclude: bool | None
    """Whether a sender here keeps a sender there out; None: not measured."""


# ---------------------------------------------------------------------------------------------
# The second host


def wait_for_host(
    path: str | os.PathLike[str], *, timeout_s: float, progress: OnStep | None = None
) -> dict[str, Any] | None:
    """Be the peer of an examination; return None if no first host came within ``timeout_s``.

    The result has the first host's ``host`` and ``pid``, and ``num_seen``, the number of versions
    received; the findings are on the first host.

    Raises:
        OptionError: an option is invalid.
        StoreAccessError: the directory is not writable, or the first host fell silent.
        StoreCorruptError: versions of the first host cannot be read here.
    """
    options.seconds("timeout_s", timeout_s)
    directory = Site.at(options.directory("path", path), allow_shared_store=True).base
    from dbuffer.receive.receiver import WeightReceiver  # and torch, which takes seconds

    remove_stale(directory)
    time.sleep(TICK_S)
    with (
        scratch(directory, "peer") as place,
        WeightReceiver(
            place / "store",
            receiver_id=_RECEIVER,
            poll_interval_s=TIMING.peer_poll_s,
            verify=True,
            # The directory is private; its owner may have another user id on the other host.
            allow_shared_store=True,
        ) as receiver,
    ):
        _introduce(place)
        if progress is not None:
            progress(f"waiting for 'dbuffer doctor {directory}' on another host")
        if receiver.wait_for_version(None, timeout_s) is None:
            return None
        try:
            report = _receive(receiver)
            _wait_until_removed(place)
            return report
        except (errors.StoreNotFoundError, errors.WaitTimeoutError) as error:
            raise errors.StoreAccessError(
                f"the first host fell silent, or gave up: {error}"
            ) from error
        except errors.DBufferError as error:
            receiver.record.write(problem=str(error))
            _wait_until_removed(place)
            raise


def _introduce(place: Path) -> None:
    medium, here = medium_of(place), Process.here()
    introduction = {
        "host": here.host,
        "pid": here.pid,
        "machine": here.machine,
        "filesystem": medium.filesystem,
        "is_network": medium.reaches_other_hosts,
    }
    data = json.dumps(introduction).encode()
    filesystem.replace_file(place / _INTRODUCTION, data, scratch=place, durable=True)
    filesystem.show_new_names(place, place.parent)


def _receive(receiver: WeightReceiver) -> dict[str, Any]:
    version, num_seen, is_last = None, 0, False
    while not is_last:
        try:
            with receiver.open(version, timeout_s=TIMING.peer_silence_s) as snapshot:
                version, first_host, num_seen = snapshot.version, snapshot.metadata, num_seen + 1
                is_last = first_host["is_last"]
                if is_last:
                    _try_to_send(receiver.store)
        except errors.VersionRegressedError:
            if not is_last:  # or the first host has its results, and has removed the store
                raise
    return {"host": first_host["host"], "pid": first_host["pid"], "num_seen": num_seen}


def _try_to_send(store: Path) -> None:
    """Take the store over, unless the lock of the first host's sender prevents it."""
    from dbuffer.publish.sender import WeightSender

    time.sleep(TICK_S)
    with contextlib.suppress(errors.DBufferError):
        WeightSender(store, allow_shared_store=True).close()


def _wait_until_removed(place: Path) -> None:
    """Keep the last acknowledgement, or the problem, until the first host has seen it."""
    deadline = time.monotonic() + TIMING.peer_answer_s
    while os.path.lexists(place) and time.monotonic() < deadline:
        time.sleep(TIMING.peer_poll_s)
        filesystem.refresh(place.parent)


# ---------------------------------------------------------------------------------------------
# The first host


def measure_with_peers(site: Site, *, timeout_s: float, progress: OnStep) -> tuple[Meeting, ...]:
    """Be the first host: measure with all peers that wait, or that come within ``timeout_s``.

    Raises:
        StoreAccessError, StoreNotFoundError, WaitTimeoutError, ReceiverFailedError: a peer does not
            answer, or left during the measurements.
    """
    deadline = time.monotonic() + timeout_s
    meetings: list[Meeting] = []
    while True:
        for place in _waiting_peers(site):
            with _claim(place) as is_ours:
                if is_ours:
                    meetings.append(_measure(place, progress))
        if meetings or time.monotonic() >= deadline:
            return tuple(meetings)
        progress(f"waiting for 'dbuffer doctor {site.base} --peer' on another host")
        time.sleep(TIMING.peer_look_s)


def _waiting_peers(site: Site) -> list[Path]:
    """Return the directories of waiting peers of this user; links are not followed."""
    filesystem.refresh(site.base)
    places = []
    for path in sorted(site.base.glob(f"{PREFIX}peer-*")):
        with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
            if path.is_symlink():
                continue
            if not site.allow_shared_store:
                filesystem.check_trust(path)
            if os.path.lexists(path / _INTRODUCTION):
                places.append(path)
    return places


@contextlib.contextmanager
def _claim(place: Path) -> Iterator[bool]:
    """Claim a peer for a ``with`` block; yield whether this host is the one that measures."""
    try:
        (place / "taken").mkdir()
    except (FileExistsError, FileNotFoundError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        remove_tree(place)  # tells the peer that the measurements are over


def _measure(place: Path, progress: OnStep) -> Meeting:
    from dbuffer.publish.sender import WeightSender

    try:
        data = filesystem.read_small(place / _INTRODUCTION, 1 << 16, owner_only=False)
        introduction = json.loads(data)
        peer = {name: introduction[name] for name in ("host", "pid", "filesystem", "is_network")}
        is_same_kernel = introduction["machine"] == Process.here().machine
    except (KeyError, TypeError, ValueError) as error:
        raise errors.StoreCorruptError(
            f"{place} is not of this version of 'dbuffer doctor': {error}"
        ) from None
    delays_ms: list[float] = []
    problem, is_late, locks_exclude = None, False, None
    with WeightSender(place / "store", checksum=True, allow_shared_store=True) as sender:
        try:
            # Not counted: the peer opens its files for the first time, and caches are cold.
            delays_ms.append(_delay_ms(sender, TIMING.peer_answer_s))
            for number in range(1, _NUM_VERSIONS + 1):
                progress(f"how late another host sees a version: {number}")
                delays_ms.append(_delay_ms(sender, TIMING.peer_limit_s))
            progress("whether a lock keeps another host out")
            locks_exclude = _locks_exclude(sender)
        except errors.WaitTimeoutError:
            if not delays_ms:  # the peer has ended
                raise
            is_late = True
        except errors.ReceiverFailedError:
            store = DoubleBuffer(sender.store, allow_shared_store=True)
            problem = "; ".join(record.problem for record in store.receivers() if record.problem)
            if not problem:  # the peer has ended
                raise
    return Meeting(
        **peer,
        is_same_kernel=is_same_kernel,
        delays_ms=tuple(delays_ms[1:]),
        is_late=is_late,
        problem=problem,
        locks_exclude=locks_exclude,
    )


def _delay_ms(sender: WeightSender, limit_s: float, *, is_last: bool = False) -> float:
    """Publish a version; return the time until the peer's acknowledgement was visible."""
    version = _send(sender, is_last=is_last)
    started = time.monotonic()
    sender.wait_applied(version, receivers=_RECEIVER, timeout_s=limit_s)
    return 1e3 * (time.monotonic() - started)


def _send(sender: WeightSender, *, is_last: bool = False) -> int:
    import torch

    time.sleep(TICK_S)
    weights = {"weight": torch.rand(_NUM_VALUES)}
    metadata = {"host": socket.gethostname(), "pid": os.getpid(), "is_last": is_last}
    return sender.send(weights, metadata=metadata).version


def _locks_exclude(sender: WeightSender) -> bool:
    """Tell the peer to take the store over; return whether it cannot."""
    try:
        _delay_ms(sender, TIMING.peer_limit_s, is_last=True)
        _send(sender)
    except errors.WriterSupersededError:
        return False
    return True


# ---------------------------------------------------------------------------------------------
# Findings


def judge(site: Site, meetings: Sequence[Meeting]) -> list[Finding]:
    """Return the findings of the measurements with all peers."""
    if not meetings:
        return [Finding("other hosts", *_without_peer(site))]
    return [finding for meeting in meetings for finding in _judge_meeting(site, meeting)]


def _without_peer(site: Site) -> Outcome:
    if site.medium.reaches_other_hosts:
        return (
            "unknown",
            "not measured: no peer waits here",
            f"to measure, run 'dbuffer doctor {site.path} --peer' on another host, then this again",
        )
    return (
        "good",
        "no peer waits here",
        "a store on a local mount is for the processes of this host",
    )


def _judge_meeting(site: Site, meeting: Meeting) -> Iterator[Finding]:
    host = meeting.host
    yield make_finding(f"{host}: mount", _mounts(site, meeting), 1)
    if meeting.problem is not None:
        yield Finding(
            f"{host}: reads a version",
            "broken",
            meeting.problem,
            "versions published here cannot be read there",
            1,
        )
        return
    yield make_finding(f"{host}: sees a version", _delays(meeting), 5)
    if meeting.locks_exclude is not None:
        yield Finding(f"{host}: locks", *_locks(meeting.locks_exclude))


def _mounts(site: Site, meeting: Meeting) -> Outcome:
    result = f"{meeting.filesystem} there, {site.medium.filesystem} here"
    if site.medium.reaches_other_hosts and meeting.is_network:
        return "good", result, "both use it as a network mount"
    if not site.medium.reaches_other_hosts and not meeting.is_network and meeting.is_same_kernel:
        return "good", f"{result}, on one machine", "both use it as a local one"
    where = "there" if site.medium.reaches_other_hosts else "here"
    return (
        "broken",
        result,
        f"used as a local mount {where}: versions published {where} are rewritten in place, "
        f"and refused on the other host; set {MOUNT_VARIABLE}=network {where}",
    )


def _delays(meeting: Meeting) -> Outcome:
    if meeting.is_late:
        result = f"a version was not seen within {TIMING.peer_limit_s:g} s"
        return "broken", result, "workers there would not see new versions"
    median_ms, max_ms = statistics.median(meeting.delays_ms), max(meeting.delays_ms)
    result = (
        f"{_duration(median_ms)} (median), {_duration(max_ms)} (max) of {len(meeting.delays_ms)}, "
        "each whole by its checksums"
    )
    if max_ms > 1e3:
        return "adapted", result, f"versions arrive that late; {POLLING}"
    return "good", result, POLLING


def _duration(duration_ms: float) -> str:
    return f"{duration_ms:.1f} ms" if duration_ms < 1e3 else f"{duration_ms / 1e3:.1f} s"


def _locks(exclude: bool) -> Outcome:
    if exclude:
        return "good", "exclude processes of the other host", "a second sender there is refused"
    return (
        "adapted",
        "do not exclude processes of the other host",
        "a second sender there is detected by its epoch, not prevented",
    )
