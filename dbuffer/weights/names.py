"""`NameMap`: rules that rename tensors, from a trainer's names to an engine's."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from dbuffer.errors import InvalidWeightsError, OptionError, UnsupportedError
from dbuffer.runtime import options
from dbuffer.runtime.lazy import cached_property
from dbuffer.weights.rules import (
    TENSOR_KINDS,
    Change,
    Rule,
    change_of,
    change_tensors,
    parse_rule,
    preset_rules,
)

if TYPE_CHECKING:
    import torch

_Step: TypeAlias = tuple[Rule, Change | None]
"""First rule of a step, and the change of names, or None if the rule changes tensors."""


class NameMap:
    r"""Rules that rename tensors, and cut, join or transpose them; names that none fits stay.

    Each rule applies to the result of the rules before it. Rules for whole names in a row are one
    table. Start with an empty map and add rules in their order::

        NameMap().prefix("actor.", "").pattern(r"(.*)\.gamma", r"\1.weight")

    Args:
        rules: the first rules.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Rule, ...]]]:
        return type(self), (self.rules,)  # without functions, which do not pickle

    @cached_property
    def _steps(self) -> list[_Step]:
        """Rules in their order; those for whole names that follow each other are a table."""
        steps: list[_Step] = []
        for is_table, group in itertools.groupby(self.rules, lambda rule: rule.kind == "name"):
            rules = list(group)
            if is_table:  # there may be 100,000; of two for one name, the first applies
                table = {str(rule.text): str(rule.to) for rule in reversed(rules)}
                steps.append((rules[0], table.get))
            else:
                changes = (None if rule.kind in TENSOR_KINDS else change_of(rule) for rule in rules)
                steps += zip(rules, changes, strict=True)
        return steps

    def exact(self, name: str, to: str) -> Self:
        """Return a map with one more rule: this name becomes ``to``."""
        return self._with(Rule("name", name, to))

    def prefix(self, prefix: str, to: str) -> Self:
        """Return a map with one more rule: names that begin so begin with ``to``.

        ``prefix("", "model.")`` puts ``model.`` before all names.
        """
        return self._with(Rule("prefix", prefix, to))

    def part(self, part: str, to: str = "") -> Self:
        """Return a map with one more rule: this part between dots becomes ``to``, or is left out.

        ``part("_orig_mod")`` makes ``layers.0.weight`` of ``layers.0._orig_mod.weight``.
        """
        return self._with(Rule("part", part, to))

    def pattern(self, pattern: str, to: str) -> Self:
        r"""Return a map with one more rule: names that match as a whole become ``to``.

        ``pattern`` is a regular expression; in ``to``, ``\1`` stands for its first group.

        Raises:
            OptionError: (a ``ValueError``) not a regular expression, or ``to`` names a group that
                it does not have.
        """
        return self._with(Rule("pattern", pattern, to))

    def split(self, name: str, to: str | Iterable[str], dim: int = 0) -> Self:
        """Return a map with one more rule: tensors of this name are cut along a dimension.

        ``split("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])`` cuts into equal parts;
        ``split("*.experts.up", "*.experts.#.up.weight")`` into one tensor for each index. The parts
        are views.

        Args:
            name: ``*`` stands for any part of a name between dots.
            to: the names of the parts, or one name with ``#`` for their index.
            dim: the dimension.

        Raises:
            OptionError: (a ``ValueError``) the names do not fit each other.
        """
        return self._with(Rule("split", name, to if isinstance(to, str) else tuple(to), (dim,)))

    def stack(self, names: str | Iterable[str], to: str, dim: int = 0) -> Self:
        """Return a map with one more rule, the reverse of :meth:`split`: tensors are joined.

        The result is computed when it is published.
        """
        text = names if isinstance(names, str) else tuple(names)
        return self._with(Rule("stack", text, to, (dim,)))

    def transpose(self, name: str, dims: tuple[int, int] = (0, 1)) -> Self:
        """Return a map with one more rule: two dimensions of these tensors are exchanged."""
        return self._with(Rule("transpose", name, dims=tuple(dims)))

    def preset(self, name: str) -> Self:
        """Return a map with the rules of a preset, one of `PRESETS`."""
        return self._with(*preset_rules(name))

    def _with(self, *rules: Rule) -> Self:
        return type(self)((*self.rules, *rules))

    @property
    def changes_tensors(self) -> bool:
        """Whether rules cut, join or transpose, so that the map applies to whole sets alone."""
        return any(rule.kind in TENSOR_KINDS for rule in self.rules)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a mapping file, which is JSON.

        ``{"rules": [...]}`` has rules in their order, each with its method's name (``"name"`` for
        :meth:`exact`): ``{"prefix": "model.", "to": ""}``, ``{"stack": ["*.q", "*.k"], "to":
        "*.qk", "dim": 0}``, ``{"transpose": "*.weight", "dims": [0, 1]}``.
        ``{"param_mappings": {"a": {"vllm_name": "b"}}}`` is Atropos' form; other fields of a tensor
        are ignored.

        Raises:
            OptionError: (a ``ValueError``) there is no such file, or it has another form.
        """
        return cls.parse(read_mapping_file(path), os.fspath(path))

    @classmethod
    def parse(cls, content: Any, source: str) -> Self:
        """Make a map from a mapping file's content; ``source`` names the file in errors.

        Raises:
            OptionError: (a ``ValueError``) the content has another form.
        """
        match content:
            case {"rules": list(rules), **rest} if not rest:
                return cls(rule for fields in rules for rule in parse_rule(fields, source))
            case {"param_mappings": dict(mappings)}:
                pairs = mappings.items()
                return cls(_parse_mapping(name, entry, source) for name, entry in pairs)
        raise OptionError(
            f"{source} must be an object with a list of 'rules' and nothing else, or with "
            "'param_mappings'"
        )

    def as_json(self) -> dict[str, Any]:
        return {"rules": [rule.as_json() for rule in self.rules]}

    def __call__(self, name: str) -> str:
        """Return a tensor's new name.

        Raises:
            UnsupportedError: (a ``NotImplementedError``) rules change tensors, not names alone.
        """
        for rule, change in self._steps:
            if change is None:
                raise UnsupportedError(
                    f"the rule {rule} changes tensors, and names alone are mapped here: use it "
                    "as rename= of a sender, for weights that are no iterator"
                )
            name = _changed(name, change)
        return name

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under their new names, cut, joined and transposed by the rules.

        Raises:
            InvalidWeightsError: two tensors get one name, or a rule does not fit a shape.
        """
        converted = dict(tensors)
        for rule, change in self._steps:
            if change is None:
                pairs = change_tensors(rule, converted)
            else:
                pairs = [(_changed(name, change), tensor) for name, tensor in converted.items()]
            converted = dict(pairs)
            if len(converted) < len(pairs):
                counts = Counter(name for name, _ in pairs)
                twice = [name for name, count in counts.items() if count > 1]
                raise InvalidWeightsError(f"rename gives several tensors one name: {twice[:5]}")
        return converted

    def __repr__(self) -> str:
        return f"NameMap({', '.join(map(str, self.rules))})"


def _changed(name: str, change: Change) -> str:
    new = change(name)
    return name if new is None else new


def read_mapping_file(path: str | os.PathLike[str]) -> Any:
    """Return the content of a mapping file, for :meth:`NameMap.parse`."""
    file = options.path("path", path)
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"cannot read names from {file}: {error}") from None


def _parse_mapping(name: str, entry: Any, source: str) -> Rule:
    match entry:
        case {"vllm_name": str(to)}:
            return Rule("name", name, to)
    raise OptionError(f"{source}: param_mappings[{name!r:.200}] has no string 'vllm_name'")
