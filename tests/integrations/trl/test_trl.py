"""TRL's trainers over a store: real ones, on a real vLLM server that follows by itself.

One program trains a whole model, and lets TRL's asynchronous trainer's code send; in soaks also
an adapter, in whose training the server is killed and started again, and a sharded model, on two
ranks of torchrun.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

import dbuffer
from dbuffer.errors import NotReadyError, OptionError, WaitTimeoutError
from dbuffer.integrations.trl import StoreWeightTransfer
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe


@pytest.mark.parametrize("role", [pytest.param("server", marks=NEEDS_VLLM)])
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_rollouts_are_of_the_weights_that_are_trained(tmp_path, role):
    more = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    # Only the server has processes of its own.
    env = environment(processes=False, **more)
    observe("trl_server.py", tmp_path, role, env=env)


# What needs neither TRL nor an engine.


def pairs(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((3,), float(version))
    yield "b", torch.full((2, 2), float(version))


def test_pairs_are_published_and_waited_for(store):
    transfer = StoreWeightTransfer(store, timeout_s=0.01)
    assert not store.exists()  # a rank that publishes nothing makes no store
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(pairs(1))
    with pytest.raises(WaitTimeoutError, match="0 of 1"):
        transfer.resume()
    target = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    with dbuffer.WeightReceiver(store) as receiver:
        assert receiver.load_into(target) == transfer.version == 1
        transfer.resume()
    assert target["a"].unique().tolist() == [1.0]
    transfer.destroy()
    transfer.destroy()


def test_a_second_run_goes_on_in_the_same_store(store):
    transfer = StoreWeightTransfer(store, receivers=0, dtype=torch.bfloat16)
    for run in (1, 2):
        with pytest.raises(NotReadyError, match="init_weight_transfer"):
            transfer.send_weights(pairs(run))
        with pytest.raises(NotReadyError):
            transfer.resume()
        transfer.init_weight_transfer()
        transfer.resume()  # TRL may have had nothing to send
        transfer.send_weights(pairs(run))
        transfer.resume()
        assert transfer.version == run
        transfer.destroy()
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert snapshot.tensors["a"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{"receivers": -1}, {"receivers": 1.5}, {"timeout_s": 0}, {"store": 3}]
)
def test_invalid_options_are_refused(store, options):
    with pytest.raises(OptionError):
        StoreWeightTransfer(**{"store": store, **options})
    assert not store.exists()
