"""Sources of weights: a `Describer` turns weights of any kind into a `Source`.

All weights are checked before a byte is written, except for tensors that an iterator or a lazy
tensor makes during the publish.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy as has_no_shape

from dbuffer.errors import InvalidWeightsError, UnsupportedError
from dbuffer.format.layout import DRAFT_PREFIX, TensorSpec
from dbuffer.runtime import options
from dbuffer.weights.lazy_tensor import LazyTensor, Tensors
from dbuffer.weights.named_tensors import (
    WeightsSpec,
    by_name,
    check_names,
    clean_names,
    is_same_memory,
    is_tensordict,
    may_have_model,
    module_tensors,
    problem_of_memory,
    spec_of,
    tensordict_tensors,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase  # its import takes as long as torch's

    from dbuffer.io.changes import Patch
    from dbuffer.weights.conversion import Conversion
    from dbuffer.weights.weight_source import SourceReader, WeightSource

Weights: TypeAlias = (
    "nn.Module"
    " | TensorDictBase"
    " | Mapping[str, torch.Tensor | LazyTensor]"
    " | Iterable[tuple[str, torch.Tensor | LazyTensor]]"
    " | WeightSource"
    " | str"
    " | os.PathLike[str]"
)

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

Progress: TypeAlias = Callable[[int, int], None]
"""Function that is called with the number of bytes copied so far, and the total number (0 if
unknown)."""


def _check_nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Weights to publish: tensors, their specs, and how to read the tensors."""

    specs: tuple[TensorSpec, ...]
    tensors: list[torch.Tensor] | list[torch.Tensor | LazyTensor]
    aliases: dict[str, str]
    """First name of a tied tensor, keyed by each of the tensor's further names."""
    is_lazy: bool = False
    """Whether `tensors` contains lazy tensors."""
    stream: Iterator[tuple[TensorSpec, torch.Tensor]] | None = None
    """Iterator over the tensors, under the trainer's names, in place of `tensors`, or None."""
    new_names: Callable[[list[str]], list[str]] = list
    """Function from the trainer's names of all tensors in `stream` to the names to publish."""
    reader: SourceReader | None = None
    """Reader that lazy tensors read from if a vLLM weight source was given, or None."""
    check: Callable[[], None] = _check_nothing
    """Function that is called before the version is committed. If it raises, nothing is
    published."""
    is_cast: bool = False
    """Whether tensors are cast to their specs' dtypes when they are published."""
    must_be_finite: bool = False
    """Whether to refuse tensors with a NaN or an infinity."""
    patch: Patch | None = None
    """Changes to the version that the sender published last, or None. They replace `tensors`."""
    progress: Progress | None = None
    """Function that is called after each copy of lazy tensors, or of a tensor in `stream`."""

    def refuse_values(self, specs: Iterable[TensorSpec], tensors: Collection[torch.Tensor]) -> None:
        """Refuse tensors that overflow in their cast or, if `must_be_finite`, are not finite."""
        if self.is_cast or self.must_be_finite:
            from dbuffer.weights.values import refuse_not_finite, refuse_overflow

            refuse_overflow(specs, tensors)
            if self.must_be_finite:
                refuse_not_finite(specs, tensors)

    def finish(self) -> None:
        """Read a weight source to its end, as all ranks must do together; then call `check`."""
        if self.reader is not None:
            self.reader.finish()
        self.check()

    @property
    def eager(self) -> list[torch.Tensor]:
        """All tensors, or [] if any of them is lazy or comes from a stream."""
        return [] if self.is_lazy else cast("list[torch.Tensor]", self.tensors)


@dataclass(kw_only=True)
class Describer:
    """Describes weights of any kind, with a sender's options, as a `Source`."""

    dtype: torch.dtype | None = None
    """Dtype to publish floating-point tensors with, or None to keep each tensor's dtype."""
    rename: Rename | None = None
    """Mapping or function from names, without the parts that wrappers add, to published names."""
    sharded: bool = False
    """Whether to accept sharded tensors. False for a sender on a single rank: its gather would wait
    forever for the other ranks."""
    as_checkpoint: bool = True
    """Whether to publish a transformers module's tensors under the names in its checkpoint."""
    require_finite: bool = False
    """Whether to refuse weights with a NaN or an infinity."""
    _of_draft: Describer | None = field(default=None, init=False)
    _conversion: Conversion | None = field(default=None, init=False)
    """Traced conversion of the weights described last, if ``rename`` changes tensors."""
    _last: tuple[WeightsSpec, tuple[TensorSpec, ...]] | None = field(default=None, init=False)
    """Specs of the weights that were described last: with the trainer's names, and as published."""

    @property
    def _changes_tensors(self) -> bool:
        """Whether ``rename`` cuts, joins or transposes tensors."""
        return getattr(self.rename, "changes_tensors", False)

    def describe(self, weights: Weights, draft: Weights | None = None) -> Source:
        """Return the `Source` for weights of any kind, without starting an iterator.

        ``draft`` has the weights of a draft model, to publish together with the weights of its
        target model.
        """
        source = self._describe(weights)
        if draft is not None:
            self._of_draft = self._of_draft or replace(self, rename=None)
            source = _with_draft(source, self._of_draft.describe(draft))
        is_cast = self.dtype is not None
        return replace(source, is_cast=is_cast, must_be_finite=self.require_finite)

    def _describe(self, weights: Weights) -> Source:
        if isinstance(weights, Iterator):
            self._require_whole_tensors("an iterator")
            return Source((), [], {}, stream=self._stream(weights), new_names=self._new_names)
        named = self._named_in(weights)
        if named is None:
            return self._describe_other(weights)
        if (source := self._like_before(named)) is not None:
            return source
        source = self._describe_tensors(self._checked(named.items()))
        is_plain = not (source.aliases or source.is_lazy or self._changes_tensors)
        self._last = (WeightsSpec.of(named), source.specs) if is_plain else None
        return source

    def _describe_tensors(
        self,
        checked: Tensors,
        reader: SourceReader | None = None,
        check: Callable[[], None] = _check_nothing,
    ) -> Source:
        tensors, aliases = _without_ties(self._published(checked))
        if not tensors and not self.sharded:  # if sharded, other ranks may have tensors
            raise InvalidWeightsError("the weights hold no tensor to publish")
        specs = tuple(spec_of(name, tensor, self.dtype) for name, tensor in tensors.items())
        is_lazy = any(isinstance(tensor, LazyTensor) for tensor in tensors.values())
        return Source(specs, list(tensors.values()), aliases, is_lazy, reader=reader, check=check)

    def _named_in(self, weights: Any) -> Mapping[str, Any] | None:
        """Return the tensors of a module, TensorDict or mapping, or None for other weights."""
        if is_tensordict(weights):
            return tensordict_tensors(weights)
        if not isinstance(weights, nn.Module):
            return weights if isinstance(weights, Mapping) else None
        named = module_tensors(weights)
        if self.as_checkpoint and may_have_model(weights):
            from dbuffer.weights.conversion import as_checkpoint, has_model

            if has_model(weights):
                return as_checkpoint(weights, self._checked(named.items()))
        return named

    def _describe_other(self, weights: Any) -> Source:
        if isinstance(weights, str | os.PathLike):
            from dbuffer.weights.checkpoint import read_checkpoint
            from dbuffer.weights.checkpoint_directory import Checkpoint

            saved = weights.files if isinstance(weights, Checkpoint) else None
            tensors, check = read_checkpoint(options.path("weights", weights), saved)
            return self._describe_tensors(tensors, check=check)
        from dbuffer.weights.weight_source import SourceReader, is_weight_source, parameters_of

        if (parameters := parameters_of(weights, may_be_sharded=self.sharded)) is not None:
            return self._describe_tensors(self._checked(parameters.items()))
        if is_weight_source(weights):
            self._require_whole_tensors("a weight source")
            reader = SourceReader(weights)
            if not self.sharded:
                reader.require_all()
            return self._describe_tensors(reader.tensors, reader)
        if isinstance(weights, Iterable) and not isinstance(weights, torch.Tensor | bytes):
            return self._describe_tensors(self._checked(weights))
        raise InvalidWeightsError(
            f"cannot publish a {type(weights).__name__}: pass a module, a state dict, a "
            "TensorDict, (name, tensor) pairs, the path of a checkpoint directory or one of "
            "vLLM's weight sources"
        )

    def _like_before(self, named: Mapping[str, Any]) -> Source | None:
        if self._last is None or not (addresses := self._last[0].addresses_of(named)):
            return None
        if 0 in addresses or len(set(addresses)) < len(named):  # some tensors are empty or tied
            return None
        return Source(self._last[1], list(named.values()), {})

    def _stream(
        self, weights: Iterator[tuple[str, torch.Tensor | LazyTensor]]
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        names = set()
        for position, pair in enumerate(weights):
            name, tensor = _checked_pair(pair, position)
            if name in names:
                raise InvalidWeightsError(f"the name {name!r} occurs twice")
            names.add(name)
            checked = _gatherable(name, tensor, sharded=self.sharded)
            spec, fetched = spec_of(name, checked, self.dtype), fetch(checked)
            yield spec, fetched

    def _checked(self, pairs: Iterable[Any]) -> Tensors:
        names: list[str] = []
        tensors: list[torch.Tensor | LazyTensor] = []
        for position, pair in enumerate(pairs):
            name, tensor = _checked_pair(pair, position)
            names.append(name)
            tensors.append(_gatherable(name, tensor, sharded=self.sharded))
        return by_name(names, tensors)

    def _published(self, tensors: Tensors) -> Tensors:
        if not self._changes_tensors:
            return dict(zip(self._new_names(list(tensors)), tensors.values(), strict=True))
        from dbuffer.weights.conversion import Conversion, shapes_of  # rarely needed

        names: Any = self.rename
        named = by_name(clean_names(tensors), tensors.values())
        shapes = shapes_of(named)
        if self._conversion is None or self._conversion.shapes != shapes:
            self._conversion = Conversion.trace(names.convert, shapes)
        converted = self._conversion.apply(names.convert, named)
        return by_name(converted, converted.values())

    def _new_names(self, names: list[str]) -> list[str]:
        """Return names to publish: without the parts that wrappers add, changed by ``rename``."""
        names = clean_names(names)
        if self.rename is not None:
            names = [_renamed(name, self.rename) for name in names]
        check_names(names)
        return names

    def _require_whole_tensors(self, weights: str) -> None:
        if self._changes_tensors:
            raise UnsupportedError(
                f"the tensors of {weights} come one by one, but this rename cuts, joins or "
                "transposes tensors: change the tensors yourself, and use a rename that only "
                "changes names"
            )


def _with_draft(target: Source, draft: Source) -> Source:
    """Return one source for a target model and its draft. Shared tensors are published once."""
    if target.stream is not None or draft.stream is not None or draft.reader is not None:
        raise InvalidWeightsError(
            "a draft must be a module, a dictionary, a list or a checkpoint, and its target one of "
            "these or a weight source: neither can be an iterator"
        )
    in_draft = [spec._replace(name=DRAFT_PREFIX + spec.name) for spec in draft.specs]
    specs = [*target.specs, *in_draft]
    names = [spec.name for spec in specs]
    named: Tensors = dict(zip(names, [*target.tensors, *draft.tensors], strict=True))
    tensors, ties = _without_ties(named)
    of_draft = {DRAFT_PREFIX + a: DRAFT_PREFIX + name for a, name in draft.aliases.items()}
    aliases = target.aliases | of_draft

    def check() -> None:
        target.check()
        draft.check()

    return replace(
        target,
        specs=tuple(spec for spec in specs if spec.name in tensors),
        tensors=list(tensors.values()),
        aliases={alias: ties.get(name, name) for alias, name in aliases.items()} | ties,
        is_lazy=target.is_lazy or draft.is_lazy,
        check=check,
    )


def fetch(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Return a tensor. If it is lazy, gather it, read it from its file, or compute it."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    fetched = tensor.fetch()
    made, declared = (fetched.dtype, tuple(fetched.shape)), (tensor.dtype, tuple(tensor.shape))
    if made != declared:
        raise InvalidWeightsError(f"a lazy tensor was declared as {declared}, but is {made}")
    return fetched


def _renamed(name: str, rename: Rename) -> str:
    new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if not isinstance(new, str):
        raise InvalidWeightsError(
            f"rename returned {new!r:.80} for {name!r}, which is not a string"
        )
    return new


def _checked_pair(pair: Any, position: int) -> tuple[str, torch.Tensor | LazyTensor]:
    match pair:
        case (str(name), torch.Tensor() | LazyTensor() as tensor):
            return name, tensor
        case (str(name), value):
            raise InvalidWeightsError(f"{name!r} is a {type(value).__name__}, not a tensor")
    raise InvalidWeightsError(f"item {position} is {pair!r:.80}, not a (name, tensor) pair")


def _gatherable(
    name: str, tensor: torch.Tensor | LazyTensor, *, sharded: bool
) -> torch.Tensor | LazyTensor:
    """Check a tensor. Return a lazy tensor for a sharded tensor, and other tensors unchanged."""
    if isinstance(tensor, LazyTensor):
        return tensor
    if hasattr(type(tensor), "local_shards"):  # nearly every other access to it raises an error
        raise UnsupportedError(
            f"tensor {name!r} is a ShardedTensor, from a state dict of FSDP1. Shard with "
            "fully_shard (FSDP2) or, with FSDP, pass a device_mesh, so that it makes DTensors, or "
            "set StateDictType.FULL_STATE_DICT"
        )
    shard: Any = tensor
    is_zero3 = hasattr(tensor, "ds_shape")  # DeepSpeed's mark on a partitioned parameter
    is_bare = has_no_shape(tensor) or tensor.is_meta
    if not is_bare and (is_zero3 or hasattr(tensor, "full_tensor")):
        if not sharded:
            meshes = () if is_zero3 else zip(shard.placements, shard.device_mesh.shape, strict=True)
            if is_zero3 or not all(way.is_replicate() or size == 1 for way, size in meshes):
                raise InvalidWeightsError(
                    f"each rank holds only a part of tensor {name!r}: publish on all ranks "
                    "together, with dbuffer.ShardedWeightSender"
                )
            return _gatherable(name, shard.detach().to_local(), sharded=sharded)
        shape = tuple(shard.ds_shape if is_zero3 else shard.shape)
        gather = _fetch_zero3 if is_zero3 else shard.detach().full_tensor
        # Tied tensors are one object, so id() identifies them. Their address does not, because a
        # rank's part of a tensor can be empty. Negate the id, so that it differs from addresses.
        return LazyTensor(tensor.dtype, shape, gather, -id(tensor), sharded=tensor)
    if problem := problem_of_memory(tensor):
        raise InvalidWeightsError(f"tensor {name!r} {problem}")
    return tensor


def _fetch_zero3() -> torch.Tensor:
    raise NotImplementedError("read a ZeRO-3 parameter in a block of `gathered`, which gathers it")


def _without_ties(named: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Return tensors under their first names, and aliases for the other names of tied tensors."""
    names_at: dict[int, list[str]] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named.items():
        is_lazy = isinstance(tensor, LazyTensor)
        address = tensor.identity if isinstance(tensor, LazyTensor) else tensor.data_ptr()
        if not address:  # an empty tensor, or a tensor from a file, is never tied
            continue
        names = names_at.setdefault(address, [])
        ties = (first for first in names if is_lazy or is_same_memory(named[first], tensor))
        if (first := next(ties, None)) is None:
            names.append(name)
        else:
            aliases[name] = first
    return {name: tensor for name, tensor in named.items() if name not in aliases}, aliases
