"""`dbuffer doctor` on two hosts that share a mount."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from dbuffer.tools.doctor import peer, probes
from dbuffer.tools.doctor.finding import Finding
from tests.lab.guest import Guest, times_to_look
from tests.lab.lab import scenario
from tests.support.soak import is_soak
from tests.support.waiting import TIMEOUT_S


def examine(connection: Connection, path: Path) -> None:
    if not is_soak():
        peer._NUM_VERSIONS = 5
    findings = probes.examine(path) + peer.measure_with_peers(path, timeout_s=TIMEOUT_S)
    connection.send(findings)


def look_without_a_pause(connection: Connection, path: Path, times: int) -> None:
    """Be the first host that looks for a peer all the time, also while it is coming."""
    peer._LOOK_S, peer._NUM_VERSIONS = 0.0, 1
    for _ in range(times):
        connection.send("looks")
        connection.send(len(peer.measure_with_peers(path, timeout_s=TIMEOUT_S / 2)))


def come_when_asked(connection: Connection, path: Path, times: int) -> None:
    for _ in range(times):
        connection.recv()
        connection.send(peer.wait_for_host(path, timeout_s=TIMEOUT_S / 2))


def be_the_second_host(connection: Connection, path: Path) -> None:
    connection.send(peer.wait_for_host(path, timeout_s=TIMEOUT_S))


@scenario()
def test_two_hosts_examine_their_mount(guest: Guest) -> None:
    with guest.on("r", be_the_second_host) as second, guest.on("w", examine) as first:
        found: list[Finding] = first.receive(2 * TIMEOUT_S)
        assert second.receive() >= 1 + 5 + 1
    for finding in found:
        print(finding)
    assert "a network mount" in found[0].result
    assert not [finding for finding in found if finding.verdict == "broken"]
    versions, clocks = found[-2:]
    assert "each whole by its checksums" in versions.result
    assert clocks.verdict == "good"
    assert list(guest.path("w").iterdir()) == []


@scenario(both=True)
def test_a_peer_is_seen_by_a_host_that_looks_while_it_comes(guest: Guest) -> None:
    """Over v3 two changes within one tick of the server's clock are one to who looks between."""
    times = times_to_look(guest)
    with (
        guest.on("w", look_without_a_pause, times) as first,
        guest.on("r", come_when_asked, times) as second,
    ):
        for _ in range(times):
            assert first.receive() == "looks"
            second.send("come")
            assert (first.receive(), second.receive()) == (2, 1 + 1 + 1)
