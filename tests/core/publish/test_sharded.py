"""Trainers of several ranks publish what each holds; real processes, with gloo between them."""

from __future__ import annotations

import contextlib
import dataclasses
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

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dbuffer
from dbuffer import ShardedWeightSender, WeightReceiver, WeightSender
from dbuffer.format.layout import ALIGNMENT_BYTES, TensorSpec
from dbuffer.format.places import is_part_of
from dbuffer.mirror import upload
from dbuffer.mirror.bucket import Bucket
from dbuffer.publish import box_share
from dbuffer.publish.shard_writer import SharedFileWriter
from dbuffer.publish.shards import Box, assign_writes
from dbuffer.ranks import agreement
from dbuffer.runtime.timing import TIMING
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.verification import verify_store
from tests.support.damage import flip_bit
from tests.support.engines.families import CONFIGURATIONS, make_family
from tests.support.moments import COPIES, at_call, die, stop
from tests.support.patterns import SMALL, newest
from tests.support.sharded import (
    ROWS,
    STRIDED,
    Case,
    Way,
    compiled,
    experts,
    fsdp,
    grid,
    hsdp,
    mounted,
    partly_fsdp,
    pattern_of,
    replicated,
    state_dict,
    strided,
    strided_experts,
    sums,
    tied,
    two_dimensions,
    uneven_rows,
)
from tests.support.soak import in_soaks_alone, in_turn, is_soak, numbers, patience_s
from tests.support.stores import assert_tidy, make_temporaries_old, named_files, weights_files
from tests.support.worlds import World


@pytest.fixture(scope="module", params=[4, 2] if is_soak() else [4], ids="{} ranks".format)
def world(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    if request.param == 4:
        yield request.getfixturevalue("four")
        return
    with World(tmp_path_factory.mktemp("world"), request.param) as world:
        yield world


# What is sent


GATHERED = {strided: 2, sums: 1, strided_experts: 4}
"""Of all experts of a layer, two tensors."""
# How it is sent


def count_gathers(monkeypatched: list[Any]) -> Callable[[], None]:
    gather = DTensor.full_tensor

    def full_tensor(self: DTensor) -> torch.Tensor:
        alive = sum(reference() is not None for reference in monkeypatched)
        assert alive <= 1, f"{alive} gathered tensors are still alive"
        tensor = gather(self)
        monkeypatched.append(weakref.ref(tensor))
        return tensor

    DTensor.full_tensor = full_tensor
    return lambda: setattr(DTensor, "full_tensor", gather)


def send_both(
    rank: int,
    case: Callable[[int], Case],
    store: Path,
    options: dict[str, Any],
    mount: str = "auto",
) -> tuple[dbuffer.Publication, int]:
    """Publish from all ranks, and the same whole from rank 0; how many tensors were gathered."""
    torch.manual_seed(0)
    weights, full = case(distributed.get_world_size())
    gathers: list[Any] = []
    undo = count_gathers(gathers)
    try:
        with mounted(mount), ShardedWeightSender(store / "sharded", **options) as sender:
            for version in (3, 4, 5):  # the third into a file that is there
                publication = sender.send(weights, version=version, metadata={"rank": rank})
                assert publication.version == version
    finally:
        undo()
    if rank == 0:
        with mounted(mount), WeightSender(store / "whole", **options) as sender:
            sender.send(full)
    distributed.barrier()
    return publication, len(gathers) // 3


def assert_equal_stores(store: Path, *, verify: bool, mount: str = "auto") -> None:
    with (
        mounted(mount),
        WeightReceiver(store / "sharded", verify=verify) as sharded,
        WeightReceiver(store / "whole", verify=verify) as whole,
        sharded.open() as ours,
        whole.open() as theirs,
    ):
        assert ours.metadata == {"rank": 0}
        names = {**theirs.tensors} | {a: theirs.tensors[n] for a, n in theirs.aliases.items()}
        found = {**ours.tensors} | {a: ours.tensors[n] for a, n in ours.aliases.items()}
        assert found.keys() == names.keys()
        for name, tensor in names.items():
            one = found[name].contiguous().view(-1).view(torch.uint8)
            other = tensor.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(one, other), name
        if list(ours.tensors) == list(theirs.tensors) and not ours.aliases and mount == "auto":
            assert ours.path.read_bytes() == theirs.path.read_bytes()


@pytest.mark.soak
@in_turn(("case", "checksum"), ROWS, [False, True])
def test_the_file_is_that_of_the_whole_weights_and_nothing_is_gathered(
    world, store, case, checksum
):
    published = world.run(send_both, case, store, {"checksum": checksum})
    assert_equal_stores(store, verify=checksum)
    assert {gathers for _, gathers in published} == {0}
    publications = [publication for publication, _ in published]
    assert {p.num_bytes for p in publications} == {publications[0].num_bytes}


@pytest.mark.parametrize("case", [STRIDED, sums, strided_experts], ids=lambda case: case.__name__)
def test_what_is_no_box_is_gathered_tensor_by_tensor(four, store, case):
    published = four.run(send_both, case, store, {"checksum": True})
    assert_equal_stores(store, verify=True)
    assert {gathers for _, gathers in published} == {GATHERED[case]}


IN_ROWS = {uneven_rows, fsdp, partly_fsdp, state_dict, replicated, tied, compiled, hsdp, experts}


@pytest.mark.parametrize(
    "case", [*ROWS, STRIDED, sums, strided_experts], ids=lambda case: case.__name__
)
def test_on_a_network_mount_each_rank_writes_a_file_of_its_own(world, store, case):
    published = world.run(send_both, case, store, {}, "network")
    assert_equal_stores(store, verify=True, mount="network")
    if case in IN_ROWS:
        assert {gathers for _, gathers in published} == {0}
    path = DoubleBuffer(store / "sharded").root / "A"
    [main] = [file for file in path.glob("weights-*.td") if ".r" not in file.name]
    parts = sorted(path.glob("weights-*.r*.td"))
    assert len(parts) == len(world.ranks) if case is fsdp else parts
    assert all(part.name.startswith(main.stem) for part in parts)
    data_bytes = sum(part.stat().st_size for part in parts)
    assert data_bytes >= published[0][0].num_bytes
    if data_bytes > 1e6:  # the weights file's own data is a hole
        assert main.stat().st_blocks * 512 < data_bytes / 10
    with mounted("network"):
        [check] = [c for c in verify_store(DoubleBuffer(store / "sharded")) if c.is_newest]
    assert check.has_checksums
    assert not check.problems


def send_family(rank: int, family: str, store: Path, mount: str) -> None:
    model = make_family(family, 0, embeds=family == "bert")
    if rank == 0:
        model.save_pretrained(store / "saved")
    for layers in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer)
    fully_shard(model)
    with mounted(mount), ShardedWeightSender(store / "sharded") as sender:
        sender.send(model)


@in_soaks_alone
@pytest.mark.parametrize("mount", ["local", "network"])
@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_sharded_families_are_published_as_their_checkpoints(four, store, family, mount):
    four.run(send_family, family, store, mount)
    expected = load_file(store / "saved" / "model.safetensors")
    with mounted(mount), WeightReceiver(store / "sharded") as receiver:
        with receiver.open() as snapshot:
            assert snapshot.tensors.keys() == expected.keys()
            assert all(torch.equal(snapshot.tensors[name], expected[name]) for name in expected)


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


@pytest.mark.soak
@in_turn(("case", "mount"), [fsdp, two_dimensions, STRIDED], ["local", "network"])
def test_casting_and_renaming(four, store, case, mount):
    options = {"dtype": torch.bfloat16, "rename": {"0.weight": "first"}, "durable": True}
    four.run(send_both, case, store, options, mount)
    assert_equal_stores(store, verify=False, mount="network" if mount == "network" else "auto")


def send_drifted(rank: int, store: Path) -> None:
    """What ranks let drift apart: small, and plain."""
    with ShardedWeightSender(store) as sender:
        sender.send({name: torch.full((100,), float(rank)) for name in ("mean", "variance", "n")})


def test_small_plain_tensors_are_all_of_one_rank(world, store):
    world.run(send_drifted, store)
    with WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert all(not tensor.any() for tensor in snapshot.tensors.values())


def test_large_plain_tensors_are_spread_over_the_ranks():
    specs = [TensorSpec(f"{index}", "float32", (1024, 1024)) for index in range(8)]
    specs.append(TensorSpec("small", "float32", (8,)))
    boxes = {
        index: Box(index, (0,) * len(spec.shape), spec.shape) for index, spec in enumerate(specs)
    }
    plan = assign_writes(specs, [boxes] * 4, rows_only=False)
    assert [len(written) for written in plan.boxes] == [3, 2, 2, 2]
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


def parts_of(store: Path, buffer: str) -> list[Path]:
    return sorted((store / buffer).glob("weights-*.r*.td"))


def test_parts_of_old_versions_are_removed(world, in_parts):
    for versions in ([4, 5, 6], [7]):
        world.run(send_parts, in_parts, versions)
        assert newest(in_parts) == versions[-1]
    double = DoubleBuffer(in_parts)
    for buffer in ("A", "B"):
        manifest = double.manifest(buffer)
        names = [path.name for path in (in_parts / buffer).glob("weights-*")]
        assert all(name == manifest.file or is_part_of(name, manifest.file) for name in names)
        assert len(names) == 1 + len(world.ranks)


def flip_a_bit(path: Path) -> None:
    flip_bit(path, 800)


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


CORRUPT, ACCESS = dbuffer.StoreCorruptError, dbuffer.StoreAccessError
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str | None]] = {
    "a flipped bit": (flip_a_bit, CORRUPT, "layers"),
    "cut short": (lambda path: os.truncate(path, 100), CORRUPT, "100 bytes"),
    "longer": (lambda path: os.truncate(path, 1 << 20), CORRUPT, "1048576 bytes"),
    "gone": (Path.unlink, CORRUPT, None),
    "a link": (replace_by_a_link, CORRUPT, None),
    "of others": (lambda path: path.chmod(0o666), ACCESS, None),
}


@pytest.mark.timing(settle_s=0.1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_refused(in_parts, damage):
    spoil, kind, message = DAMAGES[damage]
    pointer = DoubleBuffer(in_parts).pointer()
    spoil(parts_of(in_parts, pointer.buffer)[-1])
    target = SMALL.empty()
    with WeightReceiver(in_parts) as receiver:
        with pytest.raises(kind, match=message):
            receiver.load_into(target)
        with pytest.raises(kind, match=message), receiver.open():
            pass
    assert all(not tensor.any() for tensor in target.values())
    if kind is CORRUPT:
        checks = verify_store(DoubleBuffer(in_parts))
        assert [bool(check.problems) for check in checks if check.is_newest] == [True]


def send_odd_sizes(rank: int, store: Path) -> None:
    with mounted("network"), ShardedWeightSender(store) as sender:
        sender.send({name: torch.ones(3, dtype=torch.uint8) for name in "abcdefgh"})


def test_gaps_between_parts_go_into_a_bucket_as_zeros(world, store, bucket_url, monkeypatch):
    def dirty_memory(num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    world.run(send_odd_sizes, store)
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    monkeypatch.setattr(upload, "new_memory", dirty_memory)
    with dbuffer.Mirror(store, bucket_url).start() as mirror:
        mirror.wait_until_current(20)
    with Bucket(bucket_url) as bucket:
        [part] = [name for name in bucket.list("") if "/weights/" in name]
        tensors = bytes(bucket.get_range(part, 0, 8 * ALIGNMENT_BYTES))
    assert tensors == 8 * bytes([1, 1, 1]).ljust(ALIGNMENT_BYTES, b"\0")


def test_where_the_store_looks_local_parts_are_not_mapped(in_parts, monkeypatch):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "local")
    with WeightReceiver(in_parts) as receiver:
        with pytest.raises(dbuffer.StoreAccessError, match="DBUFFER_MOUNT=network"):
            receiver.load_into(SMALL.empty())


@pytest.mark.parametrize("mount", ["local", "network"])
def test_a_mirror_puts_parts_together(world, in_parts, monkeypatch, mount):
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


def test_tensordict_refuses_a_weights_file_whose_data_is_in_parts(in_parts):
    with WeightReceiver(in_parts) as receiver, receiver.open() as snapshot:
        assert SMALL.version_of(snapshot.tensors) == 3
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever its parser says
            TensorDict.from_consolidated(snapshot.path)


# What goes wrong on one rank is said on all

BAD = 1
"""The rank on which it goes wrong."""


def open_with(rank: int, store: Path, options: dict[str, Any]) -> None:
    ShardedWeightSender(**{"store": store} | (options if rank == BAD else {}))


def open_twice(rank: int, store: Path) -> None:
    with ShardedWeightSender(store), ShardedWeightSender(store):
        pass


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dtype": torch.int8}, "int8"),
        ({"num_threads": 0}, "num_threads 0"),
        ({"delta": 1}, "delta 1"),
        ({"rank_timeout_s": math.nan}, "rank_timeout_s nan"),
        ({"store": ""}, "store ''"),
    ],
)
def test_an_option_that_is_wrong_on_one_rank_is_refused_on_all(world, store, options, names):
    for outcome in world.outcomes(open_with, store, options):
        assert outcome.kind == "OptionError"
        assert re.search(f"rank 1 .*{names}", outcome.message)


def test_a_store_that_rank_0_cannot_open_is_refused_on_all(world, store):
    for outcome in world.outcomes(open_twice, store):
        assert (outcome.kind, "rank 0" in outcome.message) == ("StoreBusyError", True)
    store.chmod(0o777)
    for outcome in world.outcomes(open_with, store, {}):
        assert (outcome.kind, "0777" in outcome.message) == ("StoreAccessError", True)


def test_ranks_that_see_different_directories(world, store):
    for outcome in world.outcomes(send_elsewhere, store):
        assert outcome.kind == "StoreNotFoundError"
        assert "rank 1 could not write what it holds: cannot open the buffer" in outcome.message


def send_elsewhere(rank: int, store: Path) -> None:
    here = store / ("b" if rank == BAD else "a")
    with ShardedWeightSender(here) as sender:
        sender.send(pattern_of(1, distributed.get_world_size()))


def open_on_another_machine(rank: int, store: Path) -> None:
    original = agreement.Process.here
    if rank == BAD:
        elsewhere = dataclasses.replace(original(), host="elsewhere", boot="other")
        agreement.Process.here = lambda: elsewhere
    try:
        ShardedWeightSender(store)
    finally:
        agreement.Process.here = original


def test_a_local_store_cannot_be_written_from_two_machines(world, store):
    for outcome in world.outcomes(open_on_another_machine, store):
        assert outcome.kind == "StoreAccessError"
        assert "elsewhere" in outcome.message
        assert "network mount" in outcome.message


def send_in_groups(rank: int, store: Path) -> int:
    """Two trainers of two ranks each, in one job, each with a store of its own."""
    mine, mesh = rank // 2, grid()["inner"]
    full = SMALL.weights(1 + mine)
    weights = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in full.items()}
    with ShardedWeightSender(store / str(mine), group=mesh.get_group(), checksum=True) as sender:
        version = sender.send(weights, version=1 + mine).version
    others = distributed.new_group([0, 1]), distributed.new_group([2, 3])
    with pytest.raises(dbuffer.OptionError):
        ShardedWeightSender(store / str(mine), group=others[1 - mine])
    return version


def test_a_group_of_ranks(four, store):
    assert four.run(send_in_groups, store) == [1, 1, 2, 2]
    assert [newest(store / name, verify=True) for name in "01"] == [1, 2]


def other_names(weights: Any) -> Any:
    return {("other" if name.endswith("3.weight") else name): t for name, t in weights.items()}


def other_kind(weights: Any) -> Any:
    return {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in weights.items()}


PROBLEMS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "other names": (
        r"layers.3.weight int64\[256\] has a gap: rank 1 holds parts of it, as rank 0 says",
        lambda weights: {"weights": other_names(weights)},
    ),
    "fewer tensors": (
        r"layers.7.weight int64\[256\] has a gap: rank 1 holds parts of it, as rank 0 says",
        lambda weights: {"weights": dict(list(weights.items())[:-1])},
    ),
    "another version": ("rank 1 .* 7, .* rank 0 .* None", lambda weights: {"version": 7}),
    "whole where others hold parts": (
        r"rank 1 holds the whole of layers.1.weight int64\[256\], and ranks 0, 2, 3 hold parts",
        lambda weights: {"weights": other_kind(weights)},
    ),
    "no weights": ("rank 1 .* int", lambda weights: {"weights": 7}),
    "an iterator": ("rank 1 .* iterator", lambda weights: {"weights": iter(weights.items())}),
    "a meta tensor": (
        "rank 1 .* 'm' .* meta",
        lambda weights: {"weights": weights | {"m": torch.empty(1, device="meta")}},
    ),
}


def send_between_problems(rank: int, store: Path, delta: bool) -> dict[str, tuple[str, str]]:
    """Publish, try what cannot be published, and publish again, for each problem, with one sender.

    Return the kind and the message of each error.
    """
    size = distributed.get_world_size()
    failures = {}
    with ShardedWeightSender(store, checksum=True, delta=delta) as sender:
        sender.send(pattern_of(1, size))
        for version, (problem, (_, spoil)) in enumerate(PROBLEMS.items(), 2):
            weights = pattern_of(version, size)
            try:
                sender.send(**{"weights": weights} | (spoil(weights) if rank == BAD else {}))
            except dbuffer.DBufferError as error:
                failures[problem] = type(error).__name__, str(error)
            assert newest(store, verify=True) == version - 1
            distributed.barrier()
            sender.send(pattern_of(version, size), version=version)
            assert newest(store, verify=True) == version
            distributed.barrier()
    return failures


@pytest.mark.parametrize("delta", [False, True])
def test_weights_that_do_not_fit_together_are_refused_on_all_ranks(world, store, delta):
    for failures in world.run(send_between_problems, store, delta):
        assert failures.keys() == PROBLEMS.keys()
        for problem, (kind, message) in failures.items():
            assert kind == "InvalidWeightsError"
            assert re.search(PROBLEMS[problem][0], message)


def send_lazy(rank: int, store: Path) -> int:
    """Return how many tensors were there at a time that are made as they are published."""
    alive = most = 0

    def make() -> torch.Tensor:
        nonlocal alive, most
        made, alive = torch.ones(1000), alive + 1
        most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(made, gone)
        return made

    weights = [
        (str(number), dbuffer.LazyTensor(torch.float32, (1000,), make)) for number in range(50)
    ]
    written_bytes, box_share._WRITTEN_BYTES = box_share._WRITTEN_BYTES, 4000
    try:
        with ShardedWeightSender(store) as sender:
            sender.send(weights)
    finally:
        box_share._WRITTEN_BYTES = written_bytes
    return most


def test_tensors_that_are_made_are_not_all_there_at_once(world, store):
    assert 1 <= max(world.run(send_lazy, store)) < 5


def send_where_one_cannot(rank: int, store: Path, function: str, on_rank: int) -> list[str]:
    """Publish, with a step that raises once on one rank in the second."""
    size = distributed.get_world_size()
    with ShardedWeightSender(store, checksum=True) as sender:
        sender.send(pattern_of(1, size))
        if rank == on_rank:
            owner, name = {
                "write": (SharedFileWriter, "write"),
                "gathered": (dbuffer.publish.shards.HeldParts, "box"),
                "commit": (dbuffer.store.writer.BufferWriter, "commit"),
                "claim": (dbuffer.store.writer.BufferWriter, "claim"),
            }[function]
            original = getattr(owner, name)

            def fail(*_: Any, **__: Any) -> None:
                setattr(owner, name, original)
                raise OSError("it went up in smoke")

            setattr(owner, name, fail)
        try:
            sender.send(pattern_of(2, size))
        except dbuffer.RankFailedError as error:
            message = str(error)
        assert newest(store, verify=True) == 1
        distributed.barrier()
        sender.send(pattern_of(3, size), version=3)
        assert newest(store, verify=True) == 3
        distributed.barrier()
    return [message]


@pytest.mark.parametrize(
    ("function", "on_rank"),
    [("write", 0), ("write", 1), ("gathered", 1), ("commit", 0), ("claim", 0)],
)
def test_a_step_that_fails_on_one_rank_fails_on_all(world, store, function, on_rank):
    for [message] in world.run(send_where_one_cannot, store, function, on_rank):
        assert re.search(f"rank {on_rank} could not .*OSError: it went up in smoke", message)


def send_fsdp1(rank: int, store: Path, kind: StateDictType) -> str:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(6, 8), use_orig_params=True, device_id=torch.device("cpu")
    )
    FullyShardedDataParallel.set_state_dict_type(model, kind)
    with ShardedWeightSender(store) as sender:
        try:
            return str(sender.send(model).version)
        except dbuffer.UnsupportedError as error:
            return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", StateDictType)
def test_fsdp1_publishes_full_state_dicts_and_no_sharded_ones(world, store, kind):
    for outcome in world.run(send_fsdp1, store, kind):
        if kind is StateDictType.FULL_STATE_DICT:
            assert outcome == "1"
        else:
            assert re.search("is a ShardedTensor.*FSDP2.*FULL_STATE_DICT", outcome)


def send_a_part_alone(rank: int, store: Path) -> str:
    weights = pattern_of(1, distributed.get_world_size())
    if rank:
        return ""
    with WeightSender(store) as sender, pytest.raises(dbuffer.InvalidWeightsError) as caught:
        sender.send(weights)
    return str(caught.value)


def send_and_wait(rank: int, store: Path, timeout_s: float) -> None:
    with dbuffer.ShardedWeightSender(store) as sender:
        version = sender.send(fsdp(2)[0]).version
        sender.wait_applied(version, receivers=["worker"], timeout_s=timeout_s)


def test_all_ranks_wait_for_a_receiver(world, store):
    for outcome in world.outcomes(send_and_wait, store, 0.2):
        assert outcome.kind == "WaitTimeoutError"
    with dbuffer.WeightReceiver(store, receiver_id="worker") as receiver:
        receiver.acknowledge(2)
    assert world.run(send_and_wait, store, 20.0) == [None] * len(world.ranks)


def test_one_rank_alone_cannot_publish_what_all_hold(world, store):
    assert "dbuffer.ShardedWeightSender" in world.run(send_a_part_alone, store)[0]


def load_into_a_part(rank: int, store: Path) -> str:
    torch.manual_seed(0)
    model, _ = fsdp(distributed.get_world_size())
    with ShardedWeightSender(store) as sender:
        sender.send(model)
    with WeightReceiver(store, receiver_id=f"rank-{rank}") as receiver:
        with pytest.raises(dbuffer.WeightsMismatchError) as caught:
            receiver.load_into(model)
    return str(caught.value)


def test_a_sharded_model_cannot_be_loaded_into(world, store):
    for message in world.run(load_into_a_part, store):
        assert "sharded" in message


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
        sender = stack.enter_context(way.open(store, rank_timeout_s=timeout_s))
        for version in (1, 2, 3):
            sender.send(way.weights(version))
        if way.is_restarted:
            sender.close()
            sender = stack.enter_context(way.open(store, rank_timeout_s=timeout_s))
        weights = way.weights(4)
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
                assert waited_s < 10
    there = newest(store, verify=way.has_checksums)
    make_temporaries_old(store)
    for version in (5, 6, 7):
        next_job.run(open_and_send, store, version, way)
        assert newest(store, verify=way.has_checksums) == version
    return there


@pytest.mark.soak
@pytest.mark.timeout(patience_s())
@pytest.mark.parametrize(
    ("size", "on_rank", "way", "first"),
    [
        pytest.param(2, 0, Way(), 1, id="rank 0 of 2"),
        pytest.param(2, 1, Way(), 2, id="rank 1 of 2"),
        pytest.param(4, 0, Way(), 3, id="rank 0 of 4"),
        pytest.param(4, 1, Way(), 1, id="rank 1 of 4"),
        pytest.param(2, 0, Way("network"), 5, id="rank 0 of 2, in parts"),
        pytest.param(2, 1, Way("network"), 1, id="rank 1 of 2, in parts"),
        pytest.param(2, 0, Way(delta=True), 2, id="rank 0 of 2, a delta"),
        pytest.param(2, 1, Way(delta=True), 1, id="rank 1 of 2, a delta"),
        pytest.param(2, 0, Way("network", delta=True), 4, id="rank 0 of 2, a delta upon parts"),
        pytest.param(2, 1, Way("network", delta=True), 5, id="rank 1 of 2, a delta upon parts"),
        pytest.param(2, 0, Way("auto", True, True), 3, id="rank 0 of 2, restarted"),
        pytest.param(2, 1, Way("network", True, True), 2, id="rank 1 of 2, restarted, parts"),
    ],
)
def test_a_rank_that_is_killed_at_any_moment(
    request, shm_path, tmp_path, monkeypatch, record_property, size, on_rank, way, first
):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, way.mount)
    has_flipped = False
    kills = 0
    # Another rank than 0 has fewer calls to stop before, and hardly any in a delta.
    every = 13
    if on_rank and not way.is_restarted:
        every = 3 if way.delta else 5
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
        assert re.search("a rank was lost .*while the ranks tried to write what it holds", message)
        assert 0.5 < waited_s < 10
        assert newest(store, verify=True) == 3
        two.run(open_and_send, store, 5)
        # It goes on, into a file that nobody reads any more.
        world.ranks[1].signal(signal.SIGCONT)
        message, _ = world.outcome(1)
        assert newest(store, verify=True) == 5
        two.run(open_and_send, store, 6)
        assert newest(store, verify=True) == 6
