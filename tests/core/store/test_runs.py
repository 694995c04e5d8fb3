"""Runs: each start of a sender is one, and a version is known by its run and its number.

Stores are put back from copies here, and clocks are wrong: a number then names several versions,
and a later time does not tell a later version.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import dbuffer
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.moments import MOMENTS, at_call, die
from tests.support.children import Child, call
from tests.support.patterns import SMALL, opened
from tests.support.soak import is_soak, numbers
from tests.support.stores import back_up, copy_over, receiver_records

LOST = 100
"""Added to a version's number: the value of its tensors in a run that is lost; the next run adds it
twice."""


def send(sender: dbuffer.WeightSender, *versions: int, value: int = 0) -> None:
    for version in versions:
        published = sender.send(SMALL.weights(version + value), metadata={"step": 10 * version})
        assert published.version == version


def load(receiver: dbuffer.WeightReceiver) -> int | None:
    """Load the newest version; return the value of its tensors, or None if there is none newer."""
    target = SMALL.empty()
    return None if receiver.load_into(target) is None else SMALL.version_of(target)


# Numbers of versions


@pytest.mark.parametrize("delta", [False, True])
def test_a_number_names_the_version_of_the_newest_ones_line(any_store, delta):
    """Backups are copied over the store: ``kept/`` has versions of runs that are lost."""
    store, backup = any_store, any_store.with_name("backup")
    with dbuffer.WeightSender(store, keep=9, delta=delta) as sender:
        send(sender, *range(1, 6))
    back_up(store, backup)
    for run in (1, 2, 3, 4):
        copy_over(store, backup)
        with dbuffer.WeightSender(store, keep=9, delta=delta) as sender:
            send(sender, *range(6, 11), value=LOST * run)
            values = [version + LOST * run * (version > 5) for version in range(1, 11)]
            assert [opened(store, version) for version in range(1, 11)] == values
            for version in range(6, 11):
                number = sender.republish(version).version
                assert opened(store, number) == version + LOST * run


def test_a_version_of_a_lost_run_is_opened_by_its_id(any_store, capsys):
    """As long as it is there: pinned, it stays."""
    store, backup = any_store, any_store.with_name("backup")
    view = DoubleBuffer(store)
    with dbuffer.WeightSender(store, keep=3) as sender:
        send(sender, *range(1, 6))
        back_up(store, backup)
        lost = sender.send(SMALL.weights(6 + LOST)).id
        assert call(capsys, "pin", store, lost)[0] == 0
        send(sender, 7, 8, value=LOST)
    copy_over(store, backup)
    with dbuffer.WeightSender(store, keep=1) as sender:
        for version in range(6, 12):
            now = sender.send(SMALL.weights(version + 2 * LOST)).id
            assert opened(store, now) == version + 2 * LOST
            assert opened(store, lost) == 6 + LOST
        assert opened(store, 6) is None, "dropped, and its number names no other"
        with pytest.raises(dbuffer.VersionError):
            kept.unpin(view, 6)
        again = sender.republish(lost)
        assert opened(store, again.version) == 6 + LOST
        assert call(capsys, "unpin", store, lost)[0] == 0
        send(sender, 13, 14, value=2 * LOST)
        assert opened(store, lost) is None


def pin_and_die(connection: Connection, store: Path, number: int) -> None:
    """Publish until version 1 is dropped; pin it before a call of this, and die before the next."""
    sender = dbuffer.WeightSender(store, keep=1, num_threads=1)
    send(sender, 1, 2, 3)

    def pin() -> None:
        said_yes = True
        try:
            kept.pin(DoubleBuffer(store), 1)
        except dbuffer.VersionError:
            said_yes = False
        connection.send(said_yes)
        at_call(1, die, moments)

    moments = None if is_soak() else MOMENTS | {"rename"}
    at_call(number, pin, moments)
    send(sender, 4, 5)
    sys.setprofile(None)


def test_a_pin_that_said_yes_holds_whenever_the_sender_is_killed(shm_path):
    num_pins = 0
    for number in numbers(every=5):
        store = shm_path / str(number)
        with Child(pin_and_die, store, number) as child:
            if not child.has_sent():
                assert child.wait() == 0
                break
            said_yes = child.receive()
            child.wait()
        with dbuffer.WeightSender(store, keep=1) as sender:
            for value in (6, 7, 8, 9):
                sender.send(SMALL.weights(value))
        if said_yes:
            num_pins += 1
            assert opened(store, 1) == 1, f"pinned before call {number}, and lost"
    assert num_pins > 3


# Acknowledgements and lags


@pytest.mark.parametrize("skew_s", [-86400.0, -60.0, 0.0, 300.0])
def test_a_receivers_problem_is_told_whatever_its_clock_says(store, network, skew_s):
    """On another host, whose clock is wrong, it cannot load the version."""
    with dbuffer.WeightSender(store) as sender:
        send(sender, 1)
        with Child(load_wrong_target, store, skew_s) as child:
            assert child.receive() == "WeightsMismatchError"
            with pytest.raises(dbuffer.ReceiverFailedError, match="worker"):
                sender.wait_applied(1, receivers="worker", timeout_s=10)
            send(sender, 2)
            child.send("load")
            assert child.receive() == 2
            sender.wait_applied(2, receivers="worker", timeout_s=10)


def set_clock(skew_s: float) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + skew_s
    time.time_ns = lambda: now_ns() + int(skew_s * 1e9)


def load_wrong_target(connection: Connection, store: Path, skew_s: float) -> None:
    set_clock(skew_s)
    with dbuffer.WeightReceiver(store, receiver_id="worker", num_threads=1) as receiver:
        try:
            receiver.load_into({})
        except dbuffer.DBufferError as error:
            connection.send(type(error).__name__)
        connection.recv()
        connection.send(load(receiver))
        connection.recv()


@pytest.mark.parametrize("skew_s", [-300.0, 300.0])
def test_the_last_acknowledgement_counts_whatever_its_clock_says(store, skew_s):
    """Of a worker that was started again on a host whose clock is wrong; the first has ended."""
    with dbuffer.WeightSender(store) as sender:
        send(sender, 1)
        with dbuffer.WeightReceiver(store, receiver_id="worker") as receiver:
            assert load(receiver) == 1
        send(sender, 2)
        with Child(load_and_wait, store, skew_s) as child:
            assert child.receive() == 2
            sender.wait_applied(2, receivers="worker", timeout_s=5)
            assert sender.receiver_lags()["worker"].versions == 0


def load_and_wait(connection: Connection, store: Path, skew_s: float) -> None:
    set_clock(skew_s)
    with dbuffer.WeightReceiver(store, receiver_id="worker", num_threads=1) as receiver:
        connection.send(load(receiver))
        connection.recv()


@pytest.mark.parametrize("skew_s", [300.0, 86400.0])
def test_ages_in_the_status_are_not_negative(capsys, store, skew_s):
    with Child(send_and_load, store, skew_s) as child:
        child.receive()
        status = json.loads(call(capsys, "status", store, "--json")[1])
    ages = [each["updated_age_s"] for each in status["receivers"]]
    ages += [each["age_s"] for each in status["buffers"] if each["age_s"] is not None]
    assert len(ages) == 2
    assert all(age >= 0 for age in ages), ages


def send_and_load(connection: Connection, store: Path, skew_s: float) -> None:
    set_clock(skew_s)
    with dbuffer.WeightSender(store) as sender:
        send(sender, 1)
        load_and_wait(connection, store, 0.0)


@pytest.mark.parametrize("skew_s", [300.0, 86400.0])
def test_a_sender_whose_clock_is_ahead_leaves_young_files(store, mount, monkeypatch, skew_s):
    """A receiver makes the file of its record, and is about to rename it."""
    with dbuffer.WeightSender(store) as sender:
        send(sender, 1)
    replace = os.replace
    is_left = []

    def open_sender_first(temporary, path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with Child(open_and_close, store, skew_s) as child:
            assert child.wait() == 0
        is_left.append(Path(temporary).exists())
        replace(temporary, path)

    with dbuffer.WeightReceiver(store, receiver_id="worker") as receiver:
        monkeypatch.setattr(os, "replace", open_sender_first)
        assert load(receiver) == 1
        assert is_left == [True]
        assert receiver_records(store)["worker"]["applied"][1] == 1
    assert not list(store.rglob("*.tmp"))


def open_and_close(connection: Connection, store: Path, skew_s: float) -> None:
    set_clock(skew_s)
    dbuffer.WeightSender(store).close()


def test_a_receiver_is_told_whether_it_is_ahead_or_on_another_line(store):
    """Ahead, it waits for what may come; forked, it never sees a version that follows its own."""
    backup = store.with_name("backup")
    with dbuffer.WeightReceiver(store) as receiver:
        with dbuffer.WeightSender(store) as sender:
            send(sender, *range(1, 6))
            back_up(store, backup)
            send(sender, 6, 7, 8)
        assert load(receiver) == 8
        copy_over(store, backup)
        with pytest.raises(dbuffer.VersionRegressedError) as ahead:
            load(receiver)
        assert not ahead.value.is_forked
        with dbuffer.WeightSender(store) as sender:
            for version in range(6, 11):  # below, equal to and above the version that it has
                send(sender, version, value=LOST)
                with pytest.raises(dbuffer.VersionRegressedError) as forked:
                    load(receiver)
                assert forked.value.is_forked
            receiver.follow_fork()
            assert load(receiver) == 10 + LOST


def test_a_number_that_only_a_lost_run_has_is_no_version(any_store):
    backup = any_store.with_name("backup")
    with dbuffer.WeightSender(any_store, keep=3) as sender:
        send(sender, *range(1, 6))
        back_up(any_store, backup)
        send(sender, *range(6, 13), value=LOST)
    copy_over(any_store, backup)
    with pytest.raises(dbuffer.VersionError):
        kept.pin(DoubleBuffer(any_store), 9)
    with dbuffer.WeightSender(any_store, keep=3) as sender:
        sender.send(SMALL.weights(20), version=20)
        with pytest.raises(dbuffer.VersionError):
            sender.republish(9)


def test_a_version_of_a_lost_run_acknowledges_none_of_the_next(store):
    backup = store.with_name("backup")
    with dbuffer.WeightReceiver(store, receiver_id="worker") as receiver:
        with dbuffer.WeightSender(store) as sender:
            send(sender, *range(1, 6))
            back_up(store, backup)
            send(sender, 6, 7, 8, value=LOST)
            assert load(receiver) == 8 + LOST
        copy_over(store, backup)
        with dbuffer.WeightSender(store) as sender:
            for version in (6, 7, 8, 9):
                send(sender, version)
                with pytest.raises((dbuffer.WaitTimeoutError, dbuffer.ReceiverFailedError)):
                    sender.wait_applied(version, receivers="worker", timeout_s=0.0)
            receiver.follow_fork()
            assert load(receiver) == 9
            sender.wait_applied(9, receivers="worker", timeout_s=10)


def test_a_lag_in_steps_is_told_within_a_run(capsys, store):
    """A trainer that goes on at step 81, and a receiver that has step 100 of the run before."""
    with dbuffer.WeightReceiver(store, receiver_id="engine") as receiver:
        for step in (100, 81):
            with dbuffer.WeightSender(store) as sender:
                sender.send(SMALL.weights(step), metadata={"step": step})
                if step == 100:
                    assert load(receiver) == 100
                    continue
                assert sender.receiver_lags()["engine"] == dbuffer.Lag(1, None)
                [seen] = json.loads(call(capsys, "status", store, "--json")[1])["receivers"]
                assert (seen["lag_versions"], seen["lag_steps"]) == (1, None)
                assert load(receiver) == 81
                sender.send(SMALL.weights(83), metadata={"step": 83})
                assert sender.receiver_lags()["engine"] == dbuffer.Lag(1, 2)


def test_status_names_the_run_of_each_version(capsys, store):
    with dbuffer.WeightSender(store, run="exp-7") as sender:
        run = sender.send(SMALL.weights(9)).id.run
        code, out, _ = call(capsys, "status", store)
    assert code == 0
    assert re.search(rf" newest .* {run} +exp-7\b", out)
