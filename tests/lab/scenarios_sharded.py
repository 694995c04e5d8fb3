"""Ranks of one trainer on two hosts: each writes a part over its own mount, a third host reads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from torch import distributed

import dbuffer
from dbuffer.format.places import BUFFERS
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.moments import die
from dbuffer.testing.patterns import Sparse
from tests.lab.guest import Guest
from tests.lab.hosts import applied, load_each
from tests.lab.lab import scenario
from tests.support.patterns import Pattern, newest
from tests.support.soak import IN_SOAKS_ALONE
from tests.support.steps import Step, at_step

WEIGHTS = Pattern(num_tensors=12, numel=16_384)

CHANGING = Sparse(num_tensors=12, numel=16_384)

NUM_PUBLISHES = 20
HOSTS = ("w", "r")


def publish(
    connection: Connection,
    path: Path,
    rank: int,
    rendezvous: Path,
    versions: range,
    on_last: tuple[Step, Callable[[], None]] | None,
    pattern: Pattern = WEIGHTS,
) -> None:
    """Publish versions as a rank; say so before the last one, and what failed after it.

    Each rank has half of the tensors: sharded tensors need half of torch, which a guest imports in
    two minutes.
    """
    TIMING.keep_superseded_s = 0.5
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the trainer's own network, which is no NFS
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(HOSTS)
    )
    failure = "none"
    delta = pattern is CHANGING
    with dbuffer.ShardedWeightSender(path / "store", delta=delta, num_threads=1) as sender:
        for version in versions:
            tensors = list(pattern.weights(version).items())
            weights = dict(tensors[6 * rank : 6 * (rank + 1)])
            if version == versions[-1]:
                connection.send("all but the last")
                connection.recv()
                if on_last is not None:
                    at_step(*on_last)
            try:
                sender.send(weights, version=version)
            except dbuffer.RankFailedError as error:
                failure = str(error)
    connection.send(failure)
    connection.recv()


def published_by_two(guest: Guest, versions: range, pattern: Pattern) -> None:
    """Publish from two hosts while a third one reads: something before the last version, and it."""
    rendezvous = Path("/run", f"{guest.name}.{versions[0]}")
    with (
        guest.on("r2", load_each, "store", pattern) as reader,
        guest.on(HOSTS[0], publish, 0, rendezvous, versions, None, pattern) as one,
        guest.on(HOSTS[1], publish, 1, rendezvous, versions, None, pattern) as other,
    ):
        assert reader.receive() == "ready"
        assert one.receive() == other.receive() == "all but the last"
        num_read = len(applied(reader, versions[-2]))
        one.send()
        other.send()
        assert one.receive() == other.receive() == "none"
        num_read += len(applied(reader, versions[-1]))
    print(f"{num_read} versions of {len(versions)} read")


@IN_SOAKS_ALONE
@scenario()
def test_two_hosts_write_deltas_and_a_third_reads_no_mix(guest: Guest) -> None:
    """Upon an anchor of which each has written a part; so do those who come after them."""
    last = NUM_PUBLISHES // 3
    published_by_two(guest, range(1, last - 2), CHANGING)
    published_by_two(guest, range(last - 2, last + 1), CHANGING)  # the first one is an anchor
    store = DoubleBuffer(guest.server_path / "store")
    manifests = [store.undamaged_manifest(buffer) for buffer in BUFFERS]
    assert {found.version for found in manifests if found and found.anchor} == {last - 1, last}
    assert newest(guest.path("r2") / "store", CHANGING) == last
    assert len(list((guest.server_path / "store" / "deltas").iterdir())) > 1


@scenario()
def test_a_rank_on_another_host_dies_and_a_new_job_goes_on(guest: Guest) -> None:
    rendezvous = Path("/run", f"{guest.name}.rendezvous")
    step = Step("c_call", "fsync")
    with (
        guest.on(HOSTS[0], publish, 0, rendezvous, range(1, 4), None) as first,
        guest.on(HOSTS[1], publish, 1, rendezvous, range(1, 4), (step, die)) as second,
    ):
        assert first.receive() == second.receive() == "all but the last"
        first.send()
        second.send()
        assert second.wait() == -signal.SIGKILL
        died = time.monotonic()
        assert "rank 1" in first.receive()
        print(f"known {time.monotonic() - died:.1f} s after its death")
        assert newest(guest.path("r2") / "store", WEIGHTS) == 2
    published_by_two(guest, range(4, 6), WEIGHTS)
