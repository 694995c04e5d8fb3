"""`Finding`: result of a probe of a mount, of another host or of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dbuffer.errors import DBufferError, OptionError

Verdict = Literal["good", "adapted", "broken", "unknown"]

Outcome: TypeAlias = tuple[Verdict, str, str]
"""Verdict, result and consequence of a probe, as in its `Finding`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    probe: str
    verdict: Verdict
    """``good``: it works; ``adapted``: it does not work, and dbuffer does without; ``broken``: it
    does not work, and a store would not be safe; ``unknown``: it could not be determined."""
    result: str
    consequence: str
    """Consequence for dbuffer and its users."""


def find(probe: str, run: Callable[[], Outcome], cure: str) -> Finding:
    """Run a probe; if it raises an error, that is its result, and ``cure`` the consequence."""
    try:
        return Finding(probe, *run())
    except OptionError:  # no finding about the place
        raise
    except (DBufferError, OSError) as error:
        return Finding(probe, "broken", str(error), cure)
