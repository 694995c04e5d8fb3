"""`NameMap`: rules that change a trainer's tensor names to an engine's names.

A `Rule` is a step in converting a trainer's names and tensors for an engine.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from msgspec import ValidationError, convert

from dbuffer.errors import InvalidWeightsError, OptionError, UnsupportedError
from dbuffer.runtime import options
from dbuffer.runtime.lazy import cached_property

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["name", "prefix", "part", "pattern", "split", "stack", "transpose"]

NAME_KINDS = frozenset({"name", "prefix", "part", "pattern"})
TENSOR_KINDS = frozenset({"split", "stack", "transpose"})

Names: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that renames, cuts, joins or transposes tensors."""

    kind: Kind
    """Name of the `NameMap` method that adds the rule, or ``"name"`` for `NameMap.exact`."""
    text: Names
    """Name, prefix, part or pattern to match. For a stack, the names of the tensors to join."""
    to: Names = ""
    """Replacement: new name, prefix or part. For a split, the names of the parts."""
    dims: tuple[int, ...] = ()
    """Dimension of a split or stack, or the two dimensions of a transpose."""

    def __post_init__(self) -> None:
        problem = ""
        if self.kind == "pattern":
            try:
                re.sub(str(self.text), str(self.to), "")
            except (re.error, IndexError) as error:
                problem = str(error)
        elif self.kind == "transpose" and (len(self.dims) != 2 or self.to):
            problem = "a transpose needs two dims, and takes no new name"
        elif self.kind in ("split", "stack") and not self._is_cut():
            problem = (
                "it needs a single dim, the name of the whole tensor, and either a list of names "
                "of the parts or a single name with '#' for the part's index; all names must have "
                "the same number of '*'"
            )
        if problem:
            raise OptionError(f"invalid rule {self}: {problem}")

    def _is_cut(self) -> bool:
        name, parts = (self.text, self.to) if self.kind == "split" else (self.to, self.text)
        texts, num_indices = ((parts,), 1) if isinstance(parts, str) else (parts, 0)
        return (
            len(self.dims) == 1
            and isinstance(name, str)
            and "#" not in name
            and bool(texts)
            and all(text.count("#") == num_indices for text in texts)
            and all(text.count("*") == name.count("*") for text in texts)
        )

    def __str__(self) -> str:
        """Return the rule as JSON, as a mapping file contains it."""
        fields: dict[str, Any] = {self.kind: self.text}
        if self.kind == "transpose":
            return json.dumps(fields | {"dims": self.dims})
        return json.dumps(fields | {"to": self.to} | ({"dim": self.dims[0]} if self.dims else {}))


PRESETS: dict[str, tuple[Rule, ...]] = {
    "_orig_mod.": (Rule("part", "_orig_mod"),),
    "_fsdp_wrapped_module.": (Rule("part", "_fsdp_wrapped_module"),),
    "module.": (Rule("prefix", "module.", ""),),
    "actor.": (Rule("prefix", "actor.", ""),),
    "base_model.model.": (Rule("prefix", "base_model.model.", ""), Rule("part", "base_layer")),
    "model.language_model.": (Rule("prefix", "model.language_model.", "model."),),
}
"""Presets: rules that remove a part of trainers' names, keyed by the part. The parts come from (in
this order) torch.compile, FSDP1, DDP, a module with an actor and a critic, peft, and a
vision-language model whose language model is served alone."""


def preset_rules(name: str, source: str = "preset") -> tuple[Rule, ...]:
    """Return the rules of a preset. An error message begins with ``source``."""
    if name not in PRESETS:
        raise OptionError(f"{source}: no preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def parse_rule(fields: Any, source: str) -> tuple[Rule, ...]:
    """Return the rules of an entry in a mapping file. An error message begins with ``source``."""
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
                return (Rule("split", convert(text, str), convert(to, Names), dims),)
            case {"stack": text, "to": to, **rest} if rest.keys() <= {"dim"}:
                dims = (convert(rest.get("dim", 0), int),)
                return (Rule("stack", convert(text, Names), convert(to, str), dims),)
            case {"transpose": text, **rest} if rest.keys() <= {"dims"}:
                pair = convert(rest.get("dims", [0, 1]), tuple[int, ...])
                return (Rule("transpose", convert(text, str), dims=pair),)
    except (ValidationError, UnicodeEncodeError) as error:
        problem = str(error)
    raise OptionError(
        f"{source}: invalid rule {fields!r:.200} ({problem:.100}). A rule has one of these sets of "
        "fields: 'name', 'to'; 'prefix', 'to'; 'part', 'to'; 'pattern', 'to'; 'split', 'to' (text "
        "or list), 'dim'; 'stack' (text or list), 'to', 'dim'; 'transpose', 'dims'; 'preset'"
    )


Change: TypeAlias = Callable[[str], str]
"""Function of a rule: returns a name's new name, or the same name if the rule does not match."""

_Step: TypeAlias = tuple[Rule, Change | None]
"""Rule, and the function that applies it to a name, or None for a rule that changes tensors."""


class NameMap:
    r"""Rules that rename, cut, join or transpose tensors.

    A tensor that no rule matches keeps its name. Each rule applies to the result of the previous
    rules. But several rules for complete names (:meth:`exact`) in a row are one table: only the
    first of them that matches applies. Start with an empty map and add rules in order. Each method
    returns a new map::

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
            if is_table:
                steps.append((rules[0], _change_of_names(rules)))
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
        """Make a map from a mapping file's content. Error messages begin with ``source``."""
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
                    f"the rule {rule} changes tensors, but only names can be changed here: pass "
                    "the map as rename= to a sender, and publish weights that are not an iterator"
                )
            name = change(name)
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
                pairs = [(change(name), tensor) for name, tensor in converted.items()]
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


def _change_of_names(rules: list[Rule]) -> Change:
    """Return the function that applies the first fitting one of rules for complete names."""
    table = {str(rule.text): str(rule.to) for rule in reversed(rules)}  # up to 100,000 rules
    return lambda name: table.get(name, name)


def change_of(rule: Rule) -> Change:
    """Return the function that applies a rule for prefixes, parts or patterns to a name."""
    text, to = str(rule.text), str(rule.to)
    if rule.kind == "prefix":
        return lambda name: to + name[len(text) :] if name.startswith(text) else name
    if rule.kind == "part":
        end = r"(?=\.|$)" if to else r"\."
        part = re.compile(rf"(?:(?<=\.)|^){re.escape(text)}{end}")
        return lambda name: part.sub(lambda _: to, name)
    pattern = re.compile(text)
    return lambda name: match.expand(to) if (match := pattern.fullmatch(name)) else name


Pairs: TypeAlias = list[tuple[str, "torch.Tensor"]]


def change_tensors(rule: Rule, tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """Apply a rule that cuts, joins or transposes tensors; return all tensors with their names."""
    if rule.kind == "stack":
        return _stacked(rule, tensors)
    match_of, pairs = _matcher(str(rule.text)), Pairs()
    for name, tensor in tensors.items():
        if (match := match_of(name)) is None:
            pairs.append((name, tensor))
            continue
        if any(not -tensor.ndim <= dim < tensor.ndim for dim in rule.dims):
            raise InvalidWeightsError(
                f"the rule {rule} does not fit {name!r}, whose shape is {list(tensor.shape)}"
            )
        if rule.kind == "transpose":
            pairs.append((name, tensor.transpose(*rule.dims)))
        else:
            pairs += _split(rule, name, tensor, match[0])
    return pairs


def _matcher(text: str) -> Callable[[str], tuple[list[str], int] | None]:
    """Return a function that matches names with ``text``, which has ``*`` and perhaps a ``#``.

    The function returns a name's parts at each ``*``, and its number at ``#`` (0 without ``#``), or
    None if the name does not match.
    """
    escaped = re.escape(text).replace(r"\*", r"([^.]+)").replace(r"\#", r"(\d+)")
    pattern, place = re.compile(escaped), text.partition("#")[0].count("*")

    def match(name: str) -> tuple[list[str], int] | None:
        if (fit := pattern.fullmatch(name)) is None:
            return None
        parts = list(fit.groups())
        return parts, int(parts.pop(place)) if "#" in text else 0

    return match


def _fill(text: str, stars: Iterable[str], index: int = 0) -> str:
    """Replace each ``*`` in ``text`` by the next item of ``stars``, and ``#`` by ``index``."""
    parts = iter(stars)
    return re.sub(r"[*#]", lambda sign: next(parts) if sign[0] == "*" else str(index), text)


def _split(rule: Rule, name: str, tensor: torch.Tensor, stars: list[str]) -> Pairs:
    [dim] = rule.dims
    if isinstance(rule.to, str):
        parts = tensor.unbind(dim)
        return [(_fill(rule.to, stars, index), part) for index, part in enumerate(parts)]
    extent, remainder = divmod(tensor.shape[dim], len(rule.to))
    if remainder:
        raise InvalidWeightsError(
            f"the rule {rule} does not fit {name!r}: its size {tensor.shape[dim]} in dimension "
            f"{dim} is not divisible by {len(rule.to)}"
        )
    return [
        (_fill(to, stars), tensor.narrow(dim, index * extent, extent))
        for index, to in enumerate(rule.to)
    ]


def _stacked(rule: Rule, tensors: Mapping[str, torch.Tensor]) -> Pairs:
    texts = (rule.text,) if isinstance(rule.text, str) else rule.text
    matchers = list(map(_matcher, texts))
    parts_of: dict[str, dict[int, torch.Tensor]] = {}
    pairs: list[tuple[str, torch.Tensor | None]] = []
    for name, tensor in tensors.items():
        matches = ((place, match_of(name)) for place, match_of in enumerate(matchers))
        place, match = next((pair for pair in matches if pair[1] is not None), (0, None))
        if match is None:
            pairs.append((name, tensor))
            continue
        joined = _fill(str(rule.to), match[0])
        if joined not in parts_of:
            pairs.append((joined, None))
        index = match[1] if isinstance(rule.text, str) else place
        if index in parts_of.setdefault(joined, {}):
            raise InvalidWeightsError(
                f"the rule {rule} joins several tensors to {joined!r}, but {name!r} and another "
                f"tensor are both part {index}"
            )
        parts_of[joined][index] = tensor
    joined_parts = {name: _join(rule, name, parts) for name, parts in parts_of.items()}
    return [(name, joined_parts[name] if t is None else t) for name, t in pairs]


def _join(rule: Rule, name: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    import torch  # here, because some processes read rules without converting tensors

    is_stack, [dim] = isinstance(rule.text, str), rule.dims
    indices = range(max(parts) + 1 if is_stack else len(rule.text))
    if missing := [index for index in indices if index not in parts]:
        raise InvalidWeightsError(
            f"the rule {rule} joins {len(indices)} tensors to {name!r}, but part {missing[0]} is "
            "not among the weights"
        )
    try:
        return (torch.stack if is_stack else torch.cat)([parts[index] for index in indices], dim)
    except (RuntimeError, IndexError) as error:
        raise InvalidWeightsError(f"the rule {rule} cannot make {name!r}: {error}") from None
