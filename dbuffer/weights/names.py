"""`NameMap`: rules that rename tensors, from a trainer's names to those that an engine expects."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from dbuffer.errors import InvalidWeightsError, OptionError

MAX_FILE_BYTES = 64 << 20
"""A mapping file of 100,000 tensors, with all that other programs write into theirs, is smaller."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Rule for one name."""

    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """Rule for the beginning of names."""

    prefix: str
    to: str


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""Rule for names that match a regular expression; ``to`` may use its groups, as ``\1``.

    Raises:
        OptionError: (a ``ValueError``) it is not a regular expression, or has no such group.
    """

    pattern: str
    to: str

    def __post_init__(self) -> None:
        """Raise now, rather than in the middle of a publish."""
        try:
            # With an empty alternative there is a match to expand, without a name that fits.
            empty = re.compile(f"{self.pattern}|").fullmatch("")
            if empty is not None:
                empty.expand(self.to)
        except (re.error, IndexError, TypeError) as error:
            raise OptionError(f"invalid rule {self.pattern!r} to {self.to!r}: {error}") from None


Rule: TypeAlias = Exact | Prefix | Pattern
Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


class NameMap:
    r"""Rules that rename tensors. The first rule that fits a name decides; other names stay.

    Start with an empty map and add rules in the order in which they are tried::

        NameMap().exact("score.weight", "head.weight").pattern(r"(.*)\.gamma", r"\1.weight")

    Args:
        rules: the first rules.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        self._exact: dict[str, int] = {}
        self._others: list[tuple[int, Prefix | re.Pattern[str]]] = []
        for index, rule in enumerate(self.rules):
            if isinstance(rule, Exact):
                self._exact.setdefault(rule.name, index)
            elif isinstance(rule, Prefix):
                self._others.append((index, rule))
            else:
                self._others.append((index, re.compile(rule.pattern)))

    def exact(self, name: str, to: str) -> Self:
        """Return a map with one more rule: this name becomes ``to``."""
        return type(self)((*self.rules, Exact(name, to)))

    def prefix(self, prefix: str, to: str) -> Self:
        """Return a map with one more rule: names that begin so begin with ``to``.

        ``prefix("", "model.")`` puts ``model.`` before all names.
        """
        return type(self)((*self.rules, Prefix(prefix, to)))

    def pattern(self, pattern: str, to: str) -> Self:
        r"""Return a map with one more rule: names that match as a whole become ``to``.

        Args:
            pattern: a regular expression.
            to: the new name; ``\1`` stands for the first group of the match.

        Raises:
            OptionError: (a ``ValueError``) not a regular expression, or ``to`` names a group that
                it does not have.
        """
        return type(self)((*self.rules, Pattern(pattern, to)))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        r"""Read a mapping file, JSON in one of two forms.

        ``{"rules": [...]}`` has rules in their order, each ``{"name": "a", "to": "b"}``,
        ``{"prefix": "model.", "to": ""}`` or ``{"pattern": "(.*)\\.gamma", "to": "\\1.weight"}``.
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
        return cls(_parse(content, source))

    def as_json(self) -> dict[str, Any]:
        """Return the content of a mapping file with these rules."""
        return {"rules": [asdict(rule) for rule in self.rules]}

    def __call__(self, name: str) -> str:
        """Return a tensor's new name."""
        match = self._match(name)
        return name if match is None else match[1]

    def unused_rules(self, names: Iterable[str]) -> list[Rule]:
        """Return the rules that rename none of these names, and are probably misspelled."""
        used = {match[0] for name in names if (match := self._match(name)) is not None}
        return [rule for index, rule in enumerate(self.rules) if index not in used]

    def _match(self, name: str) -> tuple[int, str] | None:
        """Return the first rule that fits, by its index, and the new name."""
        # There may be 100,000 exact rules: they are looked up, the others tried one by one.
        exact = self._exact.get(name, len(self.rules))
        for index, rule in self._others:
            if index > exact:
                break
            if isinstance(rule, Prefix):
                if name.startswith(rule.prefix):
                    return index, rule.to + name[len(rule.prefix) :]
            elif (match := rule.fullmatch(name)) is not None:
                return index, match.expand(self.rules[index].to)
        return None if exact == len(self.rules) else (exact, self.rules[exact].to)

    def __repr__(self) -> str:
        return f"NameMap({list(self.rules)!r:.200})"


def read_mapping_file(path: str | os.PathLike[str]) -> Any:
    """Return the content of a mapping file, for :meth:`NameMap.parse`."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise OptionError(f"{file} has more than {MAX_FILE_BYTES} bytes: not a mapping file")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"cannot read names from {file}: {error}") from None


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


_KINDS: dict[str, type[Exact] | type[Prefix] | type[Pattern]] = {
    "name": Exact,
    "prefix": Prefix,
    "pattern": Pattern,
}


def _parse(content: Any, source: str) -> list[Rule]:
    match content:
        case {"rules": list(rules), **rest} if not rest:
            return [_parse_rule(rule, source) for rule in rules]
        case {"param_mappings": dict(mappings)}:
            return [_parse_mapping(name, entry, source) for name, entry in mappings.items()]
    raise OptionError(
        f"{source} must be an object with a list of 'rules' and nothing else, or with "
        "'param_mappings'"
    )


def _parse_rule(rule: Any, source: str) -> Rule:
    if isinstance(rule, dict) and len(rule) == 2 and isinstance(rule.get("to"), str):
        [(kind, what)] = ((key, value) for key, value in rule.items() if key != "to")
        if kind in _KINDS and isinstance(what, str):
            return _KINDS[kind](what, rule["to"])
    raise OptionError(
        f"{source}: invalid rule {rule!r:.200}: use 'to' and one of {', '.join(_KINDS)}, all of "
        "them strings"
    )


def _parse_mapping(name: str, entry: Any, source: str) -> Exact:
    match entry:
        case {"vllm_name": str(to)}:
            return Exact(name, to)
    raise OptionError(f"{source}: param_mappings[{name!r:.200}] has no string 'vllm_name'")
