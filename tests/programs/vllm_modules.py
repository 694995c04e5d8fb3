"""Program of `test_modules.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.programs.vllm_breadth import BFLOAT16, FAMILIES, HYBRID, Case, answering
from tests.support.engines.vllm_engines import judge, require_different, set_packing, start_llm
from tests.support.waiting import error_of
from tests.support.worlds import World

CASES = FAMILIES | BFLOAT16 | HYBRID
LAYERS = ("packed", "live")
ORDER = {"plain": (1, 0), "delta": (1, 2, 1, 0)}
"""Numbers of the weights that a sender of each kind publishes one after another.

Weights 0 and 1 differ everywhere. Weights 2 are weights 1 with one element in fifty changed: deltas
lead there and back.
"""

Send = Callable[[int], bool]


def module_of(case: Case, number: int) -> Any:
    module = case.module(min(number, 1))
    if number == 2:
        torch.manual_seed(number)
        for parameter in module.parameters():
            some = parameter.data.view(-1)[::50]
            some += 0.5 * torch.randn(some.shape)
    return module


def checkpoint_of(case: Case, number: int, directory: Path) -> Path:
    path = case.make(directory / str(number), min(number, 1))
    if number == 2:
        module_of(case, number).save_pretrained(path)
    return path


class Trained:
    """Module that is given each of the weights in turn, as training changes one in place."""

    def __init__(self, case: Case, wrap: Callable[[Any], Any] = lambda module: module) -> None:
        self._module = wrap(module_of(case, 0))
        self._states = [wrap(module_of(case, number)).state_dict() for number in range(3)]

    def at(self, number: int) -> Any:
        self._module.load_state_dict(self._states[number])
        return self._module


@contextlib.contextmanager
def sending(store: Path, weights: Callable[[int], Any], *, delta: bool) -> Iterator[Send]:
    with dbuffer.WeightSender(store, delta=delta) as sender:
        yield lambda number: sender.send(weights(number)).delta_bytes is not None


@contextlib.contextmanager
def sending_sharded(store: Path, world: World, *, delta: bool) -> Iterator[Send]:
    world.run(open_sender, store, delta)
    yield lambda number: world.run(send, number)[0]
    world.run(close_sender)


def run(directory: Path, name: str, layers: str) -> dict[str, int]:
    case = CASES[name]
    set_packing(packed=layers == "packed")
    checkpoints = [checkpoint_of(case, number, directory) for number in range(3)]
    ask, store = answering(case), directory / "store"
    engines = [start_llm(path, **case.arguments) for path in checkpoints]
    fresh = [ask(engine) for engine in engines]
    require_different(*fresh[:2])
    require_different(*fresh[1:])
    trained = Trained(case)
    num_switches = 0
    try:
        with (
            World(directory, 2, processes=multiprocessing.get_context("spawn")) as world,
            follow(engines[0], store, unused_tensors=case.unused_tensors) as follower,
        ):
            world.run(shard, name)
            for kind, numbers in ORDER.items():
                delta = kind == "delta"
                for sender in (
                    sending(store, checkpoints.__getitem__, delta=delta),
                    sending(store, trained.at, delta=delta),
                    sending_sharded(store, world, delta=delta),
                ):
                    with sender as send:
                        for place, number in enumerate(numbers):
                            is_delta = send(number)
                            error, answers = error_of(follower.sync), ask(engines[0])
                            if case.refused:
                                assert case.refused in str(error)
                                assert answers == fresh[0]
                                continue
                            assert (error, answers) == (None, fresh[number])
                            assert is_delta == (delta and place in (1, 2))
                            num_switches += 1
    except dbuffer.UnsupportedError as error:
        if not case.refused:
            raise
        assert case.refused in str(error)
        assert ask(engines[0]) == fresh[0]
    return {"switches to families in all forms": num_switches}


# What runs on the ranks.

_here: dict[str, Any] = {}


def shard(rank: int, name: str) -> None:
    _here["trained"] = Trained(CASES[name], sharded)


def sharded(module: nn.Module) -> nn.Module:
    for layers in [part for part in module.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer)
    return fully_shard(module)


def open_sender(rank: int, store: Path, delta: bool) -> None:
    _here["sender"] = dbuffer.ShardedWeightSender(store, delta=delta)


def send(rank: int, number: int) -> bool:
    publication = _here["sender"].send(_here["trained"].at(number))
    return publication.delta_bytes is not None


def close_sender(rank: int) -> None:
    _here.pop("sender").close()


if __name__ == "__main__":
    judge(run)
