"""`NameMap`: rules that rename tensors, from a trainer's names to those that an engine expects."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from dbuffer.errors import InvalidWeightsError, OptionError

MAX_FILE_BYTES = 64 << 20
"""A mapping file of 100,000 tensors, with all that other programs write into theirs, is smaller."""


WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that torch.compile, FSDP and activation checkpointing insert into names."""

_wrapper_parts = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPER_PARTS)})\.")

WRAPPER_PREFIX = "module."
"""The prefix that DDP, DataParallel and DeepSpeed add to every name."""


@dataclass(frozen=True, slots=True)
class Rule:
    r"""Rule that gives some names a new one.

    Args:
        kind: how ``text`` is compared: with the whole name (``"name"``), with its beginning
            (``"prefix"``), or as a regular expression with the whole name (``"pattern"``).
        text: the name, prefix or regular expression.
        to: the new name or prefix. For a pattern, ``\1`` stands for the first group of the match.

    Raises:
        OptionError: (a ``ValueError``) ``text`` is not a regular expression, or ``to`` names a
            group that it does not have.
    """

    kind: Literal["name", "prefix", "pattern"]
    text: str
    to: str

    def __post_init__(self) -> None:
        """Check a pattern now, rather than in the middle of a publish."""
        if self.kind != "pattern":
            return
        try:
            # With an empty alternative there is a match to expand, without a name that fits.
            empty = re.compile(f"{self.text}|").fullmatch("")
            if empty is not None:
                empty.expand(self.to)
        except (re.error, IndexError, TypeError) as error:
            raise OptionError(f"invalid rule {self.text!r} to {self.to!r}: {error}") from None

    def as_json(self) -> dict[str, str]:
        """Return the rule as a mapping file has it."""
        return {self.kind: self.text, "to": self.to}


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
        # There may be 100,000 rules for one name: they are looked up, the others tried one by one.
        self._exact: dict[str, int] = {}
        self._patterns: list[tuple[int, re.Pattern[str], str]] = []
        for index, rule in enumerate(self.rules):
            if rule.kind == "name":
                self._exact.setdefault(rule.text, index)
                continue
            pattern, to = rule.text, rule.to
            if rule.kind == "prefix":
                pattern, to = re.escape(pattern) + "(?s:(.*))", to.replace("\\", r"\\") + r"\1"
            self._patterns.append((index, re.compile(pattern), to))

    def exact(self, name: str, to: str) -> Self:
        """Return a map with one more rule: this name becomes ``to``."""
        return type(self)((*self.rules, Rule("name", name, to)))

    def prefix(self, prefix: str, to: str) -> Self:
        """Return a map with one more rule: names that begin so begin with ``to``.

        ``prefix("", "model.")`` puts ``model.`` before all names.
        """
        return type(self)((*self.rules, Rule("prefix", prefix, to)))

    def pattern(self, pattern: str, to: str) -> Self:
        r"""Return a map with one more rule: names that match as a whole become ``to``.

        Args:
            pattern: a regular expression.
            to: the new name; ``\1`` stands for the first group of the match.

        Raises:
            OptionError: (a ``ValueError``) not a regular expression, or ``to`` names a group that
                it does not have.
        """
        return type(self)((*self.rules, Rule("pattern", pattern, to)))

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
        return {"rules": [rule.as_json() for rule in self.rules]}

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
        exact = self._exact.get(name, len(self.rules))
        for index, pattern, to in self._patterns:
            if index > exact:
                break
            if (match := pattern.fullmatch(name)) is not None:
                return index, match.expand(to)
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
    match rule:
        case {"to": str(to), "name": str(text), **rest} if not rest:
            return Rule("name", text, to)
        case {"to": str(to), "prefix": str(text), **rest} if not rest:
            return Rule("prefix", text, to)
        case {"to": str(to), "pattern": str(text), **rest} if not rest:
            return Rule("pattern", text, to)
    raise OptionError(
        f"{source}: invalid rule {rule!r:.200}: use 'to' and one of name, prefix, pattern, all of "
        "them strings"
    )


def _parse_mapping(name: str, entry: Any, source: str) -> Rule:
    match entry:
        case {"vllm_name": str(to)}:
            return Rule("name", name, to)
    raise OptionError(f"{source}: param_mappings[{name!r:.200}] has no string 'vllm_name'")
