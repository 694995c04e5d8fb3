"""`dbuffer doctor` on two hosts that share a mount."""

from __future__ import annotations

import statistics
from multiprocessing.connection import Connection
from pathlib import Path

from guest import Guest
from lab import scenario
from support import TIMEOUT_S

from dbuffer.tools import doctor

SEEN_LATE_MS = 1500.0
"""A directory that is opened first shows a change at once; by its name alone, in seconds."""


def examine(connection: Connection, path: Path) -> None:
    connection.send(doctor.examine(path, timeout_s=TIMEOUT_S))


def be_the_second_host(connection: Connection, path: Path) -> None:
    connection.send(doctor.wait_for_host(path, timeout_s=TIMEOUT_S) is not None)


@scenario()
def test_two_hosts_examine_their_mount(guest: Guest) -> None:
    with guest.on("r", be_the_second_host) as second, guest.on("w", examine) as first:
        found: doctor.Examination = first.receive(2 * TIMEOUT_S)
        assert second.receive()
    for finding in found.findings:
        print(finding)
    assert found.is_network
    assert not found.broken
    [meeting] = found.peers
    assert meeting.locks_exclude == (guest.version != "3")
    assert (meeting.is_late, meeting.problem) == (False, None)
    assert statistics.median(meeting.delays_ms) < SEEN_LATE_MS
    assert list(guest.path("w").iterdir()) == []
