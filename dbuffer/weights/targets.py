"""`Matcher`: finds, for each published tensor, the tensor of a target to load it into.

`Comparison` has the differences between a version and a model, and `advice` says what to change.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy as has_no_shape

from dbuffer.errors import DBufferError, InvalidWeightsError, OptionError, WeightsMismatchError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import FileTensors, copy_one, flat_view
from dbuffer.runtime.messages import listed
from dbuffer.runtime.trouble import TranslatedErrors
from dbuffer.weights.lazy_tensor import LazyTensor
from dbuffer.weights.named_tensors import (
    WeightsSpec,
    check_unique,
    clean_names,
    is_extra_state,
    is_made_of_others,
    is_module,
    is_same_memory,
    is_tensordict,
    lies_in_memory,
    may_have_model,
    module_state,
    own_tensors,
    problem_of_memory,
    spec_of,
    tensordict_tensors,
)
from dbuffer.weights.names import NameMap

ADAPTER_KEY = "adapter_config"
"""Metadata key of an adapter's peft configuration. Only versions of adapters have the key."""


NamedIndex: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors of a target to load into, one for each published tensor, in the layout's order."""

    targets: list[torch.Tensor]
    aliases: list[tuple[torch.Tensor, int]]
    """Further tensors of the target, for the aliases of tied tensors in the layout. Each comes with
    the index of the published tensor to load into it."""
    ties: list[tuple[NamedIndex, NamedIndex]] = field(default_factory=list)
    """Pairs of published tensors (name, index in the layout) that the target has as one tensor."""

    def fill(self, published: FileTensors, copier: Copier, *, hashed: bool) -> list[int] | None:
        """Copy published tensors into the target; return the tensors' checksums if ``hashed``."""
        for alias, index in self.aliases:
            copy_one(alias, published.views[index])
        return copier.read(published, self.targets, hashed=hashed)

    def require_ties(self, published: Callable[[int], torch.Tensor]) -> None:
        """Refuse two published tensors that have different values but are tied in the target.

        ``published`` is a function that returns a published tensor, given its index in the layout.
        """
        problems = [
            f"{name!r} and {tied!r} are one tensor in the target, but two in the store, with "
            "different values"
            for (name, index), (tied, tied_index) in self.ties
            if not torch.equal(flat_view(published(index)), flat_view(published(tied_index)))
        ]
        if problems:
            raise WeightsMismatchError(_describe_problems(problems))


def refuse_adapter(metadata: Mapping[str, Any]) -> None:
    """Refuse a version whose metadata says that it is an adapter, not a model."""
    if ADAPTER_KEY in metadata:
        raise WeightsMismatchError(
            "the store holds an adapter, not a model: use save_adapter of "
            "dbuffer.integrations.peft, or publish the merged model (merged_weights)"
        )


class Matcher:
    """Finds, for each published tensor, the tensor of a module or mapping to load it into."""

    def __init__(self) -> None:
        self._last: tuple[Layout, WeightsSpec, list[int], bool] | None = None
        """Layout and target of the last match, positions of the matched tensors among the target's
        tensors, and whether all tensors of the target matched."""
        self._addresses: list[int] = []
        """Addresses of the target's tensors at the last match."""

    def match(self, target: Any, layout: Layout, *, partial: bool = False) -> Match:
        """Match a target's tensors with a layout's tensors, by name.

        If ``partial``, the layout can have fewer tensors than the target. Call
        :meth:`Match.require_ties` before you copy into the target's tensors.

        Raises:
            OptionError: the target has no named tensors.
            WeightsMismatchError: a tensor is only in the layout or only in the target, a shape or
                dtype differs, or a tensor of the target cannot be written or overlaps another
                tensor in memory. The message lists all differences.
        """
        with TranslatedErrors(_refuse_target):
            named = dict(_named_in(target))
        if may_have_model(target):
            named = _as_published(target, named, layout)
        if (targets := self._match_like_before(target, named, layout, partial)) is not None:
            return Match(targets, [])
        match, order = _match_each(target, named, layout, partial=partial)
        self._last = None
        is_all = len(named) == len(order)
        if not match.aliases and not match.ties and (is_all or partial):
            self._last = layout, WeightsSpec.of(named), order, is_all
            self._addresses = list(map(torch.Tensor.data_ptr, named.values()))
        return match

    def _match_like_before(
        self, target: Any, named: Mapping[str, torch.Tensor], layout: Layout, partial: bool
    ) -> list[torch.Tensor] | None:
        if self._last is None:
            return None
        last_layout, outline, order, is_all = self._last
        if not (is_all or partial):
            return None
        if last_layout.specs is not layout.specs and last_layout != layout:
            return None
        tensors = list(named.values())
        if (addresses := outline.addresses_of(named)) is None:
            return None
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        # Check this at each load: lazily conjugated or negated views cannot be filled, but can have
        # the same addresses as the tensors of the last load.
        if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
            return None
        # If no address has changed, skip the checks: the results would be as at the last load.
        if addresses != self._addresses:
            if (
                not all(map(lies_in_memory, tensors))
                or any(_overlap_groups(named))
                or _not_kept(target, named)
            ):
                return None
            self._addresses = addresses
        return [tensors[index] for index in order]


def require_names(loaded: Mapping[str, int], names: Set[str], version: int) -> None:
    """Refuse a partial version that would leave a target with a mix of versions.

    ``loaded``: names of the tensors that were loaded into the target, each with the first version
    that had the tensor. ``names``: names in the new version.
    """
    if lacking := sorted(loaded.keys() - names):
        lost = listed([f"{name!r} of version {loaded[name]}" for name in lacking], "; ")
        raise WeightsMismatchError(
            f"version {version} lacks tensors that earlier versions contained, so the target would "
            f"have a mix of versions: {lost}; publish at least the tensors of earlier versions"
        )


def _match_each(
    target: Any, named: Mapping[str, Any], layout: Layout, *, partial: bool
) -> tuple[Match, list[int]]:
    """Return the match, and for each of ``Match.targets`` its position in ``named``."""
    names = clean_names(named)
    with TranslatedErrors(_refuse_target):
        check_unique(names)
    tensors = dict(zip(names, named.values(), strict=True))
    unfit = _unfit(target, tensors)
    specs = [spec_of(name, tensor) for name, tensor in tensors.items() if name not in unfit]
    comparison = compare(layout, specs)
    fills: dict[int, list[str]] = {}
    for name, index in comparison.sources.items():
        fills.setdefault(index, []).append(name)
    ties, problems = _overlaps({name: tensors[name] for name in comparison.sources}, comparison)
    needed = unfit if not partial else unfit.keys() & layout.all_names
    problems = [
        *(unfit[name] for name in unfit if name in needed),
        *_differences(comparison, layout, unfit),
        *([] if partial else _unpublished(comparison, tensors)),
        *problems,
    ]
    if problems:
        raise WeightsMismatchError(
            _describe_problems(problems) + suggest(layout, specs, comparison, partial=partial)
        )
    index_in_target = {name: index for index, name in enumerate(tensors)}
    firsts = [fills[index][0] for index in range(len(layout.specs))]
    aliases = [(tensors[name], index) for index, names in fills.items() for name in names[1:]]
    match = Match([tensors[name] for name in firsts], aliases, ties)
    return match, [index_in_target[name] for name in firsts]


def _differences(comparison: Comparison, layout: Layout, unfit: Mapping[str, str]) -> Iterator[str]:
    for published, needed in comparison.differing + comparison.recast:
        yield f"published {published}, target {needed}"
    reported = {layout.aliases.get(name, name) for name in unfit}
    for spec in comparison.left_over:
        if layout.aliases.get(spec.name, spec.name) not in reported:
            yield f"the target has no {spec}"


def _unpublished(comparison: Comparison, tensors: Mapping[str, Any]) -> Iterator[str]:
    filled = [tensors[name] for name in comparison.sources]
    for spec in comparison.missing:
        tensor = tensors[spec.name]
        if not (tensor.numel() and any(is_same_memory(tensor, tied) for tied in filled)):
            yield f"the store has no {spec.name!r}"


def _overlaps(
    tensors: Mapping[str, torch.Tensor], comparison: Comparison
) -> tuple[list[tuple[NamedIndex, NamedIndex]], list[str]]:
    """Find the target's tensors that share memory.

    Return pairs of published tensors that would be loaded into the same memory, and a message about
    each pair of the target's tensors that share only a part of their memory.
    """
    ties: list[tuple[NamedIndex, NamedIndex]] = []
    problems: list[str] = []
    for first, *group in _overlap_groups(tensors):
        for name in group:
            index, other_index = comparison.sources[first], comparison.sources[name]
            if not is_same_memory(tensors[first], tensors[name]):
                problems.append(
                    f"{first!r} and {name!r} of the target overlap or are interleaved in memory"
                )
            elif index != other_index:
                ties.append(((first, index), (name, other_index)))
    return ties, problems


def _overlap_groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield groups of names. The tensors of a group have overlapping address ranges."""
    ranges = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel() and tensor.data_ptr()  # a device without addresses reports 0
    )
    group: list[str] = []
    group_device, group_end = "", 0
    for device, start, end, name in ranges:
        if device == group_device and start < group_end:
            group.append(name)
            group_end = max(group_end, end)
            continue
        if len(group) > 1:
            yield group
        group, group_device, group_end = [name], device, end
    if len(group) > 1:
        yield group


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum(stride * (size - 1) for stride, size in steps))


def _describe_problems(problems: list[str]) -> str:
    reasons = listed(problems, "; ")
    return f"the published weights do not fit the target: {reasons}"


def _as_published(
    target: nn.Module, named: dict[str, torch.Tensor], layout: Layout
) -> dict[str, torch.Tensor]:
    """Return a module's tensors, unchanged or as `as_checkpoint` converts them.

    The tensors are converted if more of their names are in the layout after the conversion.
    """
    from dbuffer.weights.conversion import as_checkpoint, has_model

    if layout.all_names <= named.keys() or not has_model(target):
        return named
    if any(not isinstance(t, torch.Tensor) or has_no_shape(t) for t in named.values()):
        return named
    names, converted = layout.all_names, dict(as_checkpoint(target, named))
    return converted if len(names & converted.keys()) > len(names & named.keys()) else named


def _refuse_target(error: BaseException) -> None:
    if isinstance(error, InvalidWeightsError):
        raise WeightsMismatchError(f"this target cannot be filled: {error}") from error


def _named_in(target: Any) -> Mapping[str, Any]:
    if is_tensordict(target):
        return tensordict_tensors(target)
    if isinstance(target, nn.Module):
        return module_state(target)
    if isinstance(target, Mapping):
        return target
    raise OptionError(
        f"cannot load into a {type(target).__name__}: pass a module, a dictionary of tensors or "
        "a function that takes (name, tensor) pairs"
    )


def _unfit(target: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    not_kept = _not_kept(target, tensors)
    reasons = {
        name: _reason_not_to_fill(name, tensor) or not_kept.get(name)
        for name, tensor in tensors.items()
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _not_kept(target: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, why tensors of the target would lose weights that are loaded into them."""
    if is_module(target):
        kept = [tensor for tensor in own_tensors(target) if not has_no_shape(tensor)]
        ids, places = set(map(id, kept)), {_storage_address(tensor) for tensor in kept} - {0}
        return {
            name: _why_not_kept(target, name)
            for name, tensor in tensors.items()
            if _has_elements(tensor)
            if (id(tensor) not in ids and _storage_address(tensor) not in places)
            or is_extra_state(name)
        }
    again = _named_in(target)
    return {
        name: _why_not_kept(target, name)
        for name, first, second in zip(tensors, tensors.values(), again.values(), strict=True)
        if first is not second and _has_elements(first)
        if not is_same_memory(first, second)
    }


def _why_not_kept(target: Any, name: str) -> str:
    if isinstance(target, nn.Module) and is_extra_state(name):
        return (
            f"{name!r} of the target is extra state, which only its module's set_extra_state can "
            "load: publish it as metadata, or load with a function"
        )
    return (
        f"{name!r} of the target is recomputed at each access to the {type(target).__name__}, "
        "so weights loaded into it would be lost"
    )


def _has_elements(tensor: Any) -> bool:
    is_shaped = isinstance(tensor, torch.Tensor) and not has_no_shape(tensor)
    return is_shaped and tensor.numel() > 0


def _storage_address(tensor: torch.Tensor) -> int:
    is_plain = tensor.layout is torch.strided and not is_made_of_others(tensor)
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _reason_not_to_fill(name: str, tensor: Any) -> str:
    if isinstance(tensor, LazyTensor):
        return (
            f"{name!r} is computed from tensors of the target, so it cannot be loaded: publish the "
            "trainer's own tensors (as_checkpoint=False)"
        )
    if not isinstance(tensor, torch.Tensor):
        return f"{name!r} of the target is a {type(tensor).__name__}"
    if hasattr(tensor, "full_tensor") and not tensor.is_meta:
        return f"{name!r} of the target is sharded"
    if problem := problem_of_memory(tensor):
        return f"{name!r} of the target {problem}"
    try:
        spec_of(name, tensor)
    except InvalidWeightsError as error:
        return str(error)
    if tensor.is_conj() or tensor.is_neg():
        return f"{name!r} of the target is a lazily conjugated or negated view"
    if _overlaps_itself(tensor):
        return f"{name!r} of the target is an expanded or overlapping view"
    return ""


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor may share memory."""
    reach = 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between a published version and a model, under the model's names."""

    missing: list[TensorSpec]
    """Tensors that are in the model, but not in the version."""
    left_over: list[TensorSpec]
    """Tensors that are in the version, but not in the model."""
    differing: list[tuple[TensorSpec, TensorSpec]]
    """Spec in the version and spec in the model of each tensor whose shapes differ."""
    recast: list[tuple[TensorSpec, TensorSpec]]
    """Tensors that differ only in dtype: each one's spec in the version, and in the model."""
    sources: dict[str, int]
    """Index of the published tensor to load, keyed by the name of the model's tensor."""

    @property
    def fits(self) -> bool:
        """Whether all names and shapes of the version and the model match. Dtypes can differ."""
        return not (self.missing or self.left_over or self.differing)


def compare(
    published: Layout, needed: Iterable[TensorSpec], rename: NameMap | None = None
) -> Comparison:
    """Compare a version's tensors, renamed by ``rename``, with a model's tensors."""
    index_of = {spec.name: index for index, spec in enumerate(published.specs)}
    index_of |= {alias: index_of[name] for alias, name in published.aliases.items()}
    offered: dict[str, TensorSpec] = {}
    for name, index in index_of.items():
        spec, new = published.specs[index], name if rename is None else rename(name)
        if new in offered:
            raise InvalidWeightsError(
                f"rename gives two tensors the same name {new!r:.200}; one of the two is {name!r}"
            )
        offered[new] = spec if spec.name == new else spec._replace(name=new)
    origins = dict(zip(offered, index_of.values(), strict=True))
    of_model = {spec.name: spec for spec in needed}
    differing, recast = [], []
    # Don't collect pairs of equal specs: 18,000 pairs would start the garbage collector.
    for name, have in offered.items():
        if (need := of_model.get(name)) is None:
            continue
        if have.shape != need.shape:
            differing.append((have, need))
        elif have.dtype != need.dtype:
            recast.append((have, need))
    # A tied tensor has several names. It is left over only if the model has none of these names.
    used = {origins[name] for name in offered if name in of_model}
    return Comparison(
        missing=[spec for name, spec in of_model.items() if name not in offered],
        left_over=[
            spec
            for name, spec in offered.items()
            if name not in of_model and origins[name] not in used
        ],
        differing=differing,
        recast=recast,
        sources={name: index for name, index in origins.items() if name in of_model},
    )


_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def suggest(
    published: Layout,
    needed: Sequence[TensorSpec],
    comparison: Comparison,
    *,
    partial: bool = False,
) -> str:
    """Return advice for an error message about weights that do not fit, or an empty string."""

    def fits(names: NameMap) -> bool:
        renamed = compare(published, needed, names)
        return renamed.fits or (partial and not (renamed.left_over or renamed.differing))

    unknown = [spec.name for spec in comparison.left_over]
    return advice(unknown, [spec.name for spec in comparison.missing], fits)


def advice(unknown: Sequence[str], missing: Iterable[str], fits: Callable[[NameMap], bool]) -> str:
    """Return advice on published names that the model lacks, or an empty string.

    ``fits`` is a function that returns whether the weights fit after a map has renamed them.
    """
    # `fits` raises an error, for instance if the map gives two tensors the same name.
    with contextlib.suppress(DBufferError):
        if (prefix := _changed_prefix(unknown, missing)) and fits(NameMap().prefix(*prefix)):
            return (
                f"; if you make the sender with rename=dbuffer.NameMap().prefix{prefix}, the "
                "weights fit"
            )
    if any(map(_FUSED.fullmatch, unknown)):
        return (
            "; the published experts are fused, as in a module of transformers 5: send the module "
            "itself, with as_checkpoint=True, instead of its state_dict()"
        )
    return ""


def _changed_prefix(unknown: Iterable[str], missing: Iterable[str]) -> tuple[str, str] | None:
    """Return an old and a new prefix that turn an unknown name into a missing one, or None.

    ``unknown``: published names that the model lacks; ``missing``: names of the model that were not
    published.
    """
    name_with = {
        end: name for name in sorted(missing, key=len, reverse=True) for end in _ends(name)
    }
    common = [(end, name) for name in unknown for end in _ends(name) if end in name_with]
    if not common:
        return None
    end, name = max(common, key=lambda pair: pair[0].count("."))
    return name.removesuffix(end), name_with[end].removesuffix(end)


def _ends(name: str) -> Iterator[str]:
    """Yield a dotted name, then the name without its first part, then without two parts, etc."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name
