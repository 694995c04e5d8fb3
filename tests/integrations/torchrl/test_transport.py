"""`VLLMDoubleBufferTransport`: sent and received by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from dbuffer import SnapshotEvictedError, WeightReceiver, WeightsMismatchError
from dbuffer.integrations.torchrl import VLLMDoubleBufferTransport as Transport
from dbuffer.integrations.torchrl.base import TransportOptions
from dbuffer.testing.waiting import TIMEOUT_S


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    transport = Transport(tmp_path / "deep" / "down" / "store")
    yield transport
    transport.close()


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight.data[:] = 7
    return model


@pytest.mark.parametrize("kind", ["module", "nested", "flat", "state dict"])
def test_what_is_sent_is_received_flat_and_once(transport, kind):
    model = make_model()
    weights = TensorDict.from_module(model)
    forms: dict[str, Any] = {
        "module": model,
        "nested": weights,
        "flat": weights.flatten_keys("."),
        "state dict": model.state_dict(),
    }
    assert transport.receive_weights() is None
    transport.send_weights("policy", forms[kind])
    received = transport.receive_weights()
    assert received.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(received[name], tensor)
    assert transport.receive_weights() is None


def test_a_received_copy_outlives_the_next_versions(transport):
    """It has tied tensors under each name."""
    tied = torch.ones(3)
    transport.send_weights("policy", {"a": tied, "b": tied})
    received = transport.receive_weights()
    for value in (2.0, 3.0, 4.0):
        transport.send_weights("policy", {"a": torch.full((3,), value)})
    assert {name: tensor.tolist() for name, tensor in received.items()} == {
        "a": [1, 1, 1],
        "b": [1, 1, 1],
    }


def test_receives_into_what_is_given(transport):
    model, other = make_model(), make_model()
    other[2].weight.data[:] = 1
    transport.send_weights("policy", model)
    places = TensorDict.from_module(other).data
    assert transport.receive_weights(weights=places) is places
    assert torch.equal(other[2].weight, model[2].weight)
    transport.send_weights("policy", {"a": torch.ones(3)})
    with pytest.raises(WeightsMismatchError):
        transport.receive_weights(weights={"a": torch.zeros(4)})


def test_the_two_ends_may_see_the_store_in_two_places(tmp_path):
    (tmp_path / "elsewhere").symlink_to(tmp_path / "here")
    transport = Transport(tmp_path / "here" / "store", tmp_path / "elsewhere" / "store")
    (tmp_path / "here").mkdir()
    transport.send_weights("policy", {"a": torch.ones(1)})
    assert transport.receive_weights()["a"].item() == 1
    transport.close()


def test_options_reach_both_ends(tmp_path):
    options = TransportOptions(dtype=torch.bfloat16, rename={"a": "b"}, checksum=True, verify=True)
    transport = Transport(tmp_path / "store", options=options)
    transport.send_weights("policy", {"a": torch.ones(1)})
    assert transport.receive_weights()["b"].dtype is torch.bfloat16
    transport.close()


def test_a_hung_reader_delays_a_mirror_by_the_option_at_most(tmp_path):
    """The mirror copies the third version into the buffer of the first, which is being read."""
    places = tmp_path / "remote" / "store", tmp_path / "local" / "store"
    transport = Transport(*places, options=TransportOptions(reader_timeout_s=0.1))

    def transfer(value: float) -> float:
        transport.send_weights("policy", {"a": torch.full((1,), value)})
        received = transport.receive_weights(timeout=TIMEOUT_S)
        return float(received["a"].item())

    assert transfer(1.0) == 1.0
    hung = WeightReceiver(places[1])
    with hung, pytest.raises(SnapshotEvictedError), hung.open():
        started = time.monotonic()
        assert [transfer(value) for value in (2.0, 3.0)] == [2.0, 3.0]
        assert time.monotonic() - started < TransportOptions.reader_timeout_s / 2
    transport.close()
