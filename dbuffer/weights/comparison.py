"""Comparison of a store's tensors with a model's, before anything is loaded, and advice on it."""

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
    """Mismatches, by the model's names."""

    missing: list[TensorSpec]
    """Tensors of the model that the store lacks."""
    left_over: list[TensorSpec]
    """Tensors of the store, renamed, that the model lacks."""
    differing: list[tuple[TensorSpec, TensorSpec]]
    """Same name and another shape: as published, as needed."""
    recast: list[tuple[TensorSpec, TensorSpec]]
    """Same name and shape, and another dtype: as published, as needed."""
    sources: dict[str, int]
    """Index of the published tensor that fills each name of the model."""

    @property
    def fits(self) -> bool:
        """Whether a load that is strict about names and shapes would succeed."""
        return not (self.missing or self.left_over or self.differing)


def compare(
    published: Layout, needed: Iterable[TensorSpec], rename: NameMap | None = None
) -> Comparison:
    """Compare a version, with names as ``rename`` makes them, with a model's tensors.

    A tied tensor was published once, under several names: any of them will do.
    """
    index_of = {spec.name: index for index, spec in enumerate(published.specs)}
    index_of |= {alias: index_of[name] for alias, name in published.aliases.items()}
    specs = {name: published.specs[index] for name, index in index_of.items()}
    offered = _renamed_specs(specs, rename)
    origins = dict(zip(offered, index_of.values(), strict=True))
    of_model = {spec.name: spec for spec in needed}
    differing, recast = [], []
    # Equal tensors get no pair: 18,000 pairs would start the garbage collector.
    for name, have in offered.items():
        if (need := of_model.get(name)) is None:
            continue
        if have.shape != need.shape:
            differing.append((have, need))
        elif have.dtype != need.dtype:
            recast.append((have, need))
    # Of a tied tensor no name is left over if another is needed.
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


def _renamed_specs(specs: dict[str, TensorSpec], rename: NameMap | None) -> dict[str, TensorSpec]:
    offered: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        new = name if rename is None else rename(name)
        if new in offered:
            raise InvalidWeightsError(
                f"rename gives two tensors the name {new!r:.200}; one of them is {name!r}"
            )
        offered[new] = spec if spec.name == new else spec._replace(name=new)
    return offered


_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def suggest(
    published: Layout,
    needed: Sequence[TensorSpec],
    comparison: Comparison,
    *,
    partial: bool = False,
) -> str:
    """Return the end of a message about weights that do not fit: advice, if there is any."""

    def fits(names: NameMap) -> bool:
        renamed = compare(published, needed, names)
        return renamed.fits or (partial and not (renamed.left_over or renamed.differing))

    unknown = [spec.name for spec in comparison.left_over]
    return advice(unknown, [spec.name for spec in comparison.missing], fits)


def advice(unknown: Sequence[str], missing: Iterable[str], fits: Callable[[NameMap], bool]) -> str:
    """Return advice on published names that are ``unknown``, and names of a model that are missing.

    ``fits`` tells whether a map of the names makes them fit.
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
