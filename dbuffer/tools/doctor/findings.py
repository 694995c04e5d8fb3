"""`Finding`: the result of a probe, and how dbuffer adapts to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

GUARANTEES = {
    1: "No torn reads",
    2: "Monotonic versions",
    3: "Crash safety",
    4: "One version per engine",
    5: "Bounded waiting",
    6: "Bad input is rejected",
}
"""Guarantees by their numbers in the README."""

POLLING = "receivers poll every poll_interval_s (1 s by default)"

OnStep = Callable[[str], None]
"""Function that is called with the next step."""

Verdict = Literal["good", "adapted", "broken", "unknown"]

Outcome: TypeAlias = tuple[Verdict, str, str]
"""Verdict, result and consequence of a probe, as in its `Finding`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    probe: str
    verdict: Verdict
    """``good``: it works; ``adapted``: it does not work, and dbuffer does without; ``broken``: it
    does not work, and a guarantee cannot hold; ``unknown``: it could not be determined."""
    result: str
    consequence: str
    """Consequence for dbuffer and its users."""
    guarantee: int | None
    """Number in `GUARANTEES` of the guarantee that cannot hold; None unless broken."""


def finding(probe: str, outcome: Outcome, guarantee: int | None = None) -> Finding:
    """Return the finding of a probe; ``guarantee`` fails if the outcome is broken."""
    return Finding(probe, *outcome, guarantee if outcome[0] == "broken" else None)
