"""Rules that would mend names that do not fit, for the messages of errors."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dbuffer.errors import DBufferError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.comparison import Comparison, compare
from dbuffer.weights.names import NameMap
from dbuffer.weights.rules import PRESETS

_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


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

    unknown = [spec.name for spec in comparison.left_over]
    text = advice(sorted(published.all_names), fits, _changed_prefixes(comparison), unknown=unknown)
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
        # An error: several tensors would get one name, for instance.
        with contextlib.suppress(DBufferError):
            if fits(candidate):
                return f"; with rename=dbuffer.{candidate!r} of the sender, they would fit"
    if any(map(_FUSED.fullmatch, names if unknown is None else unknown)):
        return (
            "; the published experts are fused, as in a module of transformers 5: send the module "
            "itself, with as_checkpoint=True, and not its state_dict()"
        )
    return ""


def _candidates(names: Sequence[str]) -> Iterator[NameMap]:
    """Yield maps for what wrappers and trainers put into names, and one for ``model.``."""
    composed, current = NameMap(), list(names)
    for _ in PRESETS:
        presets = (
            [rule for rule in rules if not NameMap([rule]).unused_rules(current)]
            for rules in PRESETS.values()
        )
        if not (used := next(filter(None, presets), [])):
            break
        composed = NameMap((*composed.rules, *used))
        current = list(map(NameMap(used), current))
        yield composed
    shorter = NameMap()
    for parts in itertools.islice(zip(*(n.split(".")[:-1] for n in names), strict=False), 3):
        if len(set(parts)) > 1:
            break
        shorter = shorter.prefix(f"{parts[0]}.", "")
        yield shorter
    yield NameMap().prefix("", "model.")


def _changed_prefixes(comparison: Comparison) -> Iterator[NameMap]:
    """Yield a map that makes a missing name of a name that is left over, if there is one."""
    if comparison.left_over and comparison.missing:
        have = comparison.left_over[0].name
        missing = (spec.name for spec in comparison.missing)
        need = max(missing, key=lambda name: (_common_end(have, name), -len(name)))
        if end := _common_end(have, need):
            yield NameMap().prefix(have[:-end], need[:-end])


def _common_end(one: str, other: str) -> int:
    """Return the length of the longest common ending of two names, in whole parts between dots."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(".".join(part for part, _ in same))
