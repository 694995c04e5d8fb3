"""Comparison of a store's tensors with a model's, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.names import NameMap, Rename, renamed
from dbuffer.weights.rules import Rule


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
    renamed: dict[str, tuple[str, ...]]
    """Names in the store of each tensor that a rule changed, by its new name."""
    sources: dict[str, int]
    """Index of the published tensor that fills each name of the model."""
    unused_rules: list[Rule]
    """Rules that no name in the store fits."""

    @property
    def fits(self) -> bool:
        """Whether a load that is strict about names and shapes would succeed."""
        return not (self.missing or self.left_over or self.differing)


def compare(
    published: Layout, needed: Iterable[TensorSpec], rename: Rename | None = None
) -> Comparison:
    """Compare a version with a model's tensors.

    A tied tensor was published once, under several names: any of them will do.
    """
    index_of = {spec.name: index for index, spec in enumerate(published.specs)}
    index_of |= {alias: index_of[name] for alias, name in published.aliases.items()}
    specs = {name: published.specs[index] for name, index in index_of.items()}
    offered, renamed_from, unused_rules = _renamed_specs(specs, rename)
    # Several names may be parts of one tensor: the number of the part tells them apart.
    origins: dict[str, tuple[int, int]] = {}
    num_parts: Counter[str] = Counter()
    for name in offered:
        source = renamed_from.get(name, (name,))[0]
        origins[name] = index_of[source], num_parts[source]
        num_parts[source] += 1
    of_model = {spec.name: spec for spec in needed}
    matching, differing, recast = [], [], []
    # Equal tensors get no pair: 18,000 pairs would start the garbage collector.
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
    used = {origins[name] for name in offered if name in of_model}
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
        renamed=renamed_from,
        sources={name: index for name, (index, _) in origins.items() if name in of_model},
        unused_rules=unused_rules,
    )


def _renamed_specs(
    specs: dict[str, TensorSpec], rename: Rename | None
) -> tuple[dict[str, TensorSpec], dict[str, tuple[str, ...]], list[Rule]]:
    """Return specs by new name, old names of changed tensors, and unused rules."""
    if isinstance(rename, NameMap) and rename.changes_tensors:
        return _converted_specs(specs, rename)
    offered: dict[str, TensorSpec] = {}
    renamed_from: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        new = renamed(name, rename)
        if new in offered:
            raise InvalidWeightsError(
                f"rename gives two tensors the name {new!r:.200}; one of them is {name!r}"
            )
        offered[new] = spec if spec.name == new else spec._replace(name=new)
        if new != name:
            renamed_from[new] = (name,)
    return offered, renamed_from, rename.unused_rules(specs) if isinstance(rename, NameMap) else []


def _converted_specs(
    specs: dict[str, TensorSpec], rename: NameMap
) -> tuple[dict[str, TensorSpec], dict[str, tuple[str, ...]], list[Rule]]:
    from dbuffer.io.tensors import DTYPE_NAMES, DTYPES
    from dbuffer.weights.conversion import Conversion

    unused: list[Rule] = []
    conversion = Conversion.trace(
        lambda tensors: rename.convert(tensors, unused),
        {name: (DTYPES[spec.dtype], spec.shape) for name, spec in specs.items()},
    )
    outputs = conversion.outputs
    return (
        {name: TensorSpec(name, DTYPE_NAMES[it.dtype], it.shape) for name, it in outputs.items()},
        {name: it.sources for name, it in outputs.items() if not it.is_unchanged(name)},
        unused,
    )
