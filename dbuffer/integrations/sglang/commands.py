"""What a follower tells an engine's processes: one command, as a tensor that has it for a name.

SGLang hands a ``custom_weight_loader`` what is in an update's tensors, and nothing else. So an
update is one tensor without elements, whose name is the command; each rank then maps the weights
itself, and nothing large goes through SGLang's sockets.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from dbuffer.errors import OptionError
from dbuffer.names import Exact, NameMap, Pattern, Prefix, Rule

NOTHING = "dbuffer_nothing"
"""The method that does nothing."""

_KINDS: dict[str, type[Exact] | type[Prefix] | type[Pattern]] = {
    "exact": Exact,
    "prefix": Prefix,
    "pattern": Pattern,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One call of a method, on all ranks."""

    method: str
    engine_id: str
    """Under which the engine acknowledges."""
    arguments: dict[str, Any]
    rename: list[list[str]] = field(default_factory=list)
    """Rules from the store's names to the engine's; see :func:`rules_of`."""

    def as_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """As what an engine takes."""
        return [(json.dumps(asdict(self)), torch.empty(0, dtype=torch.uint8))]

    def as_payload(self) -> bytes:
        """The same for a process that has never heard of this one.

        Not torch's pickles for other processes: those pass memory on, through a connection.
        """
        return pickle.dumps(self.as_tensors())

    @classmethod
    def parse(cls, tensors: list[tuple[str, torch.Tensor]]) -> Self:
        """From what a loader was given.

        Raises:
            OptionError: (a ``ValueError``) it is no command of ours.
        """
        try:
            [(text, _)] = tensors
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"{len(tensors)} tensors that are no command of dbuffer ({error}): this loader is "
                "for dbuffer.integrations.sglang.follow"
            ) from None


def rules_of(names: NameMap | None) -> list[list[str]]:
    """A map's rules, for JSON: kind, and what becomes what."""
    rules = [] if names is None else list(names.rules)
    kinds = {kind: name for name, kind in _KINDS.items()}
    return [[kinds[type(rule)], *_ends(rule)] for rule in rules]


def map_of(rules: list[list[str]]) -> NameMap | None:
    """The map that has these rules; None if there are none."""
    if not rules:
        return None
    return NameMap(_KINDS[kind](before, after) for kind, before, after in rules)


def _ends(rule: Rule) -> tuple[str, str]:
    if isinstance(rule, Exact):
        return rule.name, rule.to
    return (rule.prefix if isinstance(rule, Prefix) else rule.pattern), rule.to
