"""What two hosts see of each other: `doctor --peer` on one receives what `doctor` on another sends.

The peer makes a directory and waits in it, as a `WeightReceiver` of a store that is not there yet.
The first host finds the directory and makes the store, with a `WeightSender`: each version says in
its metadata who published it, and the last one that it is the last. Every delay is measured on the
first host's clock, from the end of a publish to the sight of the peer's acknowledgement: no two
clocks are compared, and what is measured is never less than what a worker would have waited.
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
from typing import TYPE_CHECKING

from dbuffer import errors
from dbuffer.runtime import options
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import MOUNT_VARIABLE, TICK_S
from dbuffer.store.liveness import Process
from dbuffer.store.media import medium_of
from dbuffer.tools.doctor.findings import (
    POLLING,
    Finding,
    OnStep,
    adapted,
    broken,
    duration,
    good,
    unknown,
)
from dbuffer.tools.doctor.probes import Site
from dbuffer.tools.doctor.scratch import PREFIX, remove_stale, remove_tree, scratch

if TYPE_CHECKING:
    from dbuffer.publish.sender import WeightSender
    from dbuffer.receive.receiver import WeightReceiver

_NUM_VERSIONS = 20
_NUM_VALUES = 1 << 16
_LIMIT_S = 10.0
"""How long the peer may take to acknowledge a version."""
_ANSWER_TIMEOUT_S = 15.0
"""And the first one, if it is there at all."""
_SILENCE_S = 120.0
"""After this long without a version the first host has gone."""
_POLL_S = 0.01
_LOOK_INTERVAL_S = 0.1

_RECEIVER = "peer"
_INTRODUCTION = "peer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What this host and a peer saw of each other."""

    host: str
    pid: int
    filesystem: str
    """As the peer sees it."""
    is_network: bool
    is_same_kernel: bool
    delays_ms: tuple[float, ...]
    """From the end of each publish until the peer's acknowledgement was seen."""
    is_late: bool
    """Whether one was not seen within 10 s; nothing more was measured then."""
    problem: str | None
    """Why the peer could not read a version; nothing more was measured then."""
    locks_exclude: bool | None
    """Whether a sender here keeps one there out; None: not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What a peer has to say; the results are with the first host."""

    host: str
    """The first host."""
    pid: int
    num_seen: int
    """Versions received."""


# ---------------------------------------------------------------------------------------------
# The second host


def wait_for_host(
    path: str | os.PathLike[str], *, timeout_s: float, progress: OnStep | None = None
) -> PeerReport | None:
    """Be the second host of an examination; None if no first one came within ``timeout_s``.

    Raises:
        OptionError: one of these is not what it may be.
        StoreAccessError: nothing can be written there, or the first host fell silent.
        StoreCorruptError: what it publishes cannot be read here.
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
            poll_interval_s=_POLL_S,
            verify=True,
            # The directory is this user's alone; who that is may have another number there.
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


def _receive(receiver: WeightReceiver) -> PeerReport:
    version, num_seen, is_last = None, 0, False
    while not is_last:
        with receiver.open(version, timeout_s=_SILENCE_S) as snapshot:
            version, first_host, num_seen = snapshot.version, snapshot.metadata, num_seen + 1
            is_last = first_host["is_last"]
            if is_last:
                _try_to_send(receiver.store)
    return PeerReport(host=first_host["host"], pid=first_host["pid"], num_seen=num_seen)


def _try_to_send(store: Path) -> None:
    """Take the store over, if no lock of the first host's sender prevents that: it will notice."""
    from dbuffer.publish.sender import WeightSender

    time.sleep(TICK_S)
    with contextlib.suppress(errors.DBufferError):
        WeightSender(store, allow_shared_store=True).close()


def _wait_until_removed(place: Path) -> None:
    """Leave the last acknowledgement, or the problem, until the first host has seen it."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while os.path.lexists(place) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        filesystem.refresh(place.parent)


# ---------------------------------------------------------------------------------------------
# The first host


def measure_with_peers(site: Site, *, timeout_s: float, progress: OnStep) -> tuple[Meeting, ...]:
    """Be the first host: measure with every peer that waits, or comes within ``timeout_s``.

    Raises:
        StoreAccessError, StoreNotFoundError, WaitTimeoutError, ReceiverFailedError: a
            peer does not answer, or went away in the middle.
    """
    deadline = time.monotonic() + timeout_s
    meetings: list[Meeting] = []
    while True:
        for place in _waiting(site):
            with _taken(place) as is_ours:
                if is_ours:
                    meetings.append(_measure(place, progress))
        if meetings or time.monotonic() >= deadline:
            return tuple(meetings)
        progress(f"waiting for 'dbuffer doctor {site.base} --peer' on another host")
        time.sleep(_LOOK_INTERVAL_S)


def _waiting(site: Site) -> list[Path]:
    """The directories of peers; only of our own user, who lays no links there for us to follow."""
    filesystem.refresh(site.base)
    found = []
    for path in sorted(site.base.glob(f"{PREFIX}peer-*")):
        with contextlib.suppress(errors.StoreAccessError, errors.StoreNotFoundError):
            if path.is_symlink():
                continue
            if not site.allow_shared_store:
                filesystem.check_trust(path)
            if os.path.lexists(path / _INTRODUCTION):
                found.append(path)
    return found


@contextlib.contextmanager
def _taken(place: Path) -> Iterator[bool]:
    """Whether this host is the one that measures with the peer; nobody else does then."""
    try:
        (place / "taken").mkdir()
    except (FileExistsError, FileNotFoundError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        remove_tree(place)  # from which the peer learns that this is all


def _measure(place: Path, progress: OnStep) -> Meeting:
    from dbuffer.publish.sender import WeightSender

    try:
        told = json.loads(filesystem.read_small(place / _INTRODUCTION, 1 << 16, owner_only=False))
        peer = {name: told[name] for name in ("host", "pid", "filesystem", "is_network")}
        is_same_kernel = told["machine"] == Process.here().machine
    except (KeyError, TypeError, ValueError) as error:
        raise errors.StoreCorruptError(
            f"{place} is not a doctor's of this version: {error}"
        ) from None
    delays_ms: list[float] = []
    problem, is_late, locks_exclude = None, False, None
    with WeightSender(place / "store", checksum=True, allow_shared_store=True) as sender:
        try:
            # Not counted: the peer has yet to open what it then has open, and caches are cold.
            delays_ms.append(_delay_ms(sender, _ANSWER_TIMEOUT_S))
            for number in range(1, _NUM_VERSIONS + 1):
                progress(f"how late another host sees a version: {number}")
                delays_ms.append(_delay_ms(sender, _LIMIT_S))
            progress("whether a lock keeps another host out")
            locks_exclude = _locks_exclude(sender)
        except errors.WaitTimeoutError:
            if not delays_ms:  # nobody is there
                raise
            is_late = True
        except errors.ReceiverFailedError:
            store = DoubleBuffer(sender.store, allow_shared_store=True)
            problem = "; ".join(found.problem for found in store.receivers() if found.problem)
            if not problem:  # it has ended
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
    """How long after a publish the peer's acknowledgement of it was seen."""
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
    """Whether the peer, when it is told to try, cannot take the store over."""
    try:
        _delay_ms(sender, _LIMIT_S, is_last=True)
        _send(sender)
    except errors.WriterSupersededError:
        return False
    return True


# ---------------------------------------------------------------------------------------------
# What that means


def judge(site: Site, meetings: Sequence[Meeting]) -> list[Finding]:
    """What was measured with other hosts, as findings."""
    if not meetings:
        return [_nobody(site).of("other hosts")]
    return [finding for meeting in meetings for finding in _judge(site, meeting)]


def _nobody(site: Site) -> Finding:
    if site.medium.reaches_other_hosts:
        return unknown(
            "not measured: no peer waits here",
            f"to measure, run 'dbuffer doctor {site.path} --peer' on another host, then this again",
        )
    return good("no peer waits here", "a store on a local mount is for the processes of this host")


def _judge(site: Site, meeting: Meeting) -> Iterator[Finding]:
    host = meeting.host
    yield _mounts(site, meeting).of(f"{host}: mount", 1)
    if meeting.problem is not None:
        outcome = broken(meeting.problem, "what is published here cannot be read there")
        yield outcome.of(f"{host}: reads a version", 1)
        return
    yield _delays(meeting).of(f"{host}: sees a version", 5)
    if meeting.locks_exclude is not None:
        yield _locks(meeting.locks_exclude).of(f"{host}: locks")


def _mounts(site: Site, meeting: Meeting) -> Finding:
    found = f"{meeting.filesystem} there, {site.medium.filesystem} here"
    if site.medium.reaches_other_hosts and meeting.is_network:
        return good(found, "both use it as a network mount")
    if not site.medium.reaches_other_hosts and not meeting.is_network and meeting.is_same_kernel:
        return good(f"{found}, on one machine", "both use it as a local one")
    where = "there" if site.medium.reaches_other_hosts else "here"
    return broken(
        found,
        f"used as a local mount {where}: what is published {where} is rewritten in place, "
        f"and refused on the other host; set {MOUNT_VARIABLE}=network {where}",
    )


def _delays(meeting: Meeting) -> Finding:
    if meeting.is_late:
        found = f"a version was not seen within {_LIMIT_S:g} s"
        return broken(found, "workers there would not see new versions")
    median_ms, max_ms = statistics.median(meeting.delays_ms), max(meeting.delays_ms)
    found = (
        f"{duration(median_ms)} (median), {duration(max_ms)} (max) of {len(meeting.delays_ms)}, "
        "each whole by its checksums"
    )
    if max_ms > 1e3:
        return adapted(found, f"versions arrive that late; {POLLING}")
    return good(found, POLLING)


def _locks(exclude: bool) -> Finding:
    if exclude:
        return good("exclude processes of the other host", "a second sender there is refused")
    return adapted(
        "do not exclude processes of the other host",
        "a second sender there is detected by its epoch, not prevented",
    )
