"""Trainers of several ranks publish what each holds; real processes, with gloo between them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import re
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed, nn

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver, WeightSender
from dbuffer.format.layout import ALIGNMENT_BYTES, Layout, TensorSpec
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import KeptMappings
from dbuffer.mirror import bucket_target
from dbuffer.mirror.bucket import Bucket
from dbuffer.publish import kept_copy
from dbuffer.publish.draft import Draft
from dbuffer.publish.part import HeldParts, Part, assign_writes, whole_box
from dbuffer.ranks import agreement
from dbuffer.receive.reader import verify_store
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.writer import BufferWriter
from dbuffer.testing.moments import COPIES, at_call, die, stop
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.damage import flip_bit
from tests.support.patterns import SMALL, assert_same, newest
from tests.support.sharded import (
    CASES,
    STRIDED,
    Case,
    experts,
    fsdp,
    hsdp,
    partly_fsdp,
    replicated,
    state_dict,
    strided,
    strided_experts,
    sums,
    tied,
    two_dimensions,
    uneven_rows,
)
from tests.support.soak import (
    IN_SOAKS_ALONE,
    in_turn,
    is_soak,
    numbers,
    patience_s,
)
from tests.support.stores import (
    assert_tidy,
    make_temporaries_old,
    named_files,
    removed_but_mapped,
    weights_files,
    without_garbage_collection,
)
from tests.support.waiting import meanwhile
from tests.support.ways import Way, mounted, pattern_of
from tests.support.worlds import World


@pytest.fixture(scope="module", params=[4, 2] if is_soak() else [4], ids="{} ranks".format)
def world(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    if request.param == 4:
        yield request.getfixturevalue("four")
        return
    with World(tmp_path_factory.mktemp("world"), request.param) as world:
        yield world


MOUNTS = ["local", "network"]

# What is sent, and how

GATHERED = {strided: 2, sums: 1, strided_experts: 4}
"""Tensors of cases that are no boxes: of all experts of a layer, two."""


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[Any]]:
    """References to the tensors that are gathered, of which one at a time may be alive."""

    from torch.distributed.tensor import DTensor

    gathers: list[Any] = []
    gather = DTensor.full_tensor

    def full_tensor(self: Any) -> torch.Tensor:
        alive = sum(reference() is not None for reference in gathers)
        assert alive <= 1, f"{alive} gathered tensors are still alive"
        tensor = gather(self)
        gathers.append(weakref.ref(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", full_tensor)
        yield gathers


def send_both(
    rank: int, case: Callable[[int], Case], store: Path, options: dict[str, Any], mount: str
) -> tuple[int, int]:
    """Publish from all ranks, and the same whole from rank 0.

    Return the bytes of a version, and how many tensors were gathered for it.
    """
    torch.manual_seed(0)
    weights, full = case(distributed.get_world_size())
    with mounted(mount), counted_gathers() as gathers:
        with ShardedWeightSender(store / "sharded", **options) as sender:
            for version in (3, 4, 5):  # the third into a file that is there
                publication = sender.send(weights, version=version, metadata={"rank": rank})
                assert publication.version == version
        if rank == 0:
            with WeightSender(store / "whole", **options) as sender:
                sender.send(full)
    distributed.barrier()
    return publication.num_bytes, len(gathers) // 3


def assert_equal_stores(store: Path, *, verify: bool, mount: str) -> None:
    with (
        mounted(mount),
        WeightReceiver(store / "sharded", verify=verify) as sharded,
        WeightReceiver(store / "whole", verify=verify) as whole,
        sharded.open() as ours,
        whole.open() as theirs,
    ):
        assert ours.metadata == {"rank": 0}
        found, expected = (
            {**one.tensors} | {alias: one.tensors[name] for alias, name in one.aliases.items()}
            for one in (ours, theirs)
        )
        assert_same(found, expected)
        if list(ours.tensors) == list(theirs.tensors) and not ours.aliases and mount == "local":
            assert ours.path.read_bytes() == theirs.path.read_bytes()


IN_ROWS = {uneven_rows, fsdp, partly_fsdp, state_dict, replicated, tied, hsdp, experts}


@in_turn(("case", "mount"), CASES, MOUNTS)
def test_the_version_is_that_of_the_whole_weights(world, store, case, mount):
    """Boxes are not gathered; on a network mount each rank writes boxes of rows."""
    published = world.run(send_both, case, store, {"checksum": True}, mount)
    assert_equal_stores(store, verify=True, mount=mount)
    [(num_bytes, gathers)] = set(published)
    if mount == "local" or case in IN_ROWS:
        assert gathers == GATHERED.get(case, 0)
    if mount == "network":
        assert_in_parts(store / "sharded", num_bytes, len(world.ranks) if case is fsdp else None)


def assert_in_parts(store: Path, num_bytes: int, num_parts: int | None) -> None:
    """The weights file's own data is a hole, and ranks have written what belongs there."""
    [main] = [file for file in (store / "A").glob("weights-*.td") if ".r" not in file.name]
    parts = parts_of(store, "A")
    assert len(parts) == num_parts if num_parts else parts
    assert all(part.name.startswith(main.stem) for part in parts)
    data_bytes = sum(part.stat().st_size for part in parts)
    assert data_bytes >= num_bytes
    if data_bytes > 1e6:
        assert main.stat().st_blocks * 512 < data_bytes / 10
    with mounted("network"):
        [check] = [one for one in verify_store(DoubleBuffer(store)) if one["is_newest"]]
    assert check["has_checksums"]
    assert not check["problems"]


def parts_of(store: Path, buffer: str) -> list[Path]:
    return sorted((store / buffer).glob("weights-*.r*.td"))


def send_with_a_draft(rank: int, store: Path, mount: str) -> None:
    torch.manual_seed(0)
    weights, full = fsdp(distributed.get_world_size())
    draft, full_draft = tied(distributed.get_world_size())
    with mounted(mount):
        with ShardedWeightSender(store / "sharded") as sender:
            for _ in range(2):
                sender.send(weights, draft=draft, metadata={"rank": rank})
        if rank == 0:
            with WeightSender(store / "whole") as sender:
                sender.send(full, draft=full_draft, metadata={"rank": 0})
    distributed.barrier()


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_draft_is_published_by_all_ranks(four, store, mount):
    four.run(send_with_a_draft, store, mount)
    assert_equal_stores(store, verify=False, mount=mount)


def flushes_of(rank: int, store: Path) -> list[str]:
    """Names of the files and directories that a rank flushes as it publishes, in order."""
    flushes, flush = [], os.fsync

    def note(descriptor: int) -> None:
        flush(descriptor)
        flushes.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    with mounted("network"), ShardedWeightSender(store) as sender:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", note)
            sender.send(pattern_of(1, distributed.get_world_size()))
    return flushes


def test_on_a_network_mount_each_rank_flushes_its_file(world, store):
    flushed = world.run(flushes_of, store)
    flushed_parts = [[name for name in names if ".r" in name] for names in flushed]
    assert all(len(names) == 1 for names in flushed_parts)
    parts = {path.name for path in store.rglob("weights-*.r*.td")}
    assert parts == {name for names in flushed_parts for name in names}


@in_turn(("case", "mount"), [two_dimensions, STRIDED], MOUNTS)
def test_casting_and_renaming(four, store, case, mount):
    options = {"dtype": torch.bfloat16, "rename": {"0.weight": "first"}, "durable": True}
    four.run(send_both, case, store, options, mount)
    assert_equal_stores(store, verify=False, mount=mount)


def send_refused_values(
    rank: int,
    case: Callable[[int], Case],
    store: Path,
    mount: str,
    options: dict[str, Any],
    value: float,
    message: str,
) -> None:
    weights, _ = case(distributed.get_world_size())
    with mounted(mount), ShardedWeightSender(store, **options) as sender:
        sender.send(weights)
        for tensor in weights.values():
            tensor.to_local().fill_(value)
            with pytest.raises(dbuffer.InvalidWeightsError, match=message):
                sender.send(weights)
            tensor.to_local().fill_(1)
        assert sender.send(weights).version == 2


@pytest.mark.parametrize("mount", MOUNTS)
@pytest.mark.parametrize("case", [STRIDED])
@pytest.mark.parametrize(
    "refused",
    [
        ({"dtype": torch.float16}, 1e5, "cannot be cast to float16"),
        ({"require_finite": True}, math.inf, "NaN or infinite"),
    ],
    ids=["overflow", "infinity"],
)
def test_values_are_refused_on_all_ranks(four, store, case, mount, refused):
    """In boxes that a rank holds, and in tensors that are gathered."""
    four.run(send_refused_values, case, store, mount, *refused)


def test_large_plain_tensors_are_spread_over_the_ranks():
    """Small ones, which ranks let drift apart, are all of the first."""
    specs = [TensorSpec(f"{index}", "float32", (1024, 1024)) for index in range(8)]
    specs += [TensorSpec(name, "float32", (8,)) for name in ("mean", "variance")]
    boxes = {index: whole_box(index, spec.shape) for index, spec in enumerate(specs)}
    plan = assign_writes(tuple(specs), {}, [boxes] * 4, rows_only=False)
    assert [len(written) for written in plan.boxes] == [4, 2, 2, 2]
    assert {box.tensor for box in plan.boxes[0]} > {8, 9}
    assert not plan.gathered


def send_parts(rank: int, store: Path, versions: list[int], keep_s: float = 0.0) -> None:
    """As to a network mount, where old files go as soon as nobody reads them."""
    TIMING.keep_superseded_s = keep_s
    with mounted("network"), ShardedWeightSender(store) as sender:
        for version in versions:
            sender.send(pattern_of(version, distributed.get_world_size()), version=version)


@pytest.fixture
def in_parts(world, store, monkeypatch) -> Path:
    """A store that was written in parts, version 3 last, and is read as if over a network."""
    world.run(send_parts, store, [1, 2, 3])
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    return store


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


CORRUPT, ACCESS = dbuffer.StoreCorruptError, dbuffer.StoreAccessError
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str | None]] = {
    "a flipped bit": (lambda path: flip_bit(path, 800), CORRUPT, "layers"),
    "cut short": (lambda path: os.truncate(path, 100), CORRUPT, "100 bytes"),
    "longer": (lambda path: os.truncate(path, 1 << 20), CORRUPT, "1048576 bytes"),
    "gone": (Path.unlink, CORRUPT, None),
    "a link": (replace_by_a_link, CORRUPT, None),
    "of others": (lambda path: path.chmod(0o666), ACCESS, None),
}


@pytest.mark.timing(settle_s=0.1)
def test_a_damaged_part_is_refused(in_parts):
    pointer = DoubleBuffer(in_parts).pointer()
    for name, (spoil, kind, message) in DAMAGES.items():
        store = shutil.copytree(in_parts, in_parts.parent / name)
        spoil(parts_of(store, pointer.buffer)[-1])
        target = SMALL.empty()
        with WeightReceiver(store) as receiver:
            with pytest.raises(kind, match=message):
                receiver.load_into(target)
            with pytest.raises(kind, match=message), receiver.open():
                pass
        assert all(not tensor.any() for tensor in target.values())
        if kind is CORRUPT:
            [check] = [one for one in verify_store(DoubleBuffer(store)) if one["is_newest"]]
            assert check["problems"], name


def send_odd_sizes(rank: int, store: Path) -> None:
    with mounted("network"), ShardedWeightSender(store) as sender:
        sender.send({name: torch.ones(3, dtype=torch.uint8) for name in "abcdefgh"})


def test_gaps_between_parts_go_into_a_bucket_as_zeros(world, store, bucket_url, monkeypatch):
    def dirty_memory(num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    world.run(send_odd_sizes, store)
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    monkeypatch.setattr(bucket_target, "new_memory", dirty_memory)
    with dbuffer.Mirror(store, bucket_url).start() as mirror:
        mirror.wait_until_current(TIMEOUT_S)
    with Bucket(bucket_url) as bucket:
        [file] = [name for name in bucket.list("") if name.endswith(".weights")]
        tensors = bytes(bucket.get_range(file, 0, 8 * ALIGNMENT_BYTES))
    assert tensors == 8 * bytes([1, 1, 1]).ljust(ALIGNMENT_BYTES, b"\0")


def test_parts_are_not_mapped(in_parts, monkeypatch):
    """By a reader for which the store looks local, nor by tensordict."""

    from tensordict import TensorDict

    with WeightReceiver(in_parts) as receiver, receiver.open() as snapshot:
        assert SMALL.version_of(snapshot.tensors) == 3
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever its parser says
            TensorDict.from_consolidated(snapshot.path)
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "local")
    with WeightReceiver(in_parts) as receiver:
        with pytest.raises(dbuffer.StoreAccessError, match="DBUFFER_MOUNT=network"):
            receiver.load_into(SMALL.empty())


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_mirror_puts_parts_together(world, in_parts, monkeypatch, mount):
    from tensordict import TensorDict

    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, mount)
    local = in_parts.parent / "local"
    with dbuffer.Mirror(in_parts, local, poll_interval_s=0.01).start() as mirror:
        for versions in ([], [4, 5], [6]):
            world.run(send_parts, in_parts, versions, 60.0)
            mirror.wait_until_current()
            assert newest(local, verify=True) == max([3, *versions])
    manifest = DoubleBuffer(local).manifest("A")
    assert manifest is not None
    assert not parts_of(local, "A")
    assert TensorDict.from_consolidated(local / "A" / manifest.file).keys() == set(SMALL.names)


# What goes wrong on one rank is said on all

BAD = 1
"""The rank on which it goes wrong."""


def open_with(rank: int, store: Path, options: dict[str, Any]) -> None:
    ShardedWeightSender(**{"store": store} | (options if rank == BAD else {}))


def open_twice(rank: int, store: Path) -> None:
    with ShardedWeightSender(store), ShardedWeightSender(store):
        pass


def open_to_others(rank: int, store: Path) -> None:
    if rank == 0:
        store.mkdir(mode=0o777)
        store.chmod(0o777)
    ShardedWeightSender(store)


def test_an_option_that_is_wrong_on_one_rank_is_refused_on_all(world, store):
    for options, names in (
        ({"dtype": torch.int8}, "int8"),
        ({"num_threads": 0}, "num_threads 0"),
        ({"delta": 1}, "delta 1"),
        ({"rank_timeout_s": math.nan}, "rank_timeout_s nan"),
        ({"store": ""}, "store ''"),
    ):
        for outcome in world.outcomes(open_with, store, options):
            assert outcome.kind == "OptionError"
            assert re.search(f"rank 1 .*{names}", outcome.message)


def send_elsewhere(rank: int, store: Path) -> None:
    here = store / ("b" if rank == BAD else "a")
    with ShardedWeightSender(here) as sender:
        sender.send(pattern_of(1, distributed.get_world_size()))


def open_on_another_machine(rank: int, store: Path) -> None:
    elsewhere = dataclasses.replace(agreement.Process.here(), host="elsewhere", boot="other")
    with pytest.MonkeyPatch.context() as patch:
        if rank == BAD:
            patch.setattr(agreement.Process, "here", lambda: elsewhere)
        ShardedWeightSender(store)


DIRECTORIES: list[tuple[Callable[[int, Path], None], str, str]] = [
    (open_twice, "StoreBusyError", "rank 0 could not open the store"),
    (open_to_others, "StoreAccessError", "rank 0 could not open the store: .*0777"),
    (open_on_another_machine, "StoreAccessError", "elsewhere.* use a network mount"),
    (
        send_elsewhere,
        "StoreNotFoundError",
        "rank 1 could not write its part: cannot open the buffer",
    ),
]


@pytest.mark.parametrize(("use", "kind", "message"), DIRECTORIES)
def test_a_directory_that_one_rank_cannot_use_is_refused_on_all(world, store, use, kind, message):
    for outcome in world.outcomes(use, store):
        assert outcome.kind == kind
        assert re.search(message, outcome.message)


def failing(owner: type, name: str) -> Callable[[Any, pytest.MonkeyPatch], dict[str, Any]]:
    def hinder(_: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        patch.setattr(owner, name, mock.Mock(side_effect=OSError("it went up in smoke")))
        return {}

    return hinder


SMOKE = "could not .*OSError: it went up in smoke"

PROBLEMS: list[tuple[int, Callable[[Any, pytest.MonkeyPatch], dict[str, Any]], str]] = [
    (
        BAD,
        lambda weights, _: {"weights": dict(list(weights.items())[:-1])},
        r"layers.7.weight int64\[256\] has a gap: on rank 0, rank 1 holds parts of it",
    ),
    (BAD, lambda *_: {"version": 7}, "rank 1 .* 7, .* rank 0 .* None"),
    (BAD, lambda *_: {"weights": 7}, "rank 1 .* int"),
    (BAD, lambda weights, _: {"weights": iter(weights.items())}, "rank 1 .* iterator"),
    (
        BAD,
        lambda weights, _: {"weights": weights | {"m": torch.empty(1, device="meta")}},
        "rank 1 .* 'm' .* meta",
    ),
    (BAD, lambda *_: {"version": np.int64(9)}, "rank 1 .* a version is an integer"),
    (0, failing(Draft, "write"), f"rank 0 {SMOKE}"),
    (1, failing(Draft, "write"), f"rank 1 {SMOKE}"),
    (1, failing(HeldParts, "box"), f"rank 1 {SMOKE}"),
    (0, failing(BufferWriter, "commit"), f"rank 0 {SMOKE}"),
    (0, failing(BufferWriter, "claim"), f"rank 0 {SMOKE}"),
]
"""Calls of one rank that fit the others' in no way, or fail; and what is said then."""


def send_between_problems(rank: int, store: Path) -> list[tuple[type[Exception], str]]:
    """Publish, and try what cannot be published and publish again, for each problem.

    Return each error.
    """
    size, errors = distributed.get_world_size(), []
    with ShardedWeightSender(store, checksum=True) as sender:
        sender.send(pattern_of(1, size))
        for version, (on_rank, hinder, _) in enumerate(PROBLEMS, 2):
            weights = pattern_of(version, size)
            with (
                pytest.MonkeyPatch.context() as patch,
                pytest.raises(dbuffer.DBufferError) as caught,
            ):
                options = hinder(weights, patch) if rank == on_rank else {}
                sender.send(**{"weights": weights} | options)
            errors.append((caught.type, str(caught.value)))
            assert newest(store, verify=True) == version - 1
            distributed.barrier()
            sender.send(weights, version=version)
            assert newest(store, verify=True) == version
            distributed.barrier()
    return errors


def test_what_is_wrong_on_one_rank_fails_on_all(world, store):
    for errors in world.run(send_between_problems, store):
        for (_, _, expected), (kind, message) in zip(PROBLEMS, errors, strict=True):
            special = {SMOKE: dbuffer.RankFailedError, "version": dbuffer.VersionError}
            kinds = [of for text, of in special.items() if text in expected]
            assert [kind] == (kinds or [dbuffer.InvalidWeightsError])
            assert re.search(expected, message)


def send_without_room(rank: int, store: Path) -> str:
    """Publish with deltas on a network mount; at first, rank 1 has no room for its copy."""
    weights = pattern_of(1, distributed.get_world_size())
    with mounted("network"), ShardedWeightSender(store, delta=True) as sender:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(kept_copy, "new_memory", mock.Mock(side_effect=MemoryError("full")))
            with pytest.raises(dbuffer.RankFailedError) as caught:
                sender.send(weights)
        assert sender.send(weights).version == 1
    return str(caught.value)


def test_a_rank_without_room_for_a_copy_leaves_no_rank_waiting(world, store):
    for message in world.run(send_without_room, store):
        assert "rank 1 could not copy its part: MemoryError: full" in message


def send_lazy(rank: int, store: Path) -> int:
    """Return how many tensors were there at a time that are made as they are published."""
    made: list[Any] = []
    most = 0

    def make() -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(1000)
        made.append(weakref.ref(tensor))
        most = max(most, sum(reference() is not None for reference in made))
        return tensor

    weights = [
        (str(number), dbuffer.LazyTensor(torch.float32, (1000,), make)) for number in range(50)
    ]
    with ShardedWeightSender(store) as sender:
        sender.send(weights)
    return most


class SmokeError(OSError):
    """Error that can be referred to weakly."""


def fail_to_commit(rank: int, store: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SmokeError

    weights = {"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}
    with ShardedWeightSender(store, delta=True) as sender, without_garbage_collection():
        for _ in range(3):
            sender.send(weights)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BufferWriter, "commit", fail)
                with pytest.raises(dbuffer.RankFailedError) as caught:
                    sender.send(weights)
            if rank == 0:
                cause = weakref.ref(caught.value.__cause__)
                del caught
                assert cause() is None
            assert not removed_but_mapped(store)


def test_a_rank_that_sees_another_file_than_rank_0_writes_nothing(store):
    path = store / "A" / "weights-0123456789abcdef-2.td"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    part = Part(Layout.of([TensorSpec("a", "float32", (3,))]))
    draft = Draft(
        DoubleBuffer(store),
        KeptMappings(),
        Copier(1),
        part,
        is_mapped=True,
        hashed=False,
    )
    draft.join("0123456789abcdef-2", str(path.relative_to(store)), [0, 0])
    with pytest.raises(dbuffer.StoreAccessError, match="the same directory for all ranks"):
        draft.write([0], [torch.ones(3)])


def test_a_failed_publish_takes_no_room(four, store):
    four.run(fail_to_commit, store)


def test_tensors_that_are_made_are_not_all_there_at_once(world, store):
    assert 1 <= max(world.run(send_lazy, store)) < 5


def send_fsdp1(rank: int, store: Path) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(6, 8), use_orig_params=True, device_id=torch.device("cpu")
    )
    outcomes = []
    with ShardedWeightSender(store) as sender:
        for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            FullyShardedDataParallel.set_state_dict_type(model, kind)
            with pytest.raises(dbuffer.UnsupportedError) as caught:
                sender.send(model)
            outcomes.append(str(caught.value))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        assert sender.send(model).version == 1
    return outcomes


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_publishes_full_state_dicts_and_no_sharded_ones(world, store):
    for outcomes in world.run(send_fsdp1, store):
        for outcome in outcomes:
            assert re.search("is a ShardedTensor.*FSDP2.*FULL_STATE_DICT", outcome)


def send_and_load_alone(rank: int, store: Path) -> list[str]:
    """A rank by itself can neither publish nor load what all hold."""
    torch.manual_seed(0)
    model, _ = fsdp(distributed.get_world_size())
    with ShardedWeightSender(store) as sender:
        sender.send(model)
    with WeightReceiver(store, receiver_id=f"rank-{rank}") as receiver:
        with pytest.raises(dbuffer.WeightsMismatchError) as no_load:
            receiver.load_into(model)
    with WeightSender(store.with_name(f"{rank}")) as sender:
        with pytest.raises(dbuffer.InvalidWeightsError) as no_send:
            sender.send(model)
    return [str(no_load.value), str(no_send.value)]


def send_and_wait(rank: int, store: Path, timeout_s: float) -> None:
    with dbuffer.ShardedWeightSender(store) as sender:
        version = sender.send(fsdp(2)[0]).version
        sender.wait_applied(version, receivers=["worker"], timeout_s=timeout_s)


def test_all_ranks_wait_for_a_receiver(world, store):
    for outcome in world.outcomes(send_and_wait, store, 0.2):
        assert outcome.kind == "WaitTimeoutError"
    for outcome in world.outcomes(send_and_wait, store, 660.0):  # ranks would be given up
        assert outcome.kind == "OptionError"
        assert "timeout_s" in outcome.message
    with dbuffer.WeightReceiver(store, receiver_id="worker") as receiver:
        with meanwhile(lambda: receiver.acknowledge(receiver.wait_for_version(2, TIMEOUT_S))):
            assert world.run(send_and_wait, store, TIMEOUT_S) == [None] * len(world.ranks)


def test_one_rank_alone_can_neither_publish_nor_load_what_all_hold(world, store):
    for no_load, no_send in world.run(send_and_load_alone, store):
        assert "sharded" in no_load
        assert "dbuffer.ShardedWeightSender" in no_send


# Ranks that die


WHOLE = Way()


def open_and_send(rank: int, store: Path, version: int, way: Way = WHOLE) -> None:
    TIMING.keep_superseded_s = 0.0
    with mounted(way.mount), way.open(store) as sender:
        sender.send(way.weights(version), version=version)


def send_until(
    rank: int,
    store: Path,
    on_rank: int,
    at: tuple[int, frozenset[str]],
    action: Callable[[], None],
    timeout_s: float,
    way: Way = WHOLE,
) -> tuple[str, float] | None:
    """Publish three versions, and do ``action`` on one rank before a call of the fourth.

    None: it was published, and nothing was done.
    """
    with mounted(way.mount), contextlib.ExitStack() as stack:
        sender = stack.enter_context(way.open(store))
        for version in (1, 2, 3):
            sender.send(way.weights(version))
        if way.is_restarted:
            sender.close()
            sender = stack.enter_context(way.open(store))
        weights = way.weights(4)
        # Not before: a busy machine may hold up the ranks by as much.
        sender._world._group._set_default_timeout(datetime.timedelta(seconds=timeout_s))
        distributed.barrier()
        if rank == on_rank:
            number, names = at
            at_call(number, action, names)
        started = time.monotonic()
        try:
            sender.send(weights)
        except dbuffer.RankFailedError as error:
            waited_s = time.monotonic() - started
            with pytest.raises(dbuffer.ClosedError):
                sender.send(weights)
            return str(error), waited_s
        finally:
            sys.setprofile(None)
    return None


def survives(
    store: Path, tmp_path: Path, next_job: World, on_rank: int, number: int, way: Way
) -> int | None:
    """Kill a rank before a call; the others say which, and the next job goes on.

    The version that was there then: the one before, or the new one, whole. None: there is no such
    call, and all has been published.
    """
    size = len(next_job.ranks)
    with World(tmp_path, size) as world:
        world.begin(send_until, store, on_rank, (number, COPIES), die, 600.0, way)
        others = [world.outcome(rank) for rank in range(size) if rank != on_rank]
        if world.ranks[on_rank].has_sent():
            assert [*others, world.outcome(on_rank)] == [None] * size
            return None
        assert world.ranks[on_rank].wait() == -signal.SIGKILL
        for outcome in others:
            if outcome is not None:  # else it had said its last word
                message, waited_s = outcome
                assert re.search(f"rank {on_rank} .process [0-9]+ on .* has ended", message)
                assert waited_s < 60
    there = newest(store, verify=way.has_checksums)
    make_temporaries_old(store)
    for version in (5, 6):  # into both buffers
        next_job.run(open_and_send, store, version, way)
        assert newest(store, verify=way.has_checksums) == version
    return there


@pytest.mark.timeout(patience_s())
@pytest.mark.parametrize(
    ("size", "on_rank", "way", "first"),
    [
        pytest.param(2, 0, Way(), 1, id="rank 0 of 2"),
        pytest.param(2, 1, Way("network"), 1, id="rank 1 of 2, in parts"),
        pytest.param(2, 1, Way(delta=True), 1, id="rank 1 of 2, a delta"),
        pytest.param(2, 0, Way("network", delta=True), 4, id="rank 0 of 2, a delta upon parts"),
        pytest.param(2, 0, Way("auto", True, True), 3, id="rank 0 of 2, restarted"),
        *(
            pytest.param(
                size, on_rank, way, 1, id=f"rank {on_rank} of {size}{of}", marks=IN_SOAKS_ALONE
            )
            for size, on_rank, way, of in (
                (2, 1, Way(), ""),
                (4, 1, Way(), ""),
                (2, 0, Way("network"), ", in parts"),
                (2, 0, Way(delta=True), ", a delta"),
                (2, 1, Way("network", delta=True), ", a delta upon parts"),
                (2, 1, Way("network", True, True), ", restarted, parts"),
            )
        ),
    ],
)
def test_a_rank_that_is_killed_at_any_moment(
    request, shm_path, tmp_path, monkeypatch, record_property, size, on_rank, way, first
):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, way.mount)
    has_flipped = False
    kills = 0
    # Another rank than 0 has fewer calls to stop before, and hardly any in a delta.
    every = 19
    if on_rank and not way.is_restarted:
        every = 5 if way.delta else 7
    next_job = request.getfixturevalue("four" if size == 4 else "two")
    for number in numbers(first, every):
        store = shm_path / f"{number}"
        there = survives(store, tmp_path, next_job, on_rank, number, way)
        if there is None:
            break
        kills += 1
        # Rank 1 may be gone when rank 0 commits: what it was to write is written by then.
        has_flipped |= there == 4
        assert there == (4 if has_flipped else 3), f"before call {number}"
        if way.delta:
            assert set(store.glob("deltas/*")) <= named_files(store)
        elif way.mount == "network":
            files = sum(len(names) for names in weights_files(store).values())
            assert files == 2 * (1 + size), weights_files(store)
        else:
            assert_tidy(store)
        shutil.rmtree(store)
    assert kills > 1
    record_property("kills of a rank", kills)


def test_a_rank_that_hangs_is_waited_for_as_long_as_said(store, tmp_path, two):
    with World(tmp_path, 2) as world:
        in_mid_copy = 1, frozenset({"_foreach_copy_"})
        world.begin(send_until, store, 1, in_mid_copy, stop, 1.0)
        message, waited_s = world.outcome(0)
        assert re.search("a rank was lost .*while the ranks tried to write its part", message)
        assert 0.5 < waited_s < 60
        assert newest(store, verify=True) == 3
        two.run(open_and_send, store, 5)
        # It goes on, into a file that nobody reads any more.
        world.ranks[1].signal(signal.SIGCONT)
        message, _ = world.outcome(1)
        assert newest(store, verify=True) == 5
        two.run(open_and_send, store, 6)
        assert newest(store, verify=True) == 6
