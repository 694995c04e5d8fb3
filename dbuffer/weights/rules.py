"""`Rule`: one step from a trainer's tensors to those that an engine expects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dbuffer.errors import InvalidWeightsError, OptionError

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["name", "prefix", "part", "pattern", "split", "stack", "transpose"]

NAME_KINDS = frozenset({"name", "prefix", "part", "pattern"})
"""Kinds of rules that change names alone."""
TENSOR_KINDS = frozenset({"split", "stack", "transpose"})
"""Kinds of rules that change tensors, and not names alone."""


@dataclass(frozen=True, slots=True)
class Rule:
    r"""Rule that gives some tensors a new name, or cuts, joins or transposes them.

    In the texts of the last three kinds, ``*`` stands for any part of a name between dots, and for
    the same part in ``to``. ``#`` stands for a number: the index of a part of a tensor.

    Args:
        kind: ``"name"``: the tensor of this whole name becomes ``to``. ``"prefix"``: names that
            begin with ``text`` begin with ``to``. ``"part"``: parts between dots that are ``text``
            become ``to``, or are left out. ``"pattern"``: names that match a regular expression as
            a whole become ``to``, where ``\1`` is the first group. ``"split"``: a tensor is cut
            along a dimension into equal parts, one for each of several names in ``to``; or, with
            ``#`` in the name, into one tensor for each index, without that dimension. ``"stack"``:
            the reverse: several tensors are joined along a dimension, or with ``#`` stacked into a
            new one. ``"transpose"``: two dimensions are exchanged, and the name stays.
        text: one text; for tensors that are joined, all of their names.
        to: the new name; for a tensor that is cut, all names. Nothing for ``"transpose"``.
        dims: the dimension of a split or stack; the two of a transpose.

    Raises:
        OptionError: (a ``ValueError``) ``text`` is not a regular expression, ``to`` does not fit
            it, or there are other dimensions than the kind has.
    """

    kind: Kind
    text: str | tuple[str, ...]
    to: str | tuple[str, ...] = ""
    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check a rule now, rather than in the middle of a publish."""
        if self.kind == "pattern":
            self._check_pattern()
        elif self.kind == "transpose":
            if len(self.dims) != 2 or self.to:
                raise OptionError(f"invalid rule {self}: a transpose has two dims, and no new name")
        elif self.kind in TENSOR_KINDS:
            self._check_cut()

    def _check_pattern(self) -> None:
        try:
            # With an empty alternative there is a match to expand, without a name that fits.
            empty = re.compile(f"{self.text}|").fullmatch("")
            if empty is not None:
                empty.expand(str(self.to))
        except (re.error, IndexError, TypeError) as error:
            raise OptionError(f"invalid rule {self.text!r} to {self.to!r}: {error}") from None

    def _check_cut(self) -> None:
        whole, parts = (self.text, self.to) if self.kind == "split" else (self.to, self.text)
        texts = (parts,) if isinstance(parts, str) else parts
        num_indices = 1 if isinstance(parts, str) else 0
        if (
            len(self.dims) != 1
            or not isinstance(whole, str)
            or "#" in whole
            or not texts
            or any(text.count("#") != num_indices for text in texts)
            or any(text.count("*") != whole.count("*") for text in texts)
        ):
            raise OptionError(
                f"invalid rule {self}: it has one dimension, a whole tensor, and either a list of "
                "names of its parts or one name with '#' for their index; all names have as many "
                "'*' as the whole"
            )

    @property
    def inverse(self) -> Rule:
        """Rule that undoes this one.

        Raises:
            OptionError: (a ``ValueError``) there is none: the old name is not known from the new.
        """
        if self.kind == "transpose":
            return self
        if self.kind in ("split", "stack"):
            kind: Kind = "stack" if self.kind == "split" else "split"
            return Rule(kind, self.to, self.text, self.dims)
        if self.kind == "pattern" or not self.to:
            why = "its groups may be lost" if self.kind == "pattern" else "every name would fit it"
            raise OptionError(
                f"the rule {self} cannot be inverted, because {why}: write the rule that does it"
            )
        return Rule(self.kind, self.to, self.text)

    def as_json(self) -> dict[str, Any]:
        """Return the rule as a mapping file has it."""
        text, to, dims = (
            list(value) if isinstance(value, tuple) else value
            for value in (self.text, self.to, self.dims)
        )
        if self.kind == "transpose":
            return {self.kind: text, "dims": dims}
        return {self.kind: text, "to": to} | ({"dim": dims[0]} if dims else {})

    @property
    def call(self) -> str:
        """Call of the method of `NameMap` that adds the rule."""
        method = "exact" if self.kind == "name" else self.kind
        values: list[object] = [self.text]
        if self.kind == "transpose":
            values.append(self.dims)
        elif self.to or self.kind != "part":
            values += [self.to, *self.dims]
        return f".{method}({', '.join(map(repr, values))})"

    def __str__(self) -> str:
        return json.dumps(self.as_json())


Change: TypeAlias = Callable[[str], str | None]
"""Function that returns a new name; None: the rule does not fit."""


PRESETS: dict[str, tuple[Rule, ...]] = {
    "_orig_mod.": (Rule("part", "_orig_mod"),),
    "_fsdp_wrapped_module.": (Rule("part", "_fsdp_wrapped_module"),),
    "module.": (Rule("prefix", "module.", ""),),
    "actor.": (Rule("prefix", "actor.", ""),),
    "base_model.model.": (Rule("prefix", "base_model.model.", ""), Rule("part", "base_layer")),
    "model.language_model.": (Rule("prefix", "model.language_model.", "model."),),
}
"""Rules for what trainers put into names, by that text: torch.compile, FSDP1, DDP, an actor beside
a critic, peft, and a vision-language model of which an engine has the language model."""


def preset_rules(name: str, source: str = "preset") -> tuple[Rule, ...]:
    """Return the rules of a preset; ``source`` says in errors where its name is from."""
    if name not in PRESETS:
        raise OptionError(f"{source}: no preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def change_of(rule: Rule) -> Change:
    """Return the function by which a rule changes names."""
    text, to = str(rule.text), str(rule.to)
    if rule.kind == "part":
        end = r"(?=\.|$)" if to else r"\."
        part = re.compile(rf"(?:(?<=\.)|^){re.escape(text)}{end}")

        def without(name: str) -> str | None:
            new, count = part.subn(lambda _: to, name)
            return new if count else None

        return without
    if rule.kind == "prefix":
        return lambda name: to + name[len(text) :] if name.startswith(text) else None
    pattern = re.compile(text)

    def expand(name: str) -> str | None:
        match = pattern.fullmatch(name)
        return None if match is None else match.expand(to)

    return expand


def _glob(text: str) -> re.Pattern[str]:
    """Return the expression of a text with ``*`` and ``#``; the latter is the group ``index``."""
    escaped = re.escape(text).replace(r"\*", r"([^.]+)").replace(r"\#", r"(?P<index>\d+)")
    return re.compile(escaped)


def _stars(match: re.Match[str]) -> tuple[str, ...]:
    """Return what the ``*`` of a text matched."""
    number = match.re.groupindex.get("index")
    return tuple(group for position, group in enumerate(match.groups(), 1) if position != number)


def _fill(text: str, stars: Iterable[str], index: int | None = None) -> str:
    parts = text.split("*")
    filled = parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=True))
    return filled if index is None else filled.replace("#", str(index))


Pairs: TypeAlias = list[tuple[str, "torch.Tensor"]]


def change_tensors(rule: Rule, tensors: Mapping[str, torch.Tensor]) -> tuple[Pairs, bool]:
    """Return tensors with one rule applied, and whether it fits any."""
    if rule.kind == "stack":
        return _stacked(rule, tensors)
    pattern, pairs, does_fit = _glob(str(rule.text)), Pairs(), False
    for name, tensor in tensors.items():
        if (match := pattern.fullmatch(name)) is None:
            pairs.append((name, tensor))
            continue
        does_fit = True
        if any(not -tensor.ndim <= dim < tensor.ndim for dim in rule.dims):
            raise InvalidWeightsError(
                f"the rule {rule} does not fit {name!r}, whose shape is {list(tensor.shape)}"
            )
        if rule.kind == "transpose":
            pairs.append((name, tensor.transpose(*rule.dims)))
        else:
            pairs += _split(rule, name, tensor, _stars(match))
    return pairs, does_fit


def _split(rule: Rule, name: str, tensor: torch.Tensor, stars: tuple[str, ...]) -> Pairs:
    [dim] = rule.dims
    if isinstance(rule.to, str):
        parts = tensor.unbind(dim)
        return [(_fill(rule.to, stars, index), part) for index, part in enumerate(parts)]
    extent, rest = divmod(tensor.shape[dim], len(rule.to))
    if rest:
        raise InvalidWeightsError(
            f"the rule {rule} does not fit {name!r}: {tensor.shape[dim]} in dimension {dim} do not "
            f"divide into {len(rule.to)}"
        )
    parts = tuple(tensor.narrow(dim, index * extent, extent) for index in range(len(rule.to)))
    return [(_fill(to, stars), part) for to, part in zip(rule.to, parts, strict=True)]


def _stacked(rule: Rule, tensors: Mapping[str, torch.Tensor]) -> tuple[Pairs, bool]:
    """Return tensors with those that are joined at the place of their first one."""
    texts = (rule.text,) if isinstance(rule.text, str) else rule.text
    patterns = [_glob(text) for text in texts]
    groups: dict[str, dict[int, torch.Tensor]] = {}
    pairs: list[tuple[str, torch.Tensor | None]] = []
    for name, tensor in tensors.items():
        for number, pattern in enumerate(patterns):
            if (match := pattern.fullmatch(name)) is not None:
                key = _fill(str(rule.to), _stars(match))
                if key not in groups:
                    pairs.append((key, None))
                index = int(match["index"]) if isinstance(rule.text, str) else number
                if index in groups.setdefault(key, {}):
                    raise InvalidWeightsError(
                        f"the rule {rule} makes {key!r} of several tensors, and {name!r} is part "
                        f"{index} as another one is"
                    )
                groups[key][index] = tensor
                break
        else:
            pairs.append((name, tensor))
    joined = {key: _join(rule, key, parts) for key, parts in groups.items()}
    return [(name, joined[name] if t is None else t) for name, t in pairs], bool(groups)


def _join(rule: Rule, name: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    num_parts = max(parts) + 1 if isinstance(rule.text, str) else len(rule.text)
    if missing := [index for index in range(num_parts) if index not in parts]:
        raise InvalidWeightsError(
            f"the rule {rule} makes {name!r} of {num_parts} tensors, and part {missing[0]} is not "
            "among the weights"
        )
    in_order = [parts[index] for index in range(num_parts)]
    [dim] = rule.dims
    import torch  # rules are also read where nothing is converted

    join = torch.stack if isinstance(rule.text, str) else torch.cat
    try:
        return join(in_order, dim)
    except (RuntimeError, IndexError) as error:
        raise InvalidWeightsError(f"the rule {rule} cannot make {name!r}: {error}") from None
