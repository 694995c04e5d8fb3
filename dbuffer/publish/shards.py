"""Boxes of tensors that the ranks of a sharded trainer hold, and who writes which of them.

Each rank takes an inventory: the tensors that it describes, and which box of each it holds, a first
index and an extent in every dimension. The inventories of all ranks are joined: ranks of different
pipeline stages or experts describe different tensors. Where the boxes of all ranks cover a tensor,
each box is written by one of those that hold it. Where they do not, the tensor is gathered by the
ranks that hold parts of it, written by one of them, and dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import ITEM_BYTES, Layout, Piece, TensorSpec, align, digest
from dbuffer.io.tensors import as_bytes
from dbuffer.runtime.messages import listed
from dbuffer.weights.checkpoint import HeldRows, LazyTensor, View
from dbuffer.weights.sources import Source, fetch

if TYPE_CHECKING:  # its import takes half as long as torch's
    from torch.distributed.tensor import DTensor

SPREAD_FROM_BYTES = 1 << 20
"""Size from which a box that several ranks hold is written by the least busy of them; below it, the
first writes it. What a trainer lets drift apart between ranks is small (the statistics of a batch
norm), and must not be put together from several."""


class Box(NamedTuple):
    """A region of a tensor."""

    tensor: int
    """Index of the tensor in the layout."""
    start: tuple[int, ...]
    """First index in each dimension."""
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, (start, extent) in enumerate(zip(self.start, self.shape, strict=True)):
            tensor = tensor.narrow(dimension, start, extent)
        return tensor


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """Assignment of all tensors to the ranks that write them, the same on all ranks."""

    boxes: tuple[tuple[Box, ...], ...]
    """Boxes that each rank holds and writes, by rank."""
    gathered: tuple[tuple[int, int], ...]
    """Tensors that are gathered, in this order, each with the rank that writes it."""


Boxes: TypeAlias = dict[int, Box | None]
"""Boxes that a rank holds, by the tensor's index; None: no box, or one that must be added up."""

_SAMPLED_ELEMENTS = 512
"""Number of elements of a tensor that are compared with other ranks' tensors of its name."""

Ranks: TypeAlias = tuple[int, ...]
"""Ranks that hold parts of a tensor; none where it is whole."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Tensors that a rank describes, as all ranks that hold the same describe them."""

    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    """Other names of tied tensors."""
    ranks: list[Ranks]
    """Ranks that hold parts of each tensor."""

    def encode(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        groups = list(dict.fromkeys(self.ranks))
        number = {group: index for index, group in enumerate(groups)}
        numbers = [number[ranks] for ranks in self.ranks]
        return {"specs": self.specs, "aliases": self.aliases, "groups": groups, "ranks": numbers}

    @classmethod
    def decode(cls, encoded: dict[str, Any]) -> Self:
        groups = [tuple(group) for group in encoded["groups"]]
        return cls(
            tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in encoded["specs"]),
            encoded["aliases"],
            [groups[number] for number in encoded["ranks"]],
        )

    @property
    def xxh3(self) -> str:
        return digest(json.dumps(self.encode()).encode())


def take_inventory(
    source: Source, rank: int, group_rank: Mapping[int, int]
) -> tuple[Inventory, Boxes]:
    """Return what a rank describes, and its boxes.

    ``group_rank``: ranks of the sender's group by those of the job.

    Raises:
        InvalidWeightsError: ranks outside of the group hold parts of a tensor.
    """
    if source.reader is not None:
        # Its tensors come one by one, whole, in a pass that all ranks make.
        held = source.reader.held_on(rank)
        nowhere: list[Ranks] = [()] * len(source.specs)
        return Inventory(source.specs, source.aliases, nowhere), dict.fromkeys(held)
    parts = HeldParts()
    known: dict[Any, tuple[Ranks, bool]] = {}
    ranks: list[Ranks] = []
    boxes: Boxes = {}
    for index, tensor in enumerate(source.tensors):
        sharded = _sharded_in(tensor)
        if sharded is None:
            way: Any = None
        elif hasattr(sharded, "ds_shape"):  # ZeRO-3: all of them hold parts
            way = "zero"
        elif isinstance(sharded, HeldRows):
            way = sharded.ranks
        else:
            way = sharded.device_mesh, sharded.placements
        if way not in known:
            known[way] = _part_ranks(sharded, group_rank, source.specs[index].name)
        holding, is_held = known[way]
        ranks.append(holding)
        if is_held:
            boxes[index] = parts.box(index, tensor)
    return Inventory(source.specs, source.aliases, ranks), boxes


def sample_replicas(source: Source, inventory: Inventory, boxes: Boxes) -> dict[str, str]:
    """Return a digest of some elements of each tensor that this rank holds whole.

    Two ranks that call different tensors by one name, as two stages' first layers, show by them.
    """
    names, samples = [], []
    for index in boxes if source.reader is None else ():
        tensor = source.tensors[index]
        # Ranks may let small ones drift apart, as statistics of their own batches: those are all of
        # one rank. Parts of large ones would be of several.
        is_large = source.specs[index].num_bytes >= SPREAD_FROM_BYTES
        if inventory.ranks[index] == () and is_large and isinstance(tensor, torch.Tensor):
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
            sample = flat[::step].resolve_conj().resolve_neg().contiguous()
            samples.append(sample.view(torch.uint8))
            names.append(source.specs[index].name)
    if not samples:
        return {}
    # One copy out of a device, and not one for each tensor.
    memory, digests, start = torch.cat(samples).cpu(), {}, 0
    for name, sample in zip(names, samples, strict=True):
        digests[name] = digest(as_bytes(memory[start : start + sample.numel()]))
        start += sample.numel()
    return digests


def require_alike(samples: Sequence[Mapping[str, str]]) -> None:
    """Refuse tensors of one name that are no replicas of each other.

    Raises:
        InvalidWeightsError: two ranks hold different ones whole.
    """
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, sample in enumerate(samples):
        for name, seen in sample.items():
            holder, expected = first.setdefault(name, (rank, seen))
            if seen != expected:
                differing.setdefault(name, (holder, rank))
    if differing:
        one, other = next(iter(differing.values()))
        raise InvalidWeightsError(
            f"rank {one} and rank {other} hold different tensors of one name, of which one would "
            f"be lost: {listed(sorted(differing))}; give layers and experts the names that they "
            "have in the whole model (rename), or parts of one tensor as a DTensor; of replicas "
            "that are to differ, give one alone"
        )


def _part_ranks(sharded: Any, group_rank: Mapping[int, int], name: str) -> tuple[Ranks, bool]:
    """Return the ranks that hold parts of a tensor, and whether this rank holds any of it.

    ``sharded``: the tensor as this rank has it; None: it is no sharded one.
    """
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
    """Return the ranks of the job that hold a tensor, and whether this rank is one of them."""
    if isinstance(sharded, HeldRows):
        return list(sharded.ranks), True
    mesh = sharded.device_mesh
    here = mesh.get_coordinate()
    # Of replicas, only the one that this rank is in: the others hold the same.
    pairs = zip(here or [0] * mesh.ndim, sharded.placements, strict=True)
    index = tuple(one if placement.is_replicate() else slice(None) for one, placement in pairs)
    return mesh.mesh[index].flatten().tolist(), here is not None


def encode_boxes(boxes: Boxes) -> list[Any]:
    """Return boxes as JSON has them."""
    return [[index, *(box or ())[1:]] for index, box in boxes.items()]


def decode_boxes(encoded: list[Any]) -> Boxes:
    """Return the boxes that a rank has encoded."""
    return {
        index: Box(index, tuple(place[0]), tuple(place[1])) if place else None
        for index, *place in encoded
    }


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of all ranks."""

    specs: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    index_of: dict[str, int]
    """Index of each tensor by its name."""
    held: list[Boxes]
    """Boxes that each rank holds."""

    @classmethod
    def of(cls, inventories: Sequence[Inventory], boxes: Sequence[Boxes]) -> Self:
        """Join the inventories and boxes of all ranks; equal inventories are one object.

        Raises:
            InvalidWeightsError: they do not fit together: a tensor differs between ranks, overlaps,
                has a gap, or is on no rank.
        """
        describing: dict[int, list[int]] = defaultdict(list)
        for rank, inventory in enumerate(inventories):
            describing[id(inventory)].append(rank)
        tensors: dict[str, _JoinedTensor] = {}
        aliases: dict[str, str] = {}
        held: list[Boxes] = [{} for _ in boxes]
        for ranks in describing.values():
            inventory = inventories[ranks[0]]
            index_of = []
            for spec, holding in zip(inventory.specs, inventory.ranks, strict=True):
                joined = tensors.setdefault(spec.name, _JoinedTensor(len(tensors), spec, ranks[0]))
                joined.add(ranks, spec, holding)
                index_of.append(joined.index)
            for rank in ranks:
                held[rank] = _moved(boxes[rank], index_of)
            for alias, name in inventory.aliases.items():
                if aliases.setdefault(alias, name) != name:
                    raise InvalidWeightsError(
                        f"rank {ranks[0]} ties {alias!r} to {name!r}, and another rank to "
                        f"{aliases[alias]!r}"
                    )
        if not tensors:
            raise InvalidWeightsError("no rank holds a tensor to publish")
        for alias in aliases.keys() & tensors.keys():
            raise InvalidWeightsError(
                f"{alias!r} is tied to {aliases[alias]!r} on one rank, and a tensor of its own on "
                f"rank {tensors[alias].rank}: give one of the two names on all ranks"
            )
        everywhere = set().union(*held)
        for joined in tensors.values():
            joined.check()
            if joined.index not in everywhere:
                raise InvalidWeightsError(f"no rank holds {joined.spec}")
        specs = tuple(joined.spec for joined in tensors.values())
        return cls(specs, aliases, {name: joined.index for name, joined in tensors.items()}, held)


def _moved(boxes: Boxes, index_of: list[int]) -> Boxes:
    """Return boxes with other indices of their tensors."""
    if index_of == list(range(len(index_of))):
        return boxes
    return {
        index_of[index]: box and box._replace(tensor=index_of[index])
        for index, box in boxes.items()
    }


@dataclass(slots=True)
class _JoinedTensor:
    """One tensor, as all ranks describe it."""

    index: int
    spec: TensorSpec
    rank: int
    """First rank that describes it."""
    described: dict[Ranks, list[int]] = field(default_factory=dict)
    """Ranks that describe it, by the ranks that hold parts of it."""

    def add(self, ranks: Sequence[int], spec: TensorSpec, holding: Ranks) -> None:
        if spec != self.spec:
            raise InvalidWeightsError(
                f"rank {ranks[0]} is to publish {spec}, and rank {self.rank} {self.spec}: give a "
                "tensor of one name the same shape and dtype on all ranks that hold it"
            )
        self.described.setdefault(holding, []).extend(ranks)

    def check(self) -> None:
        """Refuse an overlap, and a gap."""
        whole = self.described.get((), [])
        for holding, describing in self.described.items():
            if holding and whole:
                raise InvalidWeightsError(
                    f"{_named(whole)} the whole of {self.spec}, and {_named(describing)} parts: "
                    "give it whole or sharded, alike on all ranks that hold it"
                )
            if missing := sorted(set(holding).difference(describing)):
                raise InvalidWeightsError(
                    f"{self.spec} has a gap: {_named(missing)} parts of it, as rank "
                    f"{describing[0]} says, but not under this name: give every tensor on all "
                    "ranks that hold parts of it, under one name"
                )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {listed(ranks)} hold"


class HeldParts:
    """Parts of tensors that this rank holds; a sharded one is looked up once for all its views."""

    def __init__(self) -> None:
        self._boxes: dict[int, tuple[Box | None, bool]] = {}
        """Box of each sharded tensor, by its id, and whether its shares are strided."""
        self._local: dict[int, torch.Tensor] = {}

    def box(self, index: int, tensor: torch.Tensor | LazyTensor) -> Box | None:
        """Return the box of a tensor, or of a view of a sharded one; ``index``: in the layout."""
        if not isinstance(tensor, LazyTensor) or tensor.sharded is None:
            return whole_box(index, tensor.shape)
        box, is_strided = self._box_of(tensor.sharded)
        # Boxes of strided shares overlap, which shows in the whole tensor, and not in a part of it.
        if box is None or (tensor.view is not None and is_strided):
            return None
        box = box._replace(tensor=index)
        return box if tensor.view is None else _overlap(box, tensor.view)[0]

    def elements(self, tensor: torch.Tensor | LazyTensor, name: str) -> torch.Tensor:
        """Return the elements in a tensor's box."""
        if not isinstance(tensor, LazyTensor):
            return tensor
        if tensor.sharded is None:
            return fetch(tensor)
        box, _ = self._box_of(tensor.sharded)
        assert box is not None  # noqa: S101 - else it is gathered
        if (local := self._local.get(id(tensor.sharded))) is None:
            with torch.no_grad():
                local = self._local[id(tensor.sharded)] = tensor.sharded.to_local()
        if tuple(local.shape) != box.shape:
            raise InvalidWeightsError(
                f"of {name!r} this rank holds {list(local.shape)}, and its placements "
                f"{tensor.sharded.placements} give it {list(box.shape)}"
            )
        return local if tensor.view is None else _overlap(box, tensor.view)[1].of(local)

    def _box_of(self, sharded: Any) -> tuple[Box | None, bool]:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import _StridedShard

        if (known := self._boxes.get(id(sharded))) is None:
            known = None, False
            if isinstance(sharded, HeldRows):
                known = _box_of_rows(sharded), False
            if isinstance(sharded, DTensor):
                is_strided = any(isinstance(way, _StridedShard) for way in sharded.placements)
                known = _box_of_dtensor(0, sharded), is_strided
            self._boxes[id(sharded)] = known
        return known


def _overlap(box: Box, view: View) -> tuple[Box, View]:
    """Return the part of a view that a box of the same tensor has, and its place in the box."""
    index: list[int | slice] = []
    starts, shape = [], []
    for start, extent, place in zip(box.start, box.shape, view.index, strict=True):
        first, end = (place.start, place.stop) if isinstance(place, slice) else (place, place + 1)
        begin, stop = max(start, first), min(start + extent, end)
        if begin >= stop:
            none = (0,) * len(view.shape)
            return Box(box.tensor, none, none), view
        if isinstance(place, slice):
            index.append(slice(begin - start, stop - start))
            starts.append(begin - first)
            shape.append(stop - begin)
        else:
            index.append(begin - start)
    long = iter(view.order)
    dimensions = [None if size == 1 else next(long) for size in view.shape]
    part = Box(
        box.tensor,
        tuple(0 if dimension is None else starts[dimension] for dimension in dimensions),
        tuple(1 if dimension is None else shape[dimension] for dimension in dimensions),
    )
    return part, View(tuple(index), view.order, part.shape)


def _box_of_rows(rows: HeldRows) -> Box:
    start = (rows.first, *[0] * (rows.local.ndim - 1))
    return Box(0, start, tuple(rows.local.shape))


def _box_of_dtensor(index: int, tensor: DTensor) -> Box | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        return None
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(index, tuple(start), tuple(shape))


@contextlib.contextmanager
def gathered(tensor: torch.Tensor | LazyTensor) -> Iterator[torch.Tensor]:
    """The whole of a sharded tensor, for the length of a block that all ranks enter together."""
    if isinstance(tensor, LazyTensor) and hasattr(tensor.sharded, "ds_shape"):
        import deepspeed  # whose parameter this is, so that it is there

        with deepspeed.zero.GatheredParameters([tensor.sharded]):
            yield tensor.sharded.data
        return
    if isinstance(tensor, LazyTensor) and not isinstance(tensor.sharded, HeldRows | None):
        yield tensor.sharded.detach().full_tensor()
        return
    yield fetch(tensor)


def each_gathered(
    source: Source,
    assignment: WriteAssignment,
    rank: int,
    action: Callable[[int, torch.Tensor], int],
) -> int:
    """Gather the assigned tensors one after another; do ``action`` with those this rank writes.

    ``action`` gets the tensor's index and the whole of it. All ranks go through all tensors even if
    it fails: the others wait in the next gather.

    Returns:
        The sum of its results.
    """
    tensors = source.tensors
    total = 0
    problem: Exception | None = None

    def whole_of(pair: tuple[int, int]) -> int:
        tensor = tensors[pair[0]]
        sharded = _sharded_in(tensor)
        return id(tensor if sharded is None else sharded)

    try:
        # A tensor of which several views are published is gathered once.
        for _, pairs in itertools.groupby(assignment.gathered, whole_of):
            views = list(pairs)
            tensor = tensors[views[0][0]]
            if _sharded_in(tensor) is None and rank not in {writer for _, writer in views}:
                continue  # held by other ranks, or whole without them
            with gathered(tensor) as whole:
                for index, writer in views:
                    if writer != rank or problem is not None:
                        continue
                    try:
                        total += action(index, _viewed(tensors[index], whole))
                    except Exception as error:  # noqa: BLE001 - raised when all are through
                        problem = error
            del whole  # before the next is gathered
    except Exception as error:  # noqa: BLE001 - likewise
        problem = error
    source.finish()
    if problem is not None:
        raise problem
    return total


def _sharded_in(tensor: torch.Tensor | LazyTensor) -> Any:
    return tensor.sharded if isinstance(tensor, LazyTensor) else None


def _viewed(tensor: torch.Tensor | LazyTensor, whole: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor) and tensor.view is not None:
        return tensor.view.of(whole)
    return whole


def assign_writes(
    specs: Sequence[TensorSpec], held: Sequence[Boxes], *, rows_only: bool
) -> WriteAssignment:
    """Spread the writing of what each rank has ``held`` over the ranks.

    ``rows_only``: gather what does not lie in one row of bytes in the whole tensor.
    """
    written: list[list[Box]] = [[] for _ in held]
    gathered: list[int] = []
    busy_bytes = [0] * len(held)
    shared: list[tuple[int, Box, list[int]]] = []
    for index, spec in enumerate(specs):
        if not spec.num_bytes:  # also of what would be gathered: a piece of a part has bytes
            continue
        owners = _owners(index, held)
        if (
            owners is None
            or not _covers(list(owners), spec.shape)
            or (rows_only and not all(_is_contiguous(box, spec.shape) for box in owners))
        ):
            gathered.append(index)
            continue
        for box, ranks in owners.items():
            num_bytes = _num_bytes(box, spec)
            if len(ranks) > 1 and num_bytes >= SPREAD_FROM_BYTES:
                shared.append((num_bytes, box, ranks))
                continue
            written[ranks[0]].append(box)
            busy_bytes[ranks[0]] += num_bytes
    # Large ones first: the small ones even out what those leave.
    for num_bytes, box, ranks in sorted(shared, key=lambda row: -row[0]):
        writer = min(ranks, key=busy_bytes.__getitem__)
        written[writer].append(box)
        busy_bytes[writer] += num_bytes
    spread = []
    for index in gathered:
        holders = [rank for rank, boxes in enumerate(held) if index in boxes]
        writer = min(holders, key=busy_bytes.__getitem__)
        busy_bytes[writer] += specs[index].num_bytes
        spread.append((index, writer))
    return WriteAssignment(
        boxes=tuple(tuple(sorted(of_rank)) for of_rank in written),
        gathered=tuple(spread),
    )


def _num_bytes(box: Box, spec: TensorSpec) -> int:
    return math.prod(box.shape) * ITEM_BYTES[spec.dtype]


def _is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the elements of a box lie one behind the other in the whole: as rows do."""
    pairs = itertools.dropwhile(lambda pair: pair[0] == 1, zip(box.shape, shape, strict=True))
    return all(extent == full for extent, full in itertools.islice(pairs, 1, None))


def layout_in_parts(layout: Layout, assignment: WriteAssignment) -> Layout:
    """Return a layout of the same tensors in which each rank writes into a part of its own."""
    part_bytes = [0] * len(assignment.boxes)
    pieces = []
    whole: list[list[Box]] = [[] for _ in assignment.boxes]
    for index, writer in assignment.gathered:
        whole[writer].append(whole_box(index, layout.specs[index].shape))
    for rank, boxes in enumerate(assignment.boxes):
        for box in sorted((*boxes, *whole[rank])):
            spec = layout.specs[box.tensor]
            offset = _flat_index(box.start, spec.shape) * ITEM_BYTES[spec.dtype]
            num_bytes, place = _num_bytes(box, spec), align(part_bytes[rank])
            pieces.append(Piece(box.tensor, offset, num_bytes, rank, place))
            part_bytes[rank] = place + num_bytes
    return replace(layout, part_bytes=tuple(part_bytes), pieces=tuple(sorted(pieces)))


def whole_box(index: int, shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box(index, (0,) * len(shape), tuple(shape))


def _flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    flat = 0
    for position, extent in zip(index, shape, strict=True):
        flat = flat * extent + position
    return flat


def _owners(index: int, held: Sequence[Boxes]) -> dict[Box, list[int]] | None:
    """The ranks that hold each box of a tensor; None if one of them holds no box."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        if index not in boxes:
            continue
        if (box := boxes[index]) is None:
            return None
        if math.prod(box.shape):
            owners[box].append(rank)
    return owners


def _covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes cover a tensor, and none lies on another.

    A DTensor cuts each dimension by itself. A rank's share of one is said by its first index and
    its length alone, as torch computes them; a strided share is no run of indices. But shares
    that divide a dimension, and whose runs so described do too, are those runs: from the front,
    whatever lies before the next share's first index can belong to this share only.
    """
    num_boxes = 1
    for dimension, extent in enumerate(shape):
        runs = sorted({(box.start[dimension], box.shape[dimension]) for box in boxes})
        end = 0
        for start, length in runs:
            if start != end:
                return False
            end += length
        if end != extent:
            return False
        num_boxes *= len(runs)
    return len(boxes) == num_boxes
