"""`ShardedWeightSender`: all ranks of a trainer publish together, and each rank writes its part.

On one machine all ranks map one weights file. On a network mount each rank writes its own file.
Rank 0 is the store's writer, and commits the version when every rank has written its part.

Each rank describes its tensors in an `Inventory`. `join` makes an `Assignment`, the parts that each
rank writes, from the inventories of all ranks. Ranks of different pipeline stages or experts list
different tensors.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, Unpack

import torch
from msgspec import convert, to_builtins
from torch import distributed

from dbuffer.errors import InvalidWeightsError, OptionError
from dbuffer.format.layout import TensorSpec, digest
from dbuffer.io.copier import MAX_DEFAULT_THREADS
from dbuffer.io.tensors import as_bytes
from dbuffer.publish.draft import checked_metadata
from dbuffer.publish.part import (
    SPREAD_FROM_BYTES,
    Assignment,
    Box,
    Boxes,
    HeldParts,
    assign_writes,
    sharded_in,
)
from dbuffer.publish.publisher import Publication, Publisher, SenderKeywords, SenderOptions
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options as checks
from dbuffer.runtime.cores import num_cores
from dbuffer.runtime.messages import listed
from dbuffer.store.buffer import require_version
from dbuffer.store.liveness import Process
from dbuffer.weights.lazy_tensor import HeldRows
from dbuffer.weights.sources import Source, Weights

DEFAULT_RANK_TIMEOUT_S = 600.0

_ELSEWHERE = torch.empty(0)
_SAMPLED_ELEMENTS = 512


class ShardedWeightSender(Publisher):
    """Sender for a trainer with several ranks: FSDP2, HSDP, TP, ZeRO-3, pipeline stages.

    Make a sender on every rank, and make each call on every rank, with the rank's own model: all
    methods are collective. A call that fails on one rank raises on all ranks.

    Args:
        store: the store's directory; made with mode 0700 if it does not exist.
        group: the ranks that hold the weights. Default: all ranks of torch.distributed, which must
            be initialized. Rank 0 of the group is the store's writer.
        rank_timeout_s: how long the ranks wait for a hung rank. A dead rank is noticed at once.
        **options: fields of :class:`SenderOptions`: ``durable``, ``checksum``, ``delta`` and more.

    Raises:
        OptionError: an option is invalid, torch.distributed is not initialized, or the directory
            holds files that are not a store's.
        RankFailedError: a rank was lost, or raised an error that is not one of dbuffer's.
        StoreBusyError: another sender has the store.
        StoreAccessError: the store cannot be used.
    """

    _world: Agreement
    _assignment: Assignment
    _closed_message = (
        "this sender of {store} is closed, has lost a rank, or is of a parent process; make a new "
        "one"
    )

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        group: distributed.ProcessGroup | None = None,
        rank_timeout_s: float = DEFAULT_RANK_TIMEOUT_S,
        **options: Unpack[SenderKeywords],
    ) -> None:
        ranks = Agreement(group, timeout_s=_step_timeout_s(rank_timeout_s, options))
        try:
            with ranks.step("take its options"):
                checks.directory("store", store)
                checks.positive_seconds("rank_timeout_s", rank_timeout_s)
                chosen = SenderOptions.parse(options)
                num_threads = chosen.num_threads or _share_of_cores(ranks)
            super().__init__(store, chosen, ranks, num_threads=num_threads)
        except BaseException:
            ranks.close()
            raise
        self._describer = chosen.make_describer(sharded=True)
        of_job = distributed.get_process_group_ranks(group)
        self._group_rank = {rank: number for number, rank in enumerate(of_job)}
        self._inventory: Inventory | None = None
        self._assignment = Assignment()

    def send(
        self,
        weights: Weights,
        *,
        draft: Weights | None = None,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Publish the weights of all ranks. Call it on every rank.

        Ranks may hold different tensors: the tensors of all ranks are published. If several ranks
        hold a tensor, its shape and dtype must be the same on each. Each rank writes the DTensor
        shards that it holds. A plain tensor must be equal on all ranks that hold it, and one of
        these ranks writes it. Tensors whose shards are not rectangular parts (strided shards,
        partial sums, ZeRO-3) are gathered one by one.

        Args:
            weights: a module, a state dict, a TensorDict, a list of ``(name, tensor)`` pairs, the
                path of a HuggingFace checkpoint or a weight source of vLLM; no iterator. Pass a
                ZeRO-3 model as the module. A rank that holds no weights passes ``{}``.
            draft: weights of a draft model for speculative decoding, on all ranks or on none.
            version: number of the version, equal on all ranks and above all earlier numbers.
                Default: the last number plus one.
            metadata: a mapping that JSON can hold. Only rank 0's metadata is published.

        Returns:
            The publication, equal on all ranks.

        Raises:
            RankFailedError: a rank was lost, or raised an error that is not one of dbuffer's.
            DBufferError: any error of :meth:`WeightSender.send`, on all ranks; an
                `InvalidWeightsError` if the ranks' weights do not fit together.
        """
        with self._world.losing_interrupted(), self._publishing(), self._world.call():
            started = time.monotonic()
            source, number, checked = self._describe(weights, draft, version, metadata)
            return self._publish(started, source, number, checked)

    def _describe(
        self,
        weights: Weights,
        draft: Weights | None,
        version: int | None,
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Source, int, dict[str, Any]]:
        """Return the version's source (a list of all ranks' tensors), number and metadata.

        Collective. The number and metadata are valid on rank 0 only. If a rank's inventory has
        changed, this method assigns the parts of tensors to writing ranks again.
        """
        ranks, number, checked = self._world, 0, dict[str, Any]()
        with ranks.step("describe its weights") as step:
            require_version(version)
            source = self._describer.describe(weights, draft)
            if source.stream is not None:
                raise InvalidWeightsError(
                    "an iterator cannot be published by all ranks together: pass the module, or a "
                    "dictionary of tensors"
                )
            inventory = take_inventory(source, ranks.rank, self._group_rank)
            if ranks.rank == 0:
                number = self._writer.next_version(version)
                checked = checked_metadata(metadata)
            step.result = [version, self._inventory == inventory]
        versions, are_known = zip(*step.results, strict=True)
        if len(set(versions)) > 1:
            with ranks.step("compare the versions"):
                rank = next(rank for rank, other in enumerate(versions) if other != versions[0])
                raise InvalidWeightsError(
                    f"rank {rank} called send with version {versions[rank]}, but rank 0 with "
                    f"version {versions[0]}: pass the same version on all ranks"
                )
        if not all(are_known):
            # On a network mount each rank writes its own file, which holds only contiguous boxes.
            self._assignment = join(ranks, source, inventory, rows_only=not self._maps_files)
            # Note the inventory only after the checks in `join`: the next publish skips these
            # checks if its inventory is equal.
            self._inventory = inventory
            self._part = None
        return self._placed(source), number, checked

    def _placed(self, source: Source) -> Source:
        joined = self._assignment
        if source.specs == joined.specs:
            return replace(source, specs=joined.specs, aliases=joined.aliases)
        tensor_of = dict(zip((spec.name for spec in source.specs), source.tensors, strict=True))
        tensors = [tensor_of.get(spec.name, _ELSEWHERE) for spec in joined.specs]
        return replace(source, specs=joined.specs, tensors=tensors, aliases=joined.aliases)


def _step_timeout_s(rank_timeout_s: Any, options: SenderKeywords) -> float:
    """Return how long, in seconds, ranks wait for another rank in a collective step.

    If an option is not a valid time, return a default. The first collective step, which needs a
    timeout, then refuses the option on all ranks.
    """
    reader_timeout_s = options.get("reader_timeout_s", SenderOptions.reader_timeout_s)
    try:
        rank_s = checks.positive_seconds("rank_timeout_s", rank_timeout_s)
        # Add both times: while the other ranks wait for rank 0, it may wait for readers.
        return rank_s + checks.seconds("reader_timeout_s", reader_timeout_s)
    except OptionError:
        return DEFAULT_RANK_TIMEOUT_S


def _share_of_cores(ranks: Agreement) -> int:
    machine = Process.here().machine
    ranks_here = sum(peer.machine == machine for peer in ranks.peers)
    # If each rank is bound to its own cores, `num_cores` counts them. Otherwise share all cores.
    share = max(1, (os.cpu_count() or 1) // ranks_here)
    return min(MAX_DEFAULT_THREADS, num_cores(), share)


Ranks: TypeAlias = tuple[int, ...]
"""Ranks that hold parts of a tensor. Empty if each rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Names and shapes of all tensors that a rank knows of, and the parts of them that it holds."""

    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    groups: list[Ranks]
    group_of: list[int]
    """Which entry of `groups` has the ranks that hold parts of a tensor; one index per tensor."""
    boxes: Boxes = field(default_factory=dict)


def take_inventory(source: Source, rank: int, group_rank: Mapping[int, int]) -> Inventory:
    """Return this rank's inventory: its model's tensors, and the parts of them in its memory.

    ``group_rank`` maps ranks of the whole job to ranks of the sender's process group.
    """
    group_of = [0] * len(source.specs)
    if source.reader is not None:
        # All ranks iterate over a weight source together, and get each tensor whole. List tensors
        # without boxes (None): then one of the ranks that list a tensor writes all of it.
        boxes: Boxes = dict.fromkeys(source.reader.held_on(rank))
        return Inventory(source.specs, source.aliases, [()], group_of, boxes)
    boxes, parts = {}, HeldParts()
    groups: dict[Ranks, int] = {}
    group_by_way: dict[Any, tuple[int, bool]] = {}
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
        if way not in group_by_way:
            ranks, is_held = _part_ranks(sharded, group_rank, source.specs[index].name)
            group_by_way[way] = groups.setdefault(ranks, len(groups)), is_held
        group_of[index], is_held = group_by_way[way]
        if is_held:
            boxes[index] = parts.box(index, tensor)
    return Inventory(source.specs, source.aliases, list(groups), group_of, boxes)


def _part_ranks(sharded: Any, group_rank: Mapping[int, int], name: str) -> tuple[Ranks, bool]:
    """Return the ranks that hold parts of a tensor, and whether this rank is one of them."""
    if sharded is None:
        return (), True
    if hasattr(sharded, "ds_shape"):
        return tuple(group_rank.values()), True
    if isinstance(sharded, HeldRows):
        of_job, is_held = list(sharded.ranks), True
    else:
        mesh = sharded.device_mesh
        coordinate = mesh.get_coordinate()
        is_held = coordinate is not None
        # List only the ranks of this rank's replica. All replicas hold the same parts.
        pairs = zip(coordinate or [0] * mesh.ndim, sharded.placements, strict=True)
        index = tuple(at if placement.is_replicate() else slice(None) for at, placement in pairs)
        of_job = mesh.mesh[index].flatten().tolist()
    if outside := [rank for rank in of_job if rank not in group_rank]:
        raise InvalidWeightsError(
            f"ranks {listed(outside)} of the job hold parts of {name!r}, and are not in this "
            "sender's group: make the sender on all ranks that hold the weights"
        )
    is_whole = len(of_job) == 1
    return () if is_whole else tuple(group_rank[rank] for rank in of_job), is_held


def join(ranks: Agreement, source: Source, inventory: Inventory, *, rows_only: bool) -> Assignment:
    """Join the inventories of all ranks, and assign a writing rank to each part. Collective.

    Raises:
        InvalidWeightsError: a tensor differs between ranks, its parts overlap or leave a gap, or
            no rank holds it.
    """
    # Without boxes, the inventories of most ranks are equal.
    described = _share_distinct(ranks, "its tensors", to_builtins(replace(inventory, boxes={})))
    boxes = [box or [index] for index, box in inventory.boxes.items()]
    boxes_of = ranks.share("send its boxes", boxes)
    with ranks.step("join the tensors of all ranks"):
        assignment = _join(described, boxes_of, rows_only=rows_only)
    with ranks.step("sample the tensors that it holds whole"):
        sample = _sample_replicas(source, inventory)
    samples = _share_distinct(ranks, "its samples", sample)
    with ranks.step("compare the samples"):
        _require_alike(samples)
    return assignment


Shared: TypeAlias = list[tuple[list[int], Any]]
"""Distinct values that ranks have exchanged, each with the ranks that have the value."""


def _share_distinct(ranks: Agreement, what: str, value: Any) -> Shared:
    """Exchange a value of each rank. If all values are equal, send only their digests."""
    xxh3 = digest(json.dumps(value).encode())
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(ranks.share(f"compare {what}", xxh3)):
        holders[of_rank].append(rank)
    if len(holders) == 1:
        return [(holders[xxh3], value)]
    is_first = holders[xxh3][0] == ranks.rank
    sent = ranks.share(f"send {what}", value if is_first else None)
    return [(group, sent[group[0]]) for group in holders.values()]


def _join(described: Shared, encoded: Sequence[list[Any]], *, rows_only: bool) -> Assignment:
    specs: dict[str, TensorSpec] = {}
    indices: dict[str, int] = {}
    ranks_of: dict[str, dict[Ranks, list[int]]] = {}
    aliases: dict[str, str] = {}
    boxes: list[Boxes] = [{} for _ in encoded]
    for ranks, description in described:
        inventory, index_of = convert(description, Inventory), []
        for spec, number in zip(inventory.specs, inventory.group_of, strict=True):
            holding = inventory.groups[number]
            of_tensor = ranks_of.setdefault(spec.name, {})
            if spec != (known := specs.setdefault(spec.name, spec)):
                raise InvalidWeightsError(
                    f"rank {ranks[0]} lists {spec}, but rank {_first(of_tensor)} lists {known}: "
                    "give a tensor the same shape and dtype on all ranks that hold it"
                )
            of_tensor.setdefault(holding, []).extend(ranks)
            index_of.append(indices.setdefault(spec.name, len(indices)))
        for rank in ranks:
            for index, *place in encoded[rank]:
                joined = index_of[index]
                boxes[rank][joined] = Box(joined, *map(tuple, place)) if place else None
        for alias, name in inventory.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise InvalidWeightsError(
                    f"rank {ranks[0]} ties {alias!r} to {name!r}, and another rank to "
                    f"{aliases[alias]!r}: tie the same tensors on all ranks"
                )
    if not specs:
        raise InvalidWeightsError("no rank holds a tensor to publish")
    for alias in aliases.keys() & specs.keys():
        raise InvalidWeightsError(
            f"{alias!r} is tied to {aliases[alias]!r} on one rank, and a tensor of its own on "
            f"rank {_first(ranks_of[alias])}: publish only one of the two names, on all ranks"
        )
    on_some_rank = set().union(*boxes)
    for name, spec in specs.items():
        _check_parts(spec, ranks_of[name])
        if indices[name] not in on_some_rank:
            raise InvalidWeightsError(f"no rank holds {spec}")
    return assign_writes(tuple(specs.values()), aliases, boxes, rows_only=rows_only)


def _check_parts(spec: TensorSpec, describing: dict[Ranks, list[int]]) -> None:
    """Raise if the parts of a tensor overlap or leave a gap.

    Each key of ``describing`` is a group of ranks that hold parts of the tensor. Its value lists
    the ranks that name this group in their inventories. With the key (), each of the listed ranks
    holds the whole tensor.
    """
    unsharded = describing.get((), [])
    for holding, ranks in describing.items():
        if holding and unsharded:
            raise InvalidWeightsError(
                f"{_named(unsharded)} the whole of {spec}, and {_named(ranks)} parts: give it "
                "whole on all ranks that hold it, or sharded on all of them"
            )
        if missing := sorted(set(holding).difference(ranks)):
            raise InvalidWeightsError(
                f"{spec} has a gap: on rank {ranks[0]}, {_named(missing)} parts of it, but no "
                "tensor of this name was passed there: pass each tensor, under one name, on all "
                "ranks that hold parts of it"
            )


def _first(describing: dict[Ranks, list[int]]) -> int:
    return next(iter(describing.values()))[0]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {listed(ranks)} hold"


def _sample_replicas(source: Source, inventory: Inventory) -> dict[str, str]:
    """Return a digest of sampled elements of each large tensor that this rank holds whole.

    The digests show if two ranks give one name to different tensors: for instance, if two pipeline
    stages both call their first layer "0".
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for index in inventory.boxes if source.reader is None else ():
        tensor = source.tensors[index]
        # Skip small tensors: one rank writes all of them, so they may differ between ranks, for
        # instance as batch statistics. Several ranks may write parts of a large tensor.
        is_large = source.specs[index].num_bytes >= SPREAD_FROM_BYTES
        is_whole = not inventory.groups[inventory.group_of[index]]
        if is_whole and is_large and isinstance(tensor, torch.Tensor):
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
            sample = flat[::step].resolve_conj().resolve_neg().contiguous()
            on_device = by_device.setdefault(sample.device, {})
            on_device[source.specs[index].name] = sample.view(torch.uint8)
    digests: dict[str, str] = {}
    for samples in by_device.values():
        # Copy all samples of a device to main memory at once.
        sizes = list(map(len, samples.values()))
        parts = torch.split(torch.cat(list(samples.values())).cpu(), sizes)
        digests.update(zip(samples, map(digest, map(as_bytes, parts)), strict=True))
    return digests


def _require_alike(samples: Shared) -> None:
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for (rank, *_), sample in samples:
        for name, xxh3 in sample.items():
            holder, expected = first.setdefault(name, (rank, xxh3))
            if xxh3 != expected:
                differing.setdefault(name, (holder, rank))
    if differing:
        holder, rank = next(iter(differing.values()))
        raise InvalidWeightsError(
            f"rank {holder} and rank {rank} hold different tensors of one name, and one of the two "
            f"would be lost: {listed(sorted(differing))}; give layers and experts the names that "
            "they have in the whole model (rename), or pass parts of one tensor as a DTensor; if "
            "replicas may differ, pass only one of them"
        )
