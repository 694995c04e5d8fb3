"""Rules that would mend names that do not fit, for the messages of errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dbuffer.errors import DBufferError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.comparison import Comparison, compare
from dbuffer.weights.names import NameMap
from dbuffer.weights.rules import PRESETS

_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")

_MAX_PREFIXES = 3
"""Parts at the beginning of all names that are left out at most."""


def suggest(
    published: Layout,
    needed: Sequence[TensorSpec],
    comparison: Comparison,
    *,
    partial: bool = False,
) -> str:
    """Return the end of a message about weights that do not fit; empty if no rule mends them."""
    if not comparison.left_over and (partial or not comparison.missing):
        return ""  # it is not about names

    def fits(names: NameMap) -> bool:
        found = compare(published, needed, names)
        return found.fits or (partial and not (found.left_over or found.differing))

    changed = _changed_prefix(comparison)
    unknown = [spec.name for spec in comparison.left_over]
    names = sorted(published.all_names)
    text = advice(names, fits, [] if changed is None else [changed], unknown=unknown)
    if not text and any(_FUSED.fullmatch(spec.name) for spec in comparison.missing):
        return (
            "; the target's experts are fused, as in a module of transformers 5: load into the "
            "module itself, and not into its state_dict()"
        )
    return text


def advice(
    names: Sequence[str],
    fits: Callable[[NameMap], bool],
    more: Iterable[NameMap] = (),
    *,
    unknown: Sequence[str] | None = None,
) -> str:
    """Return the end of a message about names that do not fit; empty if no rule mends them.

    Args:
        names: as published.
        fits: whether a map makes them fit.
        more: maps to try first.
        unknown: names that have no place. Default: all of them.
    """
    for candidate in (*more, *_candidates(names)):
        try:
            does_fit = fits(candidate)
        except DBufferError:  # several tensors would get one name, for instance
            does_fit = False
        if does_fit:
            return f"; with rename=dbuffer.{candidate!r} of the sender, they would fit"
    if any(map(_FUSED.fullmatch, names if unknown is None else unknown)):
        return (
            "; the published experts are fused, as in a module of transformers 5: send the module "
            "itself, with as_checkpoint=True, and not its state_dict()"
        )
    return ""


def _candidates(names: Sequence[str]) -> Iterator[NameMap]:
    """Yield maps for what wrappers and trainers put into names."""
    for rules in PRESETS.values():
        if (preset := NameMap(rules)).unused_rules(names) != list(rules):
            yield preset
    yield from _composed(names)
    shorter = NameMap()
    for _ in range(_MAX_PREFIXES):
        firsts = {shorter(name).partition(".")[::2] for name in names}
        heads = {head for head, rest in firsts if rest}
        if len(heads) != 1 or any(not rest for _, rest in firsts):
            break
        shorter = shorter.prefix(f"{heads.pop()}.", "")
        yield shorter
    yield NameMap().prefix("", "model.")


def _composed(names: Sequence[str]) -> Iterator[NameMap]:
    """Yield a map of all presets that change something, each as often as it does."""
    composed, current = NameMap(), list(names)
    num_presets = 0
    while num_presets < len(PRESETS):
        for rules in PRESETS.values():
            used = [rule for rule in rules if rule not in NameMap([rule]).unused_rules(current)]
            if used:
                composed = NameMap((*composed.rules, *used))
                current = list(map(NameMap(used), current))
                num_presets += 1
                break
        else:
            break
        if num_presets > 1:
            yield composed


def _changed_prefix(comparison: Comparison) -> NameMap | None:
    """Return the map by which a name that is left over becomes one that is missing."""
    if not (comparison.left_over and comparison.missing):
        return None
    have = comparison.left_over[0].name
    need = max(
        (spec.name for spec in comparison.missing),
        key=lambda name: (_common_end(have, name), -len(name)),
    )
    end = _common_end(have, need)
    if not end:
        return None
    return NameMap().prefix(have[: len(have) - end], need[: len(need) - end])


def _common_end(one: str, other: str) -> int:
    """Return the length of the whole parts between dots in which two names end alike."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(".".join(part for part, _ in same))
