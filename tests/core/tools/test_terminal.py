"""The command line in a terminal of 80 columns and 24 rows."""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dbuffer
from dbuffer.format.lineage import VersionId
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools.cli import COMMANDS
from dbuffer.tools.status import read_status
from dbuffer.tools.tables import status_parts
from tests.support.terminals import Terminal

NUM_RECEIVERS = 20
LONG = f"model.layers.0.{'mlp.experts.w13_weight.' * 5}scale"


@pytest.fixture
def store(store: Path) -> Path:
    """Two versions, of tensors with long names."""
    with dbuffer.WeightSender(store, checksum=True) as sender:
        for step in (1, 2):
            sender.send({LONG: torch.ones(4), "b": torch.ones(2)}, metadata={"step": step})
    return store


def shown_by(*arguments: object) -> list[str]:
    with Terminal(*arguments) as terminal:
        code, lines = terminal.wait_for_end()
    assert code == 0, lines
    return lines


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole(command):
    lines = shown_by(command, "--help")
    assert "…" not in "".join(lines)
    text = " ".join(" ".join(lines).split())
    assert " ".join(inspect.getdoc(COMMANDS[command][0]).split()) in text
    assert f"Example: dbuffer {command}" in text


def test_help_names_all_commands():
    lines = shown_by("--help")
    assert all(any(f"  {name} " in line for line in lines) for name in COMMANDS)


def test_names_of_tensors_are_folded(store):
    lines = shown_by("ls", store)
    assert all(word in lines[0] for word in ("name", "dtype", "shape", "bytes"))
    folded = [line.split()[0] for line in lines[1:-1]]
    assert "".join(folded) == LONG
    assert "…" not in "".join(lines)


@contextlib.contextmanager
def receivers_of(store: Path):
    """Receivers that have applied a version, one with a problem; then two more are published."""
    with contextlib.ExitStack() as stack:
        receivers = [
            stack.enter_context(dbuffer.WeightReceiver(store, receiver_id=f"engine-{i:02}"))
            for i in range(NUM_RECEIVERS)
        ]
        for receiver in receivers[:-1]:
            receiver.load_into(lambda _: None)
        receivers[-1].record.write_problem(MemoryError("on rank 3"), VersionId("0" * 16, 2))
        ended = dbuffer.WeightReceiver(store, receiver_id="ended")
        ended.load_into(lambda _: None)
        ended.close()
        with dbuffer.WeightSender(store, reader_timeout_s=0.1) as sender:
            for _ in range(2):
                sender.send({LONG: torch.ones(4)})
            receivers[0].load_into(lambda _: None)
            yield


def test_status_cuts_nothing(store):
    with receivers_of(store):
        lines = shown_by("status", store)
    assert "…" not in "".join(lines)
    assert sum(line.startswith("engine-") for line in lines) == NUM_RECEIVERS + 1
    assert "engine-19 reports: MemoryError: on rank 3" in lines[:3], "problems come first"


def test_a_watched_status_follows_its_store_and_leaves_the_last_one_behind(store):
    with Terminal("status", store, "--watch") as terminal:
        terminal.wait_for(lambda lines: lines and ": version 2;" in lines[0])
        with dbuffer.WeightSender(store) as sender:
            sender.send({"b": torch.ones(2)})
        terminal.wait_for(lambda lines: lines and ": version 3;" in lines[0])
        terminal.signal(signal.SIGINT)
        code, lines = terminal.wait_for_end()
    assert code == -signal.SIGINT
    assert ": version 3;" in lines[0]


@pytest.mark.parametrize("columns", [40, 60, 72])
def test_words_of_a_narrow_status_are_whole(store, columns):
    with receivers_of(store):
        parts = status_parts(read_status(DoubleBuffer(store)))
    printed = io.StringIO()
    Console(width=columns, file=printed).print(*parts, sep="\n")
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    words = set(text.split())
    assert {"buffer", "state", "version", "newest", "previous", "receiver", "host"} <= words


@pytest.mark.parametrize("command", [("follow",), ("mirror", "LOCAL")])
def test_a_command_says_for_which_version_it_waits(store, local, command):
    name, *more = command
    more = [local if each == "LOCAL" else each for each in more]
    with Terminal(name, store, *more) as terminal:
        waiting = f"mirroring {store}" if name == "mirror" else f"waiting for a version in {store}"
        later = waiting.replace("version", "version above 2")
        terminal.wait_for(lambda lines: any(line[:20] == "version 2: 2 tensors" for line in lines))
        terminal.wait_for(lambda lines: any(later in line for line in lines))
        with dbuffer.WeightSender(store) as sender:
            sender.send({"b": torch.ones(2)})
        later = waiting.replace("version", "version above 3")
        lines = terminal.wait_for(lambda lines: sum(line[:8] == "version " for line in lines) == 2)
        lines = terminal.wait_for(lambda lines: any(later in line for line in lines))
        assert sum(waiting[:11] in line for line in lines) == 1
        terminal.signal(signal.SIGINT)
        code, lines = terminal.wait_for_end()
    assert code == -signal.SIGINT
    assert waiting[:11] not in "".join(lines)
    assert "Traceback" not in "".join(lines)
