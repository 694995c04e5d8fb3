"""Comparison of a store's tensors with those that a model needs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.names import NameMap, Rename, Rule, renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Matches and mismatches, by the model's names."""

    matching: list[TensorSpec]
    """As published, renamed. Another dtype matches: engines cast as they load."""
    missing: list[TensorSpec]
    """Tensors of the model that the store lacks."""
    left_over: list[TensorSpec]
    """Tensors of the store, renamed, that the model lacks."""
    differing: list[tuple[TensorSpec, TensorSpec]]
    """Same name and another shape: as published, as needed."""
    recast: list[tuple[TensorSpec, TensorSpec]]
    """Matching tensors that have another dtype: as published, as needed."""
    sources: dict[str, int]
    """Index of the published tensor from which each name of the model is filled."""
    unused_rules: list[Rule]
    """Rules that no name in the store fits."""

    @property
    def fits(self) -> bool:
        """Whether a load that is strict about names and shapes would succeed."""
        return not (self.missing or self.left_over or self.differing)

    @property
    def fits_exactly(self) -> bool:
        """Whether `WeightReceiver.load_into` would succeed, which casts nothing."""
        return self.fits and not self.recast


def compare(
    published: Layout, needed: Iterable[TensorSpec], rename: Rename | None = None
) -> Comparison:
    """Compare a version with a model's tensors.

    A tied tensor was published once, under several names: any of them will do.

    Raises:
        InvalidWeightsError: ``rename`` gives two tensors one name.
    """
    index_of = {spec.name: index for index, spec in enumerate(published.specs)}
    index_of |= {alias: index_of[name] for alias, name in published.aliases.items()}
    offered = _renamed_specs(published, index_of, rename)
    origins = dict(zip(offered, index_of.values(), strict=True))
    of_model = {spec.name: spec for spec in needed}
    matching, differing, recast = [], [], []
    # No pair is made for those that are alike: 18,000 of them set the garbage collector going.
    for name, have in offered.items():
        if (need := of_model.get(name)) is None:
            continue
        if have.shape != need.shape:
            differing.append((have, need))
            continue
        matching.append(have)
        if have.dtype != need.dtype:
            recast.append((have, need))
    # Of a tied tensor no name is left over if another is needed.
    used = {index for name, index in origins.items() if name in of_model}
    return Comparison(
        matching=matching,
        missing=[spec for name, spec in of_model.items() if name not in offered],
        left_over=[
            spec
            for name, spec in offered.items()
            if name not in of_model and origins[name] not in used
        ],
        differing=differing,
        recast=recast,
        sources={name: index for name, index in origins.items() if name in of_model},
        unused_rules=rename.unused_rules(index_of) if isinstance(rename, NameMap) else [],
    )


def _renamed_specs(
    published: Layout, index_of: dict[str, int], rename: Rename | None
) -> dict[str, TensorSpec]:
    offered: dict[str, TensorSpec] = {}
    for name, index in index_of.items():
        new = renamed(name, rename)
        if new in offered:
            raise InvalidWeightsError(
                f"rename gives two tensors the name {new!r:.200}; one of them is {name!r}"
            )
        spec = published.specs[index]
        offered[new] = spec if spec.name == new else spec._replace(name=new)
    return offered
