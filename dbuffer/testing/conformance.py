"""Checks of a weight-transfer backend of vLLM, with a running engine.

The checks are for vLLM 0.32: in vLLM 0.33, weight sources have another interface.

Each check is a function that takes a :class:`Bench`. If the backend does not conform, the check
raises an :class:`AssertionError`::

    bench = Bench(llm, start_trainer, first, second)

    @pytest.mark.parametrize("check", CHECKS)
    def test_backend(check):
        check(bench)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

Weights = Mapping[str, torch.Tensor]
State = tuple[dict[str, str], list[list[int]]]
"""Digest of each parameter of an engine, and the tokens that the engine generates."""

PROMPTS = [list(range(1, 6)), list(range(40, 70)), list(range(100, 140))]


class Client:
    """Client of an ``LLM`` in this process, with the methods that vLLM's trainer classes call."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()


class Source(WeightSource):  # type: ignore[misc]
    """Trainer's weights as vLLM's `WeightSource`. A check can replace `weights`, or fail reads."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.num_before_failure: int | None = None
        """Number of tensors to yield before iteration fails, or None for no failure."""

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.weights.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self.weights.items()):
            if number == self.num_before_failure:
                raise RuntimeError("the trainer's source fails")
            yield name, tensor


@dataclass(repr=False)
class Bench:
    """Test setup: an engine and a trainer with the backend under test, and two sets of weights."""

    llm: Any
    """``LLM`` in this process with the backend under test, started with the weights `first`."""
    start_trainer: Callable[[Client, Source], Any]
    """Function that returns a ``TrainerWeightTransferEngine`` for a source. The check shuts the
    trainer engine down."""
    first: Weights
    """Tensors of the checkpoint that the engine starts with."""
    second: Weights
    """Tensors with the names and shapes of `first`, but other values in every tensor."""
    fresh: State = field(init=False)
    """State of the engine after its start, with the weights `first`."""

    def __post_init__(self) -> None:
        self.fresh = self.state()

    def state(self) -> State:
        """Return digests of the engine's parameters, and its answers to fixed prompts."""
        self.llm.reset_prefix_cache()
        [parameters] = self.llm.apply_model(_digests)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        answers = self.llm.generate(prompts, greedy, use_tqdm=False)
        return parameters, [list(answer.outputs[0].token_ids) for answer in answers]

    @contextlib.contextmanager
    def training(self) -> Iterator[Trainer]:
        """Start a trainer and send the weights `first`. Shut the trainer down after the block."""
        source, client = Source(self.first), Client(self.llm)
        trainer = Trainer(self, self.start_trainer(client, source), source, client)
        try:
            trainer.send(self.first)
            yield trainer
        finally:
            trainer.engine.shutdown()


@dataclass(repr=False)
class Trainer:
    """Trainer with the backend under test, and the engine that the trainer updates."""

    bench: Bench
    engine: Any
    source: Source
    client: Client

    def send(self, weights: Weights) -> State:
        """Send weights to the engine, and return the engine's new state."""
        self.source.weights = weights
        self.engine.send_weights()
        return self.bench.state()

    def require_refused(self, problem: str, update: Callable[[], object]) -> None:
        """Require that an update raises an error, changes no weights, and blocks no later update.

        ``problem`` describes the refused update in messages.
        """
        before = self.bench.state()
        try:
            update()
        except Exception:
            with contextlib.suppress(Exception):  # an error if the backend has ended the update
                self.client.finish_weight_update()
        else:
            raise AssertionError(f"the backend accepted a wrong update: {problem}")
        assert self.bench.state() == before, f"a refused update changed the engine: {problem}"
        assert self.send(self.bench.first) == self.bench.fresh, (
            f"the next update did not work after a refused update: {problem}"
        )


def check_names(bench: Bench) -> None:
    """Check that each tensor reaches its parameter, and that wrong names are refused."""
    with bench.training() as trainer:
        assert bench.state() == bench.fresh, "sending the initial weights changed them"
        second, _ = trainer.send(bench.second)
        stale = [name for name, digest in bench.fresh[0].items() if second[name] == digest]
        assert not stale, f"an update did not change {stale}"
        trainer.send(bench.first)
        name, tensor = next(iter(bench.second.items()))
        missing = dict(bench.second)
        del missing[name]
        trainer.require_refused(f"{name} is missing", lambda: trainer.send(missing))
        renamed = {**missing, f"{name}.unknown": tensor}
        trainer.require_refused(f"{name} has another name", lambda: trainer.send(renamed))
        surplus = {**bench.second, f"{name}.unknown": tensor}
        trainer.require_refused("an additional tensor", lambda: trainer.send(surplus))


def check_shapes(bench: Bench) -> None:
    """Check that a tensor of another shape is refused before any other tensor is loaded."""
    name, tensor = [item for item in bench.second.items() if item[1].ndim == 2][-1]
    misfits = {
        "too few rows": tensor[:-1],
        "too many rows": tensor.repeat(2, 1),
        "too few columns": tensor[:, :-1],
    }
    with bench.training() as trainer:
        for problem, misfit in misfits.items():
            weights = {**bench.second, name: misfit.contiguous()}
            trainer.require_refused(problem, lambda weights=weights: trainer.send(weights))  # type: ignore[misc]


def check_refusals(bench: Bench) -> None:
    """Check that unknown fields of ``update_info`` and ``init_info`` are refused."""
    unknown = {"no_such_field": 1}
    with bench.training() as trainer:

        def update() -> None:
            trainer.client.start_weight_update()
            trainer.client.update_weights(unknown)

        trainer.require_refused("an unknown field of update_info", update)
        trainer.require_refused(
            "an unknown field of init_info",
            lambda: trainer.client.init_weight_transfer_engine(unknown),
        )


def check_half_updates(bench: Bench) -> None:
    """Check that a failed or abandoned update changes no weights and blocks no later update."""
    with bench.training() as trainer:

        def fail() -> None:
            trainer.source.num_before_failure = len(bench.second) // 2
            try:
                trainer.send(bench.second)
            finally:
                trainer.source.num_before_failure = None

        trainer.require_refused("the source fails", fail)
        trainer.client.start_weight_update()  # never finished, as if the trainer was killed
    with bench.training() as trainer:
        assert bench.state() == bench.fresh, "an unfinished update blocked the next one"


def check_sleep(bench: Bench) -> None:
    """Check that an update during a sleep mixes no weights, and that a later update works."""
    with bench.training() as trainer:
        second = trainer.send(bench.second)
        bench.llm.sleep(level=1)
        with contextlib.suppress(Exception):  # both an error and success are allowed
            trainer.source.weights = bench.first
            trainer.engine.send_weights()
        bench.llm.wake_up()
        assert bench.state() in (second, bench.fresh), "the engine has a mix of weights after sleep"
        trainer.send(bench.first)
        bench.llm.sleep(level=2)
        bench.llm.wake_up()
        bench.llm.apply_model(_lose)  # sleep of level 2 discards the weights
        assert trainer.send(bench.first) == bench.fresh, (
            "an update did not restore weights that were lost in sleep"
        )


def check_sparse(bench: Bench) -> None:
    """Check that patches (changed elements) have the same result as sending all tensors."""
    patched = {name: tensor.clone() for name, tensor in bench.first.items()}
    patches = []
    for name in list(patched)[::3]:
        tensor = patched[name].view(-1)
        places = torch.arange(0, len(tensor), 7)
        tensor[places] = bench.second[name].reshape(-1)[places]
        shape = tuple(bench.first[name].shape)
        patches.append(SparseWeightPatch(name, places.int(), tensor[places], shape))
    with bench.training() as trainer:
        trainer.engine.send_weights(patches)
        state = bench.state()
        assert state != bench.fresh, "patches changed nothing"
        assert state == trainer.send(patched), "patches and a whole update differ"
        name, places, values = patches[0].name, patches[0].indices, patches[0].values
        beyond = torch.full_like(places, bench.first[name].numel())
        wrong = SparseWeightPatch(name, beyond, values, tuple(bench.first[name].shape))
        trainer.require_refused(
            "a patch beyond the end of its tensor",
            lambda: trainer.engine.send_weights([*patches[1:], wrong]),
        )


CHECKS = (check_names, check_shapes, check_refusals, check_half_updates, check_sleep, check_sparse)
"""All checks of a backend. Leave out `check_sparse` if the backend has no patches."""


def _digests(model: torch.nn.Module) -> dict[str, str]:
    def bits(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)

    return {
        name: sha256(bits(parameter).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }


@torch.no_grad()
def _lose(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()
