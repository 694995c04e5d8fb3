"""Where weights come from, brought into one form: names, specs, and tensors or how to get them.

A module, a state dict, a TensorDict, a list or iterator of ``(name, tensor)``, or a HuggingFace
checkpoint directory; some of a mapping's or list's tensors may be lazy ones. Everything is checked
before a byte is written, except what an iterator or a lazy tensor has not yet produced.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import nn

from dbuffer.checkpoint import LazyTensor, read_checkpoint
from dbuffer.errors import InvalidWeightsError
from dbuffer.layout import TensorSpec
from dbuffer.names import Rename, renamed
from dbuffer.tensors import DTYPE_NAMES, can_cast_to

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into the middle of names."""

_wrapper_parts = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPER_PARTS)})\.")

WRAPPER_PREFIX = "module."
"""What DDP, DataParallel and DeepSpeed put before every name."""

_get_shape = operator.attrgetter("shape")
_get_dtype = operator.attrgetter("dtype")

Weights: TypeAlias = (
    nn.Module
    | TensorDictBase
    | Mapping[str, torch.Tensor | LazyTensor]
    | Iterable[tuple[str, torch.Tensor | LazyTensor]]
    | str
    | os.PathLike[str]
)


@dataclass(frozen=True, slots=True)
class Outline:
    """Weights without their values: enough to see that the next ones are like them.

    Checking 18,000 names one by one takes as long as copying 18,000 tensors. It is done for the
    first version; for one that has the same names, shapes and dtypes it need not be done again.
    """

    names: list[str]
    """As they were given, before wrappers' prefixes went."""
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    """Before they were cast."""

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> Outline:
        """Take the outline of named tensors."""
        return cls(
            list(named),
            [tensor.shape for tensor in named.values()],
            [tensor.dtype for tensor in named.values()],
        )

    def fits(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are plain tensors of just this outline, in this order."""
        tensors = named.values()
        # Shapes are compared as they are made: a list of 18,000 of them sets the garbage
        # collector going, which takes longer than all the rest.
        return (
            list(named) == self.names
            and {type(tensor) for tensor in tensors} <= {torch.Tensor, nn.Parameter}
            and {tensor.layout for tensor in tensors} == {torch.strided}
            and all(map(operator.eq, map(_get_shape, tensors), self.shapes))
            and all(map(operator.is_, map(_get_dtype, tensors), self.dtypes))
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Weights whose layout is known before any of them is fetched."""

    specs: tuple[TensorSpec, ...]
    tensors: list[torch.Tensor] | list[torch.Tensor | LazyTensor]
    aliases: dict[str, str]
    """Other names of tied tensors."""
    is_lazy: bool
    """Whether there are lazy ones among the tensors."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was found out about one version's weights, for the next."""

    outline: Outline
    specs: tuple[TensorSpec, ...]


class Describer:
    """Brings weights of a known layout into one form.

    Args:
        dtype: floating-point tensors are published in this dtype.
        rename: a mapping of whole names, or a function of a name; wrappers' prefixes are gone
            by then.
        sharded: take tensors of which each rank of a trainer holds a part. To gather them, all
            ranks must take part: a sender of one rank would wait for ever.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        sharded: bool = False,
    ) -> None:
        self.dtype = dtype
        self.rename = rename
        self.sharded = sharded
        self._known: Known | None = None

    def describe(self, weights: Weights) -> Source:
        """Specs and tensors of anything but an iterator; see :func:`is_stream`.

        Raises:
            InvalidWeightsError: something in it cannot be published; the message names it.
        """
        named = _as_mapping(weights)
        if named is None:
            return self._describe_pairs(*self._collect(weights))
        if self._known is not None and self._known.outline.fits(named):
            tensors = list(named.values())
            addresses = {tensor.data_ptr() for tensor in tensors}
            if 0 not in addresses and len(addresses) == len(tensors):  # nothing empty, nor tied
                return Source(self._known.specs, tensors, {}, is_lazy=False)
        source = self._describe_pairs(*self._checked_pairs(named.items()))
        self._known = None
        if not source.aliases and not source.is_lazy:
            self._known = Known(Outline.of(named), source.specs)
        return source

    def stream(
        self, weights: Iterator[tuple[str, torch.Tensor | LazyTensor]]
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield the tensors of an iterator one at a time, checked, with their specs.

        Ties are not looked for: a tensor that is gone by now may have had the same address.
        A wrapper's leading ``module.`` goes when the first name has it.
        """
        prefix: str | None = None
        seen = set()
        for position, pair in enumerate(weights):
            name, tensor = _checked_pair(pair, position)
            name = without_wrappers(name)
            if prefix is None:
                prefix = name.removesuffix(clean_names([name])[0])
            name = renamed(name.removeprefix(prefix), self.rename)
            _check_name(name)
            if name in seen:
                raise InvalidWeightsError(f"the name {name!r} comes twice")
            seen.add(name)
            checked = _gatherable(name, tensor, sharded=self.sharded)
            yield spec_of(name, checked, self.dtype), fetch(checked)

    def _describe_pairs(self, names: list[str], tensors: list[torch.Tensor | LazyTensor]) -> Source:
        names = [renamed(name, self.rename) for name in clean_names(names)]
        _check_names(names)
        names, tensors, aliases = _without_ties(names, tensors)
        if not names:
            raise InvalidWeightsError("there is no tensor in the weights to publish")
        pairs = zip(names, tensors, strict=True)
        return Source(
            specs=tuple(spec_of(*pair, self.dtype) for pair in pairs),
            tensors=tensors,
            aliases=aliases,
            is_lazy=any(isinstance(tensor, LazyTensor) for tensor in tensors),
        )

    def _collect(self, weights: Any) -> tuple[list[str], list[torch.Tensor | LazyTensor]]:
        if isinstance(weights, str | os.PathLike):
            return read_checkpoint(Path(weights))
        if isinstance(weights, Iterable) and not isinstance(weights, torch.Tensor | bytes):
            return self._checked_pairs(weights)
        raise InvalidWeightsError(
            f"cannot publish a {type(weights).__name__}: give a module, a state dict, a "
            "TensorDict, (name, tensor) pairs or the path of a checkpoint directory"
        )

    def _checked_pairs(
        self, pairs: Iterable[Any]
    ) -> tuple[list[str], list[torch.Tensor | LazyTensor]]:
        names: list[str] = []
        tensors: list[torch.Tensor | LazyTensor] = []
        for position, pair in enumerate(pairs):
            name, tensor = _checked_pair(pair, position)
            names.append(name)
            tensors.append(_gatherable(name, tensor, sharded=self.sharded))
        return names, tensors


def is_stream(weights: Weights) -> TypeGuard[Iterator[tuple[str, torch.Tensor | LazyTensor]]]:
    """Whether weights can be gone through only once, so that their layout shows at the end."""
    return isinstance(weights, Iterator)


def fetch(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """The tensor itself, gathered, read from its file or made if need be.

    Raises:
        InvalidWeightsError: it is not what was promised.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    fetched = tensor.fetch()
    found, promised = (fetched.dtype, tuple(fetched.shape)), (tensor.dtype, tuple(tensor.shape))
    if found != promised:
        raise InvalidWeightsError(f"a lazy tensor was to be {promised}, and turned out as {found}")
    return fetched


def clean_names(names: Iterable[str]) -> list[str]:
    """Names without what wrappers put into them; a leading ``module.`` only if all have it."""
    names = [without_wrappers(name) for name in names]
    while names and all(name.startswith(WRAPPER_PREFIX) for name in names):
        names = [name.removeprefix(WRAPPER_PREFIX) for name in names]
    return names


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by clean name, tied ones under each of their names."""
    state = module.state_dict(keep_vars=True)
    kept = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return _by_name(clean_names(kept), kept.values())


def tensordict_tensors(weights: TensorDictBase) -> dict[str, torch.Tensor]:
    """The leaves of a TensorDict, nested keys joined by dots."""
    names, tensors = [], []
    for key, value in weights.items(include_nested=True):
        name = key if isinstance(key, str) else ".".join(key)
        if is_non_tensor(value):
            raise InvalidWeightsError(f"{name!r} is not a tensor; put it into the metadata")
        if isinstance(value, torch.Tensor):
            names.append(name)
            tensors.append(value)
    return _by_name(names, tensors)


def spec_of(
    name: str, tensor: torch.Tensor | LazyTensor, dtype: torch.dtype | None = None
) -> TensorSpec:
    """A tensor's spec as it will be published, with floating-point tensors in ``dtype``."""
    kept = tensor.dtype
    if dtype is not None and can_cast_to(kept):
        kept = dtype
    try:
        return TensorSpec(name, DTYPE_NAMES[kept], tuple(tensor.shape))
    except KeyError:
        raise InvalidWeightsError(f"no format for dtype {kept} of tensor {name!r}") from None


def _by_name(names: list[str], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    _check_names(names)
    return dict(zip(names, tensors, strict=True))


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})[:5]
        raise InvalidWeightsError(f"several tensors have one name after cleaning: {twice}")
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    if not name.isascii() and json.loads(json.dumps(name)) != name:
        raise InvalidWeightsError(f"the name {name!r:.80} has a broken character in it")


def _as_mapping(weights: Any) -> Mapping[str, Any] | None:
    """Named tensors, where the weights are of that kind."""
    # A TensorDictParams is both, and a TensorDict first.
    if isinstance(weights, TensorDictBase):
        return tensordict_tensors(weights)
    if isinstance(weights, nn.Module):
        return module_tensors(weights)
    return weights if isinstance(weights, Mapping) else None


def _checked_pair(pair: Any, position: int) -> tuple[str, torch.Tensor | LazyTensor]:
    match pair:
        case (str(name), torch.Tensor() as tensor) if not is_tensor_collection(tensor):
            return name, tensor
        case (str(name), LazyTensor() as lazy):
            return name, lazy
        case (str(name), value):
            raise InvalidWeightsError(f"{name!r} is a {type(value).__name__}, not a tensor")
    raise InvalidWeightsError(f"item {position} is {pair!r:.80}, not a (name, tensor) pair")


def _gatherable(
    name: str, tensor: torch.Tensor | LazyTensor, *, sharded: bool
) -> torch.Tensor | LazyTensor:
    """The tensor, or for one of which each rank holds a part a promise to gather it."""
    if isinstance(tensor, LazyTensor):
        return tensor
    if tensor.is_meta:
        raise InvalidWeightsError(
            f"tensor {name!r} is on the meta device and has no values; load the weights first"
        )
    whole: Any = tensor
    is_zero3 = hasattr(tensor, "ds_shape")  # what DeepSpeed puts on what it partitions
    if is_zero3 or hasattr(tensor, "full_tensor"):
        if not sharded and (is_zero3 or not _is_whole(whole)):
            raise InvalidWeightsError(
                f"each rank holds only a part of tensor {name!r}: let all of them publish "
                "together, with dbuffer.ShardedWeightSender"
            )
        shape = tuple(whole.ds_shape if is_zero3 else whole.shape)
        fetch = _fetch_in_a_block if is_zero3 else whole.detach().full_tensor
        # Ties are told by the object, on all ranks alike: a rank's own part may be empty. The sign
        # keeps it apart from addresses.
        return LazyTensor(tensor.dtype, shape, fetch, -id(tensor), sharded=tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidWeightsError(
            f"tensor {name!r} is sparse, nested or of a quantized dtype; publish its parts "
            "as plain tensors"
        )
    return tensor


def _fetch_in_a_block() -> torch.Tensor:
    raise NotImplementedError("a parameter of ZeRO-3 is whole inside a block only: see `shards`")


def _is_whole(tensor: Any) -> bool:
    """Whether this rank holds all of a DTensor."""
    pairs = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return all(placement.is_replicate() or size == 1 for placement, size in pairs)


def without_wrappers(name: str) -> str:
    """A tensor's name without what wrappers put into its middle."""
    return _wrapper_parts.sub("", name)


def _without_ties(
    names: list[str], tensors: list[torch.Tensor | LazyTensor]
) -> tuple[list[str], list[torch.Tensor | LazyTensor], dict[str, str]]:
    """Keep the first of several names of one tensor; the others become aliases of it."""
    seen_at: dict[int, list[int]] = {}
    tied: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        is_lazy = isinstance(tensor, LazyTensor)
        place = tensor.identity if isinstance(tensor, LazyTensor) else tensor.data_ptr()
        if not place:  # empty, or read from a file: nothing to share
            continue
        others = seen_at.setdefault(place, [])
        for other in others:
            if is_lazy or is_same_memory(tensors[other], tensor):
                tied[index] = other
                break
        else:
            others.append(index)
    if not tied:
        return names, tensors, {}
    kept = [index for index in range(len(names)) if index not in tied]
    aliases = {names[index]: names[first] for index, first in tied.items()}
    return [names[index] for index in kept], [tensors[index] for index in kept], aliases


def is_same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors are one and the same elements, seen in the same way."""
    return bool(
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )
