"""`Finding`: what a probe found, and what dbuffer does about it."""

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
"""As the README numbers them."""

POLLING = "receivers poll every poll_interval_s (1 s by default)"

OnStep = Callable[[str], None]
"""Called with what is done next."""

Verdict = Literal["good", "adapted", "broken", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    probe: str = field(default="", kw_only=True)
    verdict: Verdict
    """``good``: it works; ``adapted``: it does not, and dbuffer does without; ``broken``: it does
    not, and a guarantee cannot hold; ``unknown``: it could not be determined."""
    found: str
    consequence: str
    """What dbuffer does about it."""
    guarantee: int | None = None
    """The one that cannot hold, by its number in `GUARANTEES`; None unless broken."""

    def of(self, probe: str, guarantee: int | None = None) -> Finding:
        """As the finding of a probe, on which this guarantee rests."""
        is_broken = self.verdict == "broken"
        return replace(self, probe=probe, guarantee=guarantee if is_broken else None)


good = functools.partial(Finding, "good")
adapted = functools.partial(Finding, "adapted")
broken = functools.partial(Finding, "broken")
unknown = functools.partial(Finding, "unknown")


def duration(duration_ms: float) -> str:
    """Milliseconds, for people."""
    return f"{duration_ms:.1f} ms" if duration_ms < 1e3 else f"{duration_ms / 1e3:.1f} s"
