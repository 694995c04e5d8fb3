"""Formatting for messages: lists, counts, errors and bytes."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_MESSAGE = 2000
_MAX_LINE = 500


def listed(items: Sequence[object], separator: str = ", ", *, most: int = 8) -> str:
    """Return the first few items, and the number of the others, for a message."""
    num_more = len(items) - most
    return separator.join(map(str, items[:most])) + (
        f" and {num_more} more" if num_more > 0 else ""
    )


def counted(count: float, noun: str) -> str:
    """Return a number and a noun, which is in the plural unless the number is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def described(error: BaseException) -> str:
    """Return the type and the message of an error. A long message is cut."""
    return f"{type(error).__name__}: {error!s:.{_MAX_MESSAGE}}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:_MAX_LINE]


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a decimal unit, as ``1.23 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
