"""Ranks publish together what changed since the version before; real processes, with gloo."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver
from dbuffer.format import chain
from dbuffer.publish.draft import Draft
from dbuffer.store.buffer import DoubleBuffer
from tests.support.patterns import bits, received
from tests.support.sharded import (
    STRIDED,
    Case,
    fsdp,
    hsdp,
    mounted,
    partly_fsdp,
    placements,
    replicated,
    sums,
    tied,
    two_dimensions,
    whole,
)
from tests.support.soak import IN_SOAKS_ALONE, in_turn
from tests.support.worlds import World

MOUNTS = ["local", "network"]


@pytest.fixture(scope="module")
def world(four: World) -> World:
    return four


def few(size: int) -> Case:
    """Too little for all ranks to write some of it."""
    full = {"weight": whole(400, 50), "bias": whole(400)}
    return full, full


def tensors_of(weights: Any) -> dict[str, torch.Tensor]:
    found = weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights
    return {name: tensor.detach() for name, tensor in found.items()}


def nudge(weights: Any, one_in: int, number: int) -> None:
    """Change a bit of some elements. Their values choose them, so shards and the whole agree.

    Of all elements, if ``one_in`` is 1, a bit of each byte.
    """
    seen = set()
    for tensor in tensors_of(weights).values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.numel() or local.is_complex() or local.dtype is torch.bool:
            continue
        if local.data_ptr() in seen:  # tied
            continue
        seen.add(local.data_ptr())
        bits = local.view(getattr(torch, f"int{8 * local.itemsize}"))
        mask = int.from_bytes(b"\x01" * (local.itemsize if one_in == 1 else 1), "little")
        bits ^= mask * ((bits * 5 >> 1) % one_in == number % one_in)


def gathered(weights: Any) -> dict[str, torch.Tensor]:
    """The whole of each tensor, on every rank."""
    return {
        name.removeprefix("module."): (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ).clone()
        for name, tensor in tensors_of(weights).items()
    }


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        assert bits(tensor) == bits(wanted[name].to(tensor.dtype)), name


class Went(NamedTuple):
    """How the versions of a sender went, on one rank."""

    has_delta: list[bool]
    log: list[str]


def follow(
    rank: int,
    case: Callable[[int], Case],
    store: Path,
    mount: str,
    one_in: list[int],
    options: dict[str, Any],
    restart: int,
) -> Went:
    """Publish versions of which each changes one element in so many.

    Rank 0 reads each of them, as who has followed all along and as one who comes late. Before the
    version ``restart`` all ranks close their senders, and make new ones.
    """
    torch.manual_seed(0)
    weights, _ = case(distributed.get_world_size())
    has_checksums = options.get("checksum", mount == "network")
    has_delta = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mounted(mount))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(chain, "MAX_CHAIN", 3)
        log = stack.enter_context(warnings_logged())
        sender = stack.enter_context(ShardedWeightSender(store, delta=True, **options))
        target: dict[str, torch.Tensor] = {}
        if rank == 0:
            follower = stack.enter_context(WeightReceiver(store, receiver_id="follower"))
        for version, share in enumerate(one_in, 1):
            nudge(weights, share, version)
            if version == restart:
                sender.close()
                sender = stack.enter_context(ShardedWeightSender(store, delta=True, **options))
            publication = sender.send(weights)
            assert publication.version == version
            has_delta.append(publication.delta_bytes is not None)
            full = gathered(weights)
            if rank == 0:
                with follower.open() as snapshot:
                    assert snapshot.version == version
                    assert_same(snapshot.tensors, full)
                    if not target:
                        target = {name: t.clone() for name, t in snapshot.tensors.items()}
                assert follower.load_into(target) == version
                assert_same(target, full)
                with WeightReceiver(store, verify=has_checksums) as late, late.open() as snapshot:
                    assert_same(snapshot.tensors, full)
    return Went(has_delta, log)


CASES = [
    *(fsdp, replicated, two_dimensions, sums, few),
    # Cut in other ways: `test_sharded.py` publishes these whole.
    *(pytest.param(case, marks=IN_SOAKS_ALONE) for case in (hsdp, partly_fsdp, tied, placements)),
    pytest.param(*STRIDED.values, marks=(*STRIDED.marks, IN_SOAKS_ALONE)),
]
STORES: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("local", {"checksum": True, "durable": True}),
    ("network", {}),
    ("network", {"checksum": False}),
]


@in_turn(("case", "kind"), CASES, STORES)
def test_every_version_is_what_the_ranks_hold(world, store, case, kind):
    mount, options = kind
    # Some, none, all of a few tensors, far too much, and some again; and across anchors.
    one_in = [64, 64, 10**6, 64, 1, 64, 64, 64, 64, 64]
    for went in world.run(follow, case, store, mount, one_in, options, 8):
        assert went == Went([False, *[True] * 3, False, *[True] * 2, False, *[True] * 2], [])


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dbuffer").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("dbuffer").removeHandler(handler)


def send_other_tensors(rank: int, store: Path, mount: str) -> list[bool]:
    """Each time other boxes of the same tensors, or other tensors."""
    has_delta = []
    with mounted(mount), ShardedWeightSender(store, delta=True) as sender:
        for case in (fsdp, whole_everywhere, tied):
            torch.manual_seed(0)
            weights, _ = case(distributed.get_world_size())
            for number in range(2):
                nudge(weights, 64, number)
                has_delta.append(sender.send(weights).delta_bytes is not None)
                full = gathered(weights)
                if rank == 0:
                    assert_same(received(store), full)
    return has_delta


def whole_everywhere(size: int) -> Case:
    weights, full = fsdp(size)
    return gathered(weights), full


@pytest.mark.parametrize("mount", MOUNTS)
def test_other_tensors_or_boxes_begin_with_a_whole_version(world, store, mount):
    for has_delta in world.run(send_other_tensors, store, mount):
        assert has_delta == [False, True] * 3


def no_room(*_: Any, **__: Any) -> NoReturn:
    raise dbuffer.StoreFullError("no room")


def fail_in_between(rank: int, store: Path, mount: str, why: str) -> list[Any]:
    """A version fails on rank 0: when its metadata is checked, or after all have compared."""
    torch.manual_seed(0)
    weights, _ = fsdp(distributed.get_world_size())
    told: list[Any] = []
    with mounted(mount), ShardedWeightSender(store, delta=True) as sender:
        for number in range(5):
            nudge(weights, 64, number)
            fails = number == 2 and rank == 0
            metadata = {"not for JSON": object()} if fails and why == "metadata" else {}
            with pytest.MonkeyPatch.context() as patch:
                if fails and why == "no room":
                    patch.setattr(Draft, "claimed", no_room)
                try:
                    told.append(sender.send(weights, metadata=metadata).delta_bytes is not None)
                except dbuffer.DBufferError as error:
                    told.append(type(error).__name__)
        full = gathered(weights)
        if rank == 0:
            assert_same(received(store), full)
    return told


@pytest.mark.parametrize(
    ("why", "error", "mount"),
    [
        ("no room", "StoreFullError", "local"),
        ("no room", "StoreFullError", "network"),
        ("metadata", "InvalidWeightsError", "local"),
    ],
)
def test_after_a_failure_the_next_version_is_whole(world, store, mount, why, error):
    """But not after a refused version, which spoils no delta."""
    for told in world.run(fail_in_between, store, mount, why):
        assert told == [False, True, error, why == "metadata", True]
    assert DoubleBuffer(store).pointer().version == 4
