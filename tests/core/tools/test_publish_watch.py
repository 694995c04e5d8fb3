"""`dbuffer publish --watch`: checkpoints that a trainer saves, as processes, files and signals."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from dbuffer.weights.checkpoint import INDEX
from dbuffer.weights.checkpoint_directory import Checkpoint, Order, send_saved
from tests.support.children import Child, Command, call
from tests.support.patterns import SMALL

pytestmark = pytest.mark.timing(settle_s=0.2)

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shards(number: int) -> list[dict[str, torch.Tensor]]:
    """Weights of a save, in two parts of one size each save."""
    weights, half = list(SMALL.weights(number).items()), len(SMALL.names) // 2
    return [dict(weights[:half]), dict(weights[half:])]


def save(directory: Path, number: int) -> None:
    """Save a checkpoint in two files and an index, in the order of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, part in zip(FILES, shards(number), strict=True):
        save_file(part, directory / file)
    write_index(directory)


def write_index(directory: Path) -> None:
    pairs = zip(FILES, shards(0), strict=True)
    index = {"weight_map": {name: file for file, part in pairs for name in part}}
    (directory / INDEX).write_text(json.dumps(index))


def set_time(directory: Path, saved_at: float) -> None:
    for file in directory.iterdir():
        os.utime(file, (saved_at, saved_at))


class Watch:
    """The command, while it watches a directory."""

    def __init__(self, directory: Path, store: Path) -> None:
        self.store = store
        self.command = Command(directory.parent, "publish", "--watch", directory, store, "--json")

    def version_of(self, line: int) -> tuple[int | None, Any]:
        """Return the save that the version of a printed line is wholly of, and its step."""
        version = json.loads(self.command.line(line))["version"]
        with dbuffer.WeightReceiver(self.store) as receiver, receiver.open() as snapshot:
            assert snapshot.version == version
            number = SMALL.version_of(dict(sorted(snapshot.tensors.items())))
            return number, snapshot.metadata.get("step")

    def refusal(self, number: int = 1) -> str:
        """Return the n-th line of its log, whose first says that it watches."""
        return self.command.line_of_errors(number)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def watch(out: Path, store: Path) -> Iterator[Watch]:
    watch = Watch(out, store)
    with watch.command:
        yield watch


def test_checkpoints_of_a_trainer_are_published_with_their_steps(watch, out):
    """The directory comes later."""
    text = f"publishing each checkpoint that is saved into {out}, which does not exist yet"
    assert watch.refusal(0).endswith(text)
    for number, name in enumerate(("checkpoint-80", "step_90", "global_step_100")):
        save(out / name, number + 1)
        assert watch.version_of(number) == (number + 1, int(name.split("_")[-1].split("-")[-1]))
    (out / "checkpoint-old").mkdir()
    watch.command.signal(signal.SIGINT)
    assert watch.command.wait() == -signal.SIGINT


def test_a_directory_that_is_written_over(watch, out):
    for number in range(3):
        save(out, number + 1)
        assert watch.version_of(number) == (number + 1, None)


def test_all_that_are_there_are_published_in_the_order_of_saves(out, store):
    for number in (9, 10, 8):
        save(out / f"checkpoint-{number}", number)
        set_time(out / f"checkpoint-{number}", 1000 if number > 8 else 1001)
    watch = Watch(out, store)
    with watch.command:
        lines = [json.loads(watch.command.line(number)) for number in range(3)]
        assert [line["version"] for line in lines] == [1, 2, 3]
        assert watch.version_of(2) == (8, 8)


def test_what_is_published_is_not_published_again_after_a_restart(capsys, out, store):
    save(out / "checkpoint-1", 1)
    arguments = ["publish", "--watch", out, store, "--count", 1, "--metadata", '{"loss": 2}']
    code, printed, _ = call(capsys, *arguments)
    assert code == 0
    assert printed.endswith(f", from {out / 'checkpoint-1'}\n")
    save(out / "checkpoint-2", 2)
    assert call(capsys, *arguments)[0] == 0
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert snapshot.version == 2
        assert (snapshot.metadata["step"], snapshot.metadata["loss"]) == (2, 2)
        assert SMALL.version_of(dict(sorted(snapshot.tensors.items()))) == 2


def save_and_die(connection: Connection, directory: Path, number: int) -> None:
    """Write the first file of a save, and a half of the second one."""
    directory.mkdir(parents=True, exist_ok=True)
    first, second = shards(number)
    save_file(first, directory / FILES[0])
    if number % 2:
        save_file(second, directory / FILES[1])
        os.truncate(directory / FILES[1], (directory / FILES[1]).stat().st_size // 2)
    connection.send(None)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_writer(directory: Path, number: int) -> None:
    with Child(save_and_die, directory, number) as child:
        child.receive()
        child.wait()


@pytest.mark.parametrize("number", [1, 2])
def test_a_save_whose_writer_was_killed_is_refused_and_told(watch, out, store, number):
    kill_writer(out / "checkpoint-1", number)
    assert f"{out / 'checkpoint-1'} is not published" in watch.refusal()
    assert f"has several files, but no {INDEX}" in watch.refusal()
    save(out / "checkpoint-1", 3)
    assert watch.version_of(0) == (3, 1)


@pytest.mark.parametrize("number", [2, 3])
def test_a_save_over_another_one_whose_writer_was_killed_is_refused_and_told(
    watch, out, store, number
):
    """Its files have the names and sizes of the save before."""
    save(out, 1)
    assert watch.version_of(0) == (1, None)
    kill_writer(out, number)
    problem = f"{FILES[0]} was written after {INDEX}, so it may be from another save"
    assert problem in watch.refusal()
    write_index(out)  # as by `touch`
    said = "is older than the checkpoint" if number == 2 else f"cannot read {out / FILES[1]}"
    assert said in watch.refusal(2)
    save(out, 4)
    assert watch.version_of(1) == (4, None)


def test_files_that_the_index_names_and_that_are_missing_are_told(watch, out):
    save(out, 1)
    (out / FILES[1]).rename(out / "aside")
    assert f"names files that do not exist: {FILES[1]}" in watch.refusal()
    (out / "aside").rename(out / FILES[1])
    assert watch.version_of(0) == (1, None)


def test_a_checkpoint_that_is_saved_again_while_another_one_is_sent_is_waited_for(out, store):
    """Its first file is of the new save already, and has the size that it had."""
    sent: list[tuple[int | None, Any]] = []
    with dbuffer.WeightSender(store) as sender:

        def send(saved: Checkpoint, metadata: dict[str, Any]) -> None:
            sender.send(saved, metadata=metadata)
            with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
                number = SMALL.version_of(dict(sorted(snapshot.tensors.items())))
            sent.append((number, metadata["step"]))
            if len(sent) == 1:
                save_file(shards(3)[0], out / "checkpoint-2" / FILES[0])
                threading.Timer(0.1, save, [out / "checkpoint-2", 3]).start()

        for number in (1, 2):
            save(out / f"checkpoint-{number}", number)
        send_saved(out, DoubleBuffer(store), send, threading.Event(), count=2)
    assert sent == [(1, 1), (3, 2)]


def test_a_save_that_begins_after_the_last_look_is_waited_for(out, store):
    """Its first file is there before the files are read, and the others after they were read."""
    sent = []
    with dbuffer.WeightSender(store) as sender:

        def send(saved: Checkpoint, metadata: dict[str, Any]) -> None:
            sent.append(saved)
            if len(sent) == 1:
                save_file(shards(2)[0], out / FILES[0])
                threading.Timer(0.1, save, [out, 2]).start()
            sender.send(saved, metadata=metadata)

        save(out, 1)
        send_saved(out, DoubleBuffer(store), send, threading.Event(), count=1)
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert SMALL.version_of(dict(sorted(snapshot.tensors.items()))) == 2


@pytest.mark.timing(retry_min_s=0.01, retry_max_s=0.01)
@pytest.mark.parametrize(
    ("call", "number"),
    [("preadv", errno.EIO), ("open", errno.EMFILE), ("posix_fallocate", errno.ENOSPC)],
)
def test_an_error_of_a_file_system_is_told_once_and_waited_out(caplog, out, store, call, number):
    attempts = []
    with dbuffer.WeightSender(store) as sender:

        def send(saved: Checkpoint, metadata: dict[str, Any]) -> None:
            attempts.append(saved)
            fault = mock.patch.object(os, call, side_effect=OSError(number, os.strerror(number)))
            with fault if len(attempts) < 3 else contextlib.nullcontext():
                sender.send(saved, metadata=metadata)

        save(out, 1)
        send_saved(out, DoubleBuffer(store), send, threading.Event(), count=1)
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(attempts) == 3
    assert ["; trying again" in told[0], "recovered" in told[1], len(told)] == [True, True, 2]


def test_a_checkpoint_whose_publish_failed_at_its_end_is_not_published_again(
    caplog, out, store, monkeypatch
):
    sync_directory = filesystem.sync_directory

    def fail_once(directory: Path) -> None:
        if directory == store and (store / "CURRENT").exists():
            monkeypatch.setattr(filesystem, "sync_directory", sync_directory)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(directory)

    monkeypatch.setattr(filesystem, "sync_directory", fail_once)
    save(out, 1)
    with dbuffer.WeightSender(store, durable=True) as sender:

        def send(saved: Checkpoint, metadata: dict[str, Any]) -> None:
            sender.send(saved, metadata=metadata)

        send_saved(out, DoubleBuffer(store), send, threading.Event(), count=1)
    assert DoubleBuffer(store).pointer().version == 1
    assert "version 1 is published, but" in caplog.text


@pytest.mark.timing(retry_min_s=30.0)
def test_a_checkpoint_that_a_later_one_overtakes_is_named(caplog, out, store):
    with dbuffer.WeightSender(store) as sender:

        def send(saved: Checkpoint, metadata: dict[str, Any]) -> None:
            if metadata["step"] == 1:
                save(out / "step-2", 2)
                raise dbuffer.StoreFullError("no room is left")
            sender.send(saved, metadata=metadata)

        save(out / "step-1", 1)
        send_saved(out, DoubleBuffer(store), send, threading.Event(), count=1)
    assert f"{out}/step-1 is not published: {out}/step-2, a later checkpoint" in caplog.text


def test_a_file_that_grows_is_waited_for(watch, out):
    """Its header describes all of it from the start."""
    save(out / "complete", 1)
    (out / "complete" / FILES[1]).rename(out / "last")
    (out / "complete").rename(out / "step-1")
    data = (out / "last").read_bytes()
    with (out / "step-1" / FILES[1]).open("wb") as file:
        for piece in range(8):
            file.write(data[piece * len(data) // 8 : (piece + 1) * len(data) // 8])
            file.flush()
            time.sleep(0.05)
    write_index(out / "step-1")
    assert watch.version_of(0) == (1, 1)
    assert watch.command.errors().count("not published") == 0


def test_a_save_that_is_slower_than_files_settle_is_told_once(caplog, monkeypatch, out, store):
    """A file that is saved during a look at the others is no problem."""
    looks = []
    require_one_save = Checkpoint.require_one_save
    first, second = shards(1)
    (out / "checkpoint-1").mkdir(parents=True)
    save_file(first, out / "checkpoint-1" / FILES[0])

    def look(checkpoint: Checkpoint, last: Order) -> None:
        looks.append(checkpoint)
        if len(looks) == 1:
            save_file(second, out / "checkpoint-1" / FILES[1])
        require_one_save(checkpoint, last)

    monkeypatch.setattr(Checkpoint, "require_one_save", look)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(send_saved, out, DoubleBuffer(store), print, stop)
        until("it has settled again", lambda: len(looks) == 2)
        save_file(second, out / "checkpoint-1" / FILES[1])
        until("it has settled once more", lambda: len(looks) == 3)
        stop.set()
        watching.result()
    [told] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"has several files, but no {INDEX}" in told
