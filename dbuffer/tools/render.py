"""Output for a terminal: tables, and text made safe to print.

Names, hosts, paths and messages come from other programs, and may contain markup or control
sequences. All of them pass through :func:`printable` or :func:`cell`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.manifest import step_in
from dbuffer.format.places import is_kept
from dbuffer.runtime.messages import format_bytes
from dbuffer.tools.doctor import Examination
from dbuffer.tools.doctor.probes import GUARANTEES
from dbuffer.weights.comparison import Comparison

if TYPE_CHECKING:
    from dbuffer.tools.verification import BufferCheck


def printable(text: object) -> str:
    r"""Return text with control characters written out (``\x1b``), except for line ends."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def cell(text: object) -> Text:
    """Return printable text for a table or a line, without markup."""
    return Text(printable(text).replace("\n", "\\n"))


class PrintableFormatter(logging.Formatter):
    """Formatter of log records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with a traceback if there is one, as printable text."""
        return printable(super().format(record))


def format_age(age_s: float | None) -> str:
    """Return seconds in the largest unit in which they are at least one."""
    if age_s is None:
        return ""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{max(age_s, 0.0):.1f} s"


def status_tables(status: dict[str, Any]) -> RenderableType:
    """Return a store's status as tables."""
    version = status["version"]
    newest = "nothing published yet" if version is None else f"version {version}"
    head = f"{status['store']} ({status['filesystem']}): {newest}; {_describe_writer(status)}"
    buffers = Table(
        "buffer", "state", "version", "tensors", "size", "published", "checksums", "held by"
    )
    for buffer in status["buffers"]:
        buffers.add_row(*map(cell, _buffer_row(buffer)))
    if not status["receivers"]:
        return Group(cell(head), buffers, "no receiver yet")
    columns = [_receiver_columns(receiver) for receiver in status["receivers"]]
    has_steps = any(each["step"] for each in columns)
    names = [name for name in columns[0] if name != "step" or has_steps]
    receivers = Table(*names)
    for each in columns:
        receivers.add_row(*(cell(each[name]) for name in names))
    problems = [
        cell(f"{receiver['receiver']} reports: {receiver['problem']}")
        for receiver in status["receivers"]
        if receiver["problem"] is not None
    ]
    return Group(cell(head), buffers, receivers, *problems)


def describe_check(check: BufferCheck) -> str:
    """Return the result of `verify` for one buffer."""
    which = "kept" if is_kept(check.buffer) else "newest" if check.is_newest else "previous"
    head = f"buffer {check.buffer}, version {check.version} ({which}): "
    if check.problems:
        return printable(head + "\n  ".join(["damaged", *check.problems]))
    if check.has_checksums:
        return head + "every byte matches its checksum"
    return head + "records, layout and size are correct; no checksums, so bytes are not verified"


def doctor_table(examination: Examination) -> RenderableType:
    """Return the findings of `doctor`, and below them the guarantees that cannot hold."""
    title = examination.path
    if examination.probed_in != examination.path:
        title += f" (does not exist: probed in {examination.probed_in})"
    table = Table("", "probed", "result", "consequence")
    for finding in examination.findings:
        mark, style = _VERDICTS[finding.verdict]
        row = (mark, finding.probe, finding.result, finding.consequence)
        table.add_row(*map(cell, row), style=style)
    problems = [
        cell(
            f"guarantee {number} ({GUARANTEES[number]}) cannot hold here: {finding.probe}: "
            f"{finding.result}"
        )
        for finding in examination.broken
        if (number := finding.guarantee) is not None
    ]
    return Group(cell(f"{title}, on {examination.host}"), table, *problems)


def comparison_table(comparison: Comparison, title: str, suggestion: str = "") -> RenderableType:
    """Return the number of tensors that match, and the names of those that do not.

    ``suggestion`` ends the summary.
    """
    table = Table("", "tensor", "published", "needed", title=cell(title))
    for spec, needed in comparison.differing:
        table.add_row("differs", *map(cell, (spec.name, _kind(spec), _kind(needed))))
    for spec in comparison.missing:
        table.add_row("missing", *map(cell, (spec.name, "", _kind(spec))))
    for spec in comparison.left_over:
        table.add_row("left over", *map(cell, (spec.name, _kind(spec), "")))
    for spec, needed in comparison.recast:
        table.add_row("is cast", *map(cell, (spec.name, _kind(spec), _kind(needed))))
    for name, old in comparison.renamed.items():
        table.add_row("renamed", *map(cell, (name, ", ".join(old), "")))
    unused = [cell(f"no name matches the rule {rule}") for rule in comparison.unused_rules]
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
    return Group(*([table] if table.rows else []), *unused, Text(summary + suggestion))


def layout_table(layout: Layout, title: str) -> RenderableType:
    """Return all tensors, with the other names of tied ones."""
    table = Table("name", "dtype", "shape", "bytes", title=cell(title))
    for spec in layout.specs:
        shape = "x".join(map(str, spec.shape)) or "scalar"
        table.add_row(*map(cell, (spec.name, spec.dtype, shape, format_bytes(spec.num_bytes))))
    for alias, name in layout.aliases.items():
        table.add_row(*map(cell, (alias, "", f"tied to {name}", "")))
    return table


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


_VERDICTS = {
    "good": ("ok", ""),
    "adapted": ("note", "yellow"),
    "unknown": ("?", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


def _describe_writer(status: dict[str, Any]) -> str:
    writer = status["writer"]
    if writer is None:
        return "never opened by a sender"
    state = "sender" if writer["is_alive"] else "last sender (ended):"
    return f"{state} process {writer['pid']} on {writer['host']}, epoch {writer['epoch']}"


def _buffer_row(buffer: dict[str, Any]) -> tuple[str, ...]:
    return (
        "" if is_kept(buffer["buffer"]) else buffer["buffer"],
        buffer["state"],
        _or_blank(buffer["version"]),
        str(buffer["num_tensors"]),
        _size_of(buffer),
        format_age(buffer["age_s"]),
        "yes" if buffer["has_checksums"] else "no",
        ", ".join(buffer["held_by"]),
    )


def _size_of(buffer: dict[str, Any]) -> str:
    """Return the size of a version; for a delta, without its anchor."""
    if buffer["is_whole"]:
        return format_bytes(buffer["file_bytes"])
    return f"{buffer['num_deltas']} deltas, {format_bytes(buffer['delta_bytes'])}"


def _receiver_columns(receiver: dict[str, Any]) -> dict[str, str]:
    name = receiver["receiver"]
    if receiver["part_of"] is not None:
        name = f"  {name.removeprefix(receiver['part_of'] + '.')}"
    return {
        "receiver": name if receiver["is_alive"] else f"{name} (ended)",
        "host": receiver["host"],
        "pid": str(receiver["pid"]),
        "applied": _or_blank(receiver["applied_version"]),
        "step": _or_blank(step_in(receiver["metadata"])),
        "behind by": _lag_of(receiver),
        "staged": _or_blank(receiver["staged_version"]),
        "updated": format_age(receiver["updated_age_s"]),
    }


def _lag_of(receiver: dict[str, Any]) -> str:
    if receiver["only_version"] is not None:
        return "stays"
    steps = receiver["lag_steps"]
    return _or_blank(receiver["lag_versions"]) + ("" if steps is None else f" ({steps} steps)")


def _or_blank(value: float | None) -> str:
    return "" if value is None else str(value)
