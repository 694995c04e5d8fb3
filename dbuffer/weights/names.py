"""`NameMap`: rules that rename tensors, from a trainer's names to those that an engine expects."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from msgspec import ValidationError, convert

from dbuffer.errors import InvalidWeightsError, OptionError, UnsupportedError
from dbuffer.runtime import options
from dbuffer.runtime.lazy import cached_property
from dbuffer.weights.rules import (
    NAME_KINDS,
    TENSOR_KINDS,
    Change,
    Rule,
    change_of,
    change_tensors,
    preset_rules,
)

if TYPE_CHECKING:
    import torch

MAX_FILE_BYTES = 64 << 20
"""A mapping file of 100,000 tensors, with all that other programs write into theirs, is smaller."""


WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that torch.compile, FSDP and activation checkpointing insert into names."""

_wrapper_parts = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPER_PARTS)})\.")

WRAPPER_PREFIX = "module."
"""The prefix that DDP, DataParallel and DeepSpeed add to every name."""


_Names: Any = str | tuple[str, ...]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_Indices: TypeAlias = int | dict[str, int]
"""Index of one rule, or of each rule of a table by the name that it fits."""


class NameMap:
    r"""Rules that rename tensors, and cut, join or transpose them; names that none fits stay.

    Each rule applies to what the rules before it made. Rules for whole names that follow each other
    are one table. Start with an empty map and add rules in their order::

        NameMap().prefix("actor.", "").pattern(r"(.*)\.gamma", r"\1.weight")

    Args:
        rules: the first rules.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Rule, ...]]]:
        return type(self), (self.rules,)  # without functions, which do not pickle

    @cached_property
    def _steps(self) -> list[tuple[Change | Rule, _Indices]]:
        """Functions that rename, or rules that change tensors, and the indices of their rules."""
        steps: list[tuple[Change | Rule, _Indices]] = []
        rules = enumerate(self.rules)
        for is_name, group in itertools.groupby(rules, lambda pair: pair[1].kind == "name"):
            if is_name:  # there may be 100,000: they are looked up
                indices: dict[str, int] = {}
                for index, rule in group:
                    indices.setdefault(str(rule.text), index)
                table = {name: str(self.rules[index].to) for name, index in indices.items()}
                steps.append((table.get, indices))
            else:
                for index, rule in group:
                    change = rule if rule.kind in TENSOR_KINDS else change_of(rule)
                    steps.append((change, index))
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

        Args:
            pattern: a regular expression.
            to: the new name; ``\1`` stands for the first group of the match.

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

        Raises:
            OptionError: (a ``ValueError``) the names do not fit each other.
        """
        text = names if isinstance(names, str) else tuple(names)
        return self._with(Rule("stack", text, to, (dim,)))

    def transpose(self, name: str, dims: tuple[int, int] = (0, 1)) -> Self:
        """Return a map with one more rule: two dimensions of these tensors are exchanged."""
        return self._with(Rule("transpose", name, dims=tuple(dims)))

    def preset(self, name: str) -> Self:
        """Return a map with the rules of a preset, one of `PRESETS`.

        Raises:
            OptionError: (a ``ValueError``) there is no such preset.
        """
        return self._with(*preset_rules(name))

    def _with(self, *rules: Rule) -> Self:
        return type(self)((*self.rules, *rules))

    @property
    def inverse(self) -> Self:
        """Map that undoes this one.

        Raises:
            OptionError: (a ``ValueError``) a rule has no inverse; the message names it.
        """
        return type(self)(rule.inverse for rule in reversed(self.rules))

    @property
    def changes_tensors(self) -> bool:
        """Whether rules cut, join or transpose, so that the map applies to whole sets alone."""
        return any(rule.kind in TENSOR_KINDS for rule in self.rules)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        r"""Read a mapping file: TOML, if its name ends so, or JSON.

        ``{"rules": [...]}`` has rules in their order, each ``{"name": "a", "to": "b"}``,
        ``{"prefix": "model.", "to": ""}``, ``{"part": "_orig_mod", "to": ""}``,
        ``{"pattern": "(.*)\\.gamma", "to": "\\1.weight"}``,
        ``{"split": "*.qkv", "to": ["*.q", "*.k", "*.v"], "dim": 0}``,
        ``{"stack": ["*.q", "*.k", "*.v"], "to": "*.qkv", "dim": 0}``,
        ``{"transpose": "*.weight", "dims": [0, 1]}`` or ``{"preset": "actor."}``.
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
                return cls(rule for fields in rules for rule in _parse_rule(fields, source))
            case {"param_mappings": dict(mappings)}:
                pairs = mappings.items()
                return cls(_parse_mapping(name, entry, source) for name, entry in pairs)
        raise OptionError(
            f"{source} must be an object with a list of 'rules' and nothing else, or with "
            "'param_mappings'"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the content of a mapping file with these rules."""
        return {"rules": [rule.as_json() for rule in self.rules]}

    def __call__(self, name: str) -> str:
        """Return a tensor's new name.

        Raises:
            UnsupportedError: (a ``NotImplementedError``) rules change tensors, not names alone.
        """
        for change, _ in self._steps:
            if isinstance(change, Rule):
                raise UnsupportedError(
                    f"the rule {change} changes tensors, and names alone are mapped here: use it "
                    "as rename= of a sender, for weights that are no iterator"
                )
            new = change(name)
            name = name if new is None else new
        return name

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under their new names, cut, joined and transposed by the rules.

        Raises:
            InvalidWeightsError: two tensors get one name, or a rule does not fit a shape.
        """
        return self._convert(tensors, set())

    def unused_rules(self, tensors: Mapping[str, torch.Tensor] | Iterable[str]) -> list[Rule]:
        """Return the rules that fit none of these tensors or names, and are probably misspelled."""
        used: set[int] = set()
        if isinstance(tensors, Mapping):
            self._convert(tensors, used)
        else:
            for name in tensors:
                self._use(name, used)
        return [rule for index, rule in enumerate(self.rules) if index not in used]

    def _use(self, name: str, used: set[int]) -> None:
        for change, indices in self._steps:
            new = None if isinstance(change, Rule) else change(name)
            if new is not None:
                used.add(_index_in(indices, name))
                name = new

    def _convert(
        self, tensors: Mapping[str, torch.Tensor], used: set[int]
    ) -> dict[str, torch.Tensor]:
        converted = dict(tensors)
        for change, indices in self._steps:
            if isinstance(change, Rule):
                pairs, does_fit = change_tensors(change, converted)
                if does_fit:
                    used.add(_index_in(indices, ""))
            else:
                pairs = []
                for name, tensor in converted.items():
                    new = change(name)
                    if new is not None:
                        used.add(_index_in(indices, name))
                    pairs.append((name if new is None else new, tensor))
            converted = dict(pairs)
            if len(converted) < len(pairs):
                counts = Counter(name for name, _ in pairs)
                twice = [name for name, count in counts.items() if count > 1]
                raise InvalidWeightsError(f"rename gives several tensors one name: {twice[:5]}")
        return converted

    def __repr__(self) -> str:
        return f"NameMap(){''.join(rule.call for rule in self.rules)}"


def _index_in(indices: _Indices, name: str) -> int:
    return indices if isinstance(indices, int) else indices[name]


def read_mapping_file(path: str | os.PathLike[str]) -> Any:
    """Return the content of a mapping file, for :meth:`NameMap.parse`."""
    file = options.path("path", path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise OptionError(f"{file} has more than {MAX_FILE_BYTES} bytes: not a mapping file")
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text(encoding="utf-8"))
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"cannot read names from {file}: {error}") from None


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the parts that wrappers insert."""
    return _wrapper_parts.sub("", name)


def clean_names(names: Iterable[str]) -> list[str]:
    """Return names without wrappers' parts, and without a ``module.`` that all of them have."""
    names = [without_wrappers(name) for name in names]
    while names and all(name.startswith(WRAPPER_PREFIX) for name in names):
        names = [name.removeprefix(WRAPPER_PREFIX) for name in names]
    return names


def renamed(name: str, rename: Rename | None) -> str:
    """Return a tensor's new name.

    Raises:
        InvalidWeightsError: ``rename`` returned something else than a string.
    """
    if rename is None:
        return name
    new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if not isinstance(new, str):
        raise InvalidWeightsError(
            f"rename returned {new!r:.80} for {name!r}, which is not a string"
        )
    return new


def _parse_rule(fields: Any, source: str) -> tuple[Rule, ...]:
    problem = "unknown fields"
    try:
        match fields:
            case {"preset": str(name), **rest} if not rest:
                return preset_rules(name, source)
            case {"to": str(to), **rest} if len(rest) == 1 and rest.keys() <= NAME_KINDS:
                kind: Any = next(iter(rest))
                return (Rule(kind, convert(rest[kind], str), to),)
            case {"split": text, "to": to, **rest} if rest.keys() <= {"dim"}:
                dims = (convert(rest.get("dim", 0), int),)
                return (Rule("split", convert(text, str), convert(to, _Names), dims),)
            case {"stack": text, "to": to, **rest} if rest.keys() <= {"dim"}:
                dims = (convert(rest.get("dim", 0), int),)
                return (Rule("stack", convert(text, _Names), convert(to, str), dims),)
            case {"transpose": text, **rest} if rest.keys() <= {"dims"}:
                pair = convert(rest.get("dims", [0, 1]), tuple[int, ...])
                return (Rule("transpose", convert(text, str), dims=pair),)
    except (ValidationError, UnicodeEncodeError) as error:
        problem = str(error)
    raise OptionError(
        f"{source}: invalid rule {fields!r:.200} ({problem:.100}): use 'to' and one of name, "
        "prefix, part, pattern (strings), or split, stack ('to' or they are lists, and 'dim' a "
        "number), or transpose (and 'dims'), or preset"
    )


def _parse_mapping(name: str, entry: Any, source: str) -> Rule:
    match entry:
        case {"vllm_name": str(to)}:
            return Rule("name", name, to)
    raise OptionError(f"{source}: param_mappings[{name!r:.200}] has no string 'vllm_name'")
