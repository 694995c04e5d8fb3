"""`dbuffer doctor` on two hosts that share a mount."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from dbuffer.testing.waiting import TIMEOUT_S, until
from dbuffer.tools.doctor import peer, probes
from dbuffer.tools.doctor.probes import Finding
from tests.lab.guest import Guest
from tests.lab.lab import scenario
from tests.support.soak import is_soak


def examine(connection: Connection, path: Path) -> None:
    if not is_soak():
        peer._NUM_VERSIONS = 5
    findings, found = probes.examine(path), list[Finding]()

    def has_found() -> bool:
        found.extend(peer.measure_with_peers(path))
        return bool(found)

    until("a peer is seen", has_found, TIMEOUT_S)
    connection.send(findings + found)


def be_the_second_host(connection: Connection, path: Path) -> None:
    connection.send(peer.wait_for_host(path))


@scenario()
def test_two_hosts_examine_their_mount(guest: Guest) -> None:
    with guest.on("r", be_the_second_host) as second, guest.on("w", examine) as first:
        found: list[Finding] = first.receive(2 * TIMEOUT_S)
        assert second.receive() >= 1 + 5
    for finding in found:
        print(finding)
    assert "a network mount" in found[0].result
    assert not [finding for finding in found if finding.verdict == "broken"]
    versions, clocks = found[-2:]
    assert "each whole by its checksums" in versions.result
    assert clocks.verdict == "good"
    assert list(guest.path("w").iterdir()) == []
