"""`NameMap`: rules that change a trainer's tensor names to an engine's names."""

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
"""Rule, and the function that applies the rule to a name, or None if it changes tensors."""


class NameMap:
    r"""Rules that rename, cut, join or transpose tensors.

    A tensor that no rule matches keeps its name. Each rule applies to the result of the previous
    rules. Consecutive rules for complete names (:meth:`exact`) act as a single rule, a table of
    names. Start with an empty map and add rules in order. Each method returns a new map::

        NameMap().prefix("actor.", "").pattern(r"(.*)\.gamma", r"\1.weight")

    Args:
        rules: the first rules.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Rule, ...]]]:
        return type(self), (self.rules,)  # without `_steps`, whose functions cannot be pickled

    @cached_property
    def _steps(self) -> list[_Step]:
        steps: list[_Step] = []
        for is_table, group in itertools.groupby(self.rules, lambda rule: rule.kind == "name"):
            rules = list(group)
            if is_table:  # up to 100,000 rules; the first rule for a name applies
                table = {str(rule.text): str(rule.to) for rule in reversed(rules)}
                steps.append((rules[0], table.get))
            else:
                changes = (None if rule.kind in TENSOR_KINDS else change_of(rule) for rule in rules)
                steps += zip(rules, changes, strict=True)
        return steps

    def exact(self, name: str, to: str) -> Self:
        """Add a rule that changes the complete name ``name`` to ``to``."""
        return self._with(Rule("name", name, to))

    def prefix(self, prefix: str, to: str) -> Self:
        """Add a rule that replaces a prefix. ``prefix("", "model.")`` only adds a prefix."""
        return self._with(Rule("prefix", prefix, to))

    def part(self, part: str, to: str = "") -> Self:
        """Add a rule that replaces a dot-separated part of names; an empty ``to`` removes it.

        ``part("_orig_mod")`` changes ``layers.0._orig_mod.weight`` to ``layers.0.weight``.
        """
        return self._with(Rule("part", part, to))

    def pattern(self, pattern: str, to: str) -> Self:
        r"""Add a rule that replaces each name that a regular expression matches completely.

        In ``to``, ``\1`` is replaced by the pattern's first group.

        Raises:
            OptionError: (a ``ValueError``) ``pattern`` is not a regular expression, or ``to``
                refers to a group that the pattern does not have.
        """
        return self._with(Rule("pattern", pattern, to))

    def split(self, name: str, to: str | Iterable[str], dim: int = 0) -> Self:
        """Add a rule that cuts tensors along the dimension ``dim``.

        ``split("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])`` cuts a tensor into
        three equal parts. ``split("*.experts.up", "*.experts.#.up.weight")`` cuts a tensor into one
        part per index of the dimension. The parts are views.

        Args:
            name: name of the tensors to cut; ``*`` matches any part of a name between dots.
            to: names of the parts, or a single name with ``#`` in the place of the part's index.
            dim: the dimension to cut.

        Raises:
            OptionError: (a ``ValueError``) ``name`` and ``to`` do not fit each other.
        """
        return self._with(Rule("split", name, to if isinstance(to, str) else tuple(to), (dim,)))

    def stack(self, names: str | Iterable[str], to: str, dim: int = 0) -> Self:
        """Add a rule that joins tensors along the dimension ``dim``: the reverse of :meth:`split`.

        The joined tensor is computed when it is published.
        """
        text = names if isinstance(names, str) else tuple(names)
        return self._with(Rule("stack", text, to, (dim,)))

    def transpose(self, name: str, dims: tuple[int, int] = (0, 1)) -> Self:
        """Add a rule that exchanges two dimensions of each tensor that ``name`` matches."""
        return self._with(Rule("transpose", name, dims=tuple(dims)))

    def preset(self, name: str) -> Self:
        """Add the rules of a preset, whose name is a key of `PRESETS`."""
        return self._with(*preset_rules(name))

    def _with(self, *rules: Rule) -> Self:
        return type(self)((*self.rules, *rules))

    @property
    def changes_tensors(self) -> bool:
        """Whether any rule cuts, joins or transposes tensors, which requires :meth:`convert`."""
        return any(rule.kind in TENSOR_KINDS for rule in self.rules)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a mapping file, which is JSON.

        The file has one of these forms:

        * ``{"rules": [...]}``, with the rules in order. The first key of a rule is the name of the
          method that adds the rule, or ``"name"`` for :meth:`exact`:
          ``{"prefix": "model.", "to": ""}``,
          ``{"stack": ["*.q", "*.k"], "to": "*.qk", "dim": 0}``,
          ``{"transpose": "*.weight", "dims": [0, 1]}``.
        * ``{"param_mappings": {"a": {"vllm_name": "b"}}}``, Atropos' form, which renames ``a`` to
          ``b``. Other fields of a tensor are ignored.

        Raises:
            OptionError: (a ``ValueError``) the file does not exist, or has another form.
        """
        return cls.parse(read_mapping_file(path), os.fspath(path))

    @classmethod
    def parse(cls, content: Any, source: str) -> Self:
        """Make a map from the content of a mapping file, which errors call ``source``."""
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

    def __call__(self, name: str) -> str:
        """Return a tensor's new name.

        Raises:
            UnsupportedError: (a ``NotImplementedError``) a rule cuts, joins or transposes tensors.
        """
        for rule, change in self._steps:
            if change is None:
                raise UnsupportedError(
                    f"the rule {rule} changes tensors, but only names are mapped here: use it "
                    "as rename= of a sender, for weights that are not an iterator"
                )
            name = _changed(name, change)
        return name

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply all rules to tensors; return the new tensors by their new names.

        Raises:
            InvalidWeightsError: two tensors get the same name, or a rule does not fit a shape.
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
                raise InvalidWeightsError(
                    f"rename gives several tensors the same name: {twice[:5]}"
                )
        return converted

    def __repr__(self) -> str:
        return f"NameMap({', '.join(map(str, self.rules))})"


def _changed(name: str, change: Change) -> str:
    new = change(name)
    return name if new is None else new


def read_mapping_file(path: str | os.PathLike[str]) -> Any:
    """Return the decoded JSON of a mapping file."""
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
