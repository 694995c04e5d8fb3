"""Options are checked in one place, when an object is made or a method called."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.errors import OptionError
from dbuffer.integrations.atropos.config import BridgeConfig
from dbuffer.integrations.atropos.mapping import mapping_path
from dbuffer.mirror.mirror import start_mirror
from dbuffer.publish.publisher import SenderKeywords
from dbuffer.runtime import options
from tests.support.children import call

NO_TIMES: list[Any] = [
    *(math.nan, math.inf, -math.inf, -1, -0.001, 1e10, 10**400),
    *("5", None, True, False, [1], 1j, b"1"),
]

NO_WHOLE_NUMBERS: list[Any] = [0, -1, 1.5, 1.0, math.nan, "4", None, True, False, [4], 1j]


# The checks themselves


@pytest.mark.parametrize("value", NO_TIMES, ids=repr)
def test_no_time(value):
    for check in (options.seconds, options.positive_seconds):
        with pytest.raises(OptionError) as caught:
            check("wait_s", value)
        assert str(caught.value).startswith(f"invalid wait_s {value!r:.200}: use seconds ")


def test_a_time_is_a_number():
    assert options.seconds("wait_s", 0) == 0.0
    with pytest.raises(OptionError, match="wait_s 0"):
        options.positive_seconds("wait_s", 0)
    for value in (1, 0.001, threading.TIMEOUT_MAX, numpy.float64(0.5)):
        assert options.positive_seconds("wait_s", value) == value
        assert type(options.positive_seconds("wait_s", value)) is float
    event = threading.Event()
    event.set()
    assert event.wait(options.seconds("wait_s", options.MAX_SECONDS)), "it can be waited for"


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS, ids=repr)
def test_no_whole_number(value):
    with pytest.raises(OptionError) as caught:
        options.whole_number("count", value)
    assert str(caught.value) == f"invalid count {value!r}: use a whole number of at least 1"


def test_a_whole_number_is_within_its_bounds():
    assert options.whole_number("count", 4) == 4
    assert options.whole_number("count", 0, at_least=0) == 0
    with pytest.raises(OptionError, match="from 0 to 9"):
        options.whole_number("count", 10, at_least=0, at_most=9)


@pytest.mark.parametrize("value", [1, 0, 1.0, "True", "yes", None, [True]], ids=repr)
def test_a_choice_has_a_type(value):
    with pytest.raises(OptionError, match=r"check .*True, False or 'auto'"):
        options.choice("check", value, (True, False, "auto"))
    with pytest.raises(OptionError, match=r"check .*True or False"):
        options.flag("check", value)
    assert options.choice("check", "auto", (True, False, "auto")) == "auto"
    assert options.flag("check", False) is False


def test_a_tilde_is_a_home(tmp_path, monkeypatch, capsys):
    """Of whoever runs the process: dbuffer never makes a directory of that name."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for directory in (home, elsewhere):
        directory.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    save_file({"a.w": torch.ones(3)}, home / "model.safetensors")
    (home / "names.json").write_text('{"rules": [{"name": "a.w", "to": "b.w"}]}')
    with dbuffer.WeightSender("~/store", rename=dbuffer.NameMap.read("~/names.json")) as sender:
        assert sender.store == home / "store"
        sender.send("~/model.safetensors")
    dbuffer.Mirror("~/store", "~/copy").close()
    with dbuffer.WeightReceiver("~/store") as receiver:
        assert receiver.load_into({"b.w": torch.zeros(3)}) == 1
    assert call(capsys, "ls", "~/store")[0] == 0
    assert mapping_path("~/logs").parent == home / "logs"
    assert EngineOptions(store="~/store").store == str(home / "store")
    with pytest.raises(OptionError, match=r"write \./~"):
        dbuffer.WeightSender("~nobody-of-this-name/store")
    assert not list(elsewhere.iterdir())


def test_one_text_is_one_name():
    assert options.names("receivers", "engine-0") == {"engine-0"}
    assert options.names("receivers", (name for name in "ab")) == {"a", "b"}
    assert options.names("receivers", 2) == 2
    for value in (-1, True, 1.0, None, [1], [b"a"]):
        with pytest.raises(OptionError, match="invalid receivers "):
            options.names("receivers", value)


# Who takes options. The checks are tested above: a value that none accepts shows who asks them


def make_manager(*arguments: Any, **options: Any) -> Any:
    from dbuffer.integrations.lightrft import manager  # takes as long as torch

    return manager.BroadcastManager(*arguments, **options)


MAKERS: dict[str, tuple[Any, str]] = {
    "WeightSender": (
        dbuffer.WeightSender,
        "reader_timeout_s num_threads num_threads=0 checksum delta as_checkpoint durable "
        "allow_shared_store dtype rename keep run require_finite",
    ),
    "WeightReceiver": (
        dbuffer.WeightReceiver,
        "poll_interval_s poll_interval_s=0 num_threads num_threads=0 verify receiver_id "
        "allow_shared_store",
    ),
    "Mirror": (
        lambda store, **wrong: dbuffer.Mirror(store, store.with_name("local"), **wrong),
        "poll_interval_s poll_interval_s=0 reader_timeout_s num_threads num_threads=0 "
        "allow_shared_store",
    ),
    "start_mirror": (
        lambda store, **wrong: start_mirror(store, store.with_name("local"), **wrong),
        "poll_interval_s poll_interval_s=0 reader_timeout_s",
    ),
    "BridgeConfig": (
        lambda store, **wrong: BridgeConfig(**wrong),
        "timeout_seconds timeout_seconds=0 world_size world_size=0 trainer_rank "
        "num_inference_nodes",
    ),
    "BroadcastManager": (
        lambda store, **wrong: make_manager(torch.nn.Linear(2, 2), None, None, **wrong),
        "timeout_s timeout_s=0 rank_timeout_s rank_timeout_s=0",
    ),
}
"""Functions that make something, and names of options, which also refuse 0 if that is there."""


@pytest.mark.parametrize(
    ("maker", "option"),
    [(name, option) for name, (_, options) in MAKERS.items() for option in options.split()],
)
def test_options_are_checked_as_the_object_is_made(tmp_path, maker, option):
    name, _, zero = option.partition("=")
    value = 0 if zero else 1j
    store = tmp_path / "store"
    threads = threading.active_count()
    with pytest.raises(OptionError) as caught:
        MAKERS[maker][0](store, **{name: value})
    assert str(caught.value).startswith(f"invalid {name} {value!r}")
    assert list(tmp_path.iterdir()) == []  # nothing was made
    assert threading.active_count() <= threads  # one of an earlier test may have ended


def test_keywords_of_senders_are_their_options(tmp_path):
    hints = [get_type_hints(one) for one in (SenderKeywords, dbuffer.SenderOptions)]
    assert hints[0] == hints[1]
    with pytest.raises(
        OptionError, match=r"unknown options \['kept'\]; known are durable, .*keep,"
    ):
        dbuffer.WeightSender(tmp_path / "store", kept=1)  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["", "a\0b", b"store", None], ids=repr)
def test_no_store_is_made_at_no_path(tmp_path, monkeypatch, place):
    """An empty path is that of a variable that is not set; not the working directory."""
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    makers: list[Any] = [
        lambda: dbuffer.WeightSender(place),
        lambda: dbuffer.WeightReceiver(place),
        lambda: dbuffer.Mirror(place, other),
        lambda: dbuffer.Mirror(other, place),
        lambda: start_mirror(place, other),
        lambda: EngineOptions(store=place),
    ]
    if place is not None:
        makers.append(lambda: start_mirror(other, place))
    for make in makers:
        with pytest.raises(OptionError, match=r"invalid (store|remote|local|path) "):
            make()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["store", "local_store"])
def test_an_engines_stores_are_paths_or_texts(tmp_path, monkeypatch, name):
    """They stay where they are in a process with another working directory, to which JSON goes."""
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "there", Path("there"), "there"):
        options = EngineOptions(**{"store": "/other", name: place})
        assert getattr(options, name) == str(tmp_path / "there")
    with dbuffer.WeightSender(".") as sender:
        assert sender.store == tmp_path, "the working directory can be named"


def test_times_of_methods_are_checked_as_they_are_called(tmp_path):
    store = tmp_path / "store"
    with (
        dbuffer.WeightSender(store) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        dbuffer.Mirror(store, tmp_path / "local") as mirror,
    ):
        version = sender.send({"a": torch.ones(2)}).version
        timed = [
            lambda value: sender.wait_applied(version, timeout_s=value),
            mirror.wait_until_current,
            lambda value: receiver.open(1, value).__enter__(),
            lambda value: receiver.wait_for_version(1, value),
        ]
        for call, value in itertools.product(timed, (math.nan, "5")):
            with pytest.raises(OptionError, match="invalid timeout_s "):
                call(value)
        versioned = [
            ("newer_than", lambda value: receiver.wait_for_version(value, 0)),
            ("version", lambda value: receiver.open(version=value).__enter__()),
            ("version", lambda value: sender.wait_applied(value, timeout_s=0)),
            ("version", lambda value: UpdateRequest(version=value)),
        ]
        for (name, call), value in itertools.product(versioned, ("1", 1.0, True, -2)):
            with pytest.raises(OptionError, match=f"invalid {name} "):
                call(value)
