"""Results of commands as lines and tables, each from the dictionary that `--json` prints."""

from __future__ import annotations

import datetime
import itertools
import json
from typing import TYPE_CHECKING, Any

from dbuffer.format.manifest import step_in
from dbuffer.format.places import is_kept
from dbuffer.runtime.messages import counted, format_bytes
from dbuffer.tools.terminal import line, table

if TYPE_CHECKING:
    from rich.console import RenderableType


def status_parts(status: dict[str, Any]) -> list[RenderableType]:
    """Return a status: problems first, then the versions and the receivers."""
    version, writer = status["version"], status["writer"]
    newest = "nothing published yet" if version is None else f"version {version}"
    title = f"{status['store']} ({status['filesystem']}): {newest}"
    if writer is not None:
        state = "sender" if writer["is_alive"] else "last sender (ended):"
        title += f"; {state} process {writer['pid']} on {writer['host']}"
        title += f", sender {writer['epoch']} of this store"
    buffers, receivers = status["buffers"], status["receivers"]
    return [
        *map(line, [title, *_problems(status)]),
        *([table(list(map(_buffer_row, buffers)))] if buffers else []),
        table(list(map(_receiver_row, receivers))) if receivers else line("no receiver"),
    ]


def _problems(status: dict[str, Any]) -> list[str]:
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
    return [*status["problems"], *damaged, *reported]


def _buffer_row(buffer: dict[str, Any]) -> dict[str, object]:
    size = format_bytes(buffer["file_bytes"])
    if not buffer["is_whole"]:
        size = f"{counted(buffer['num_deltas'], 'delta')}, {format_bytes(buffer['delta_bytes'])}"
    return {
        "buffer": "" if is_kept(buffer["buffer"]) else buffer["buffer"],
        "state": buffer["state"],
        "version": buffer["version"],
        "tensors": buffer["num_tensors"],
        "size": size,
        "age": format_age(buffer["age_s"]),
        "checksums": "yes" if buffer["has_checksums"] else "no",
        "held by": ", ".join(buffer["held_by"]),
    }


def _receiver_row(receiver: dict[str, Any]) -> dict[str, object]:
    name, engine, copied = (receiver[key] for key in ("receiver", "part_of", "copied_version"))
    if engine is not None:
        name = f"  {name.removeprefix(engine + '.')}"
    return {
        "receiver": name if receiver["is_alive"] else f"{name} (ended)",
        "host": receiver["host"],
        "pid": receiver["pid"],
        "applied": receiver["applied_version"] if copied is None else f"{copied} (copied)",
        "step": step_in(receiver["metadata"]),
        "behind by": _lag(receiver),
        "staged": receiver["staged_version"],
        # Of a rank it would look stale: the record of its engine says what all ranks have.
        "updated": None if engine else format_age(receiver["updated_age_s"]),
    }


def _lag(receiver: dict[str, Any]) -> object:
    if receiver["has_forked"]:
        return "forked"
    if receiver["only_version"] is not None:
        return "stays"
    if receiver["lag_steps"] is None:
        return receiver["lag_versions"]
    return f"{receiver['lag_versions']} ({counted(receiver['lag_steps'], 'step')})"


def format_age(age_s: float | None) -> str:
    """Return seconds in the largest unit in which they are at least one."""
    if age_s is None:
        return ""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{max(age_s, 0.0):.1f} s"


def log_parts(log: dict[str, Any]) -> list[RenderableType]:
    """Return the runs of a store, newest first, each with its versions."""
    parts: list[RenderableType] = []
    for run, before in itertools.zip_longest(log["runs"], log["runs"][1:]):
        upon = "an empty store"
        if run["upon"] is not None:
            upon = f"version {run['upon']}" + (f" of run {before['id']}" if before else "")
        name = f" ({run['name']})" if run["name"] else ""
        parts.append(
            line(
                f"run {run['id']}{name}: process {run['pid']} on {run['host']}, "
                f"since {_format_time(run['started_at'])}, upon {upon}"
            )
        )
        if run["versions"]:
            parts.append(table(list(map(_version_row, run["versions"]))))
    if log["lost"]:
        parts.append(line("lost, as they do not lead to the newest version:"))
        parts.append(table(list(map(_version_row, log["lost"]))))
    return parts or [line("nothing published yet")]


def _version_row(version: dict[str, Any]) -> dict[str, object]:
    return {
        "version": f"{version['run']}-{version['version']}",
        "state": version["state"] or "gone",
        "published": _format_time(version["published_at"]),
        "metadata": json.dumps(version["metadata"]) if version["metadata"] else None,
        "applied by": ", ".join(version["applied_by"]),
    }


def _format_time(seconds: float | None) -> str:
    """Return a time on a trainer's clock as people read it."""
    if not seconds:
        return ""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def layout_parts(layout: dict[str, Any]) -> list[RenderableType]:
    """Return all tensors, with the other names of tied ones."""
    rows = [
        {
            "name": tensor["name"],
            "dtype": tensor["dtype"],
            "shape": "x".join(map(str, tensor["shape"])) or "scalar",
            "bytes": tensor["num_bytes"],
        }
        for tensor in layout["tensors"]
    ]
    for alias, name in layout["aliases"].items():
        rows.append({"name": alias, "dtype": "", "shape": f"tied to {name}", "bytes": None})
    return [table(rows)] if rows else []


def comparison_parts(comparison: dict[str, Any]) -> list[RenderableType]:
    """Return the names of tensors that differ, and the number of those that match."""

    def row(kind: str, name: str, published: object, needed: object) -> dict[str, object]:
        return {"": kind, "tensor": name, "published": published, "needed": needed}

    def pair(kind: str, pair: dict[str, Any]) -> dict[str, object]:
        have, need = pair["published"], pair["needed"]
        return row(kind, need["name"], _kind(have), _kind(need))

    rows = [
        *(pair("differs", each) for each in comparison["differing"]),
        *(row("missing", spec["name"], None, _kind(spec)) for spec in comparison["missing"]),
        *(row("left over", spec["name"], _kind(spec), None) for spec in comparison["left_over"]),
        *(pair("is cast", each) for each in comparison["recast"]),
        *(
            row("renamed", name, ", ".join(old), None)
            for name, old in comparison["renamed"].items()
        ),
    ]
    unused = [f"no name matches the rule {rule}" for rule in comparison["unused_rules"]]
    numbers = {
        "match": "matching",
        "differ in shape": "differing",
        "missing": "missing",
        "left over": "left_over",
    }
    summary = ", ".join(f"{len(comparison[key])} {text}" for text, key in numbers.items())
    if comparison["recast"]:
        summary += (
            f"; {len(comparison['recast'])} of those that match have another dtype, which engines "
            "cast and load_into refuses"
        )
    if comparison["suggestion"]:
        summary += f"; {comparison['suggestion']}"
    return [*([table(rows)] if rows else []), *map(line, [*unused, summary])]


def _kind(spec: dict[str, Any]) -> str:
    return f"{spec['dtype']} {list(spec['shape'])}"


_VERDICTS = {
    "good": ("ok", ""),
    "adapted": ("note", "yellow"),
    "unknown": ("?", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


def doctor_parts(examination: dict[str, Any]) -> list[RenderableType]:
    """Return the findings of `doctor`."""
    marks = [_VERDICTS[finding["verdict"]] for finding in examination["findings"]]
    rows = [
        {
            "": mark,
            "probed": each["probe"],
            "result": each["result"],
            "for you": each["consequence"],
        }
        for (mark, _), each in zip(marks, examination["findings"], strict=True)
    ]
    title = f"{examination['path']}, on {examination['host']}"
    return [line(title), table(rows, [style for _, style in marks])]


def describe_check(check: dict[str, Any]) -> str:
    """Return the result of `verify` for one version."""
    which = "newest" if check["is_newest"] else "previous"
    if check["buffer"] is not None and is_kept(check["buffer"]):
        which = "kept"
    head = f"version {check['version']} ({which}): "
    if check["buffer"] is not None:
        head = f"buffer {check['buffer']}, {head}"
    if check["problems"]:
        return head + "\n  ".join(["damaged", *check["problems"]])
    if check["has_checksums"]:
        return head + "every byte matches its checksum"
    if check["buffer"] is None:
        return head + "every part matches its digest; no checksums of tensors"
    return head + "records, layout and size are correct; no checksums, so bytes are not verified"
