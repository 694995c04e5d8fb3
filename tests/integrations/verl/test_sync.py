"""Both ends of a sync, without verl: which version a rollout worker takes, and when.

What verl itself makes of them is in ``test_verl``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.errors import (
    InvalidWeightsError,
    NotReadyError,
    OptionError,
    StoreBusyError,
    WaitTimeoutError,
)
from dbuffer.integrations.verl.syncing import StoreSync
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.stores import remove_store

STEP = 7


def weights(number: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((1000,), number)
    yield "b", torch.full((2, 2), number)


def taken(incoming: StoreSync) -> dict[str, torch.Tensor]:
    async def take() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in incoming.receive_weights()}

    return asyncio.run(take())


def publish(outgoing: StoreSync, pairs: Iterable[tuple[str, torch.Tensor]], step: Any) -> None:
    asyncio.run(outgoing.send_weights(pairs, step))


def number_of(found: dict[str, torch.Tensor]) -> float:
    assert found.keys() == {"a", "b"}
    [number] = torch.cat([tensor.flatten().float() for tensor in found.values()]).unique().tolist()
    return float(number)


def newest(store: Path) -> dbuffer.Snapshot:
    with (
        dbuffer.WeightReceiver(store) as receiver,
        receiver.open(timeout_s=0, acknowledge=False) as snapshot,
    ):
        return snapshot


class Ends:
    def __init__(
        self,
        store: Path,
        *,
        local_store: str | None = None,
        timeout_s: float = TIMEOUT_S,
        **actor: Any,
    ) -> None:
        new = functools.partial(StoreSync, 1, store=str(store))
        self.new_actor = functools.partial(new, is_master=True, **actor)
        self.new_rollout = functools.partial(new, local_store=local_store, timeout_s=timeout_s)
        self.outgoing = self.new_actor()
        self.incoming = self.new_rollout()

    def begin(self) -> None:
        self.incoming.init_process_group(self.outgoing.prepare())

    def publish(self, number: float, step: int | None = STEP) -> None:
        self.begin()
        publish(self.outgoing, weights(number), step)

    def sync(self, number: float, step: int | None = STEP) -> float:
        self.publish(number, step)
        found = number_of(taken(self.incoming))
        self.incoming.finalize()
        return found

    def restart_trainer(self) -> None:
        """Another process has the store now; this one's sender is closed as that of one dead."""
        self.outgoing._sender.close()
        self.outgoing = self.new_actor()


@pytest.fixture
def ends(store: Path) -> Ends:
    return Ends(store)


def test_each_sync_is_a_version_that_says_its_step(ends, store):
    assert [ends.sync(1, 10), ends.sync(2, 20)] == [1, 2]
    assert newest(store).version == 2
    assert newest(store).metadata["global_steps"] == 20
    ends.restart_trainer()
    assert ends.sync(3) == 3
    assert newest(store).version == 3


@pytest.mark.parametrize("step", [STEP, None])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_version_of_another_sync_is_not_taken_whatever_its_step(ends, step, is_new):
    ends.sync(1, step)
    ends.publish(2, step)  # and verl gave this sync up
    if is_new:
        ends.incoming = ends.new_rollout()
    ends.begin()
    waiting = ends.incoming.waiting()
    next(waiting)
    publish(ends.outgoing, weights(3), step)
    assert list(waiting) == []
    assert number_of(taken(ends.incoming)) == 3


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_rollout_workers_follow_a_trainer_that_begins_the_store_anew(
    tmp_path, store, how, is_mirrored
):
    local_store = tmp_path / "local" if is_mirrored else None
    ends = Ends(store, local_store=local_store and str(local_store))
    assert [ends.sync(1), ends.sync(2)] == [1, 2]
    assert newest(local_store or store).version == 2
    remove_store(store)
    if how == "emptied":
        store.mkdir(mode=0o700)
    ends.restart_trainer()
    assert [ends.sync(3), ends.sync(4)] == [3, 4]
    assert newest(local_store or store).version == 2
    if is_mirrored:
        ends.incoming._mirror.close()


def test_a_second_trainer_is_refused_when_its_sync_begins(ends):
    ends.sync(1)
    with pytest.raises(StoreBusyError):
        ends.new_actor().prepare()


def test_a_version_that_does_not_come_is_an_error(store):
    ends = Ends(store, timeout_s=0.05)
    ends.sync(1)
    ends.begin()
    with pytest.raises(WaitTimeoutError, match=r"0\.05 s"):
        taken(ends.incoming)


class TestFailure:
    def test_nothing_is_published_and_the_next_sync_works(self, ends, store):
        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights(2)
            raise ZeroDivisionError

        ends.sync(1)
        ends.begin()
        with pytest.raises(ZeroDivisionError):
            publish(ends.outgoing, broken(), STEP)
        assert newest(store).version == 1
        assert ends.sync(3) == 3

    def test_who_still_waits_for_it_does_not_take_the_next_one(self, ends):
        ends.sync(1)
        ends.begin()
        waiting = ends.incoming.waiting()
        next(waiting)
        ends.publish(2)
        with pytest.raises(WaitTimeoutError):
            next(waiting)
        assert number_of(taken(ends.incoming)) == 2

    def test_a_version_that_was_overwritten_unfinished_does_not_fail_the_next(self, ends, store):
        ends.publish(1)
        taken(ends.incoming)
        ends.outgoing._sender.close()
        with dbuffer.WeightSender(store, reader_timeout_s=0.01) as impatient:
            for number in (2.0, 3.0):
                impatient.send(dict(weights(number)))
        ends.outgoing = ends.new_actor()
        assert ends.sync(4) == 4

    def test_all_weights_are_asked_for_as_other_ranks_ask_for_them_too(self, ends):
        asked = []

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name in ("a", "a", "b", "c"):  # a name twice cannot be published
                asked.append(name)
                yield name, torch.ones(2)

        ends.begin()
        with pytest.raises(InvalidWeightsError, match="'a'"):
            publish(ends.outgoing, gathered(), STEP)
        publish(ends.new_rollout(), gathered(), STEP)
        assert asked == ["a", "a", "b", "c"] * 2

    def test_a_sync_is_published_once_and_taken_after_its_begin(self, ends):
        with pytest.raises(NotReadyError):
            taken(ends.incoming)
        gathered = iter(weights(1))
        with pytest.raises(NotReadyError):
            publish(ends.outgoing, gathered, STEP)
        assert next(gathered, None) is None, "the other ranks gather with this one"
        ends.publish(1)
        with pytest.raises(NotReadyError):
            publish(ends.outgoing, weights(1), STEP)


class TestAcknowledgement:
    def test_it_comes_when_the_engine_has_loaded_and_not_else(self, ends):
        ends.publish(1)
        taken(ends.incoming)
        with pytest.raises(WaitTimeoutError):
            self.wait(ends, 1)
        ends.incoming.finalize()
        self.wait(ends, 1)
        ends.publish(2)
        taken(ends.incoming)
        ends.begin()  # of the next: nobody finished this one
        with pytest.raises(WaitTimeoutError):
            self.wait(ends, 2)

    @staticmethod
    def wait(ends: Ends, version: int) -> None:
        ends.outgoing._sender.wait_applied(version, timeout_s=0.01)


class TestOptions:
    def test_weights_are_published_in_another_dtype(self, store):
        ends = Ends(store, dtype="bfloat16")
        assert ends.sync(1.5) == 1.5
        assert newest(store).specs[0].dtype == "bfloat16"

    def test_what_changed_is_published(self, store, monkeypatch):
        monkeypatch.setenv("DBUFFER_MOUNT", "network")
        ends = Ends(store, delta=True)
        one = torch.arange(100_000.0)

        def reused(number: float) -> Iterable[tuple[str, torch.Tensor]]:
            memory = torch.empty_like(one)
            for name, offset in (("a", 0), ("b", 1)):
                torch.add(one, offset, out=memory)
                memory[3] = number
                yield name, memory

        for number in (1, 2):
            ends.begin()
            publish(ends.outgoing, reused(number), STEP)
            found = taken(ends.incoming)
            ends.incoming.finalize()
            for name, tensor in reused(number):
                assert torch.equal(found[name], tensor)
        assert ends.outgoing._sender.stats["deltas"] == 1

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("store", ""),
            ("store", None),
            ("local_store", ""),
            ("delta", "yes"),
            ("dtype", "bf16"),
            ("dtype", ["bfloat16"]),
            ("timeout_s", 0),
            ("timeout_s", "600"),
        ],
    )
    def test_what_they_may_not_be_is_refused_by_name(self, store, option, value):
        with pytest.raises(OptionError, match=f"engine_kwargs.dbuffer.{option} "):
            StoreSync(1, **({"store": str(store)} | {option: value}))
