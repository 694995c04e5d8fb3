"""Ranks publish together what changed since the version before; real processes, with gloo."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver
from dbuffer.format import chain
from dbuffer.format.lineage import VersionId
from dbuffer.io.transfer import part_path
from dbuffer.publish import delta_chain
from dbuffer.publish.shard_writer import PartFileWriter, SharedFileWriter
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import Held, hold_buffer, hold_newest
from tests.support.damage import flip_bit
from tests.support.patterns import SPARSE, bits, newest, received
from tests.support.sharded import (
    STRIDED,
    Case,
    fsdp,
    hsdp,
    mounted,
    partly_fsdp,
    pattern_of,
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
    """Change a bit of some elements, chosen by what they are: the same in each shard and in all."""
    seen = set()
    for tensor in tensors_of(weights).values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.numel() or local.is_complex() or local.dtype is torch.bool:
            continue
        if local.data_ptr() in seen:  # tied
            continue
        seen.add(local.data_ptr())
        bits = local.view(getattr(torch, f"int{8 * local.itemsize}"))
        bits ^= (bits * 5 >> 1) % one_in == number % one_in


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
    restarts: Collection[int] = (),
    first: int = 1,
    hindrance: tuple[int, Any, str, Any] | None = None,
) -> Went:
    """Publish versions of which each changes one element in so many, from the ``first`` on.

    Rank 0 reads each of them, as who has followed all along and as one who comes late. Before some
    versions all ranks are closed and begin anew. The ``hindrance`` is a rank, and what of which
    class is something else there.
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
        if hindrance is not None and rank == hindrance[0]:
            patch.setattr(*hindrance[1:])
        sender = stack.enter_context(ShardedWeightSender(store, delta=True, **options))
        target: dict[str, torch.Tensor] = {}
        if rank == 0:
            follower = stack.enter_context(WeightReceiver(store, receiver_id="follower"))
        for version, share in enumerate(one_in, 1):
            nudge(weights, share, version)
            if version < first:
                continue
            if version in restarts:
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
    """They are restarted after a whole version, one in a chain, one that a restart began with."""
    mount, options = kind
    # Some, none, all of a few tensors, far too much, and some again; and across anchors.
    one_in = [64, 64, 10**6, 64, 1, 64, 64, 64, 64, 64]
    for went in world.run(follow, case, store, mount, one_in, options, (2, 4, 7, 8)):
        assert went == Went([False, *[True] * 3, False, *[True] * 5], [])


HASHED = {"checksum": True}


def publish_three(world: World, store: Path, mount: str) -> None:
    world.run(follow, fsdp, store, mount, [64] * 3, HASHED)


def go_on(
    world: World, case: Callable[[int], Case], store: Path, mount: str, *hindrance: Any
) -> list[Went]:
    """Publish the versions 4 to 6, by new senders."""
    return world.run(follow, case, store, mount, [64] * 6, HASHED, (), 4, hindrance or None)


def fail_to_read(*_: Any) -> None:
    raise dbuffer.StoreAccessError(SMOKE)


def hold_the_one_before(buffers: DoubleBuffer, version: VersionId) -> Held | None:
    """As who is late to see what was published, or early to see what comes after it."""
    idle = next(buffer for buffer in "AB" if buffers.manifest(buffer).version < version.number)
    return hold_buffer(buffers, idle)


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


def damage(store: Path, mount: str, what: str) -> None:
    if "delta" in what:
        path = max((store / "deltas").iterdir())
        bit = 8 * path.stat().st_size - 9 if mount == "network" else 8 * 60
    else:  # a file that a rank has written; on a network mount, of the anchor
        with hold_newest(DoubleBuffer(store), newer_than=None) as held:
            path = held.path if mount == "local" else part_path(held.path, 2)
        bit = 8 * (path.stat().st_size // 2)
    if "lost" in what:
        path.unlink()
    else:
        flip_bit(path, bit)


SMOKE = "it went up in smoke"
LATE = "it does not see version 3 as rank 0 does"


@in_turn(("what", "mount"), ["flipped base", "lost base", "flipped delta", "lost delta"], MOUNTS)
def test_ranks_build_upon_nothing_that_is_damaged(world, store, what, mount):
    publish_three(world, store, mount)
    with mounted(mount):
        damage(store, mount, what)
    first, *others = go_on(world, fsdp, store, mount)
    assert first.has_delta == [False, True, True]
    assert all(went == Went(first.has_delta, []) for went in others)
    assert sum("not upon its last" in message for message in first.log) == 1, first.log


@in_turn(
    ("why", "failing", "mount"),
    [
        pytest.param(SMOKE, 0),
        pytest.param(LATE, 3),
        pytest.param(SMOKE, 3, marks=IN_SOAKS_ALONE),
        pytest.param(LATE, 0, marks=IN_SOAKS_ALONE),
    ],
    MOUNTS,
)
def test_one_rank_that_cannot_read_lets_all_begin_with_a_whole_version(
    world, store, failing, mount, why
):
    publish_three(world, store, mount)
    hindrance = (failing, "dbuffer.publish.publisher.hold_version", hold_the_one_before)
    if why == SMOKE:
        output = SharedFileWriter if mount == "local" else PartFileWriter
        hindrance = (failing, output, "read_back", fail_to_read)
    first, *others = go_on(world, fsdp, store, mount, *hindrance)
    assert first.has_delta == [False, True, True]
    assert all(went == Went(first.has_delta, []) for went in others)
    [message] = first.log
    assert f"not upon its last: rank {failing}: {why}" in message


@pytest.mark.parametrize("mount", MOUNTS)
def test_other_tensors_begin_with_a_whole_version(world, store, mount):
    publish_three(world, store, mount)
    for went in go_on(world, tied, store, mount):
        assert went == Went([False, True, True], [])


@pytest.mark.parametrize("mount", MOUNTS)
def test_another_number_of_ranks(world, two, store, mount):
    """On one machine the file is the same; across a network each rank has written a part."""
    publish_three(world, store, mount)
    for went in go_on(two, fsdp, store, mount):
        assert went == Went([mount == "local", True, True], [])


@pytest.mark.parametrize("mount", MOUNTS)
def test_what_was_published_by_one_process_before(world, store, mount):
    with mounted(mount), dbuffer.WeightSender(store, delta=True) as sender:
        for version in (1, 2, 3):
            sender.send(SPARSE.weights(version))
    world.run(publish_sparse, store, range(4, 8), mount, mount == "local")
    assert DoubleBuffer(store).pointer().version == 7


@pytest.mark.parametrize("mount", MOUNTS)
def test_cast(world, store, mount):
    """What changes and is the same when it is cast is no change."""
    options = {"dtype": torch.bfloat16, "rename": {"0.weight": "first"}}
    [found, *_] = world.run(send_casting, store, mount, options)
    assert found[1] is not None
    assert found[1] < found[2]


def send_casting(rank: int, store: Path, mount: str, options: dict[str, Any]) -> list[int | None]:
    torch.manual_seed(0)
    weights, _ = two_dimensions(distributed.get_world_size())
    with mounted(mount), ShardedWeightSender(store, delta=True, **options) as sender:
        found = [sender.send(weights).delta_bytes]
        nudge(weights, 4, 1)
        found.append(sender.send(weights).delta_bytes)
        for tensor in tensors_of(weights).values():
            tensor.to_local()[..., :1] += 1.0
        found.append(sender.send(weights).delta_bytes)
        full = gathered(weights)
        if rank == 0:
            with WeightReceiver(store) as receiver, receiver.open() as snapshot:
                names = {"first": "0.weight"}
                wanted = {name: full[names.get(name, name)] for name in snapshot.tensors}
                assert_same(snapshot.tensors, wanted)
    return found


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
                    patch.setattr(delta_chain.DeltaChain, "begin", no_room)
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


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_mirror_brings_them_on(world, store, monkeypatch, mount):
    """Also those of a sender that was restarted."""
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    local = store.parent / "local"
    with dbuffer.Mirror(store, local, poll_interval_s=0.01).start() as mirror:
        for versions in (range(1, 2), range(2, 6), range(6, 9)):
            world.run(publish_sparse, store, versions, mount, versions[0] > 1)
            mirror.wait_until_current(30)
            assert newest(local) == versions[-1]


def publish_sparse(rank: int, store: Path, versions: range, mount: str, goes_on: bool) -> None:
    with mounted(mount), ShardedWeightSender(store, delta=True) as sender:
        for version in versions:
            weights = pattern_of(version, distributed.get_world_size(), SPARSE)
            has_delta = sender.send(weights, version=version).delta_bytes is not None
            assert has_delta == (goes_on or version > versions[0])
