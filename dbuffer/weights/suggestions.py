"""The prefix that would mend names that do not fit, for the messages of errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dbuffer.errors import DBufferError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.comparison import Comparison, compare
from dbuffer.weights.names import NameMap

_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def suggest(
    published: Layout,
    needed: Sequence[TensorSpec],
    comparison: Comparison,
    *,
    partial: bool = False,
) -> str:
    """Return the end of a message about weights that do not fit; empty if nothing is known."""

    def fits(names: NameMap) -> bool:
        found = compare(published, needed, names)
        return found.fits or (partial and not (found.left_over or found.differing))

    unknown = [spec.name for spec in comparison.left_over]
    return advice(unknown, [spec.name for spec in comparison.missing], fits)


def advice(unknown: Sequence[str], missing: Iterable[str], fits: Callable[[NameMap], bool]) -> str:
    """Return the end of a message about names that do not fit; empty if nothing is known.

    Args:
        unknown: published names that have no place.
        missing: names of the model that were not published.
        fits: whether a map of the names makes them fit.
    """
    # An error: several tensors would get one name, for instance.
    with contextlib.suppress(DBufferError):
        if (prefix := _changed_prefix(unknown, missing)) and fits(NameMap().prefix(*prefix)):
            return f"; with rename=dbuffer.NameMap().prefix{prefix} of the sender, they would fit"
    if any(map(_FUSED.fullmatch, unknown)):
        return (
            "; the published experts are fused, as in a module of transformers 5: send the module "
            "itself, with as_checkpoint=True, and not its state_dict()"
        )
    return ""


def _changed_prefix(unknown: Iterable[str], missing: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefixes of the two names that have the longest end in common, or None."""
    name_with = {
        end: name for name in sorted(missing, key=len, reverse=True) for end in _ends(name)
    }
    common = [(end, name) for name in unknown for end in _ends(name) if end in name_with]
    if not common:
        return None
    end, name = max(common, key=lambda pair: pair[0].count("."))
    return name.removesuffix(end), name_with[end].removesuffix(end)


def _ends(name: str) -> Iterator[str]:
    """Yield the name, and it without its first parts between dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name
