"""`Inventory`: the tensors that a trainer rank holds or describes.

`join` makes an `Assignment`, the parts that each rank writes, from the inventories of all ranks.
Ranks of different pipeline stages or experts list different tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import TensorSpec, digest
from dbuffer.io.tensors import as_bytes
from dbuffer.publish.assignment import (
    SPREAD_FROM_BYTES,
    Assignment,
    Box,
    Boxes,
    assign_writes,
)
from dbuffer.publish.shards import HeldParts, sharded_in
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime.messages import listed
from dbuffer.weights.lazy_tensor import HeldRows
from dbuffer.weights.sources import Source

if TYPE_CHECKING:  # importing it takes half as long as importing torch
    from torch.distributed.tensor import DTensor

_SAMPLED_ELEMENTS = 512

Ranks: TypeAlias = tuple[int, ...]
"""Ranks that hold parts of a tensor. Empty if each rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Tensors that a rank lists, and the parts of them that it holds. It may hold no part."""

    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    ranks: list[Ranks]
    boxes: Boxes

    def encode_description(self) -> dict[str, Any]:
        groups = list(dict.fromkeys(self.ranks))
        number = {group: index for index, group in enumerate(groups)}
        numbers = [number[ranks] for ranks in self.ranks]
        return {"specs": self.specs, "aliases": self.aliases, "groups": groups, "ranks": numbers}

    def encode_boxes(self) -> list[Any]:
        return [[index, *(box or ())[1:]] for index, box in self.boxes.items()]

    @classmethod
    def decode_description(cls, encoded: dict[str, Any]) -> Self:
        groups = [tuple(group) for group in encoded["groups"]]
        return cls(
            tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in encoded["specs"]),
            encoded["aliases"],
            [groups[number] for number in encoded["ranks"]],
            {},
        )


def take_inventory(source: Source, rank: int, group_rank: Mapping[int, int]) -> Inventory:
    """Return this rank's inventory: the tensors that it lists, and the parts that it holds.

    ``group_rank`` maps ranks of the whole job to ranks of the sender's process group.
    """
    ranks: list[Ranks] = [()] * len(source.specs)
    if source.reader is not None:
        # All ranks iterate over these tensors together, and get each one whole.
        boxes: Boxes = dict.fromkeys(source.reader.held_on(rank))
        return Inventory(source.specs, source.aliases, ranks, boxes)
    boxes, parts = {}, HeldParts()
    ranks_by_way: dict[Any, tuple[Ranks, bool]] = {}
    for index, tensor in enumerate(source.tensors):
        sharded = sharded_in(tensor)
        if sharded is None:
            way: Any = None
        elif hasattr(sharded, "ds_shape"):  # ZeRO-3: all ranks of the group hold parts
            way = "zero"
        elif isinstance(sharded, HeldRows):
            way = sharded.ranks
        else:
            way = sharded.device_mesh, sharded.placements
        if way not in ranks_by_way:
            ranks_by_way[way] = _part_ranks(sharded, group_rank, source.specs[index].name)
        ranks[index], is_held = ranks_by_way[way]
        if is_held:
            boxes[index] = parts.box(index, tensor)
    return Inventory(source.specs, source.aliases, ranks, boxes)


def _part_ranks(sharded: Any, group_rank: Mapping[int, int], name: str) -> tuple[Ranks, bool]:
    if sharded is None:
        return (), True
    if hasattr(sharded, "ds_shape"):
        return tuple(group_rank.values()), True
    of_job, is_held = _holders(sharded)
    if outside := [rank for rank in of_job if rank not in group_rank]:
        raise InvalidWeightsError(
            f"ranks {listed(outside)} of the job hold parts of {name!r}, and are not in this "
            "sender's group: make the sender on all ranks that hold the weights"
        )
    is_whole = len(of_job) == 1
    return () if is_whole else tuple(group_rank[rank] for rank in of_job), is_held


def _holders(sharded: DTensor | HeldRows) -> tuple[list[int], bool]:
    if isinstance(sharded, HeldRows):
        return list(sharded.ranks), True
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    # Only the ranks of this rank's replica: other replicas hold the same.
    pairs = zip(coordinate or [0] * mesh.ndim, sharded.placements, strict=True)
    index = tuple(place if placement.is_replicate() else slice(None) for place, placement in pairs)
    return mesh.mesh[index].flatten().tolist(), coordinate is not None


def join(ranks: Agreement, source: Source, inventory: Inventory, *, rows_only: bool) -> Assignment:
    """Join the inventories of all ranks, and assign a writing rank to each part. Collective.

    Raises:
        InvalidWeightsError: a tensor differs between ranks, its parts overlap or leave a gap, or
            no rank holds it.
    """
    description = inventory.encode_description()
    xxh3 = digest(json.dumps(description).encode())
    digests = ranks.share("list its tensors", xxh3)
    described = {xxh3: inventory}
    # On most trainers all ranks list the same tensors: then the long list is not sent.
    if len(set(digests)) > 1:
        is_first = digests.index(xxh3) == ranks.rank
        sent = ranks.share("send the list of its tensors", description if is_first else {})
        for of_rank, encoded in zip(digests, sent, strict=True):
            if of_rank not in described:
                described[of_rank] = Inventory.decode_description(encoded)
    boxes = ranks.share("send its boxes", inventory.encode_boxes())
    with ranks.step("join the tensors of all ranks"):
        assignment = _join(digests, described, boxes, rows_only=rows_only)
    _compare_replicas(ranks, source, inventory)
    return assignment


def _join(
    digests: Sequence[str],
    described: Mapping[str, Inventory],
    encoded: Sequence[list[Any]],
    *,
    rows_only: bool,
) -> Assignment:
    describing: dict[str, list[int]] = defaultdict(list)
    for rank, xxh3 in enumerate(digests):
        describing[xxh3].append(rank)
    specs: dict[str, TensorSpec] = {}
    indices: dict[str, int] = {}
    ranks_of: dict[str, dict[Ranks, list[int]]] = {}
    aliases: dict[str, str] = {}
    boxes: list[Boxes] = [{} for _ in encoded]
    for xxh3, ranks in describing.items():
        inventory = described[xxh3]
        index_of = []
        for spec, holding in zip(inventory.specs, inventory.ranks, strict=True):
            of_tensor = ranks_of.setdefault(spec.name, {})
            if spec != (known := specs.setdefault(spec.name, spec)):
                raise InvalidWeightsError(
                    f"rank {ranks[0]} is to publish {spec}, and rank {_first(of_tensor)} {known}: "
                    "give a tensor of one name the same shape and dtype on all ranks that hold it"
                )
            of_tensor.setdefault(holding, []).extend(ranks)
            index_of.append(indices.setdefault(spec.name, len(indices)))
        for rank in ranks:
            boxes[rank] = _decode_boxes(encoded[rank], index_of)
        for alias, name in inventory.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise InvalidWeightsError(
                    f"rank {ranks[0]} ties {alias!r} to {name!r}, and another rank to "
                    f"{aliases[alias]!r}"
                )
    if not specs:
        raise InvalidWeightsError("no rank holds a tensor to publish")
    for alias in aliases.keys() & specs.keys():
        raise InvalidWeightsError(
            f"{alias!r} is tied to {aliases[alias]!r} on one rank, and a tensor of its own on "
            f"rank {_first(ranks_of[alias])}: give one of the two names on all ranks"
        )
    on_some_rank = set().union(*boxes)
    for name, spec in specs.items():
        _check_parts(spec, ranks_of[name])
        if indices[name] not in on_some_rank:
            raise InvalidWeightsError(f"no rank holds {spec}")
    return assign_writes(tuple(specs.values()), aliases, boxes, rows_only=rows_only)


def _decode_boxes(encoded: list[Any], index_of: Sequence[int]) -> Boxes:
    return {
        index_of[index]: Box(index_of[index], tuple(place[0]), tuple(place[1])) if place else None
        for index, *place in encoded
    }


def _check_parts(spec: TensorSpec, describing: dict[Ranks, list[int]]) -> None:
    """Raise if the parts of a tensor overlap or leave a gap.

    ``describing`` maps each set of ranks that hold one part of the tensor to the ranks whose
    inventories list that part.
    """
    unsharded = describing.get((), [])
    for holding, ranks in describing.items():
        if holding and unsharded:
            raise InvalidWeightsError(
                f"{_named(unsharded)} the whole of {spec}, and {_named(ranks)} parts: give it "
                "whole or sharded, alike on all ranks that hold it"
            )
        if missing := sorted(set(holding).difference(ranks)):
            raise InvalidWeightsError(
                f"{spec} has a gap: {_named(missing)} parts of it, as rank {ranks[0]} says, but "
                "not under this name: give every tensor on all ranks that hold parts of it, under "
                "one name"
            )


def _first(describing: dict[Ranks, list[int]]) -> int:
    return next(iter(describing.values()))[0]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {listed(ranks)} hold"


def _compare_replicas(ranks: Agreement, source: Source, inventory: Inventory) -> None:
    """Raise if tensors with one name differ between ranks. Collective.

    Sampled elements show if two ranks give one name to different tensors: for instance, if two
    pipeline stages both call their first layer "0".
    """
    with ranks.step("sample the tensors that it holds whole") as step:
        sample = _sample_replicas(source, inventory)
        step.result = digest(json.dumps(sample).encode())
    if len(set(step.results)) > 1:
        samples = ranks.share("send its samples", sample)
        with ranks.step("compare the samples"):
            _require_alike(samples)


def _sample_replicas(source: Source, inventory: Inventory) -> dict[str, str]:
    """Return a digest of sampled elements of each large tensor that this rank holds whole."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for index in inventory.boxes if source.reader is None else ():
        tensor = source.tensors[index]
        # Small tensors may drift apart, as statistics of each rank's batches do: one rank writes
        # them all. Parts of a large tensor could come from several ranks.
        is_large = source.specs[index].num_bytes >= SPREAD_FROM_BYTES
        if inventory.ranks[index] == () and is_large and isinstance(tensor, torch.Tensor):
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
            sample = flat[::step].resolve_conj().resolve_neg().contiguous()
            on_device = by_device.setdefault(sample.device, {})
            on_device[source.specs[index].name] = sample.view(torch.uint8)
    digests: dict[str, str] = {}
    for samples in by_device.values():
        # One copy from the device for all samples.
        sizes = list(map(len, samples.values()))
        parts = torch.split(torch.cat(list(samples.values())).cpu(), sizes)
        digests.update(zip(samples, map(digest, map(as_bytes, parts)), strict=True))
    return digests


def _require_alike(samples: Sequence[Mapping[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, sample in enumerate(samples):
        for name, xxh3 in sample.items():
            holder, expected = first.setdefault(name, (rank, xxh3))
            if xxh3 != expected:
                differing.setdefault(name, (holder, rank))
    if differing:
        holder, rank = next(iter(differing.values()))
        raise InvalidWeightsError(
            f"rank {holder} and rank {rank} hold different tensors of one name, and one of the two "
            f"would be lost: {listed(sorted(differing))}; give layers and experts the names that "
            "they have in the whole model (rename), or parts of one tensor as a DTensor; of "
            "replicas that are to differ, give one alone"
        )
