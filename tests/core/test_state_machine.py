"""The store against a model: a dictionary of what was published, and nothing else.

Hypothesis draws sequences of publishes, failures, crashes, restarts, slow readers and damage,
and shrinks the shortest one that breaks what must hold after every step. A crash is the death of a
process: nothing of it clears up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import dbuffer
from dbuffer.format import chain
from dbuffer.runtime.timing import TIMING
from dbuffer.store.buffer import DoubleBuffer, other_buffer
from dbuffer.testing.moments import CHANGING_CALLS, at_call, die
from tests.support.children import Child
from tests.support.patterns import patches_between
from tests.support.soak import is_soak
from tests.support.stores import SHARED_MEMORY, assert_tidy, make_temporaries_old

Tensors = dict[str, torch.Tensor]

READER_TIMEOUT_S = 0.01

LAYOUTS: tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], ...] = (
    {"weight": (torch.float32, (16, 4)), "bias": (torch.bfloat16, (7,))},
    {"weight": (torch.float32, (16, 4)), "bias": (torch.float32, (7,))},
    {"scale": (torch.int64, ()), "nothing": (torch.float16, (0, 3)), "mask": (torch.bool, (9,))},
    {"large": (torch.uint8, (3 << 19,)), "größe/1.weight": (torch.complex64, (2, 2))},
)


def tensors_of(layout: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in LAYOUTS[layout].items():
        below = 2 if dtype is torch.bool else 100
        tensors[name] = torch.randint(0, below, shape, generator=generator).to(dtype)
    return tensors


def are_equal(one: Any, other: Tensors) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == value.dtype and torch.equal(one[name], value)
        for name, value in other.items()
    )


def copied(pairs: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.clone() for name, tensor in pairs}


def changed(tensors: Tensors, seed: int) -> Tensors:
    """The same, with another element or two in most of them."""
    generator = torch.Generator().manual_seed(seed)
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in result.values():
        flat = tensor.view(-1)
        if flat.numel() and seed % 4:
            at = torch.randint(0, flat.numel(), (seed % 3,), generator=generator)
            flat[at] = (flat[at] == 0).to(tensor.dtype)
    return result


Given = tuple[int, int]
"""Weights: their layout and seed."""


def publish_and_die(
    connection: Connection,
    store: Path,
    options: dict[str, bool],
    weights: list[Tensors],
    number: int,
) -> None:
    """Be killed before the ``number``-th call that changes the disk, or at the end of it all.

    These are calls of the last publish, by a sender that has published before. If there is one
    publish, or none, they are also those of opening the sender.
    """
    set_short_limits()
    if len(weights) < 2:
        at_call(number, die, CHANGING_CALLS)
    sender = make_sender(store, options)
    for index, tensors in enumerate(weights):
        if index and index == len(weights) - 1:
            at_call(number, die, CHANGING_CALLS)
        connection.send(sender.send(tensors).version)
    die()


def set_short_limits() -> None:
    TIMING.keep_superseded_s = 0.0
    # The weights are small, and deltas soon as large; chains are to end, and not with each version.
    chain.MAX_CHAIN, chain.MAX_CHAIN_SHARE = 3, 100.0


def make_sender(store: Path, options: dict[str, bool]) -> dbuffer.WeightSender:
    return dbuffer.WeightSender(store, reader_timeout_s=READER_TIMEOUT_S, num_threads=1, **options)


@dataclass
class Held:
    """A snapshot in somebody's hands, and what it must show until it is let go."""

    snapshot: dbuffer.Snapshot
    leave: contextlib.ExitStack
    version: int
    tensors: Tensors
    is_evicted: bool = False


@dataclass
class Reader:
    receiver: dbuffer.WeightReceiver
    loaded: int | None = None


given = st.tuples(st.integers(0, 3), st.integers(0, 99))


class StoreMachine(RuleBasedStateMachine):
    """What is done to the store is done to the model; they must agree."""

    readers = Bundle("readers")
    snapshots = Bundle("snapshots")
    mount = "local"
    """A publish takes the file of a version that somebody holds on to, and removes old files at
    once; on a network mount it does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.dict(os.environ, DBUFFER_MOUNT=self.mount))
        for name in ("MAX_CHAIN", "MAX_CHAIN_SHARE"):
            self.patches.enter_context(mock.patch.object(chain, name))
        set_short_limits()
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="dbuffer-test-", dir=base))
        self.store = self.directory / "store"
        # The model.
        self.published: dict[int, Tensors] = {}
        self.metadata: dict[int, Any] = {}
        self.newest = 0
        self.held: list[Held] = []

    @initialize(durable=st.booleans(), checksum=st.booleans(), delta=st.booleans())
    def start(self, durable: bool, checksum: bool, delta: bool) -> None:
        self.options = {"durable": durable, "checksum": checksum, "delta": delta}
        self.sender = self.make_sender()

    def make_sender(self) -> dbuffer.WeightSender:
        return make_sender(self.store, self.options)

    def teardown(self) -> None:
        for held in self.held:
            with contextlib.suppress(dbuffer.SnapshotEvictedError):
                held.leave.close()
        if hasattr(self, "sender"):
            self.sender.close()
        shutil.rmtree(self.directory)
        self.patches.close()

    def note_publication(self, version: int, tensors: Tensors, metadata: Any) -> None:
        self.published[version] = tensors
        self.metadata[version] = metadata
        self.newest = version

    def note_claim(self) -> None:
        """The buffer that is not the newest was taken, whoever held it."""
        if self.mount == "network":
            return  # its bytes are in memory
        for held in self.held:
            held.is_evicted |= held.version != self.newest

    # Publishing

    @rule(
        layout=st.integers(0, 3),
        seed=st.integers(0, 99),
        as_stream=st.booleans(),
        skipped=st.none() | st.integers(0, 1000),
        metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    )
    def publish(
        self,
        layout: int,
        seed: int,
        as_stream: bool = False,
        skipped: int | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        tensors, version = tensors_of(layout, seed), None
        if as_stream and self.options["delta"]:
            with pytest.raises(dbuffer.InvalidWeightsError):
                self.sender.send(iter(tensors.items()))
            as_stream = False
        if skipped is not None:
            version = self.newest + 1 + skipped
        self.note_claim()
        publication = self.sender.send(
            iter(tensors.items()) if as_stream else tensors, version=version, metadata=metadata
        )
        # A first version that crashed between manifest and pointer may leave its number unused.
        assert publication.version == (version or self.newest + 1) or not self.newest
        assert publication.num_tensors == len(tensors)
        assert publication.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        self.note_publication(publication.version, tensors, metadata or {})

    @rule(layout=st.integers(0, 3), after=st.integers(0, 2))
    def publish_a_stream_that_breaks_off(self, layout: int, after: int) -> None:
        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from itertools.islice(tensors_of(layout, 0).items(), after)
            raise KeyError("the trainer's own trouble")

        if self.options["delta"]:
            return
        self.note_claim()
        with pytest.raises(KeyError):
            self.sender.send(stream())

    # Deltas

    def has_deltas(self) -> bool:
        return bool(self.newest) and self.options["delta"]

    @precondition(has_deltas)
    @rule(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=5), by_patches=st.booleans())
    def publish_few_changes(self, seeds: list[int], by_patches: bool) -> None:
        for seed in seeds:
            before = self.published[self.newest]
            tensors = changed(before, seed)
            publication = None
            self.note_claim()
            if by_patches:
                # It has sent nothing yet, or has failed.
                with contextlib.suppress(dbuffer.VersionError):
                    publication = self.sender.send_patches(patches_between(before, tensors))
            if publication is None:
                publication = self.sender.send(tensors)
            self.note_publication(publication.version, tensors, {})

    # Senders come and go

    @rule()
    def restart(self) -> None:
        self.sender.close()
        self.sender = self.make_sender()

    @rule()
    def refuse_a_second_sender(self) -> None:
        with pytest.raises(dbuffer.StoreBusyError):
            self.make_sender()

    @rule(
        first=st.none() | given,
        seeds=st.lists(st.integers(0, 99), max_size=6),
        are_alike=st.booleans(),
        number=st.integers(1, 40),
    )
    def crash(self, first: Given | None, seeds: list[int], are_alike: bool, number: int) -> None:
        """Of several versions, each of which may differ little from the one before, the last."""
        weights = [] if first is None else [tensors_of(*first)]
        for seed in seeds if weights else ():
            weights.append(changed(weights[-1], seed) if are_alike else tensors_of(seed % 4, seed))
        self.sender.close()
        with Child(publish_and_die, self.store, self.options, weights, number) as child:
            for tensors in weights[:-1]:
                self.note_claim()
                self.note_publication(child.receive(), tensors, {})
            assert child.wait() == -signal.SIGKILL
        for held in self.held:  # it may have come before the mark: readers keep what they hold
            held.is_evicted |= not held.snapshot._opened.is_unchanged()
        pointer = DoubleBuffer(self.store).pointer()
        if pointer is not None and pointer.version > self.newest:
            self.note_publication(pointer.version, weights[-1], {})
        self.sender = self.make_sender()

    # Readers come and go, and hold on

    @rule(target=readers, verify=st.booleans())
    def add_reader(self, verify: bool) -> Reader:
        verify = verify and self.options["checksum"]
        return Reader(dbuffer.WeightReceiver(self.store, verify=verify, num_threads=1))

    @rule(reader=readers)
    def load(self, reader: Reader) -> None:
        into: Tensors = {}
        version = reader.receiver.load_into(lambda pairs: into.update(copied(pairs)))
        if reader.loaded == self.newest or not self.newest:
            assert version is None
        else:
            assert version == self.newest
            assert are_equal(into, self.published[version])
            reader.loaded = version

    @rule(reader=readers, layout=st.integers(0, 3))
    def load_in_place(self, reader: Reader, layout: int) -> None:
        into = {name: torch.full_like(t, 1) for name, t in tensors_of(layout, 0).items()}
        before = {name: tensor.clone() for name, tensor in into.items()}
        is_new = bool(self.newest) and reader.loaded != self.newest
        specs = [(name, t.dtype, t.shape) for name, t in into.items()]
        newest = self.published.get(self.newest, {})
        if is_new and specs != [(name, t.dtype, t.shape) for name, t in newest.items()]:
            with pytest.raises(dbuffer.WeightsMismatchError):
                reader.receiver.load_into(into)
            assert are_equal(into, before)
            return
        version = reader.receiver.load_into(into)
        assert version == (self.newest if is_new else None)
        assert are_equal(into, newest if is_new else before)
        reader.loaded = version or reader.loaded

    @precondition(lambda self: self.newest)
    @rule(target=snapshots, reader=readers)
    def open(self, reader: Reader) -> Any:
        leave = contextlib.ExitStack()
        snapshot = leave.enter_context(reader.receiver.open(timeout_s=1))
        assert snapshot.version == self.newest
        assert snapshot.metadata == self.metadata[self.newest]
        held = Held(snapshot, leave, self.newest, self.published[self.newest])
        self.held.append(held)
        return multiple(held)

    @rule(held=snapshots, scribbles=st.booleans())
    def let_go(self, held: Held, scribbles: bool) -> None:
        """A snapshot's tensors are a program's own: nobody else sees what it writes into them."""
        if held not in self.held:
            return
        self.held.remove(held)
        assert are_equal(held.snapshot.tensors, held.tensors)
        for tensor in held.snapshot.tensors.values() if scribbles else ():
            tensor.zero_()
        if held.is_evicted:
            with pytest.raises(dbuffer.SnapshotEvictedError):
                held.leave.close()
        else:
            held.leave.close()

    # Damage to what is not the newest

    # Else it would be a snapshot's own file.
    @precondition(
        lambda self: self.newest and {held.version for held in self.held} <= {self.newest}
    )
    @rule(damage=st.sampled_from(["garbled", "no manifest", "no file", "cut short", "emptied"]))
    def damage_the_idle_buffer(self, damage: str) -> None:
        store = DoubleBuffer(self.store)
        pointer = store.pointer()
        directory = self.store / other_buffer(pointer.buffer)
        manifest = directory / "manifest.json"
        newest = store.manifest(pointer.buffer)
        assert newest is not None
        for file in directory.glob("weights-*"):
            if file.name == newest.file:
                continue  # the newest version stands on it
            if damage == "no file":
                file.unlink()
            elif damage == "cut short":
                with file.open("r+b") as opened:
                    opened.truncate(file.stat().st_size // 2)
        if damage == "garbled":
            manifest.write_bytes(b'{"format":1,"state":')
        elif damage == "no manifest":
            manifest.unlink(missing_ok=True)
        elif damage == "emptied":
            manifest.write_bytes(b"")

    # What must hold after every step

    @invariant()
    def newest_version_reads_whole(self) -> None:
        if not hasattr(self, "sender"):
            return
        into: Tensors = {}
        verify = self.options["checksum"]
        with dbuffer.WeightReceiver(
            self.store, receiver_id="check", verify=verify, num_threads=1
        ) as receiver:
            version = receiver.load_into(lambda pairs: into.update(copied(pairs)))
        assert (version or 0) == self.newest
        if self.newest:
            assert are_equal(into, self.published[self.newest])

    @invariant()
    def snapshots_stay_what_they_were(self) -> None:
        for held in self.held:
            assert are_equal(held.snapshot.tensors, held.tensors)

    @invariant()
    def nothing_is_left_over(self) -> None:
        if hasattr(self, "sender") and self.mount == "local":
            files = [*self.store.rglob("weights-*")]
            assert len(files) <= 3, "a crash may leave one, until the next publish"

    @rule()
    def restart_and_tidy(self) -> None:
        make_temporaries_old(self.store)
        self.restart()
        if self.mount == "network":
            time.sleep(READER_TIMEOUT_S)
            self.publish(0, 1)
        self.publish(0, 0)
        assert_tidy(self.store)


class NetworkStoreMachine(StoreMachine):
    """As on a network mount."""

    mount = "network"


def case_of(machine: type[StoreMachine], max_examples: int, in_soaks: int) -> Any:
    """Return the test of a machine, with so many examples."""
    case: Any = machine.TestCase
    case.settings = settings(
        max_examples=in_soaks if is_soak() else max_examples,
        stateful_step_count=30,
        report_multiple_bugs=False,
        # Making a sequence that fails shorter takes up to 300 s.
        phases=tuple(Phase) if is_soak() else (Phase.generate,),
    )
    return case


TestStore = case_of(StoreMachine, 5, 2_000)
TestNetworkStore = case_of(NetworkStoreMachine, 5, 1_000)
