"""Output for people: lines of text, and tables of the dictionaries that `--json` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.tools.terminal import printable


def line(text: object) -> RenderableType:
    """Return a line of plain text. rich does not interpret markup in the line."""
    return Text(_printable_line(text), overflow="fold")


def _printable_line(text: object) -> str:
    return printable(text).replace("\n", "\\n")


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> RenderableType:
    """Return a table of dictionaries with the same keys, without empty columns.

    ``columns`` are the keys to show, the most important key first. Default: all keys.
    """
    keys = columns or rows[0]
    cells = {key: [_printable_line(_cell(key, row[key])) for row in rows] for key in keys}
    titles = {key: key.removesuffix("_s").replace("_", " ") for key in cells}
    return _FittingTable([[titles[key], *cells[key]] for key in cells if any(cells[key])])


_GAP = 2  # between columns
_WORD = 9
"""Smallest width of a column. Longer words, such as tensor names, are folded."""


@dataclasses.dataclass
class _FittingTable:
    """Table that fits a narrow terminal: it folds cells at spaces, and drops the last columns."""

    columns: list[list[str]]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        drawn = Table(box=None, padding=(0, _GAP, 0, 0))
        widths = self._widths(options.max_width)
        for (title, *_cells), width in zip(self.columns, widths, strict=False):
            drawn.add_column(title, overflow="fold", width=width)
        for row in zip(*(cells[1:] for cells in self.columns[: len(widths)]), strict=True):
            drawn.add_row(*map(line, row))
        yield drawn

    def _widths(self, room: int) -> list[int]:
        words = [[word for text in column for word in text.split()] for column in self.columns]
        minimums = [min(_WORD, max(map(cell_len, column))) for column in words]
        while len(minimums) > 2 and sum(minimums) + _GAP * len(minimums) > room:
            minimums.pop()
        widths = [max(map(cell_len, column)) for column in self.columns[: len(minimums)]]
        while sum(widths) + _GAP * len(widths) > room and widths != minimums:
            widest = max(range(len(widths)), key=lambda i: widths[i] - minimums[i])
            widths[widest] -= 1
        return widths


def _cell(key: str, value: object) -> str:
    match value:
        case None | False:
            return ""
        case True:
            return "yes"
        case list() | tuple():
            return ", ".join(map(str, value))
        case float() if key.endswith("_s"):
            return _format_age(value)
        case int() if key.endswith("_bytes"):
            return format_bytes(value)
    return str(value)


def _format_age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{age_s:.1f} s"


_BUFFER = (
    *("buffer", "state", "version", "num_tensors", "file_bytes", "num_deltas", "age_s"),
    *("has_checksums", "held_by", "run", "run_name"),
)
_RECEIVER = (
    *("receiver", "part_of", "host", "pid", "has_ended", "applied_version", "copied_version"),
    *("only_version", "has_forked", "step", "lag_versions", "lag_steps", "staged_version"),
    *("device_bytes", "memory_bytes", "updated_age_s"),
)


def status_parts(status: dict[str, Any]) -> list[RenderableType]:
    """Return the lines and tables of a status: problems, versions, receivers."""
    version, writer = status["version"], status["writer"]
    newest = "nothing published yet" if version is None else f"version {version}"
    title = f"{status['store']} ({status['filesystem']}): {newest}"
    if writer is not None:
        role, process = writer["role"], f"pid {writer['pid']} on {writer['host']}"
        title += f"; {role} {process}" if writer["is_alive"] else f"; no {role} (last: {process})"
    parts = list(map(line, [title, *status["problems"]]))
    if status["buffers"]:
        parts.append(table(status["buffers"], *_BUFFER))
    for buffer in status["buffers"]:
        if buffer["state"] == "newest" and buffer["deltas_until_anchor"] is not None:
            versions = counted(buffer["deltas_until_anchor"], "version")
            size = format_bytes(buffer["bytes_until_anchor"])
            parts.append(line(f"next anchor after {versions} or {size} of deltas"))
    receivers = [
        {
            **receiver,
            "has_ended": not receiver["is_alive"],
            "step": receiver["metadata"].get("step"),
            # Hide the age of a rank's record: a rank rarely writes its record, even while it runs.
            "updated_age_s": None if receiver["part_of"] else receiver["updated_age_s"],
            "device_bytes": receiver["device_bytes"] or None,
            "memory_bytes": receiver["memory_bytes"] or None,
        }
        for receiver in status["receivers"]
    ]
    return [*parts, table(receivers, *_RECEIVER) if receivers else line("no receiver")]


def layout_parts(layout: dict[str, Any]) -> list[RenderableType]:
    """Return a table of a layout's tensors, and a line for each second name of a tied tensor."""
    tensors = [table(layout["tensors"])] if layout["tensors"] else []
    tied = [f"{alias} is tied to {name}" for alias, name in layout["aliases"].items()]
    return [*tensors, *map(line, tied)]


def verification_parts(checks: list[dict[str, Any]]) -> list[RenderableType]:
    """Return a table of verified buffers with their damage, and notes on missing checksums."""
    notes = [
        f"version {check['version']} has no checksums, so the bytes of its tensors were not checked"
        for check in checks
        if not check["has_checksums"] and not check["problems"]
    ]
    return [table(checks), *map(line, notes)]


def server_parts(answer: dict[str, Any]) -> list[RenderableType]:
    """Return a line that says whether a server passed the check, and a table of its replicas."""
    serves = "serves" if answer["is_verified"] else "does not serve"
    title = f"{answer['engine']} {serves} verified weights of version {answer['id'].number}"
    return [line(title), table(answer["replicas"])]
