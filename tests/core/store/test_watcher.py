"""The watcher: events wake at once, and everything works without them."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dbuffer import WeightReceiver
from dbuffer.store import filesystem, medium
from dbuffer.store import watcher as watcher_module
from dbuffer.store.watcher import Watcher
from dbuffer.testing.waiting import until
from tests.support.soak import in_turn
from tests.support.stores import begin_watching
from tests.support.waiting import meanwhile

LONG_S = 300.0
"""A poll interval that no test waits for."""

SOON_S = 60.0


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    begin_watching(tmp_path)
    return path


@pytest.fixture
def watch():
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(contextlib.closing(Watcher(path.parent, path.name)))


def settle(watcher: Watcher) -> None:
    """Wait until no event is left: the first wait after a watch was set never lasts."""
    until("the watcher comes to rest", lambda: waited_s(watcher, 0.15) >= 0.15)


def replace(path: Path, text: str = "new") -> None:
    scratch = path.parent.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    filesystem.replace_file(path, text.encode(), scratch=scratch)


def waited_s(watcher: Watcher, timeout_s: float = LONG_S) -> float:
    started = time.monotonic()
    watcher.wait(timeout_s)
    return time.monotonic() - started


def assert_wakes(watcher: Watcher, directory: Path) -> None:
    settle(watcher)
    with meanwhile(replace, directory / "CURRENT"):
        assert waited_s(watcher) < SOON_S


@pytest.fixture
def watcher(directory, watch):
    """Watch the pointer of the directory, with no event left."""
    watcher = watch(directory / "CURRENT")
    settle(watcher)
    return watcher


def test_wakes_when_the_file_is_replaced_or_it_is_woken(directory, watcher):
    for _ in range(3):
        assert_wakes(watcher, directory)
    replace(directory / "CURRENT")
    time.sleep(0.1)
    assert waited_s(watcher) < SOON_S, "what happened before the wait counts"
    settle(watcher)
    with meanwhile(watcher.wake):
        assert waited_s(watcher) < SOON_S


def test_does_not_wake_for_other_files(directory, watcher):
    for name in ("CURRENT.tmp", "writer.json", ".CURRENT", "xCURRENT"):
        replace(directory / name)
        (directory / name).unlink()
    (directory / "A").mkdir()
    (directory / "A" / "CURRENT").touch()
    assert 0.3 <= waited_s(watcher, 0.3) < SOON_S


def test_the_directory_may_come_later(directory, watch):
    directory.rmdir()
    watcher = watch(directory / "CURRENT")
    assert 0.1 <= waited_s(watcher, 0.1) < SOON_S
    directory.mkdir()
    assert_wakes(watcher, directory)


@pytest.mark.parametrize("how", ["removed", "removed and seen", "renamed"])
def test_the_directory_may_be_replaced_by_another(directory, watcher, tmp_path, how):
    if how == "renamed":
        directory.rename(tmp_path / "old")
    else:
        shutil.rmtree(directory)  # on ext4 the new one gets its inode number
    if how == "removed and seen":
        watcher.wait(0.05)
    directory.mkdir()
    assert_wakes(watcher, directory)


def test_the_directory_may_vanish_while_it_is_looked_at(directory, watch, monkeypatch):
    fail_to_observe(monkeypatch, errno.ENOENT)
    watcher = watch(directory / "CURRENT")
    for _ in range(3):
        watcher.wait(0.01)
    monkeypatch.undo()
    assert_wakes(watcher, directory)


def fail_to_observe(monkeypatch, number: int, at: str = "start") -> None:
    """Let watchdog find inotify in a bad state."""

    class BrokenObserver(watcher_module.BaseObserver):  # type: ignore[misc, valid-type]
        def schedule(self, *args, **options):
            if at == "schedule":
                raise OSError(number, os.strerror(number))
            return super().schedule(*args, **options)

        def start(self):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(watcher_module, "BaseObserver", BrokenObserver)


NO_INOTIFY = (errno.EMFILE, errno.ENOSPC, errno.ENFILE, errno.EACCES)


def assert_only_sleeps(watcher: Watcher, directory: Path, caplog: Any, level: str) -> None:
    """Require waits that end by themselves, without a thread, and one line of the log."""
    before = set(threading.enumerate())
    with caplog.at_level(logging.DEBUG, "dbuffer"):
        for _ in range(3):
            watcher.wait(0.01)
            replace(directory / "CURRENT")
    assert 0.1 <= waited_s(watcher, 0.1) < SOON_S
    told = [record for record in caplog.records if str(directory) in record.getMessage()]
    assert [record.levelname for record in told] == [level]
    assert set(threading.enumerate()) <= before


@in_turn(("number", "at"), NO_INOTIFY, ["start", "schedule"])
def test_without_inotify_it_sleeps_and_says_so_once(
    directory, watch, monkeypatch, caplog, number, at
):
    fail_to_observe(monkeypatch, number, at)
    assert_only_sleeps(watch(directory / "CURRENT"), directory, caplog, "WARNING")
    assert os.strerror(number) in caplog.text


@pytest.mark.timing(inotify_retry_s=0.1)
def test_inotify_is_used_when_there_is_some_again(directory, watch, monkeypatch):
    watcher = watch(directory / "CURRENT")
    with monkeypatch.context() as exhausted:
        fail_to_observe(exhausted, errno.EMFILE)
        watcher.wait(0.01)
        assert 0.1 <= waited_s(watcher, 0.1) < SOON_S
    assert_wakes(watcher, directory)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_without_access_to_the_directory_it_sleeps(directory, watch, monkeypatch, number):
    """The look at the pointer raises the store's own error."""
    watcher = watch(directory / "CURRENT")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", Mock(side_effect=OSError(number, os.strerror(number))))
        assert not watcher.wait(0.01)
    assert_wakes(watcher, directory)


def test_on_a_network_mount_it_sleeps(directory, watch, monkeypatch, caplog):
    monkeypatch.setattr(medium, "_mount_of", lambda path: ("nfs4", "server:/export"))
    assert_only_sleeps(watch(directory / "CURRENT"), directory, caplog, "INFO")


def test_a_receiver_that_is_dropped_leaves_no_thread(directory):
    threads = set(threading.enumerate())
    receiver = WeightReceiver(directory, num_threads=1)
    receiver.wait_for_version(timeout_s=0.5)  # begins to watch, also on a busy machine
    assert set(threading.enumerate()) - threads
    del receiver
    gc.collect()
    until("they have ended", lambda: set(threading.enumerate()) <= threads)
