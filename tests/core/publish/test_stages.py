"""Ranks that hold different tensors publish together: pipeline stages, experts, replicas."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn

import dbuffer
from dbuffer import ShardedWeightSender
from dbuffer.publish.draft import Draft
from dbuffer.ranks.agreement import Agreement
from tests.support.patterns import assert_same, received
from tests.support.sharded import grid, mesh_of, mixtral, state_of, whole
from tests.support.soak import in_turn
from tests.support.ways import NEEDS_CONVERSIONS, mounted

WIDTH = 64

Weights = dict[str, torch.Tensor]


class Trainer(NamedTuple):
    """Weights of one rank, and its training step."""

    weights: nn.Module | Weights
    step: Callable[[], Any]


class Layers(nn.Module):
    """Some layers of a model, by their numbers in it."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = {str(number): nn.Linear(WIDTH, WIDTH) for number in range(4)}
        self.layers = nn.ModuleDict({str(number): whole[str(number)] for number in numbers})

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            states = layer(states).relu()
        return states


def pipeline(rank: int, *, is_sharded: bool = True) -> Trainer:
    """Two pipeline stages, each sharded over two ranks with FSDP2, or in two replicas."""

    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = grid()
    number = mesh.get_local_rank("outer")
    model = Layers(range(2 * number, 2 * number + 2))
    if is_sharded:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["inner"])
        fully_shard(model, mesh=mesh["inner"])
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("outer"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    states, target = torch.rand(4, WIDTH), torch.rand(4, WIDTH)

    def step() -> None:
        schedule.step(*([states] if number == 0 else []), **({"target": target} if number else {}))
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, step)


def replicas(rank: int) -> Trainer:
    return pipeline(rank, is_sharded=False)


def nudged(weights: Weights) -> Trainer:
    """Train by hand: a few elements of each tensor, alike in all replicas."""

    def step() -> None:
        for tensor in weights.values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.view(-1)[:2] += 1

    return Trainer(weights, step)


def experts(rank: int) -> Trainer:
    """Each of two ranks has half of the experts, in two replicas, and all of the rest.

    The replicas describe them in another order.
    """
    torch.manual_seed(0)
    names = [f"experts.{number}" for number in range(8)]
    full = {"router": whole(8, WIDTH), **{name: whole(WIDTH, WIDTH) for name in names}}
    mine = ["router", *names[4 * (rank % 2) :][:4]]
    return nudged({name: full[name] for name in (mine if rank < 2 else reversed(mine))})


def first_and_last(rank: int) -> Trainer:
    """The embedding, tied in the model, is on the first stage and on the last."""
    torch.manual_seed(0)
    full = {"embedding": whole(700, 600), **{str(number): whole(5, 5) for number in range(4)}}
    names = {0: ("embedding", "0"), 1: ("1",), 2: ("2",), 3: ("embedding", "3")}[rank]
    return nudged({name: full[name] for name in names})


def one_has_nothing(rank: int) -> Trainer:
    torch.manual_seed(0)
    return nudged({} if rank == 0 else {f"{rank}": whole(50, 50), "scalar": whole()})


def columns(rank: int) -> Trainer:
    """Stages of which each rank holds columns: not in a row in the file."""

    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = grid()
    torch.manual_seed(0)
    full = [whole(100, 60) for _ in range(4)]
    number = mesh.get_local_rank("outer")
    return nudged(
        {
            f"{layer}": distribute_tensor(full[layer], mesh["inner"], [Shard(1)])
            for layer in range(2 * number, 2 * number + 2)
        }
    )


def tensors_of(weights: nn.Module | Weights) -> Weights:
    return weights.state_dict() if isinstance(weights, nn.Module) else weights


def wholes(weights: nn.Module | Weights) -> Weights:
    """All tensors of all ranks, whole."""
    mine = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in tensors_of(weights).items()
    }
    by_rank: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(by_rank, mine)
    return {name: tensor for of_rank in by_rank for name, tensor in of_rank.items()}


def num_bytes_held(weights: nn.Module | Weights) -> int:
    tensors = tensors_of(weights).values()
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)


@contextlib.contextmanager
def counted(seen: dict[str, int]) -> Iterator[None]:
    """Count the bytes that this rank writes and sends, and the collectives of its tensors."""

    from torch.distributed.tensor.debug import CommDebugMode

    seen |= {"written": 0, "sent": 0}
    write, gather = Draft.write, Agreement._gather

    def counted_write(self: Any, numbers: Sequence[int], elements: list[torch.Tensor]) -> None:
        seen["written"] += sum(tensor.nbytes for tensor in elements)
        write(self, numbers, elements)

    def counted_gather(self: Any, data: bytes) -> Any:
        seen["sent"] += len(data)
        return gather(self, data)

    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as collectives:
        patch.setattr(Draft, "write", counted_write)
        patch.setattr(Agreement, "_gather", counted_gather)
        yield
    seen["gathers"] = collectives.get_total_counts()


class Went(NamedTuple):
    """How a version was published, on one rank."""

    num_bytes: int
    held: int
    written: int
    sent: int
    gathers: int
    delta_bytes: int | None


def publish(
    rank: int,
    case: Callable[[int], Trainer],
    store: Path,
    mount: str,
    delta: bool = False,
) -> list[Went]:
    """Publish a version after each step; rank 0 reads each, as one who has not seen any before."""
    trainer = case(rank)
    options: dict[str, Any] = {"delta": delta, "keep": 3}
    went: list[Went] = []
    versions: list[Weights] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mounted(mount))
        sender = stack.enter_context(ShardedWeightSender(store, **options))
        for _ in range(4):
            trainer.step()
            seen: dict[str, int] = {"held": num_bytes_held(trainer.weights)}
            with counted(seen):
                publication = sender.send(trainer.weights)
            went.append(Went(publication.num_bytes, **seen, delta_bytes=publication.delta_bytes))
            full = wholes(trainer.weights)
            assert publication.num_bytes == sum(tensor.nbytes for tensor in full.values())
            versions.append(full)
            if rank == 0:
                assert_same(received(store), full)
            distributed.barrier()
        for has_delta in (False, delta):  # of all tensors in other boxes: whole on each rank
            assert (sender.send(full).delta_bytes is not None) == has_delta
            if rank == 0:
                assert_same(received(store), full)
            distributed.barrier()
        if rank == 0:
            with dbuffer.WeightReceiver(store) as receiver, receiver.open(version=2) as snapshot:
                assert_same(snapshot.tensors, versions[1])  # kept
    return went


WAYS = [("local", False), ("network", True), ("network", False), ("local", True)]
"""Mounts, and whether versions are published as deltas."""
CASES = [pipeline, replicas, experts, first_and_last, one_has_nothing, columns]


@in_turn(("case", "way"), CASES, WAYS)
def test_ranks_that_hold_different_tensors_publish_all(four, store, case, way):
    """Each byte is written once; columns alone are gathered, in their stage, across a network."""
    mount, delta = way
    by_rank = four.run(publish, case, store, mount, delta)
    are_gathered = case is columns and mount == "network"
    for of_rank in zip(*by_rank, strict=True):
        assert len({went.delta_bytes for went in of_rank}) == 1
        assert {went.gathers for went in of_rank} == {2 if are_gathered else 0}
        if of_rank[0].delta_bytes is None:
            assert sum(went.written for went in of_rank) == of_rank[0].num_bytes
            if case is pipeline:
                assert all(went.written == went.held for went in of_rank)
        if case is pipeline and not delta:
            assert all(went.sent < went.held / 4 for went in of_rank)
    if case is pipeline and not delta:
        assert all(went[-1].sent < 2000 for went in by_rank), "who holds what is said once"
    if delta and case not in (pipeline, replicas):  # of which a step changes all
        assert all(went.delta_bytes is not None for went in by_rank[0][1:])


def send_transformers_stages(rank: int, store: Path) -> None:
    """Mixtral in two stages of two ranks each: fused experts, published one by one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from transformers.core_model_loading import revert_weight_conversion

    mesh = grid()
    torch.manual_seed(0)  # the same weights on all ranks, whatever they did before
    model = mixtral()
    full = revert_weight_conversion(model, state_of(model))
    number = mesh.get_local_rank("outer")
    layer = model.model.layers[number]
    model.model.layers[1 - number] = nn.Identity()
    if number == 0:
        model.model.norm = model.lm_head = nn.Identity()
    else:
        model.model.embed_tokens = nn.Identity()
    for part in (layer, model):
        fully_shard(part, mesh=mesh["inner"])
    with ShardedWeightSender(store) as sender, CommDebugMode() as collectives:
        sender.send(model)
    assert collectives.get_total_counts() == 0
    if rank == 0:
        assert_same(received(store), full)


@NEEDS_CONVERSIONS
def test_stages_of_a_transformers_module_are_published_as_its_checkpoint(four, store):
    four.run(send_transformers_stages, store)


# What does not fit together


def rows(tensor: torch.Tensor, *ranks: int) -> torch.Tensor:
    """A tensor of which each of these ranks holds rows."""

    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, mesh_of(*ranks), [Shard(0)])


def gap_in_sum(rank: int) -> Weights:
    """As a gap, where no box says so."""

    from torch.distributed.tensor import DTensor, Partial

    part = DTensor.from_local(torch.ones(4), mesh_of(0, 1, 2, 3), [Partial()])
    return {f"{rank}": torch.ones(3)} | ({} if rank == 1 else {"sum": part})


def nowhere(rank: int) -> Weights:
    """A tensor of ranks that do not describe it."""

    from torch.distributed.tensor import DTensor, Replicate

    part = DTensor.from_local(torch.ones(2), mesh_of(0, 1), [Replicate()])
    return {f"{rank}": torch.ones(3)} | ({"away": part} if rank > 1 else {})


ONE, OTHER = torch.ones(4), torch.zeros(4)

REFUSED: dict[str, Callable[[int], Weights]] = {
    r"rank 2 lists shared float32\[5\], but rank 0 lists shared float32\[4\]": (
        lambda rank: {f"{rank}": OTHER, "shared": torch.ones(4 + rank // 2)}
    ),
    r"rank 3 lists shared float64\[4\], but rank 0 lists shared float32\[4\]": (
        lambda rank: {"shared": ONE.double() if rank == 3 else ONE}
    ),
    r"ranks 2, 3 hold the whole of shared float32\[4\], and ranks 0, 1 hold parts": (
        lambda rank: {f"{rank}": OTHER, "shared": (rows(ONE, 0, 1), ONE)[rank // 2]}
    ),
    r"mine float32\[8\] has a gap: on rank 0, rank 2 holds parts of it": (
        lambda rank: {("other" if rank == 2 else "mine"): rows(torch.ones(8), 0, 1, 2, 3)}
    ),
    r"sum float32\[4\] has a gap: on rank 0, rank 1 holds parts of it": gap_in_sum,
    "'head' is tied to 'embedding' on one rank, and a tensor of its own on rank 3": (
        lambda rank: {0: {"embedding": ONE, "head": ONE}, 3: {"head": ONE}}.get(rank, {})
    ),
    "rank 1 ties 'head' to 'one', and another rank to 'other'": (
        lambda rank: {"one": ONE, "other": OTHER, "head": ONE if rank else OTHER}
    ),
    "no rank holds a tensor to publish": lambda rank: {},
    r"no rank holds away float32\[2\]": nowhere,
    # Two stages whose layers each begin at 0.
    "rank 0 and rank 2 hold different tensors of one name, .*: layers.0;": (
        lambda rank: {f"{rank}": ONE, "layers.0": torch.full((512, 512), float(rank // 2))}
    ),
    # One expert a rank: all describe the same.
    "rank 0 and rank 1 hold different tensors of one name, .*: experts;": (
        lambda rank: {"all": torch.zeros(9), "experts": torch.full((1, 512, 512), float(rank))}
    ),
}
"""Weights that do not fit together, by what is said of them."""


def send_refused(rank: int, store: Path) -> list[str]:
    """Publish, try what is refused, and publish again, for each case, with one sender."""
    good = nudged({"all": torch.zeros(900), f"{rank}": torch.ones(900)})
    messages = []
    with ShardedWeightSender(store, delta=True) as sender:
        sender.send(good.weights)
        for version, case in enumerate(REFUSED.values(), 2):
            before = content_of(store)
            distributed.barrier()
            with pytest.raises(dbuffer.InvalidWeightsError) as caught:
                sender.send(case(rank))
            messages.append(str(caught.value))
            assert content_of(store) == before
            distributed.barrier()
            good.step()
            publication = sender.send(good.weights)
            assert publication.version == version
            assert publication.delta_bytes is not None
    return messages


def content_of(store: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in store.rglob("*") if file.is_file()}


def test_what_does_not_fit_together_is_refused_by_name_on_all_ranks(four, store):
    messages, *others = four.run(send_refused, store)
    assert others == [messages] * 3
    for expected, message in zip(REFUSED, messages, strict=True):
        step = "could not (join the tensors of all ranks|compare the samples)"
        assert re.search(f"{step}: .*{expected}", message), message


def send_beyond_the_group(rank: int, store: Path) -> str:
    tensor = rows(torch.ones(8), 0, 1, 2, 3)
    group = grid().get_group("inner")
    with ShardedWeightSender(store / f"{rank // 2}", group=group) as sender:
        with pytest.raises(dbuffer.InvalidWeightsError) as caught:
            sender.send({"tensor": tensor})
    return str(caught.value)


def test_parts_on_ranks_outside_of_the_group_are_refused(four, store):
    first, _, last, _ = four.run(send_beyond_the_group, store)
    assert "ranks 2, 3 of the job hold parts of 'tensor', and are not in this sender's" in first
    assert "ranks 0, 1 of the job hold parts of 'tensor', and are not in this sender's" in last


def send_one_replica(rank: int, store: Path) -> None:
    """HSDP, with a sender of one replica's ranks, and none on the others."""

    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, mine = grid(), store / f"{rank // 2}"
    torch.manual_seed(0)
    full = whole(9, 3)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    with ShardedWeightSender(mine, group=mesh.get_group("inner")) as sender:
        sender.send({"tensor": tensor})
    if rank % 2 == 0:
        assert_same(received(mine), {"tensor": full})
    groups = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with pytest.raises(dbuffer.OptionError, match="not in the group"):
        ShardedWeightSender(mine, group=groups[1 - rank // 2])


def test_one_replica_of_several_publishes(four, store):
    four.run(send_one_replica, store)
