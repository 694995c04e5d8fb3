"""Names: from those of a trainer's tensors to those that an engine expects.

Whatever takes a ``rename`` takes a :class:`NameMap`, a plain mapping of names, or a function.
"""

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
"""A mapping file of 100,000 tensors with all that others write into theirs is smaller."""


@dataclass(frozen=True, slots=True)
class Exact:
    """One name becomes another."""

    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of names becomes another; ``Prefix("", "model.")`` is put before all."""

    prefix: str
    to: str


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""Names of which the whole fits a regular expression; ``to`` may use its groups, as ``\1``.

    Raises:
        OptionError: (a ``ValueError``) it is not a regular expression, or has no such group.
    """

    pattern: str
    to: str

    def __post_init__(self) -> None:
        """Raise now, rather than in the middle of a publish."""
        try:
            # With an empty alternative, there is a match to expand without a name that fits.
            empty = re.compile(f"{self.pattern}|").fullmatch("")
            if empty is not None:
                empty.expand(self.to)
        except (re.error, IndexError, TypeError) as error:
            raise OptionError(f"invalid rule {self.pattern!r} to {self.to!r}: {error}") from None


Rule: TypeAlias = Exact | Prefix | Pattern
Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


class NameMap:
    """Renames by rules: the first that fits a name; a name that none fits stays.

    Args:
        rules: in the order in which they are tried.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
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

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        r"""Read a mapping file, which is JSON and comes in two forms.

        ``{"rules": [...]}`` has rules in their order, each ``{"name": "a", "to": "b"}``,
        ``{"prefix": "model.", "to": ""}`` or ``{"pattern": "(.*)\\.gamma", "to": "\\1.weight"}``.
        ``{"param_mappings": {"a": {"vllm_name": "b"}}}`` is Atropos' (whatever else it says of a
        tensor is passed over).

        Raises:
            OptionError: (a ``ValueError``) there is no such file, or it is something else.
        """
        return cls.parse(read_mapping_file(path), os.fspath(path))

    @classmethod
    def parse(cls, content: Any, source: str) -> Self:
        """Make one of what a mapping file holds; ``source`` is for the message.

        Raises:
            OptionError: (a ``ValueError``) it is something else.
        """
        return cls(_parse(content, source))

    def as_json(self) -> dict[str, Any]:
        """What a mapping file with these rules holds."""
        return {"rules": [asdict(rule) for rule in self.rules]}

    def __call__(self, name: str) -> str:
        found = self._find(name)
        return name if found is None else found[1]

    def unused_rules(self, names: Iterable[str]) -> list[Rule]:
        """Rules that rename none of these names, probably misspelt."""
        used = {found[0] for name in names if (found := self._find(name)) is not None}
        return [rule for index, rule in enumerate(self.rules) if index not in used]

    def _find(self, name: str) -> tuple[int, str] | None:
        """Which rule fits first, and the new name. Exact ones, of which many are, are looked up."""
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
    """What is in a mapping file; :meth:`NameMap.parse` makes a map of it."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise OptionError(f"{file} has more than {MAX_FILE_BYTES} bytes: not a mapping file")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"cannot read names from {file}: {error}") from None


def renamed(name: str, rename: Rename | None) -> str:
    """A tensor's new name."""
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
