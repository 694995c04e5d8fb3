"""Tables for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dbuffer.comparison import Comparison
from dbuffer.doctor import GUARANTEES, Examination
from dbuffer.layout import TensorSpec
from dbuffer.status import BufferStatus, ReceiverStatus, StoreStatus
from dbuffer.verification import BufferCheck


def format_bytes(num_bytes: float) -> str:
    """Bytes with a decimal unit, as ``1.23 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def format_age(age_s: float | None) -> str:
    """Seconds in the largest unit that leaves a number above one."""
    if age_s is None:
        return ""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{max(age_s, 0.0):.1f} s"


def status_tables(status: StoreStatus) -> RenderableType:
    """A store's status as tables."""
    newest = "nothing published yet" if status.version is None else f"version {status.version}"
    head = f"{status.store} ({status.filesystem}): {newest}; {_describe_writer(status)}"
    buffers = Table(
        "buffer", "state", "version", "tensors", "size", "published", "checksums", "held by"
    )
    for buffer in status.buffers:
        buffers.add_row(*_buffer_row(buffer))
    if not status.receivers:
        return Group(head, buffers, "no receiver came yet")
    receivers = Table("receiver", "host", "pid", "applied", "behind by", "ready", "updated")
    for receiver in status.receivers:
        receivers.add_row(*_receiver_row(receiver))
    problems = [
        Text(f"{receiver.receiver} has a problem with {receiver.problem}")
        for receiver in status.receivers
        if receiver.problem is not None and receiver.is_alive
    ]
    return Group(head, buffers, receivers, *problems)


def describe_check(check: BufferCheck) -> str:
    """What `verify` found in one buffer."""
    which = "newest" if check.is_newest else "previous"
    head = f"buffer {check.buffer}, version {check.version} ({which}): "
    if check.problems:
        return head + "\n  ".join(["damaged", *check.problems])
    if check.has_checksums:
        return head + "every byte is as it was published"
    return head + "records, layout and size are right; no checksums to check its bytes with"


def doctor_table(examination: Examination) -> RenderableType:
    """What `doctor` found, a row for each probe, and below it what cannot hold."""
    # Texts, not strings: paths and error messages may hold what looks like markup.
    title = examination.path
    if examination.probed_in != examination.path:
        title += f" (not there: probed in {examination.probed_in})"
    table = Table("", "probed", "found", "what dbuffer does about it")
    for finding in examination.findings:
        mark, style = _VERDICTS[finding.verdict]
        row = (mark, finding.probe, finding.found, finding.consequence)
        table.add_row(*(Text(text) for text in row), style=style)
    problems = [
        Text(
            f"guarantee {number} ({GUARANTEES[number]}) cannot hold here: {finding.probe}: "
            f"{finding.found}"
        )
        for finding in examination.broken
        if (number := finding.guarantee) is not None
    ]
    return Group(Text(f"{title}, on {examination.host}"), table, *problems)


def comparison_table(comparison: Comparison, title: str) -> RenderableType:
    """What matches by count, and what does not by name."""
    table = Table("", "tensor", "published", "needed", title=title)
    for spec, needed in comparison.differing:
        table.add_row("differs", *map(Text, (spec.name, _kind(spec), _kind(needed))))
    for spec in comparison.missing:
        table.add_row("missing", *map(Text, (spec.name, "", _kind(spec))))
    for spec in comparison.left_over:
        table.add_row("left over", *map(Text, (spec.name, _kind(spec), "")))
    unused = [Text(f"no name fits the rule {rule}") for rule in comparison.unused_rules]
    summary = (
        f"{len(comparison.matching)} match, {len(comparison.differing)} differ in shape, "
        f"{len(comparison.missing)} missing, {len(comparison.left_over)} left over"
    )
    return Group(*([] if comparison.fits else [table]), *unused, Text(summary))


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


_VERDICTS = {
    "good": ("ok", ""),
    "adapted": ("note", "yellow"),
    "unknown": ("?", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


def _describe_writer(status: StoreStatus) -> str:
    writer = status.writer
    if writer is None:
        return "never opened by a sender"
    state = "sender" if writer.is_alive else "last sender, gone:"
    return f"{state} process {writer.pid} on {writer.host}, epoch {writer.epoch}"


def _buffer_row(buffer: BufferStatus) -> tuple[str, ...]:
    return (
        buffer.buffer,
        buffer.state,
        _or_blank(buffer.version),
        str(buffer.num_tensors),
        format_bytes(buffer.file_bytes),
        format_age(buffer.age_s),
        ", ".join(buffer.held_by),
    )


def _receiver_row(receiver: ReceiverStatus) -> tuple[str, ...]:
    name = receiver.receiver
    if receiver.part_of is not None:
        name = f"  {name.removeprefix(receiver.part_of + '.')}"
    return (
        name if receiver.is_alive else f"{name} (gone)",
        receiver.host,
        str(receiver.pid),
        _or_blank(receiver.applied_version),
        _or_blank(receiver.lag_versions),
        _or_blank(receiver.staged_version),
        format_age(receiver.updated_age_s),
    )


def _or_blank(value: int | None) -> str:
    return "" if value is None else str(value)
