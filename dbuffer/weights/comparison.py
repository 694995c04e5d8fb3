"""Comparison of published tensors with a model before a load, and advice on mismatches."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dbuffer.errors import DBufferError, InvalidWeightsError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.names import NameMap


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
    """Spec in the version and spec in the model of each tensor if only the dtypes differ."""
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
    # A tied tensor has several names. It is left over only if the model has none of the names.
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
    """Return the prefixes of an unknown and a missing name that otherwise are the same."""
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
