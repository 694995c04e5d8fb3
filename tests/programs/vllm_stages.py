"""Pipeline stages and spread experts, whose steps vLLM's CPU build cannot run: what each rank gets.

Two ranks of our own over gloo, each with vLLM's own configuration, groups, loader and model of its
stage (or of its half of the experts), follow a store as an engine's workers do. What they have
after each switch is compared with what vLLM makes of the checkpoint, to the byte. What one rank
cannot take, no rank takes.
"""

from __future__ import annotations

import multiprocessing
import os
import uuid
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.engine.contract import RankRequest
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from tests.support.engines.misfits import BIAS, K_PROJ, NORM, Q_PROJ
from tests.support.engines.tiny_models import save_model, weights_in
from tests.support.engines.vllm_engines import engine_arguments, judge, set_packing
from tests.support.stores import SHARED_MEMORY
from tests.support.worlds import World

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
EXPERTS: dict[str, Any] = {"tp": 2, "enable_expert_parallel": True}
TIED = "two stages of a tied model"
CASES = {
    "two stages": ("qwen3", STAGES),
    TIED: ("tied-qwen2", STAGES),
    "two stages with experts": ("qwen3-moe", STAGES),
    "experts spread over two ranks": ("qwen3-moe", EXPERTS),
}
DONE = ["", ""]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ORDER = (1, 0, 1, 0)
REFUSED: dict[str, dict[str, torch.Tensor | None]] = {
    **{name: {name: torch.ones(2)} for name in ("bogus", Q_PROJ, NORM)},
    **{name: {name: torch.ones(2)} for name in (f"model.layers.{n}.bogus" for n in range(3))},
    BIAS: {BIAS: torch.ones(64)},  # passed over by both
    "qkv_proj": {K_PROJ: None},
}


def run(directory: Path) -> None:
    shared = os.environ["VLLM_DIST_IDENT"] = uuid.uuid4().hex
    try:
        with World(directory, 2, processes=multiprocessing.get_context("spawn")) as world:
            for case in CASES:
                switch_parts(world, directory, case)
            world.begin(leave)
            assert [rank.wait() for rank in world.ranks] == [0, 0]
    finally:  # of its workers' memory, which they leave behind
        for path in SHARED_MEMORY.glob(f"{shared}-*"):
            path.unlink()


def switch_parts(world: World, directory: Path, case: str) -> None:
    family, kind = CASES[case]
    place = directory / case.replace(" ", "-")
    paths = [save_model(family, seed, place) for seed in (0, 1)]
    pair = [weights_in(path) for path in paths]
    fresh = [world.run(start, path, kind) for path in reversed(paths)][::-1]
    require_different(*fresh)
    with dbuffer.WeightSender(place / "store") as sender:
        assert world.run(follow, place / "store") == DONE

        def switch_to(weights: dict[str, Any]) -> list[str]:
            sender.send({name: tensor for name, tensor in weights.items() if tensor is not None})
            return world.run(update)

        def require_refused(weights: dict[str, Any], problem: str) -> None:
            for answer in switch_to(weights):
                assert problem in answer
                assert "no rank was touched" in answer
            assert world.run(digests) == fresh[0]

        for number in ORDER:
            assert switch_to(pair[number]) == DONE
            assert world.run(digests) == fresh[number]
        for name, change in REFUSED.items():
            require_refused(pair[1] | change, name)
        if case == TIED:  # a head that no stage reads is redundant if it is equal
            weights = pair[0] | {HEAD: pair[0][EMBEDDING].clone()}
            assert switch_to(weights) == DONE
            assert world.run(digests) == fresh[0]
            for scale in (2, 3):
                differs = f"{HEAD} (it differs from {EMBEDDING}"
                require_refused(weights | {HEAD: scale * weights[HEAD]}, differs)
        world.run(end)
        for answer in world.run(follow_with_balancing, sender.store):
            assert "enable_eplb" in answer


def require_different(first: list[dict[str, str]], second: list[dict[str, str]]) -> None:
    assert first[0] != first[1]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if name.endswith("weight") and ("proj" in name or "experts" in name):
                assert one[name] != other[name]


# What runs on the ranks.

_here: dict[str, Any] = {}


def start(rank: int, checkpoint: Path, kind: dict[str, Any]) -> dict[str, str]:
    """Make this rank's part of a model as vLLM's worker does; what is in its tensors then."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker import cpu_model_runner

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
    """Give back what is shared, and end at once: torch aborts if rank 0's interpreter is ended."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    os._exit(0)


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
    return ask(RankRequest("begin", options=EngineOptions.parse({"store": str(store)})))


def update(rank: int) -> str:
    return ask(RankRequest("update", update=UpdateRequest()))


def end(rank: int) -> str:
    return ask(RankRequest("end"))


def follow_with_balancing(rank: int, store: Path) -> str:
    parallel = _here["config"].parallel_config
    parallel.enable_eplb = True  # vLLM lets no CPU have it
    try:
        return follow(rank, store)
    finally:
        parallel.enable_eplb = False


def ask(request: Any) -> str:
    """What is wrong with it; "" if it was done."""
    from dbuffer.engine.endpoint import RankEndpoint, capture_answer
    from dbuffer.integrations.vllm.rank import WorkerRank

    config, model = _here["config"], _here["model"]

    def rank() -> WorkerRank:
        return WorkerRank(config, model, torch.device("cpu"))

    answer = capture_answer(lambda: RankEndpoint.of(model).do(request, rank))
    return str(answer) if isinstance(answer, dbuffer.DBufferError) else ""


if __name__ == "__main__":
    judge(run)
