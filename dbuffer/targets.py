"""Where weights go: matching the tensors of a target with those of a layout, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
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

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Match:
    """A target's tensors, in the order of a layout."""

    targets: list[torch.Tensor]
    aliases: list[tuple[torch.Tensor, int]]
    """Further tensors that the source had tied, and the index of the tensor each is filled from."""


class Matcher:
    """Finds the tensor that each of a layout's tensors is to be copied into."""

    def __init__(self) -> None:
        self._known: tuple[Layout, Outline, list[int]] | None = None

    def match(self, target: Any, layout: Layout) -> Match:
        """Match all of a target's tensors with all of a layout's.

        Raises:
            TargetTypeError: the target holds no named tensors.
            WeightsMismatchError: a name is missing or left over, a shape or dtype differs, or a
                tensor of the target cannot be written. All differences are listed.
        """
        named = _tensors_of(target)
        if (targets := self._match_like_before(named, layout)) is not None:
            return Match(targets, [])
        match = _match_each(named, layout)
        self._known = None
        if not match.aliases and len(named) == len(match.targets):
            index_of = {name: index for index, name in enumerate(clean_names(named))}
            order = [index_of[spec.name] for spec in layout.specs]
            self._known = (layout, Outline.of(named), order)
        return match

    def _match_like_before(
        self, named: Mapping[str, torch.Tensor], layout: Layout
    ) -> list[torch.Tensor] | None:
        if self._known is None:
            return None
        known_layout, outline, order = self._known
        if known_layout.specs is not layout.specs and known_layout != layout:
            return None
        if not outline.fits(named):
            return None
        tensors = list(named.values())
        if not all(tensor.is_contiguous() and not tensor.is_meta for tensor in tensors):
            return None
        return [tensors[index] for index in order]


def _match_each(named: Mapping[str, torch.Tensor], layout: Layout) -> Match:
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
        elif not any(_shares_memory(tensor, other) for other in targets):
            problems.append(f"the store has no {name!r}")
    if problems:
        raise WeightsMismatchError(_describe_problems(problems))
    return Match(targets, aliases)


def _describe_problems(problems: list[str]) -> str:
    more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    listed = "; ".join(problems[:_MAX_LISTED])
    return "the published weights do not fit the target, which was not touched: " + listed + more


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
