"""What a probe found, in words, and what that means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

GUARANTEES = {
    1: "No mix",
    2: "Forward only",
    3: "Crash anywhere",
    4: "One version per engine",
    5: "Nobody waits for ever",
    6: "Bad input is refused",
}
"""As the README numbers them."""

POLLING = "receivers look every poll_interval_s (1 s by default)"

Verdict = Literal["good", "adapted", "broken", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one probe found."""

    probe: str
    verdict: Verdict
    """``good``; ``adapted``: it is not as one would wish, and dbuffer does without; ``broken``: a
    guarantee cannot hold; ``unknown``: it could not be found out."""
    found: str
    consequence: str
    """What dbuffer does about it."""
    guarantee: int | None = None
    """Which one cannot hold, by its number in `GUARANTEES`; None unless broken."""


class Outcome(NamedTuple):
    """A finding that does not know yet which probe made it."""

    verdict: Verdict
    found: str
    consequence: str

    def of(self, probe: str, guarantee: int | None = None) -> Finding:
        """As the finding of a probe, on which this guarantee rests."""
        is_broken = self.verdict == "broken"
        return Finding(
            probe=probe,
            verdict=self.verdict,
            found=self.found,
            consequence=self.consequence,
            guarantee=guarantee if is_broken else None,
        )


def good(found: str, consequence: str) -> Outcome:
    """It works."""
    return Outcome("good", found, consequence)


def adapted(found: str, consequence: str) -> Outcome:
    """It does not, and nothing rests on it."""
    return Outcome("adapted", found, consequence)


def broken(found: str, consequence: str) -> Outcome:
    """It does not, and a guarantee rests on it."""
    return Outcome("broken", found, consequence)


def unknown(found: str, consequence: str) -> Outcome:
    """It could not be found out."""
    return Outcome("unknown", found, consequence)


def size(num_bytes: float) -> str:
    """Bytes, for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def duration(duration_ms: float) -> str:
    """Milliseconds, for people."""
    return f"{duration_ms:.1f} ms" if duration_ms < 1e3 else f"{duration_ms / 1e3:.1f} s"
