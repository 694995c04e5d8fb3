"""Formatting for messages: lists, counts, errors and bytes."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_MESSAGE = 2000
_MAX_LINE = 500


def listed(items: Sequence[object], separator: str = ", ", *, most: int = 8) -> str:
    """Return the first ``most`` items as text, such as ``a, b and 3 more``."""
    num_more = len(items) - most
    return separator.join(map(str, items[:most])) + (
        f" and {num_more} more" if num_more > 0 else ""
    )


def counted(count: float, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.{_MAX_MESSAGE}}".rstrip(": ")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:_MAX_LINE]


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
