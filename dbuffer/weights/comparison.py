"""Comparison of a store's tensors with a model's, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.errors import InvalidWeightsError
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
    """Return specs by new name, in the same order."""
    offered: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        new = name if rename is None else rename(name)
        if new in offered:
            raise InvalidWeightsError(
                f"rename gives two tensors the name {new!r:.200}; one of them is {name!r}"
            )
        offered[new] = spec if spec.name == new else spec._replace(name=new)
    return offered
