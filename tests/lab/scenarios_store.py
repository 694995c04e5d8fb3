"""The guarantees, across machines: one host publishes, two read, and things go wrong.

On one of the readers' hosts, and on the writer's, someone keeps old files of the store open and
mapped all the time: a client's caches live on for as long as anybody holds on to them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.receive import reader as reader_module
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime.timing import TIMING
from dbuffer.store.open_version import OpenStoreVersion
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.lab.guest import Guest, times_to_look
from tests.lab.hosts import Looking, publish_when_told, published
from tests.lab.lab import scenario
from tests.support.children import Child
from tests.support.patterns import Pattern
from tests.support.soak import is_soak
from tests.support.steps import Step, at_step

WEIGHTS = Pattern(num_tensors=12, numel=16_384)
WEIGHTS_BYTES = 12 * 16_384 * 8  # 1.5 MiB

NUM_PUBLISHES = 150 if is_soak() else 12
POLL_INTERVAL_S = 0.5
STALE_S = 10.0
"""Less than what a host keeps of a store after silence, more than a look takes at any load."""
READER_TIMEOUT_S = 9.0
NO_WAIT_S = 6.0
"""Less than a sender waits for readers, and than the 10 s for which the server waits for what a
host has that was cut off: who waits for either takes longer than this and the usual time."""
ENOUGH_READS = 8 if is_soak() else 5
PUBLISH_INTERVAL_S = 0.05
"""Less than the shortest read, by far."""
MAX_KEPT = 400  # twice that many descriptors


def keep_old_files(connection: Connection, path: Path, every_s: float) -> None:
    """Open and map the store's files as they come, and never let go of any."""
    kept: dict[int, tuple[int, mmap.mmap]] = {}
    while True:
        with contextlib.suppress(FileNotFoundError):  # a directory's entry went meanwhile
            for file in list((path / "store").rglob("*")):
                if file.is_file() and len(kept) < MAX_KEPT:
                    keep_one(file, kept)
        if not connection.closed and kept:
            connection.send("keeping")
            connection.close()
        time.sleep(every_s)


def keep_one(file: Path, kept: dict[int, tuple[int, mmap.mmap]]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it went; it is empty
        if file.stat().st_ino not in kept:
            descriptor = os.open(file, os.O_RDONLY)
            mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            kept[os.fstat(descriptor).st_ino] = descriptor, mapped


@contextlib.contextmanager
def old_files_kept(guest: Guest, *clients: str, every_s: float = 0.5) -> Iterator[None]:
    keepers: list[Child] = []
    with contextlib.ExitStack() as stack:
        for client in clients:
            keeper = stack.enter_context(guest.on(client, keep_old_files, every_s))
            assert keeper.receive() == "keeping"
            keepers.append(keeper)
        yield
        assert all(keeper._process.is_alive() for keeper in keepers)


def publish_at_full_speed(connection: Connection, path: Path) -> None:
    with dbuffer.WeightSender(path / "store", num_threads=1) as sender:
        sender.send(WEIGHTS.weights(1))
        connection.send("published")
        connection.recv()
        for version in range(2, NUM_PUBLISHES + 1):
            sender.send(WEIGHTS.weights(version))
    connection.send("all")


def read_with_delays(
    connection: Connection, path: Path, seed: int, last: int, pattern: Pattern
) -> None:
    """Read until ``last`` has come, in all the ways that there are; send the versions read."""
    rng = random.Random(seed)
    target = pattern.empty()
    versions: list[int] = [0]
    with dbuffer.WeightReceiver(path / "store", poll_interval_s=0.05, num_threads=1) as receiver:
        connection.send("ready")
        while versions[-1] < last:
            version = receiver.wait_for_version(versions[-1], timeout_s=TIMEOUT_S)
            assert version is not None, (
                f"nothing after version {versions[-1]} came in {TIMEOUT_S} s"
            )
            if rng.random() < 0.5:
                with receiver.open(versions[-1]) as snapshot:
                    time.sleep(rng.uniform(0, 0.3))
                    version = snapshot.version
                    target = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
            else:
                version = receiver.load_into(target)
            assert pattern.version_of(target) == version, f"a mix was read as version {version}"
            versions.append(version)
            time.sleep(rng.choice((0, 0, rng.uniform(0, 0.2))))
    connection.send(versions[1:])


@scenario(both=True)
def test_publishing_at_full_speed_nobody_reads_a_mix(guest: Guest) -> None:
    last = NUM_PUBLISHES
    with guest.on("w", publish_at_full_speed) as writer:
        assert writer.receive() == "published"
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(old_files_kept(guest, "w", "r2"))
            readers = [
                stack.enter_context(guest.on(client, read_with_delays, seed, last, WEIGHTS))
                for seed, client in enumerate(("r", "r2"))
            ]
            for reader in readers:
                assert reader.receive() == "ready"
            writer.send()
            num_read = []
            for reader in readers:
                versions = reader.receive(2 * TIMEOUT_S)
                print(f"{len(versions)} versions of {last} read")
                assert versions == sorted(set(versions)), "a version came twice, or went back"
                num_read.append(len(versions))
                assert reader.wait() == 0
            # One alone may be so late, on a busy machine, that it finds the last version only.
            assert sum(num_read) > max(len(readers), last / 10), "nobody read while others came"
            assert writer.receive() == "all"
        print(f"{last} publishes in {time.monotonic() - started:.1f} s")
    left = sum(file.stat().st_size for file in guest.server_path.rglob("weights-*"))
    print(f"{left / 2**20:.0f} MiB are left")


def publish_until_told(connection: Connection, path: Path, name: str) -> None:
    """Publish again and again, and keep old files for those alone who say that they read them."""
    TIMING.keep_superseded_s = 0.0
    with dbuffer.WeightSender(path / name, num_threads=1) as sender:
        for version in itertools.count(1):
            sender.send(WEIGHTS.weights(version))
            if version == 1:
                connection.send("published")
            if connection.poll(PUBLISH_INTERVAL_S):
                break


def read_slowly(connection: Connection, path: Path, name: str, announces: bool, seed: int) -> None:
    """Read some versions, or until a file has gone meanwhile; send how many, and whether one went.

    It stops between finding a version and reading it, and no checksum is compared.
    """
    rng = random.Random(seed)
    read_whole = reader_module.read_whole

    def read_later(*args: Any, **options: Any) -> Any:
        time.sleep(rng.uniform(0.2, 1.0))
        return read_whole(*args, **options)

    def note_lost(*args: Any) -> None:
        raise EOFError  # where it would be tried again

    reader_module.read_whole, OpenStoreVersion.wait_after_loss = read_later, note_lost
    if not announces:
        WeightReceiver._announce = lambda self, version: None
    versions: list[int] = []
    with WeightReceiver(path / name, verify=False, num_threads=1) as reader:
        target = WEIGHTS.empty()
        while len(versions) < ENOUGH_READS:
            reader.wait_for_version(versions[-1] if versions else None, timeout_s=TIMEOUT_S)
            try:
                version = reader.load_into(target)
            except EOFError:
                break
            assert version is not None
            assert WEIGHTS.version_of(target) == version, "a mix"
            versions.append(version)
    assert versions == sorted(set(versions))
    connection.send((len(versions), len(versions) < ENOUGH_READS))


@scenario()
def test_a_file_that_a_reader_has_announced_is_kept_and_another_is_not(guest: Guest) -> None:
    """Nothing else keeps it here: no other process holds it open, no grace, no checksum, no retry.

    The control are readers that say nothing. Over NFSv3 they must lose files; an NFSv4 server keeps
    a file that is open on some host, until it restarts.
    """
    for announces in (True, False):
        name = "announced" if announces else "unannounced"
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(guest.on("w", publish_until_told, name))
            assert writer.receive() == "published"
            readers = [
                stack.enter_context(guest.on(client, read_slowly, name, announces, seed))
                for seed, client in enumerate(("r", "r2"))
            ]
            found = [reader.receive() for reader in readers]
            writer.send("enough")
            assert writer.wait() == 0
        print(f"{name}: {found} (read, lost)")
        for read, lost in found:
            if announces:
                assert not lost, f"after {read} versions"
            else:
                assert lost or guest.version != "3"


def say_when_seen(connection: Connection, path: Path) -> None:
    """Send each version's number, when it was seen, and looks and waits until then; load it."""
    version, target = None, WEIGHTS.empty()
    with Looking(path / "store", poll_interval_s=POLL_INTERVAL_S) as receiver:
        while True:
            version = receiver.wait_for_version(version, timeout_s=None)
            connection.send((version, time.monotonic(), receiver.looks, receiver.waits_s))
            assert receiver.load_into(target) == version == WEIGHTS.version_of(target)
            receiver.looks.clear()
            receiver.waits_s.clear()


@scenario(quiet=True, both=True)
def test_a_flip_is_seen_within_a_poll_interval_and_a_second(guest: Guest) -> None:
    """Also after silence: what a client has cached may be a minute old by then.

    No look that begins after the flip may miss it, and looks are a poll interval apart. The second
    is for the look, which takes longer on a machine that does other things as well.
    """
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(guest.on("q", publish_when_told, WEIGHTS))
        published(writer, 1)
        stack.enter_context(old_files_kept(guest, "q", "q3", every_s=3.0))
        readers = [stack.enter_context(guest.on(name, say_when_seen)) for name in ("q2", "q3")]
        for reader in readers:
            assert reader.receive()[0] == 1
        for version, silence_s in enumerate((0.7, 3.1, 70.0), start=2):
            time.sleep(silence_s)
            _, flipped, _ = published(writer, version)
            for reader in readers:
                seen, when, looks, waits_s = reader.receive()
                print(f"after {silence_s} s: version {seen} after {when - flipped:.2f} s")
                assert seen == version
                assert [version for began, version in looks if began > flipped] in ([], [seen])
                assert max(waits_s, default=0.0) <= POLL_INTERVAL_S
                assert when - flipped < STALE_S


def make_stores_among_other_things(connection: Connection, path: Path, times: int) -> None:
    for number in range(times):
        connection.recv()
        (path / f"logs-{number}").mkdir()
        with dbuffer.WeightSender(path / f"store-{number}", num_threads=1) as sender:
            sender.send({"weight": torch.zeros(4)})
        connection.send("sent")


def look_without_a_pause(connection: Connection, path: Path, times: int) -> None:
    for number in range(times):
        with WeightReceiver(path / f"store-{number}", poll_interval_s=0.0001) as receiver:
            connection.send("looks")
            connection.send(receiver.wait_for_version(timeout_s=TIMEOUT_S / 2))


@scenario(both=True)
def test_a_reader_that_looks_while_a_store_is_made_finds_it(guest: Guest) -> None:
    """Over v3 two changes within one tick of the server's clock are one to who looks between.

    Such a reader would wait for a store that is there until the directory changes once more.
    """
    times = times_to_look(guest)
    with (
        guest.on("w", make_stores_among_other_things, times) as writer,
        guest.on("r", look_without_a_pause, times) as reader,
    ):
        for _ in range(times):
            assert reader.receive() == "looks"
            writer.send("make it")
            assert writer.receive() == "sent"
            assert reader.receive() == 1


IN_MID_PUBLISH = (
    Step("call", "write_tensors"),  # nothing is written yet
    Step("call", "BufferWriter.commit"),  # all is written, nothing is flushed
    Step("call", "replace_file", nth=3),  # before the pointer moves
    Step("return", "replace_file", nth=3),  # it has moved
)


def publish_with_a_stop(connection: Connection, path: Path) -> None:
    """Publish one version after another; stop at a step, if one is sent, until told to go on."""
    store, version = path / "store", 0
    with dbuffer.WeightSender(store, num_threads=1, reader_timeout_s=READER_TIMEOUT_S) as sender:
        while True:
            stop_if_told(connection)
            try:
                sender.send(WEIGHTS.weights(version + 1))
            except dbuffer.DBufferError as error:
                connection.send(error)
            else:
                version += 1
                connection.send(version)


def stop_if_told(connection: Connection) -> None:
    """Wait for a start; where a step comes with it, stop there until told to go on."""
    step = connection.recv()

    def stop() -> None:
        connection.send("stopped")
        connection.recv()

    if step is not None:
        at_step(step, stop)


def read_when_told(connection: Connection, path: Path) -> None:
    """Read the newest version; send its number and how long that took, in seconds."""
    with dbuffer.WeightReceiver(path / "store", num_threads=1) as receiver:
        while True:
            stop_if_told(connection)
            started = time.monotonic()
            with receiver.open() as snapshot:
                tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
                assert WEIGHTS.version_of(tensors) == snapshot.version, "a mix"
            connection.send((snapshot.version, time.monotonic() - started))


class Trio:
    """A writer that has published version 1, and a reader on each of the other hosts."""

    def __init__(
        self,
        guest: Guest,
        stack: contextlib.ExitStack,
        keepers: tuple[str, ...] = ("w", "r2"),
    ) -> None:
        self.version = 0
        self.writer = stack.enter_context(guest.on("w", publish_with_a_stop))
        self.publish()
        stack.enter_context(old_files_kept(guest, *keepers))
        self.readers = {
            client: stack.enter_context(guest.on(client, read_when_told)) for client in ("r", "r2")
        }
        started = time.monotonic()
        assert self.read("r", "r2") == {1}
        self.usual_s = 2 * (time.monotonic() - started)
        """Time to publish and read on this machine, with its load."""

    def publish(self) -> None:
        """Publish the next version, undisturbed."""
        started = time.monotonic()
        self.writer.send(None)
        self.expect_published()
        say_if_slow(f"publishing {self.version}", time.monotonic() - started)

    def expect_published(self) -> None:
        """Wait until the version that is being published is."""
        received = self.writer.receive()
        assert received == self.version + 1, repr(received)
        self.version = received

    def expect_refused(self) -> None:
        """The version that is being published does not come about; the last one stays."""
        error = self.writer.receive()
        assert isinstance(error, dbuffer.StoreFullError), repr(error)
        assert self.read("r", "r2") == {self.version}

    def read(self, *clients: str) -> set[int]:
        """The versions that the readers find now, all at once."""
        for client in clients:
            self.readers[client].send(None)
        versions = set()
        for client in clients:
            version, took_s = self.readers[client].receive()
            say_if_slow(f"reading {version} on {client}", took_s)
            versions.add(version)
        return versions


def say_if_slow(what: str, took_s: float) -> None:
    if took_s > 1:
        print(f"{what} took {took_s:.1f} s")


def stop_at(child: Child, step: Step) -> None:
    child.send(step)
    assert child.receive() == "stopped"


@scenario()
def test_the_writers_network_is_cut_in_mid_publish(guest: Guest) -> None:
    """For a moment, and for longer than the 10 s after which a server may forget a client.

    Nobody waits for these 10 s: what the writer's host has read was open for writing elsewhere, so
    no server has delegated it.
    """
    with contextlib.ExitStack() as stack:
        trio = Trio(guest, stack)
        for step in IN_MID_PUBLISH[1:]:
            stop_at(trio.writer, step)
            guest.cut("w")
            trio.writer.send()  # go on, and wait for the server
            has_moved = step.event == "return"
            started = time.monotonic()
            assert trio.read("r", "r2") == {trio.version + has_moved}
            assert time.monotonic() - started < NO_WAIT_S + trio.usual_s
            time.sleep(12 if step == IN_MID_PUBLISH[1] else 1)
            guest.restore("w")
            trio.expect_published()
            assert trio.read("r", "r2") == {trio.version}
        trio.publish()


@scenario()
def test_a_readers_network_is_cut_in_mid_read(guest: Guest) -> None:
    """For less and for longer than the file that it reads is kept for it."""
    with contextlib.ExitStack() as stack:
        # Not on w, whose kernel would keep a file that is open there.
        trio = Trio(guest, stack, keepers=("r2",))
        for cut_s in (TIMING.keep_superseded_s + 0.5, READER_TIMEOUT_S + 2):
            trio.publish()
            cut_at = trio.version
            stop_at(trio.readers["r"], Step("call", "read_tensors"))
            guest.cut("r")
            trio.readers["r"].send()
            end_s = time.monotonic() + cut_s
            while time.monotonic() < end_s:  # and nobody waits for it any more
                started = time.monotonic()
                trio.publish()
                assert trio.read("r2") == {trio.version}
                assert time.monotonic() - started < NO_WAIT_S + trio.usual_s
                time.sleep(1.0)
            guest.restore("r")
            read, took_s = trio.readers["r"].receive()
            print(f"cut off in version {cut_at}: read {read} after {took_s:.1f} s")
            if cut_s < READER_TIMEOUT_S:
                assert read == cut_at
            assert cut_at <= read <= trio.version
            assert trio.read("r", "r2") == {trio.version}


@scenario(disruptive=True)
def test_the_servers_disk_is_full(guest: Guest) -> None:
    with contextlib.ExitStack() as stack:
        trio = Trio(guest, stack)
        # With room for a part of a version, and with none even for a manifest.
        for free_bytes in (WEIGHTS_BYTES // 2, 0):
            guest.fill_disk(free_bytes=free_bytes)
            trio.writer.send(None)
            trio.expect_refused()
            guest.free_disk()
        # There was room, but others take it while the version is written.
        stop_at(trio.writer, IN_MID_PUBLISH[0])
        guest.fill_disk(free_bytes=WEIGHTS_BYTES // 2)
        trio.writer.send()
        trio.expect_refused()
        guest.free_disk()
        trio.publish()
        assert trio.read("r", "r2") == {2}


def publish_durably(connection: Connection, path: Path, first: int) -> None:
    """Publish at full speed; send each version when it is published."""
    with dbuffer.WeightSender(path / "store", durable=True, num_threads=1) as sender:
        for version in itertools.count(first):
            sender.send(WEIGHTS.weights(version), version=version)
            connection.send(version)


def receive_all(child: Child) -> list[int]:
    """What a child has sent, until it sends no more for a second."""
    received = []
    while child._connection.poll(1):
        received.append(child.receive())
    return received


@scenario(disruptive=True)
def test_the_servers_power_is_cut(guest: Guest) -> None:
    """What was published before is whole after it, and whoever is alive goes on."""
    rng = random.Random(guest.version)
    last = 0
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(guest.on("r", read_when_told))
        for dies in (True, False) if is_soak() else (False,):
            with guest.on("w", publish_durably, last + 1) as writer:
                assert writer.receive() == last + 1
                time.sleep(rng.uniform(0.5, 1.5))
                guest.power_cut()
                newest_sent = receive_all(writer)[-1]
                if dies:
                    writer.signal(signal.SIGKILL)
                guest.power_restore()
                guest.drop_caches()
                reader.send(None)
                last, took_s = reader.receive()
                print(f"published {newest_sent}; after the cut {last} is read, in {took_s:.1f} s")
                assert last >= newest_sent
                if not dies:
                    last = writer.receive()
                    assert last > newest_sent


@scenario(disruptive=True)
def test_the_server_restarts_before_it_has_answered(guest: Guest) -> None:
    """What it has done it does not know then, and is asked to do again: a rename cannot be."""
    with contextlib.ExitStack() as stack:
        trio = Trio(guest, stack)
        scratch = guest.server_path / "store" / "tmp"
        for file in ("manifest.json", "CURRENT") if is_soak() else ("CURRENT",):
            stop_at(trio.writer, Step("c_call", "replace", file))
            (temporary,) = scratch.glob(f".{file}.*")
            guest.delay("w", 2_000)  # of each answer, and before the rename there are others
            trio.writer.send()
            until("the server has renamed it", lambda path=temporary: not path.exists(), 60)
            guest.cut("w")  # before the answer is there
            guest.delay("w", 0)
            guest.restart_server()
            guest.restore("w")
            trio.expect_published()
            assert trio.read("r", "r2") == {trio.version}
        trio.publish()
