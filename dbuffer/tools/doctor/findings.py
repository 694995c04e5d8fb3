"""`Finding`: the result of a probe, and how dbuffer adapts to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    probe: str = field(default="", kw_only=True)
    verdict: Verdict
    """``good``: it works; ``adapted``: it does not work, and dbuffer does without; ``broken``: it
    does not work, and a guarantee cannot hold; ``unknown``: it could not be determined."""
    result: str
    consequence: str
    """Consequence for dbuffer and its users."""
    guarantee: int | None = None
    """Number in `GUARANTEES` of the guarantee that cannot hold; None unless broken."""

    def of(self, probe: str, guarantee: int | None = None) -> Finding:
        """Return the finding with its probe, and the guarantee that fails with it."""
        is_broken = self.verdict == "broken"
        return replace(self, probe=probe, guarantee=guarantee if is_broken else None)


good = functools.partial(Finding, "good")
adapted = functools.partial(Finding, "adapted")
broken = functools.partial(Finding, "broken")
unknown = functools.partial(Finding, "unknown")


def duration(duration_ms: float) -> str:
    """Return milliseconds as text for people."""
    return f"{duration_ms:.1f} ms" if duration_ms < 1e3 else f"{duration_ms / 1e3:.1f} s"
