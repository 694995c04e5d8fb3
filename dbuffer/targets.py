"""Where weights go: matching the tensors of a target with those of a layout, all or nothing.

With ``partial=True`` a layout may hold a part of a target's tensors. What must not happen then is a
mix of two versions: :class:`Brought` remembers what versions have brought, and a later one that
lacks some of it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from dbuffer.errors import InvalidWeightsError, TargetTypeError, WeightsMismatchError
from dbuffer.layout import Layout
from dbuffer.sources import (
    Outline,
    clean_names,
    is_same_memory,
    module_tensors,
    spec_of,
    tensordict_tensors,
)

ADAPTER_KEY = "adapter_config"
"""In the metadata of a version that holds an adapter: its configuration, as peft saves it."""

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Match:
    """A target's tensors, in the order of a layout."""

    targets: list[torch.Tensor]
    aliases: list[tuple[torch.Tensor, int]]
    """Further tensors that the source had tied, and the index of the tensor each is filled from."""


def refuse_adapter(metadata: Mapping[str, Any]) -> None:
    """Refuse a version that holds no model, by its metadata.

    Raises:
        WeightsMismatchError: it holds an adapter.
    """
    if ADAPTER_KEY in metadata:
        raise WeightsMismatchError(
            "the store holds an adapter, and no model: use load_adapter or save_adapter of "
            "dbuffer.integrations.peft, or publish the merged model (merged_weights); nothing was "
            "touched"
        )


class Matcher:
    """Finds the tensor that each of a layout's tensors is to be copied into."""

    def __init__(self) -> None:
        self._known: tuple[Layout, Outline, list[int], bool] | None = None

    def match(self, target: Any, layout: Layout, *, partial: bool = False) -> Match:
        """Match all of a target's tensors with all of a layout's.

        Args:
            target: a module or a dictionary of tensors.
            layout: what was published.
            partial: leave out tensors of the target that the layout lacks.

        Raises:
            TargetTypeError: the target holds no named tensors.
            WeightsMismatchError: a name is missing or left over, a shape or dtype differs, or a
                tensor of the target cannot be written. All differences are listed.
        """
        named = _tensors_of(target)
        if (targets := self._match_like_before(named, layout, partial)) is not None:
            return Match(targets, [])
        match = _match_each(named, layout, partial=partial)
        self._known = None
        is_all = len(named) == len(match.targets)
        if not match.aliases and (is_all or partial):
            index_of = {name: index for index, name in enumerate(clean_names(named))}
            order = [index_of[spec.name] for spec in layout.specs]
            self._known = (layout, Outline.of(named), order, is_all)
        return match

    def _match_like_before(
        self, named: Mapping[str, torch.Tensor], layout: Layout, partial: bool
    ) -> list[torch.Tensor] | None:
        if self._known is None:
            return None
        known_layout, outline, order, is_all = self._known
        if not (is_all or partial):
            return None
        if known_layout.specs is not layout.specs and known_layout != layout:
            return None
        if not outline.fits(named):
            return None
        tensors = list(named.values())
        if not all(tensor.is_contiguous() and not tensor.is_meta for tensor in tensors):
            return None
        return [tensors[index] for index in order]


class Brought:
    """Names of all tensors that versions have brought so far, and the first that brought each.

    Who loads parts of a target's tensors would mix two versions in it if one had less than one
    before: the rest would stay the earlier one's.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def note(self, names: Set[str], version: int) -> None:
        """A version is about to be loaded; what it touches stays touched if it fails half way."""
        self._first |= dict.fromkeys(names - self._first.keys(), version)

    def forget(self) -> None:
        """Everything is as it was before any version came."""
        self._first = {}

    def require_all(self, names: Set[str], version: int) -> None:
        """Refuse a version that lacks some of them.

        Raises:
            WeightsMismatchError: it does; the message says which, and who brought them.
        """
        if lacking := sorted(self._first.keys() - names):
            listed = _listed([f"{name!r} of version {self._first[name]}" for name in lacking])
            raise WeightsMismatchError(
                f"version {version} lacks what earlier versions have brought, and would leave a "
                f"mix of versions: {listed}; nothing was touched; publish at least what was "
                "published before"
            )


def _match_each(named: Mapping[str, torch.Tensor], layout: Layout, *, partial: bool) -> Match:
    tensors = dict(zip(clean_names(named), named.values(), strict=True))
    problems = []
    targets: list[torch.Tensor] = []
    for spec in layout.specs:
        found = tensors.pop(spec.name, None)
        if found is None:
            problems.append(f"the target has no {spec}")
            continue
        problems.extend(_problems(spec.name, found, str(spec)))
        targets.append(found)
    index_of = {spec.name: index for index, spec in enumerate(layout.specs)} if tensors else {}
    aliases = []
    for name, tensor in tensors.items():
        if name in layout.aliases:
            index = index_of[layout.aliases[name]]
            expected = layout.specs[index]._replace(name=name)
            problems.extend(_problems(name, tensor, str(expected)))
            aliases.append((tensor, index))
        elif not partial and not any(_shares_memory(tensor, other) for other in targets):
            problems.append(f"the store has no {name!r}")
    if problems:
        raise WeightsMismatchError(_describe_problems(problems))
    return Match(targets, aliases)


def _describe_problems(problems: list[str]) -> str:
    return (
        f"the published weights do not fit the target, which was not touched: {_listed(problems)}"
    )


def _listed(problems: list[str]) -> str:
    more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return "; ".join(problems[:_MAX_LISTED]) + more


def _shares_memory(one: Any, other: Any) -> bool:
    """Whether these are two names of one tied tensor."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and one.numel() > 0 and is_same_memory(one, other)


def _tensors_of(target: Any) -> Mapping[str, torch.Tensor]:
    if isinstance(target, TensorDictBase):
        return tensordict_tensors(target)
    if isinstance(target, nn.Module):
        return module_tensors(target)
    if isinstance(target, Mapping):
        return target
    raise TargetTypeError(
        f"cannot load into a {type(target).__name__}: give a module, a dictionary of tensors or "
        "a function that takes (name, tensor) pairs"
    )


def _problems(name: str, tensor: Any, expected: str) -> list[str]:
    """What speaks against filling this tensor with what is ``expected``."""
    if not isinstance(tensor, torch.Tensor):
        return [f"{name!r} of the target is a {type(tensor).__name__}"]
    if tensor.is_meta:
        return [f"{name!r} of the target is on the meta device"]
    if hasattr(tensor, "full_tensor"):
        return [f"{name!r} of the target is sharded"]
    try:
        found = str(spec_of(name, tensor))
    except InvalidWeightsError as error:
        return [str(error)]
    if found != expected:
        return [f"published {expected}, target {found}"]
    if tensor.is_conj() or tensor.is_neg():
        return [f"{name!r} of the target is a lazily conjugated or negated view"]
    if _overlaps_itself(tensor):
        return [f"{name!r} of the target is an expanded or overlapping view"]
    return []


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements may lie in one place, so that a copy into it has no meaning."""
    reach = 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
