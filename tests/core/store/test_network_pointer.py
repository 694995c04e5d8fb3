"""A network store whose pointer is away for a while: readers go by the manifests.

Over NFSv3 it is away while it is replaced. What is found instead must be a version that was
published, and never one below what this reader has seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.format.manifest import Manifest
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import Descriptor
from dbuffer.testing.moments import die, stop
from tests.support.children import Child
from tests.support.patterns import SMALL, load, newest, publish
from tests.support.steps import Step, at_step

pytestmark = pytest.mark.usefixtures("network")


def take_away(store: Path) -> None:
    (store / "CURRENT").unlink()


def test_readers_go_by_the_manifests(store, sender, receiver, caplog):
    """One warning says so."""
    publish(sender, 1)
    take_away(store)
    # With one manifest there is no telling whether the version was published.
    assert load(receiver) is None
    assert receiver.wait_for_version(timeout_s=0) is None
    publish(sender, 2, 3)
    assert load(receiver) == 3
    assert str(store) not in caplog.text
    take_away(store)
    # The newest may be on its way; the older one was published for certain.
    assert newest(store) == 2
    for _ in range(3):
        assert receiver.wait_for_version(timeout_s=0) == 3
        assert load(receiver) is None, "there is nothing newer, and nothing older is taken"
    [line] = [r.message for r in caplog.records if "by the manifests of its buffers" in r.message]
    assert str(store) in line
    with receiver.open() as snapshot:
        assert snapshot.version == SMALL.version_of(snapshot.tensors) == 3
    publish(sender, 4)
    take_away(store)
    assert load(receiver) is None, "version 3 is there still, and 4 may be on its way"
    publish(sender, 5)
    assert load(receiver) == 5


RECORDS = ("CURRENT", "A/manifest.json", "B/manifest.json")


def test_a_store_that_went_back_or_was_emptied_is_no_pointer_on_its_way(store, sender, receiver):
    publish(sender, 1, 2)
    earlier = {name: (store / name).read_bytes() for name in RECORDS}
    publish(sender, 3, 4)
    assert load(receiver) == 4
    for name, data in earlier.items():
        (store / name).write_bytes(data)
    take_away(store)
    with pytest.raises(dbuffer.VersionRegressedError, match=r"\b4\b"):
        load(receiver)
    for name in RECORDS[1:]:
        (store / name).unlink()
    with pytest.raises(dbuffer.VersionRegressedError, match=r"emptied.*\b4\b"):
        load(receiver)


def test_on_a_local_disk_the_pointer_alone_counts(store, sender, monkeypatch):
    """There it is replaced in one step, so that one that is away was taken away."""
    publish(sender, 1, 2)
    take_away(store)
    monkeypatch.setenv("DBUFFER_MOUNT", "local")
    assert newest(store) is None


# A publish under way


def publish_up_to(
    connection: Connection, store: Path, first: int, last: int, step: Step, action: Callable
) -> None:
    os.environ["DBUFFER_MOUNT"] = "network"
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, *range(first, last))
        at_step(step, action)
        # Other bytes than the version that came about: who reads them, reads what was not.
        sender.send(SMALL.weights(last + 1000), version=last)


STEPS = {
    "mark in place": Step("c_return", "replace", "manifest.json"),
    "manifest in place": Step("c_return", "replace", "manifest.json", nth=2),
    "before the pointer": Step("call", "replace_file", "CURRENT"),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_version_that_is_not_published_is_not_read(store, step):
    with Child(publish_up_to, store, 1, 4, step, stop) as child:
        child.wait_until_stopped()
        take_away(store)
        version = newest(store)
        # The one before the newest was overwritten when this publish began, so the newest it is:
        # version 3; unless version 4 is whole, and 3 the lower of the two.
        assert version == 3
        child.signal(signal.SIGCONT)
        assert child.wait() == 0
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert snapshot.version == 4


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_first_version_whose_writer_died_is_never_read(store, step):
    """Not even once the next writer's first version is on its way."""
    with Child(publish_up_to, store, 1, 1, step, die) as child:
        assert child.wait() == -signal.SIGKILL
    assert newest(store) is None
    for next_step in STEPS.values():
        with Child(publish_up_to, store, 1, 1, next_step, die) as child:
            assert child.wait() == -signal.SIGKILL
            assert newest(store) is None
    with dbuffer.WeightSender(store, num_threads=1) as sender:
        publish(sender, 1)
        assert newest(store) == 1
        publish(sender, 2)
        assert newest(store) == 2
        take_away(store)
        assert newest(store) == 1


def at_look(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> list[str]:
    """Call ``action`` after the ``number``-th look at a manifest; return the looks so far."""
    read_manifest, looks = DoubleBuffer.manifest, []

    def look(self: DoubleBuffer, buffer: str) -> Manifest | None:
        found = read_manifest(self, buffer)
        looks.append(buffer)
        if len(looks) == number:
            with monkeypatch.context() as patch:
                patch.setattr(DoubleBuffer, "manifest", read_manifest)
                action()
        return found

    monkeypatch.setattr(DoubleBuffer, "manifest", look)
    return looks


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("step", ["mark", "pointer"])
def test_writer_that_comes_round_between_the_looks_at_two_manifests(
    store, sender, receiver, monkeypatch, times, look, step
):
    """A version of two moments may be neither old nor new, nor published at all."""
    publish(sender, 1, 2)
    assert load(receiver) == 2
    publish(sender, 3)
    assert load(receiver) == 3
    take_away(store)
    replace_file = dbuffer.store.filesystem.replace_file

    def all_but_the_pointer(path: Path, data: bytes, **options: Any) -> Descriptor:
        if path.name == "CURRENT":
            raise KeyError("dies here")
        return replace_file(path, data, **options)

    def come_round() -> None:
        publish(sender, *range(4, 4 + times))
        # And the next one has begun, and got as far as its mark, or all but its pointer.
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            if step == "mark":
                sender.send(broken())
            patch.setattr(dbuffer.store.filesystem, "replace_file", all_but_the_pointer)
            publish(sender, 4 + times)
        take_away(store)

    looks = at_look(monkeypatch, look, come_round)
    version = load(receiver)
    assert len(looks) >= 2
    assert version is None or 3 < version <= 3 + times
    monkeypatch.undo()
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    publish(sender, 10)
    assert load(receiver) == 10


def broken() -> Iterator[tuple[str, object]]:
    raise KeyError("breaks off after the mark")
    yield
