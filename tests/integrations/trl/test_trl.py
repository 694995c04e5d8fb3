"""TRL's trainers over a store: real ones, on a real vLLM server that follows by itself.

One program trains a whole model, and lets TRL's asynchronous trainer's code send; in soaks also
with the weights held back, an adapter, in whose training the server is killed and started again,
and a sharded model, on two ranks of torchrun. What the trainer computes of each token is compared
with what the server sampled it with: they differ where the server had other weights. The tests
judge what the program saw. (One engine in the trainer's process: ``test_examples``.)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.errors import NotReadyError, OptionError, WaitTimeoutError
from dbuffer.integrations.trl import StoreWeightTransfer
from tests.programs import trl_server
from tests.programs.trl_server import NUM_RANK_STEPS, NUM_STEPS, signature_of
from tests.support.engines.vllm_engines import NEEDS_VLLM, TIMEOUT_S, environment, observe
from tests.support.soak import IN_SOAKS_ALONE, in_soaks_alone

NEEDS_TRL = [
    *NEEDS_VLLM,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


def needs_trl(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_TRL:
        test = mark(test)
    return test


MAX_DIFFERENCE = 1e-3
"""Of log-probabilities of one token under the same weights, in float32: computed twice."""
MAX_DIFFERENCE_BF16 = 0.2
EACH_KIND = pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=IN_SOAKS_ALONE)])


def run(role: str, directory: Path) -> Any:
    more = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    # Only the server has processes of its own.
    env = environment(processes=False, **more)
    return observe(trl_server.__file__, directory, role, env=env)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("server", tmp_path_factory.mktemp("trl"))


@needs_trl
@EACH_KIND
def test_synchronous_trainer(observed, kind):
    """Every token is sampled with the weights that are trained, and the reward climbs."""
    seen = observed[kind]
    assert len(seen["differences"]) == NUM_STEPS
    assert max(seen["differences"]) < MAX_DIFFERENCE
    assert seen["rewards"][-1] - seen["rewards"][0] >= 0.2
    assert seen["answers"] == seen["expected"] != seen["answers before"]
    # Versions go on from run to run, and say their step.
    first = 1 if kind == "full" else NUM_STEPS + 2
    assert seen["version"] == first + NUM_STEPS
    assert seen["metadata"] == {"step": NUM_STEPS}
    assert seen["has checksums"]
    assert seen["was killed"] == (kind == "lora"), "training goes on with the next server"


@needs_trl
@in_soaks_alone
def test_weights_that_are_held_back_are_seen(observed):
    seen = observed["held back"]
    assert max(seen["rewards"]) - seen["rewards"][0] < 0.1
    assert seen["differences"][0] < MAX_DIFFERENCE < min(seen["differences"][1:])
    assert seen["answers"] == seen["answers before"]


@needs_trl
def test_trainers_that_cannot_work_say_so(observed):
    kind, text = observed["not followed"]
    assert kind == "WaitTimeoutError"
    assert "0 of 1 receivers applied version 1" in text
    assert "--middleware dbuffer.integrations.vllm.FollowStore" in text
    kind, text = observed["without vLLM"]
    assert kind == "OptionError"
    assert "set use_vllm=True" in text
    assert observed["client"] == "trl.generation.vllm_client", "TRL has its own client again"


@needs_trl
@in_soaks_alone
@pytest.mark.parametrize("kind", ["zero-3", "zero-2 lora"])
def test_each_rank_publishes_its_part_to_the_server(observed, kind):
    """Adapters of ranks that hold all are merged."""
    for seen in observed[kind]:
        assert len(seen["differences"]) == NUM_RANK_STEPS
        assert max(seen["differences"]) < MAX_DIFFERENCE
        if kind == "zero-3":
            assert seen["sender"] == "ShardedWeightSender"
            assert seen["partitioned"] > 0
    assert len({seen["version"] for seen in observed[kind]}) == 1


@needs_trl
@in_soaks_alone
@pytest.mark.parametrize("kind", ["colocate", "colocate lora"])
def test_each_rank_switches_the_engine_in_its_process(tmp_path, kind):
    for seen in run(kind, tmp_path):
        assert seen["version"] == NUM_RANK_STEPS + 1
        assert len(seen["differences"]) == NUM_RANK_STEPS
        assert max(seen["differences"]) < MAX_DIFFERENCE_BF16


@needs_trl
def test_asynchronous_trainer(observed):
    """It has the calls of TRL's protocol; the server answers on while weights are published."""
    wanted = observed["protocol"]
    assert set(wanted) == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    assert {name: signature_of(getattr(StoreWeightTransfer, name)) for name in wanted} == wanted
    seen = observed["asynchronous"]
    assert seen["counted"] == 1
    assert seen["serves"] == str(seen["version"])
    assert seen["answers"] == seen["expected"] != seen["answers before"]
    assert len(seen["paused"]) == seen["tensors"] > 1
    assert not any(seen["paused"])
    assert all(answers == seen["answers before"] for answers in seen["meanwhile"])


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
