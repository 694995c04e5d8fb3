"""Senders take weight sources as vLLM's protocol has them, on one rank and on several."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver, WeightSender
from tests.support.patterns import assert_same
from tests.support.ways import mounted
from tests.support.worlds import Failure, world_of

two = world_of(2)

SHAPES = {"embedding": (7, 4), "layers.0": (3, 5), "layers.1": (300, 300), "none": (0, 2)}


class Meta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    """Ranks that have it; None: all. vLLM's sources say so since 0.33."""


class Export:
    """A source whose tensors are made one after another, in memory that the next one uses again.

    On several ranks it behaves as an export of Megatron's: making a tensor is a collective, and
    ranks besides the first get nothing.
    """

    def __init__(self, version: int = 1, **problem: Any) -> None:
        self.version = version
        self.num_passes = 0
        self.problem = problem

    def metadata(self) -> list[Meta]:
        return [Meta(name, torch.float32, shape) for name, shape in SHAPES.items()]

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        memory = torch.empty(300 * 300)
        names = self.problem.get("names", list(SHAPES))
        for name in names:
            shape = SHAPES.get(name, (1,))
            tensor = memory[: torch.Size(shape).numel()].view(shape)
            tensor.copy_(value_of(name, self.version))
            if distributed.is_initialized():
                distributed.all_reduce(torch.ones(1))
                if distributed.get_rank():
                    yield None
                    continue
            yield name, tensor.double() if self.problem.get("dtype") == name else tensor
        memory.fill_(-1.0)


class LaterExport(Export):
    """As vLLM has its sources since 0.33."""

    iter_full = Export.__iter__
    __iter__ = None  # type: ignore[assignment]

    @functools.cached_property
    def metadata(self) -> list[Meta]:  # type: ignore[override]
        return Export.metadata(self)


HELD = {0: ("embedding", "layers.1"), 1: ("embedding", "layers.0", "none")}


class Split(Export):
    """A source of which each rank holds a part; both hold the first."""

    def held_names(self) -> tuple[str, ...]:
        return tuple(self.problem.get("held", HELD)[distributed.get_rank()])

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        for name, shape in SHAPES.items():
            distributed.all_reduce(torch.ones(1))
            is_held = name in self.held_names()
            yield name, value_of(name, self.version).expand(shape) if is_held else None


class LaterSplit(LaterExport):
    """As vLLM has such sources since 0.33: a pass leaves out what this rank does not have."""

    @functools.cached_property
    def metadata(self) -> list[Meta]:  # type: ignore[override]
        held = self.problem.get("held", HELD)
        every = self.problem.get("every", ())
        return [
            one._replace(owners=tuple(rank for rank in held if one.name in held[rank]))
            if one.name not in every
            else one
            for one in Export.metadata(self)
        ]

    def iter_full(self) -> Iterator[Any]:
        self.num_passes += 1
        rank = distributed.get_rank()
        for name, _, shape, owners in self.metadata:
            if owners is None or rank in owners:
                if owners is None or len(owners) > 1:
                    distributed.all_reduce(torch.ones(1))
                yield name, value_of(name, self.version).expand(shape)


class Local(LaterExport):
    """A source that yields pieces of tensors alone."""

    def implements_iter_full(self) -> bool:
        return False


def value_of(name: str, version: int) -> torch.Tensor:
    """Values that differ in one element between versions."""
    values = torch.arange(torch.Size(SHAPES.get(name, (1,))).numel(), dtype=torch.float32)
    values[:1] += version
    return values.view(SHAPES.get(name, (1,)))


def assert_holds(rank: int, store: Path, version: int) -> None:
    """Compare the newest version on rank 0, for which the others wait."""
    if rank == 0:
        with WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert snapshot.version == version
            assert list(snapshot.tensors) == list(SHAPES)
            assert_same(snapshot.tensors, {name: value_of(name, version) for name in SHAPES})
    if distributed.is_initialized():
        distributed.barrier()


MOUNTS = ["local", "network"]


Sender = Callable[..., WeightSender | ShardedWeightSender]


def send_sources(
    rank: int, make_sender: Sender, kind: Callable[[], Export], store: Path, mount: str, delta: bool
) -> list[bool]:
    """Publish three versions; return which have a delta."""
    source = kind()
    has_delta = []
    with mounted(mount), make_sender(store, delta=delta) as sender:
        for version in (1, 2, 3):
            source.version = version
            has_delta.append(sender.send(source).delta_bytes is not None)
            assert_holds(rank, store, version)
    assert source.num_passes == 3
    return has_delta


@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("delta", [False, True], ids=["", "delta"])
@pytest.mark.parametrize("kind", [Export, LaterExport, Split, LaterSplit])
def test_senders_take_a_source(two, store, kind, delta, mount):
    together = two.run(send_sources, ShardedWeightSender, kind, store, mount, delta)
    assert together == [[False, delta, delta]] * 2
    if not issubclass(kind, Split | LaterSplit):
        alone = store.with_name("alone")
        assert send_sources(0, WeightSender, kind, alone, mount, delta) == [False, delta, delta]


def test_names_are_cleaned_renamed_and_cast(store):
    with WeightSender(store, rename={"none": "empty"}, dtype=torch.bfloat16) as sender:
        sender.send(Export())
    with WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert list(snapshot.tensors) == [*list(SHAPES)[:3], "empty"]
        assert snapshot.tensors["layers.0"].dtype is torch.bfloat16


def test_a_source_is_neither_changed_nor_sent_in_the_background(store):
    names = dbuffer.NameMap().transpose("layers.0")
    with WeightSender(store, rename=names) as sender:
        with pytest.raises(dbuffer.UnsupportedError, match="come one by one"):
            sender.send(Export())
    with WeightSender(store) as sender:
        with pytest.raises(dbuffer.OptionError, match="lazy"):
            sender.send(Export(), wait=False)
        with pytest.raises(dbuffer.InvalidWeightsError, match="metadata of this Strange"):
            sender.send(Strange())
        with pytest.raises(dbuffer.UnsupportedError, match=r"this Local has no iter_full\(\)"):
            sender.send(Local())


PROBLEMS: dict[str, dict[str, Any]] = {
    "yields 'layers.0' where its metadata.* has 'embedding'": {
        "names": ["layers.0", "embedding", "layers.1", "none"]
    },
    "yields 'other' where its metadata.* has 'layers.0'": {
        "names": ["embedding", "other", "layers.1", "none"]
    },
    "ended without 'layers.1'": {"names": ["embedding", "layers.0"]},
    "yields more, and more, which its metadata": {"names": [*SHAPES, "more", "and more"]},
    "declared as .*float32.* but is .*float64": {"dtype": "layers.1"},
}
"""Sources that differ from their metadata, by what is said of each."""


class Strange:
    def metadata(self) -> Any:
        return {"name": "shape"}

    def __iter__(self) -> Any:
        return iter(())


def send_bad_sources(rank: int, make_sender: Sender, store: Path) -> list[str]:
    """Rank 0 finds a problem in the middle of a pass; the other is in the next collective."""
    messages = []
    with make_sender(store) as sender:
        sender.send(Export())
        for version, how in enumerate(PROBLEMS.values(), 2):
            with pytest.raises(dbuffer.InvalidWeightsError) as caught:
                sender.send(Export(99, **how))
            messages.append(str(caught.value))
            assert_holds(rank, store, version - 1)
            sender.send(Export(version))
            assert_holds(rank, store, version)
    return messages


def test_a_source_that_differs_from_its_metadata_is_refused_on_all_ranks(two, store):
    alone = send_bad_sources(0, WeightSender, store.with_name("alone"))
    together = two.run(send_bad_sources, ShardedWeightSender, store)
    assert together == [together[0]] * 2
    for expected, message, of_ranks in zip(PROBLEMS, alone, together[0], strict=True):
        assert re.search(expected, message)
        assert re.search(f"rank 0 could not gather and write.*{expected}", of_ranks)


def send_orphan(rank: int, kind: Callable[..., Export], store: Path) -> None:
    with ShardedWeightSender(store) as sender:
        sender.send(kind(held={0: ["embedding"], 1: ["layers.0", "none"]}))


@pytest.mark.parametrize("kind", [Split, LaterSplit])
def test_a_tensor_of_a_source_that_no_rank_holds_is_refused_by_name(two, store, kind):
    for outcome in two.outcomes(send_orphan, kind, store):
        assert isinstance(outcome, Failure)
        assert "no rank holds layers.1 float32[300, 300]" in outcome.message


def send_partly_split(rank: int, store: Path) -> None:
    """Send a source of which some tensors are on all ranks, and the others on one."""
    with ShardedWeightSender(store) as sender:
        sender.send(LaterSplit(every=("embedding",)))
        assert_holds(rank, store, 1)


def test_tensors_of_a_split_source_may_be_on_all_ranks(two, store):
    two.run(send_partly_split, store)


def send_split_alone(rank: int, store: Path) -> list[str]:
    """Send split sources from each rank by a sender of its own."""
    messages = []
    with WeightSender(store / str(rank)) as sender:
        for kind in (Split, LaterSplit):
            with pytest.raises(dbuffer.UnsupportedError) as caught:
                sender.send(kind())
            messages.append(str(caught.value))
        sender.send(LaterSplit(held={rank: tuple(SHAPES)}))
    return messages


def test_a_sender_of_one_rank_refuses_a_split_source_before_it_writes(two, store):
    missing = ("'?layers.0'?, '?none'?", "'?layers.1'?")
    for names, messages in zip(missing, two.run(send_split_alone, store), strict=True):
        for message in messages:
            assert re.search(f"this rank does not have {names} of .*ShardedWeightSender", message)
