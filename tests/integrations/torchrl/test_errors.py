"""What TorchRL's schemes raise is ours, and still of the standard type that TorchRL raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dbuffer

# torchrl warns of its own legacy classes, and of torch's, as it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COLLECTORS_SCHEME = "DoubleBufferSyncScheme"
ENGINES_SCHEME = "VLLMDoubleBufferSyncScheme"
NO_ENGINE = "http://127.0.0.1:1"
"""URL of a server that does not answer."""


def make(kind: str, store: Path, **options: Any) -> Any:
    from dbuffer.integrations import torchrl  # takes seconds, and processes import this file

    return getattr(torchrl, kind)(remote_addr=str(store), **options)


def sending(scheme: Any) -> Any:
    scheme.kept = nn.Linear(1, 1)
    scheme.init_on_sender(model_id="policy", model=scheme.kept)
    return scheme


def receiving(scheme: Any) -> Any:
    engine = None if type(scheme).__name__ == COLLECTORS_SCHEME else NO_ENGINE
    scheme.init_on_receiver(model_id="policy", model=engine, context=None)
    return scheme


def connected(scheme: Any) -> Any:
    sending(scheme).connect()
    return scheme


def shut_down(scheme: Any) -> Any:
    connected(scheme).shutdown()
    return scheme


EVERY: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "send first": (lambda s: s.send(), RuntimeError),
    "send after the end": (lambda s: shut_down(s).send(), RuntimeError),
    "receive first": (lambda s: s.receive(), RuntimeError),
    "send what is nothing": (lambda s: connected(s).send(3), ValueError),
}

COLLECTORS: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "send before connect": (lambda s: sending(s).send(), RuntimeError),
    "no such worker": (
        lambda s: connected(s).send({"a": torch.ones(1)}, worker_ids=[7]),
        ValueError,
    ),
    "nothing for a worker": (
        lambda s: connected(s).send({0: {"a": torch.ones(1)}}, worker_ids=[1]),
        ValueError,
    ),
    "a name to send": (lambda s: connected(s).send("env.nothing"), ValueError),
    "receive before connect": (lambda s: receiving(s).receive(), RuntimeError),
    "a transport": (lambda s: s.create_transport(), NotImplementedError),
}

ENGINES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "get_sender first": (lambda s: s.get_sender(), RuntimeError),
    "get_receiver first": (lambda s: s.get_receiver(), RuntimeError),
    "get_sender after the end": (lambda s: shut_down(s).get_sender(), RuntimeError),
    "apply first": (lambda s: s.apply_weights({}), RuntimeError),
    "no model": (lambda s: s.create_sender().update_weights(), RuntimeError),
    "a model that is gone": (lambda s: with_model_gone(s).update_weights(), RuntimeError),
    "out of place": (
        lambda s: receiving(s).apply_weights({}, inplace=False),
        ValueError,
    ),
    "no context": (lambda s: receiving(s).get_receiver().register_model("policy"), ValueError),
    "no engine": (lambda s: s.create_receiver(None), NotImplementedError),
    "receive after the end": (lambda s: ended(receiving(s)).receive(), RuntimeError),
}


def with_model_gone(scheme: Any) -> Any:
    sender = scheme.create_sender()
    sender.register_model(nn.Linear(1, 1))
    return sender


def ended(scheme: Any) -> Any:
    scheme.shutdown()
    return scheme


def assert_raises_ours(scheme: Any, call: Callable[[Any], Any], standard: type[Exception]) -> None:
    with pytest.raises(standard) as caught:
        call(scheme)
    scheme.shutdown()
    assert isinstance(caught.value, dbuffer.DBufferError), repr(caught.value)


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.parametrize("kind", [COLLECTORS_SCHEME, ENGINES_SCHEME])
def test_errors_of_every_scheme(kind, case, store):
    assert_raises_ours(make(kind, store), *EVERY[case])


@pytest.mark.parametrize("case", COLLECTORS)
def test_errors_of_the_collectors_scheme(case, store):
    assert_raises_ours(make(COLLECTORS_SCHEME, store), *COLLECTORS[case])


@pytest.mark.parametrize("case", ENGINES)
def test_errors_of_the_engines_schemes(case, store):
    assert_raises_ours(make(ENGINES_SCHEME, store), *ENGINES[case])


@pytest.mark.parametrize("kind", [COLLECTORS_SCHEME, ENGINES_SCHEME])
@pytest.mark.parametrize(
    ("option", "value"),
    [("verify", 3), ("poll_interval_s", 0), ("delta", "x"), ("wait", True), ("strategy", "pickle")],
)
def test_an_option_that_is_invalid_is_refused_at_once(kind, store, option, value):
    with pytest.raises(dbuffer.OptionError, match=option):
        make(kind, store, **{option: value})
