"""What a store holds against what a model needs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dbuffer.errors import InvalidWeightsError
from dbuffer.layout import Layout, TensorSpec
from dbuffer.names import NameMap, Rename, Rule, renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What fits and what does not, by the model's names."""

    matching: list[TensorSpec]
    """As published, renamed. Another dtype matches: engines cast as they load."""
    missing: list[TensorSpec]
    """What the model needs and the store has not."""
    left_over: list[TensorSpec]
    """What the store has, renamed, and the model has not."""
    differing: list[tuple[TensorSpec, TensorSpec]]
    """Same name and another shape: as published, as needed."""
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

    Raises:
        InvalidWeightsError: ``rename`` gives two tensors one name.
    """
    by_name = {spec.name: spec for spec in published.specs}
    names = [*by_name, *published.aliases]
    specs = [by_name[published.aliases.get(name, name)] for name in names]
    offered: dict[str, TensorSpec] = {}
    for name, spec in zip(names, specs, strict=True):
        new = renamed(name, rename)
        if new in offered:
            raise InvalidWeightsError(f"two tensors become {new!r:.200}; one of them is {name!r}")
        offered[new] = spec._replace(name=new)
    wanted = {spec.name: spec for spec in needed}
    both = [(spec, wanted[name]) for name, spec in offered.items() if name in wanted]
    # Of a tied tensor no name is left over if another is needed.
    used = {specs[index].name for index, name in enumerate(offered) if name in wanted}
    return Comparison(
        matching=[have for have, need in both if have.shape == need.shape],
        missing=[spec for name, spec in wanted.items() if name not in offered],
        left_over=[
            offered[name]
            for index, name in enumerate(offered)
            if name not in wanted and specs[index].name not in used
        ],
        differing=[(have, need) for have, need in both if have.shape != need.shape],
        unused_rules=rename.unused_rules(names) if isinstance(rename, NameMap) else [],
    )
