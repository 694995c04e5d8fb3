"""The store against a model: a dictionary of what was published, and nothing else.

Hypothesis draws sequences of publishes, failures, crashes, restarts, slow readers and damage,
and shrinks the shortest one that breaks what must hold after every step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
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
from support import SHARED_MEMORY, assert_tidy, make_temporaries_old

import dbuffer
from dbuffer import filesystem, retirement
from dbuffer.buffer import DoubleBuffer, other_buffer

Tensors = dict[str, torch.Tensor]

READER_TIMEOUT_S = 0.01

LAYOUTS: tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], ...] = (
    {"weight": (torch.float32, (16, 4)), "bias": (torch.bfloat16, (7,))},
    {"weight": (torch.float32, (16, 4)), "bias": (torch.float32, (7,))},
    {"scale": (torch.int64, ()), "nothing": (torch.float16, (0, 3)), "mask": (torch.bool, (9,))},
    {"large": (torch.uint8, (3 << 19,)), "größe/1.weight": (torch.complex64, (2, 2))},
)


class CrashError(BaseException):
    """Stands for the death of the sender's process: nothing it does afterwards has an effect."""


def tensors_of(layout: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype)
        if dtype is torch.bool
        else (torch.randint(0, 100, shape, generator=generator)).to(dtype)
        for name, (dtype, shape) in LAYOUTS[layout].items()
    }


def are_equal(one: Any, other: Tensors) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == value.dtype and torch.equal(one[name], value)
        for name, value in other.items()
    )


def copied(pairs: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.clone() for name, tensor in pairs}


@contextlib.contextmanager
def dying_at(step: int) -> Iterator[None]:
    """Raise before the ``step``-th call that writes, and at every one after it."""
    calls = itertools.count(1)

    def mortal(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= step:
                raise CrashError
            return function(*args, **kwargs)

        return call

    names = ("replace_file", "allocate", "sync_file", "write_at", "unlock", "lock_within")
    with contextlib.ExitStack() as patches:
        for name in names:
            changed = mortal(getattr(filesystem, name))
            patches.enter_context(mock.patch.object(filesystem, name, changed))
        unlink = mortal(Path.unlink)
        patches.enter_context(mock.patch.object(Path, "unlink", unlink))
        yield


@dataclass
class Held:
    """A snapshot in somebody's hands, and what it must show until it is let go."""

    snapshot: dbuffer.Snapshot
    leave: contextlib.ExitStack
    version: int
    is_evicted: bool = False


@dataclass
class Reader:
    receiver: dbuffer.WeightReceiver
    loaded: int | None = None
    seen: int = 0


class StoreMachine(RuleBasedStateMachine):
    """What is done to the store is done to the model; they must agree."""

    readers = Bundle("readers")
    snapshots = Bundle("snapshots")
    is_network = False

    def __init__(self) -> None:
        super().__init__()
        self.patches = contextlib.ExitStack()
        mount = {"DBUFFER_MOUNT": "network" if self.is_network else "local"}
        self.patches.enter_context(mock.patch.dict(os.environ, mount))
        self.patches.enter_context(mock.patch.object(retirement, "KEEP_AT_LEAST_S", 0.0))
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="dbuffer-test-", dir=base))
        self.store = self.directory / "store"
        # The model.
        self.published: dict[int, Tensors] = {}
        self.metadata: dict[int, Any] = {}
        self.newest = 0
        self.held: list[Held] = []

    @initialize(durable=st.booleans(), checksum=st.booleans())
    def start(self, durable: bool, checksum: bool) -> None:
        self.options = {"durable": durable, "checksum": checksum}
        self.sender = self.make_sender()

    def make_sender(self) -> dbuffer.WeightSender:
        return dbuffer.WeightSender(
            self.store, reader_timeout_s=READER_TIMEOUT_S, num_threads=1, **self.options
        )

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
        if self.is_network:
            return  # its file was left alone, and is in memory besides
        for held in self.held:
            held.is_evicted |= held.version != self.newest

    # Publishing

    @rule(layout=st.integers(0, 3), seed=st.integers(0, 99), as_stream=st.booleans())
    def publish(self, layout: int, seed: int, as_stream: bool) -> None:
        tensors = tensors_of(layout, seed)
        self.note_claim()
        publication = self.sender.send(iter(tensors.items()) if as_stream else tensors)
        # A first version that crashed between manifest and pointer may leave its number unused.
        assert publication.version == self.newest + 1 or not self.newest
        assert publication.num_tensors == len(tensors)
        assert publication.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        self.note_publication(publication.version, tensors, {})

    @rule(layout=st.integers(0, 3), skipped=st.integers(1, 1000), note=st.text(max_size=5))
    def publish_a_version_further_on(self, layout: int, skipped: int, note: str) -> None:
        tensors, version = tensors_of(layout, skipped), self.newest + 1 + skipped
        metadata = {"note": note, "skipped": skipped}
        self.note_claim()
        publication = self.sender.send(tensors, version=version, metadata=metadata)
        assert publication.version == version
        self.note_publication(version, tensors, metadata)

    @rule(back=st.integers(0, 3))
    def refuse_a_version_that_does_not_go_up(self, back: int) -> None:
        with pytest.raises(dbuffer.VersionError):
            self.sender.send(tensors_of(0, 0), version=self.newest - back)

    @rule(
        weights=st.sampled_from(
            [{}, [("a", torch.ones(1)), ("a", torch.ones(1))], {"a": 1.0}, 7, "no such directory"]
        )
    )
    def refuse_what_is_no_weights(self, weights: Any) -> None:
        with pytest.raises(dbuffer.InvalidWeightsError):
            self.sender.send(weights)

    @rule(metadata=st.sampled_from([{"a": object()}, {"a": {1, 2}}, {"a": "x" * (1 << 20)}]))
    def refuse_metadata_that_json_cannot_hold(self, metadata: Any) -> None:
        with pytest.raises(dbuffer.InvalidWeightsError):
            self.sender.send(tensors_of(0, 0), metadata=metadata)

    @rule(layout=st.integers(0, 3), after=st.integers(0, 2))
    def publish_a_stream_that_breaks_off(self, layout: int, after: int) -> None:
        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield from itertools.islice(tensors_of(layout, 0).items(), after)
            raise KeyError("the trainer's own trouble")

        self.note_claim()
        with pytest.raises(KeyError, match="trainer"):
            self.sender.send(stream())

    # Senders come and go

    @rule()
    def restart(self) -> None:
        self.sender.close()
        self.sender = self.make_sender()

    @rule()
    def refuse_a_second_sender(self) -> None:
        with pytest.raises(dbuffer.WriterActiveError):
            self.make_sender()

    @rule(layout=st.integers(0, 3), seed=st.integers(0, 99), step=st.integers(1, 12))
    def crash_while_publishing(self, layout: int, seed: int, step: int) -> None:
        tensors = tensors_of(layout, seed)
        with dying_at(step), contextlib.suppress(CrashError):
            self.sender.send(tensors)
        self.sender.close()
        self.note_claim_if_it_came_to_that()
        pointer = DoubleBuffer(self.store).pointer()
        if pointer is not None and pointer.version > self.newest:
            self.note_publication(pointer.version, tensors, {})
        self.sender = self.make_sender()

    def note_claim_if_it_came_to_that(self) -> None:
        """A crash may have come before the mark; then the readers keep what they hold."""
        store = DoubleBuffer(self.store)
        for held in self.held:
            held.is_evicted |= not store.is_unchanged(held.snapshot._held)

    @rule(step=st.integers(1, 4))
    def crash_while_starting(self, step: int) -> None:
        self.sender.close()
        with dying_at(step), contextlib.suppress(CrashError):
            self.make_sender().close()
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
            reader.loaded = reader.seen = version

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
        held = Held(snapshot, leave, snapshot.version)
        self.held.append(held)
        return multiple(held)

    @rule(held=snapshots)
    def let_go(self, held: Held) -> None:
        if held not in self.held:
            return
        self.held.remove(held)
        assert are_equal(held.snapshot.tensors, self.published[held.version])
        if held.is_evicted:
            with pytest.raises(dbuffer.SnapshotEvictedError):
                held.leave.close()
        else:
            held.leave.close()

    @rule(held=snapshots)
    def scribble(self, held: Held) -> None:
        """What a program does to its snapshot's tensors, nobody else sees."""
        if held in self.held:
            self.held.remove(held)
            for tensor in held.snapshot.tensors.values():
                tensor.zero_()
            with contextlib.suppress(dbuffer.SnapshotEvictedError):
                held.leave.close()

    # Damage to what is not the newest

    @precondition(lambda self: self.newest)
    @rule(damage=st.sampled_from(["garbled", "no manifest", "no file", "cut short", "emptied"]))
    def damage_the_idle_buffer(self, damage: str) -> None:
        if any(held.version != self.newest for held in self.held):
            return  # it would be the snapshot's own file
        store = DoubleBuffer(self.store)
        pointer = store.pointer()
        assert pointer is not None
        directory = self.store / other_buffer(pointer.buffer)
        manifest = directory / "manifest.json"
        for file in directory.glob("weights-*"):
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
            assert are_equal(held.snapshot.tensors, self.published[held.version])

    @invariant()
    def nothing_is_left_over(self) -> None:
        if hasattr(self, "sender") and not self.is_network:  # there they go in time
            files = [*self.store.rglob("weights-*")]
            assert len(files) <= 3, "a crash may leave one, until the next publish"

    @rule()
    def restart_and_tidy(self) -> None:
        make_temporaries_old(self.store)
        self.restart()
        if self.is_network:
            time.sleep(READER_TIMEOUT_S)
            self.publish(0, 1, as_stream=False)
        self.publish(0, 0, as_stream=False)
        assert_tidy(self.store)


class NetworkStoreMachine(StoreMachine):
    """As on a network mount, where the pointer may be away for a while."""

    is_network = True

    @precondition(lambda self: self.newest)
    @rule(seen=st.booleans())
    def look_while_the_pointer_is_away(self, seen: bool) -> None:
        pointer = self.store / "CURRENT"
        into: Tensors = {}
        with dbuffer.WeightReceiver(self.store, receiver_id="away", num_threads=1) as receiver:
            if seen:
                assert receiver.wait_for_version(timeout_s=0) == self.newest
                with receiver.open(acknowledge=False):
                    pass
            data = pointer.read_bytes()
            pointer.unlink()
            version = None
            # None: a buffer was damaged, or holds nothing yet.
            with contextlib.suppress(dbuffer.StoreCorruptError, dbuffer.VersionRegressedError):
                version = receiver.load_into(lambda pairs: into.update(copied(pairs)))
            pointer.write_bytes(data)
            pointer.chmod(0o600)
        if version is not None:
            assert version >= (self.newest if seen else 0)
            assert are_equal(into, self.published[version]), "it was published, just so"


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, report_multiple_bugs=False)
TestStore.pytestmark = [pytest.mark.slow]
TestNetworkStore = NetworkStoreMachine.TestCase
TestNetworkStore.settings = settings(TestStore.settings, max_examples=30)
TestNetworkStore.pytestmark = [pytest.mark.slow]
