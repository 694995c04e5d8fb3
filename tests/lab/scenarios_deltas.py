"""Deltas across machines: no mix, what each host fetches of a version, and how soon it has it."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import dbuffer
from dbuffer.runtime.timing import TIMING
from dbuffer.testing.patterns import Sparse
from dbuffer.testing.waiting import TIMEOUT_S
from tests.lab.guest import Guest
from tests.lab.hosts import applied, load_each, publish_when_told, published
from tests.lab.lab import scenario
from tests.lab.scenarios_mirror import local_stores, mirror
from tests.lab.scenarios_store import read_with_delays
from tests.support.patterns import newest
from tests.support.soak import is_soak

MB = 1 << 20
SMALL_CHANGES = Sparse(num_tensors=12, numel=16_384)
NUM_DEATHS = 80 if is_soak() else 2
MOST_BETWEEN_DEATHS = 50 if is_soak() else 4
LAST_WITH_DEATHS = 100_000
LARGE = Sparse(num_tensors=4, numel=MB // 16, one_in=256)
LARGE_BYTES = 2 * MB
NUM_VERSIONS = 8 if is_soak() else 5
LATE = 3
"""The version with which the late reader comes."""


def publish_until_killed(connection: Connection, path: Path) -> None:
    """Publish versions after the one that is there; send whether each is a delta."""
    TIMING.keep_superseded_s = 2.0
    with dbuffer.WeightSender(path / "store", num_threads=1, delta=True) as sender:
        for version in itertools.count(sender._writer.next_version(None)):
            publication = sender.send(SMALL_CHANGES.weights(version))
            assert publication.version == version
            connection.send((version, publication.delta_bytes is not None))


@scenario()
def test_senders_of_deltas_are_killed_at_any_moment_and_started_again(guest: Guest) -> None:
    """Each begins with a whole version; two hosts follow, and one comes late after each death."""
    rng, version = random.Random(0), 0
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        readers = []
        for seed, client in enumerate(("r", "r2")):
            reader = guest.on(client, read_with_delays, seed, LAST_WITH_DEATHS, SMALL_CHANGES)
            readers.append(stack.enter_context(reader))
            assert readers[-1].receive() == "ready"
        for _ in range(NUM_DEATHS):
            is_first = True
            with guest.on("w", publish_until_killed) as writer:
                for _ in range(rng.randint(1, MOST_BETWEEN_DEATHS)):
                    version, is_delta = writer.receive()
                    assert is_delta or is_first, "a version after a sender's first was whole"
                    is_first = False
                time.sleep(rng.uniform(0, 0.2))
                writer.kill()
            late = newest(guest.path("r2") / "store", SMALL_CHANGES, verify=True)
            assert late is not None
            assert late >= version
            version = late
        with dbuffer.WeightSender(guest.path("w") / "store", num_threads=1) as sender:
            sender.send(SMALL_CHANGES.weights(LAST_WITH_DEATHS), version=LAST_WITH_DEATHS)
        read = [reader.receive(2 * TIMEOUT_S) for reader in readers]
    assert all(versions == sorted(set(versions)) for versions in read), "twice, or backwards"
    guest.figures |= {
        "versions published with deltas over NFS": version,
        "reads of them on other hosts, none of them a mix": sum(map(len, read)),
        "kills of their sender, and a late reader after each": NUM_DEATHS,
    }
    print(f"in {time.monotonic() - started:.1f} s: {guest.figures}")


def follow(guest: Guest, name: str, *, delta: bool) -> tuple[list[int], int, float]:
    """Bytes that a follower fetches of each version and a late reader at first; seconds of each."""
    fetched: list[int] = []
    times_s: list[float] = []
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(guest.on("w", publish_when_told, LARGE, name, delta=delta))
        readers = {"r": stack.enter_context(guest.on("r", load_each, name, LARGE))}
        assert readers["r"].receive() == "ready"
        for version in range(1, NUM_VERSIONS + 1):
            before = guest.nfs_read_bytes("r")
            started, _, _ = published(writer, version)
            found, done = readers["r"].receive()
            assert found == version
            fetched.append(guest.nfs_read_bytes("r") - before)
            times_s.append(done - started)
            if version == LATE:
                before = guest.nfs_read_bytes("r2")
                readers["r2"] = stack.enter_context(guest.on("r2", load_each, name, LARGE))
                assert readers["r2"].receive() == "ready"
            if version >= LATE:
                assert applied(readers["r2"], version) == [version]
            if version == LATE:
                fetched_late = guest.nfs_read_bytes("r2") - before
    return fetched, fetched_late, statistics.median(times_s[2:])


@scenario()
def test_a_host_fetches_what_changed_and_a_late_one_the_anchor_too(guest: Guest) -> None:
    whole, whole_late, whole_s = follow(guest, "whole", delta=False)
    changes, changes_late, changes_s = follow(guest, "changes", delta=True)
    for what, fetched, late in (("whole", whole, whole_late), ("deltas", changes, changes_late)):
        listed = ", ".join(f"{num_bytes / MB:.2f}" for num_bytes in fetched)
        print(f"{what}: {listed} MiB fetched; by the one that came late {late / MB:.2f}")
    share = statistics.median(changes[1:]) / statistics.median(whole[1:])
    print(f"of each version {share:.4f} of what a whole one takes")
    print(f"published to applied: {whole_s:.3f} s whole, {changes_s:.3f} s as a delta: ", end="")
    print(f"{changes_s / whole_s:.2f} of it")
    assert min(whole) >= LARGE_BYTES
    assert max(changes[1:]) < LARGE_BYTES / 10
    assert LARGE_BYTES <= changes_late < 1.5 * LARGE_BYTES


@scenario()
def test_a_mirror_fetches_what_changed_and_is_killed_and_started_again(guest: Guest) -> None:
    """It goes on from what its buffers hold, which lag: two versions' deltas are fetched then."""
    fetched = []
    with contextlib.ExitStack() as stack:
        [local] = stack.enter_context(local_stores("r"))
        writer = stack.enter_context(guest.on("w", publish_when_told, LARGE, delta=True))
        version = 0
        for _ in range(2):
            with guest.on("r", mirror, local, 0.05) as mirroring:
                for _ in range(4):
                    version += 1
                    before = guest.nfs_read_bytes("r")
                    published(writer, version)
                    applied(mirroring, version)
                    fetched.append(guest.nfs_read_bytes("r") - before)
                    assert newest(local, LARGE, verify=False) == version
        assert newest(guest.path("r2") / "store", LARGE, verify=True) == version
    print(", ".join(f"{num_bytes / MB:.2f}" for num_bytes in fetched) + " MiB fetched")
    assert LARGE_BYTES <= fetched[0] < 1.5 * LARGE_BYTES
    # Each of the two local buffers begins with a whole version.
    assert max(fetched[2:]) < LARGE_BYTES / 4
