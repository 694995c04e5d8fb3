"""Results as text and tables: for a terminal, or tab-separated for a pipe.

rich, which draws tables in terminals, is imported only for one.
"""

from __future__ import annotations

import datetime
import itertools
import json
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dbuffer.format.manifest import step_in
from dbuffer.format.places import is_kept
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.tools.terminal import printable, status_line

if TYPE_CHECKING:
    from dbuffer.format.layout import Layout, TensorSpec
    from dbuffer.tools.doctor.finding import Finding
    from dbuffer.tools.verification import BufferCheck
    from dbuffer.weights.comparison import Comparison


@dataclass(frozen=True, slots=True)
class Table:
    """Table whose cells are whole in a pipe, and folded where a terminal is too narrow."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    styles: Sequence[str] = ()
    """Style of each row; empty: none."""
    droppable: tuple[str, ...] = ()
    """Columns that a terminal that is too narrow for all does without."""

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as printable text; each cell is one line."""
        return [tuple(map(_one_line, row)) for row in self.rows]

    def without(self, name: str) -> Table:
        """Return the table without one of its columns."""
        keep = [column != name for column in self.columns]
        rows = [tuple(itertools.compress(row, keep)) for row in self.rows]
        return replace(self, columns=tuple(itertools.compress(self.columns, keep)), rows=rows)

    def fitted(self, width: int) -> Table:
        """Return the table with as many of its droppable columns as fit."""
        columns = zip(self.columns, *self.cells(), strict=True)
        needed = sum(max(map(len, column)) + len(_GAP) for column in columns)
        dropped = next((name for name in self.droppable if name in self.columns), None)
        if needed <= width or dropped is None:
            return self
        return self.without(dropped).fitted(width)


_GAP = "  "

Part = str | Table
"""Part of a result: a line, or a table."""


def print_parts(parts: Iterable[Part]) -> None:
    """Print a result on stdout; the status line goes."""
    status_line.clear()
    if sys.stdout.isatty():
        print("\n".join(terminal_lines(parts, shutil.get_terminal_size().columns)))
        return
    for part in parts:
        rows = [(_one_line(part),)] if isinstance(part, str) else [part.columns, *part.cells()]
        print("\n".join("\t".join(row) for row in rows))


def terminal_lines(parts: Iterable[Part], width: int) -> list[str]:
    """Return a result as lines for a terminal, with control sequences for colors."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, str):
                console.print(Text(_one_line(part), overflow="fold"))
                continue
            table = part.fitted(width)
            drawn = RichTable(box=None, padding=(0, len(_GAP), 0, 0), header_style="bold")
            for column in table.columns:
                drawn.add_column(column, overflow="fold")
            for row, style in itertools.zip_longest(table.cells(), table.styles, fillvalue=""):
                drawn.add_row(*map(Text, row), style=style)
            console.print(drawn)
    return capture.get().rstrip("\n").split("\n")


def format_age(age_s: float | None) -> str:
    """Return seconds in the largest unit in which they are at least one."""
    if age_s is None:
        return ""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{max(age_s, 0.0):.1f} s"


def _one_line(text: object) -> str:
    return printable(text).replace("\n", "\\n")


def status_parts(status: dict[str, Any]) -> list[Part]:
    """Return the status of a store or a bucket: its versions, its receivers, and problems."""
    receivers = status["receivers"]
    table = _receiver_table(receivers, status.get("run")) if receivers else "no receiver"
    tables = [_buffer_table(status), *_objects_of(status), table]
    if _is_bucket(status):
        return [_describe_store(status), *_problems_of(status), *tables]
    return [_describe_store(status), *tables, *_problems_of(status)]


def watch_screen(status: dict[str, Any], columns: int, rows: int) -> list[str]:
    """Return a status as lines that fit on a screen, with what needs attention first.

    Problems come before all else. Receivers that have ended are left out; of the others, those
    with the longest lag come first. What does not fit is counted in the last line.
    """
    live = [receiver for receiver in status["receivers"] if receiver["is_alive"]]
    num_ended = len(status["receivers"]) - len(live)
    problems = terminal_lines(_problems_of({**status, "receivers": live}), columns)
    problems = [line for line in problems if line]
    at_most = rows // 3
    if len(problems) > at_most:
        problems = [*problems[: at_most - 1], f"... {len(problems) - at_most + 1} more such lines"]
    lines = [
        *terminal_lines([_describe_store(status)], columns),
        *problems,
        *terminal_lines([_buffer_table(status, brief=True), *_objects_of(status)], columns),
    ]
    shown = _longest_lag_first(live)
    while True:
        counts = [(len(live) - len(shown), "more receiver"), (num_ended, "ended receiver")]
        rest = ", ".join(counted(count, what) for count, what in counts if count)
        table = (
            terminal_lines([_receiver_table(shown, status.get("run"))], columns) if shown else []
        )
        screen = [*lines, *table, *([f"... {rest}"] if rest else [])]
        if len(screen) <= rows or not shown:
            return screen[:rows]
        shown = shown[: len(shown) - max(1, (len(screen) - rows) // 2)]


def describe_check(check: BufferCheck) -> str:
    """Return the result of `verify` for one buffer."""
    which = "newest" if check.is_newest else "previous"
    if check.buffer is not None and is_kept(check.buffer):
        which = "kept"
    head = f"version {check.version} ({which}): "
    if check.buffer is not None:
        head = f"buffer {check.buffer}, {head}"
    if check.problems:
        return printable(head + "\n  ".join(["damaged", *check.problems]))
    if check.has_checksums:
        return head + "every byte matches its checksum"
    if check.buffer is None:
        return head + "every part matches its digest; no checksums of tensors"
    return head + "records, layout and size are correct; no checksums, so bytes are not verified"


def doctor_parts(place: str, findings: Sequence[Finding]) -> list[Part]:
    """Return the findings of `doctor`."""
    marks = [_VERDICTS[finding.verdict] for finding in findings]
    rows = [
        (mark, finding.probe, finding.result, finding.consequence)
        for (mark, _), finding in zip(marks, findings, strict=True)
    ]
    columns = ("", "probed", "result", "consequence")
    title = f"{place}, on {socket.gethostname()}"
    return [title, Table(columns, rows, styles=[style for _, style in marks])]


def comparison_parts(comparison: Comparison, title: str, suggestion: str = "") -> list[Part]:
    """Return the number of tensors that match, and the names of those that do not.

    ``suggestion`` ends the summary.
    """
    rows: list[tuple[object, ...]] = [
        *(("differs", a.name, _kind(a), _kind(b)) for a, b in comparison.differing),
        *(("missing", spec.name, "", _kind(spec)) for spec in comparison.missing),
        *(("left over", spec.name, _kind(spec), "") for spec in comparison.left_over),
        *(("is cast", a.name, _kind(a), _kind(b)) for a, b in comparison.recast),
        *(("renamed", name, ", ".join(old), "") for name, old in comparison.renamed.items()),
    ]
    differences: list[Part] = [title, Table(("", "tensor", "published", "needed"), rows)]
    unused = [f"no name matches the rule {rule}" for rule in comparison.unused_rules]
    summary = (
        f"{len(comparison.matching)} match, {len(comparison.differing)} differ in shape, "
        f"{len(comparison.missing)} missing, {len(comparison.left_over)} left over"
    )
    if comparison.recast:
        summary += (
            f"; {len(comparison.recast)} of those that match have another dtype, which engines "
            "cast and load_into refuses"
        )
    if comparison.renamed:
        summary += f"; {len(comparison.renamed)} are renamed"
    return [*(differences if rows else []), *unused, summary + suggestion]


def layout_table(layout: Layout) -> Table:
    """Return all tensors, with the other names of tied ones."""
    rows: list[tuple[object, ...]] = [
        (spec.name, spec.dtype, "x".join(map(str, spec.shape)) or "scalar", spec.num_bytes)
        for spec in layout.specs
    ]
    rows += [(alias, "", f"tied to {name}", "") for alias, name in layout.aliases.items()]
    return Table(("name", "dtype", "shape", "bytes"), rows)


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


_VERDICTS = {
    "good": ("ok", ""),
    "adapted": ("note", "yellow"),
    "unknown": ("?", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


def _describe_store(status: dict[str, Any]) -> str:
    version = status["version"]
    newest = "nothing published yet" if version is None else f"version {version}"
    return f"{status['store']} ({status['filesystem']}): {newest}; {_describe_writer(status)}"


def _problems_of(status: dict[str, Any]) -> list[Part]:
    damaged = [
        f"buffer {buffer['buffer']} is damaged: see `dbuffer verify {status['store']}`"
        for buffer in status["buffers"]
        if buffer["state"] == "damaged"
    ]
    reported = [
        f"{receiver['receiver']} reports: {receiver['problem']}"
        for receiver in status["receivers"]
        if receiver["problem"] is not None
    ]
    return [*status.get("problems", []), *damaged, *reported]


def log_parts(log: dict[str, Any]) -> list[Part]:
    """Return the runs of a store, newest first, each with its versions."""
    parts: list[Part] = []
    for run, before in itertools.zip_longest(log["runs"], log["runs"][1:]):
        upon = "an empty store"
        if run["upon"] is not None:
            upon = f"version {run['upon']}" + (f" of run {before['id']}" if before else "")
        name = f" ({run['name']})" if run["name"] else ""
        parts.append(
            f"run {run['id']}{name}: process {run['pid']} on {run['host']}, "
            f"since {_format_time(run['started_at'])}, upon {upon}"
        )
        if run["versions"]:
            parts.append(_log_table(run["versions"]))
    if log["lost"]:
        parts += ["lost, as they do not lead to the newest version:", _log_table(log["lost"])]
    return parts or ["nothing published yet"]


def _log_table(versions: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            f"{each['run']}-{each['version']}",
            each["state"] or "gone",
            _format_time(each["published_at"]),
            json.dumps(each["metadata"]) if each["metadata"] else "",
            ", ".join(each["applied_by"]),
        )
        for each in versions
    ]
    return Table(("version", "state", "published", "metadata", "applied by"), rows)


def _format_time(seconds: float | None) -> str:
    """Return a time on a trainer's clock as people read it."""
    if not seconds:
        return ""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _is_bucket(status: dict[str, Any]) -> bool:
    return "objects" in status


def _objects_of(status: dict[str, Any]) -> list[Part]:
    """Return what a bucket's newest version consists of, and what else is there."""
    if not _is_bucket(status):
        return []
    parts: list[Part] = []
    if status["files"]:
        anchor, deltas = status["files"]["anchor"], status["files"]["deltas"]
        rows = [(f"anchor, version {anchor['version']}", *_sum_of([anchor]))]
        if deltas:
            rows.append(("deltas", *_sum_of(deltas)))
        parts.append(Table(("consists of", "files", "size", "parts"), rows))
    there = status["objects"]
    others = f"{there['num_others']}, {format_bytes(there['num_other_bytes'])}"
    row = (
        there["num_versions"],
        there["num_anchors"],
        there["num_objects"],
        format_bytes(there["num_bytes"]),
        others if there["num_others"] else "",
    )
    columns = ("versions kept", "anchors", "objects", "size", "other objects")
    return [*parts, Table(columns, [row])]


def _sum_of(files: list[dict[str, Any]]) -> tuple[int, str, int]:
    num_bytes = sum(file["num_bytes"] for file in files)
    return len(files), format_bytes(num_bytes), sum(file["num_parts"] for file in files)


def _describe_writer(status: dict[str, Any]) -> str:
    writer = status["writer"]
    if writer is None:
        return "never opened by a sender"
    if _is_bucket(status):
        put = f"put {format_age(writer['put_age_s'])} ago by mirror {writer['mirror']}"
        return f"of run {status['run']}, {put}"
    state = "sender" if writer["is_alive"] else "last sender (ended):"
    return (
        f"{state} process {writer['pid']} on {writer['host']}, "
        f"sender {writer['epoch']} of this store"
    )


def _buffer_table(status: dict[str, Any], *, brief: bool = False) -> Table:
    columns = ("buffer", "state", "version", "tensors", "size", "age", "checksums", "held by")
    return Table(columns, [_buffer_row(each, brief=brief) for each in status["buffers"]])


def _receiver_table(receivers: Sequence[dict[str, Any]], run: str | None) -> Table:
    rows = [_receiver_columns(receiver, run) for receiver in receivers]
    table = Table(
        tuple(rows[0]), [tuple(row.values()) for row in rows], droppable=("pid", "host", "updated")
    )
    return table if any(row["step"] for row in rows) else table.without("step")


def _longest_lag_first(receivers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort receivers by lag, and keep an engine's ranks below it. No version counts as longest."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for receiver in receivers:
        groups.setdefault(receiver["part_of"] or receiver["receiver"], []).append(receiver)

    def lag_of(group: list[dict[str, Any]]) -> float:
        lags = [receiver["lag_versions"] for receiver in group]
        return max(float("inf") if lag is None else lag for lag in lags)

    ordered = sorted(groups.values(), key=lag_of, reverse=True)
    return list(itertools.chain.from_iterable(ordered))


def _buffer_row(buffer: dict[str, Any], *, brief: bool) -> tuple[str, ...]:
    held_by = ", ".join(buffer["held_by"])
    if brief and len(buffer["held_by"]) > 1:
        held_by = f"{len(buffer['held_by'])} receivers"
    return (
        "" if is_kept(buffer["buffer"]) else buffer["buffer"],
        buffer["state"],
        _or_blank(buffer["version"]),
        str(buffer["num_tensors"]),
        _size_of(buffer),
        format_age(buffer["age_s"]),
        "yes" if buffer["has_checksums"] else "no",
        held_by,
    )


def _size_of(buffer: dict[str, Any]) -> str:
    """Return the size of a version; for a delta, without its anchor."""
    if buffer["is_whole"]:
        return format_bytes(buffer["file_bytes"])
    deltas = counted(buffer["num_deltas"], "delta")
    return f"{deltas}, {format_bytes(buffer['delta_bytes'])}"


def _receiver_columns(receiver: dict[str, Any], run: str | None) -> dict[str, str]:
    name = receiver["receiver"]
    if receiver["part_of"] is not None:
        name = f"  {name.removeprefix(receiver['part_of'] + '.')}"
    return {
        "receiver": name if receiver["is_alive"] else f"{name} (ended)",
        "host": receiver["host"],
        "pid": str(receiver["pid"]),
        "applied": _applied_by(receiver),
        "step": _or_blank(step_in(receiver["metadata"])),
        "behind by": _lag_of(receiver, run),
        "staged": _or_blank(receiver["staged_version"]),
        # Of a rank it would look stale: the record of its engine says what all ranks have.
        "updated": "" if receiver["part_of"] else format_age(receiver["updated_age_s"]),
    }


def _applied_by(receiver: dict[str, Any]) -> str:
    """Return the version that a receiver has applied, or a mirror copied."""
    copied = receiver["copied_version"]
    return _or_blank(receiver["applied_version"]) if copied is None else f"{copied} (copied)"


def _lag_of(receiver: dict[str, Any], run: str | None) -> str:
    if receiver["has_forked"]:
        return "forked"
    if receiver["only_version"] is not None:
        return "stays"
    steps = receiver["lag_steps"]
    in_steps = "" if steps is None else f" ({counted(steps, 'step')})"
    if receiver["run"] != run and step_in(receiver["metadata"]) is not None:
        in_steps = " (of another run)"  # whose steps are not compared
    return _or_blank(receiver["lag_versions"]) + in_steps


def _or_blank(value: float | None) -> str:
    return "" if value is None else str(value)
