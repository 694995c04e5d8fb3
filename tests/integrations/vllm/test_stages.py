"""Pipeline stages and spread experts, whose steps vLLM's CPU build cannot run: what each rank gets.

Two ranks of our own over gloo, each with vLLM's own configuration, groups, loader and model of its
stage (or of its half of the experts), follow a store as an engine's workers do. What they have
after each switch is compared with what vLLM makes of the checkpoint, to the byte.
"""

from __future__ import annotations

import copy
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.support.children import preloaded
from tests.support.engines.misfits import BIAS, K_PROJ, NORM, Q_PROJ
from tests.support.engines.tiny_models import save_model, weights_in
from tests.support.engines.vllm_engines import NEEDS_VLLM, engine_arguments
from tests.support.stores import SHARED_MEMORY
from tests.support.worlds import World

pytestmark = NEEDS_VLLM

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
EXPERTS: dict[str, Any] = {"tp": 2, "enable_expert_parallel": True}
CASES = {
    "two stages": ("qwen3", STAGES),
    "two stages of a tied model": ("tied-qwen2", STAGES),
    "two stages with experts": ("qwen3-moe", STAGES),
    "experts spread over two ranks": ("qwen3-moe", EXPERTS),
}
IMPORTED = (
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.v1.worker.cpu_model_runner",
    "dbuffer.integrations.vllm.rank",
)
"""By both ranks, once: it takes each of them 8 s."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ORDER = (1, 0, 1, 0)
"""Of the two checkpoints, as they are published: the last switches are copies."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        shared = uuid.uuid4().hex
        patch.setenv("VLLM_DIST_IDENT", shared)  # of its workers' memory, which they leave behind
        with preloaded(*IMPORTED), World(tmp_path_factory.mktemp("world"), 2) as world:
            yield world
            world.begin(leave)
            for rank in world.ranks:
                assert rank.wait() == 0
        for path in SHARED_MEMORY.glob(f"{shared}-*"):
            path.unlink()


@dataclass(frozen=True)
class Engine:
    """What two ranks have of a model, and the store that they follow."""

    world: World
    pair: list[dict[str, torch.Tensor]]
    fresh: list[list[dict[str, str]]]
    """By checkpoint and rank: digests of its tensors, as vLLM loads them."""
    sender: dbuffer.WeightSender

    def switch_to(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """What the ranks say of this version, each."""
        self.sender.send(weights)
        return self.world.run(update)

    def digests(self) -> list[dict[str, str]]:
        return self.world.run(digests)


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, world: World, directory: Path) -> Iterator[Engine]:
    family, kind = CASES[request.param]
    place = directory / request.param.replace(" ", "-")
    paths = [save_model(family, seed, place) for seed in (0, 1)]
    fresh = [world.run(start, path, kind) for path in reversed(paths)]
    with dbuffer.WeightSender(place / "store") as sender:
        assert world.run(follow, place / "store") == ["", ""]
        pair = [weights_in(path) for path in paths]
        yield Engine(world, pair, fresh[::-1], sender)
        world.run(end)


def test_each_rank_has_after_switches_what_vllm_gives_it(engine: Engine) -> None:
    first, second = engine.fresh
    for rank in (0, 1):
        assert first[rank].keys() == second[rank].keys()
        for name in first[rank]:
            if name.endswith("weight") and ("proj" in name or "experts" in name):
                assert first[rank][name] != second[rank][name]
    assert first[0] != first[1]
    for number in ORDER:
        assert engine.switch_to(engine.pair[number]) == ["", ""]
        assert engine.digests() == engine.fresh[number]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.0.bogus", {"model.layers.0.bogus": torch.ones(2)}),
        ("model.layers.1.bogus", {"model.layers.1.bogus": torch.ones(2)}),
        ("model.layers.2.bogus", {"model.layers.2.bogus": torch.ones(2)}),
        ("bogus", {"bogus": torch.ones(2)}),
        (BIAS, {BIAS: torch.ones(64)}),  # passed over by both
        (Q_PROJ, {Q_PROJ: torch.ones(2)}),
        (NORM, {NORM: torch.ones(2)}),
        ("qkv_proj", {K_PROJ: None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_one_rank_cannot_take_no_rank_takes(
    engine: Engine, name: str, change: dict[str, torch.Tensor | None]
) -> None:
    """A stage skips names of the other one; what nobody has taken is refused all the same."""
    before = engine.digests()
    changed = engine.pair[1] | change
    answers = engine.switch_to({name: t for name, t in changed.items() if t is not None})
    for answer in answers:
        assert name in answer
        assert "no rank was touched" in answer
    assert engine.digests() == before


@pytest.mark.parametrize("engine", ["two stages of a tied model"], indirect=True)
def test_a_head_that_no_stage_reads_is_redundant_if_it_is_equal(engine: Engine) -> None:
    weights = engine.pair[0] | {HEAD: engine.pair[0][EMBEDDING].clone()}
    assert engine.switch_to(weights) == ["", ""]
    assert engine.digests() == engine.fresh[0]
    for scale in (2, 3):
        for answer in engine.switch_to(weights | {HEAD: scale * weights[HEAD]}):
            assert f"{HEAD} (it differs from {EMBEDDING}" in answer
            assert "no rank was touched" in answer
        assert engine.digests() == engine.fresh[0]


def test_experts_that_move_are_refused(world: World, engine: Engine) -> None:
    for answer in world.run(follow_with_balancing, engine.sender.store):
        assert "enable_eplb" in answer


# What runs on the ranks.

_here: dict[str, Any] = {}


def start(rank: int, checkpoint: Path, kind: dict[str, Any]) -> dict[str, str]:
    """Make this rank's part of a model as vLLM's worker does; what is in its tensors then."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker import cpu_model_runner

    from tests.integrations.vllm.test_vllm import set_packing

    cpu_model_runner._set_torch_accelerator_to_noop()
    set_packing(packed=False)  # what kernels keep to themselves has no bytes to compare
    arguments = engine_arguments(checkpoint, distributed_executor_backend="mp", **kind)
    config = EngineArgs(**arguments).create_engine_config()
    parallel = config.parallel_config
    with set_current_vllm_config(config):
        parallel_state.destroy_model_parallel()
        parallel_state.init_distributed_environment(2, rank, "env://", rank, "gloo")
        parallel_state.ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    _here.update(config=config, model=model)
    return digests(rank)


def leave(rank: int) -> None:
    """Give back what is shared, which a tracker would tell of after all else has been said."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    sys.exit()


def digests(rank: int) -> dict[str, str]:
    import xxhash

    model = _here["model"]
    return {
        name: xxhash.xxh3_64_hexdigest(
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def follow(rank: int, store: Path) -> str:
    from dbuffer.integrations.engine.engine_options import EngineOptions
    from dbuffer.integrations.engine.messages import RankRequest

    return ask(RankRequest("begin", options=EngineOptions.parse({"store": str(store)})))


def update(rank: int) -> str:
    from dbuffer.integrations.engine.engine_options import UpdateRequest
    from dbuffer.integrations.engine.messages import RankRequest

    return ask(RankRequest("update", update=UpdateRequest()))


def end(rank: int) -> str:
    from dbuffer.integrations.engine.messages import RankRequest

    return ask(RankRequest("end"))


def follow_with_balancing(rank: int, store: Path) -> str:
    config = _here["config"]
    _here["config"] = copy.copy(config)
    _here["config"].parallel_config = copy.copy(config.parallel_config)
    _here["config"].parallel_config.enable_eplb = True  # vLLM lets no CPU have it
    try:
        return follow(rank, store)
    finally:
        _here["config"] = config


def ask(request: Any) -> str:
    """What is wrong with it; "" if it was done."""
    from dbuffer.integrations.engine.endpoint import RankEndpoint, capture_answer
    from dbuffer.integrations.vllm.rank import WorkerRank

    config, model = _here["config"], _here["model"]

    def rank() -> WorkerRank:
        return WorkerRank(config, model, torch.device("cpu"))

    answer = capture_answer(lambda: RankEndpoint.of(model).do(request, rank))
    return "" if answer is None else str(answer)
