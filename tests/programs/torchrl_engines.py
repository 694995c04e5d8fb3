"""Program of `test_vllm.py`: TorchRL's vLLM classes over a store, with real engines.

What engines answer is compared with what fresh engines on the same weights do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.engines.async_engines import start_async_llm
from tests.support.engines.tiny_models import make_model, make_tokenizer, save_model
from tests.support.engines.vllm_engines import (
    NUM_TOKENS,
    PROMPTS,
    engine_arguments,
    greedy,
    greedy_parameters,
    judge,
    start_llm,
)
from tests.support.waiting import meanwhile

with warnings.catch_warnings():
    # torchrl warns of its own legacy classes, and of torch's, as it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from tensordict import TensorDict


import dbuffer
from dbuffer.integrations.torchrl import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    get_model_metadata,
)
from tests.support import ROOT

HEAD = "lm_head.weight"
NORM = "model.norm.weight"
WRONG_METADATA: dict[str, tuple[str, Any]] = {
    "a name too few": (NORM, None),
    "a name too many": ("bogus", (torch.float32, torch.Size([2]))),
    "another shape": (HEAD, (torch.float32, torch.Size([500, 5]))),
    "another dtype": (NORM, (torch.int64, torch.Size([64]))),
}
"""Wrong metadata by what is wrong: a name, and its wrong entry; None: it has none."""
SOON_S = 0.3

Models = dict[int, torch.nn.Module]
Answers = list[list[int]]
Fresh = list[Answers]
"""Answers of fresh engines, by the seed of the weights that they were started on."""


def wrong_metadata(metadata: Mapping[str, Any], wrong: str) -> dict[str, Any]:
    name, entry = WRONG_METADATA[wrong]
    others = {key: value for key, value in metadata.items() if key != name}
    return others if entry is None else others | {name: entry}


def misfit(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = model.state_dict()
    return weights | {HEAD: weights[HEAD][:, :5].clone()}


def start_fresh(directory: Path) -> tuple[Models, Fresh]:
    checkpoints = [save_model("qwen3", seed, directory) for seed in (0, 1, 2)]
    fresh = [greedy(start_llm(path, how="none")) for path in checkpoints]
    assert len({str(answer) for answers in fresh for answer in answers}) == 3 * len(PROMPTS)
    return {seed: make_model("qwen3", seed) for seed in (1, 2)}, fresh


@contextlib.contextmanager
def both_ends(scheme: Any, engine: Any) -> Iterator[tuple[Any, Any]]:
    receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
    yield receiver, sender
    receiver.shutdown()
    sender.shutdown()


# With an `LLM` and an `AsyncLLM` of this process, which were started with no option of dbuffer.


def run_local(directory: Path) -> None:
    models, fresh = start_fresh(directory)
    llm = start_llm(directory / "qwen3-0", how="none")
    poll(directory / "polled" / "store", llm, models, fresh)
    send_to_holders(directory / "holders", llm, models, fresh)
    push(directory / "pushed", llm, models, fresh)
    asyncio.run(update_async_llm(directory, models, fresh))


def version_reported(llm: Any) -> str:
    outputs = llm.generate([{"prompt_token_ids": [7]}], greedy_parameters(4), use_tqdm=False)
    [span] = outputs[0].outputs[0].weight_versions
    return str(span.version)


def cached_tokens(llm: Any) -> list[int]:
    """How much of each prompt was found in the prefix cache."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedy_parameters(2), use_tqdm=False)
    return [output.num_cached_tokens for output in outputs]


def poll(store: Path, llm: Any, models: Models, fresh: Fresh) -> None:
    scheme = VLLMDoubleBufferSyncScheme(str(store))
    assert version_reported(llm) == "default"
    with both_ends(scheme, llm) as (receiver, sender):
        begun = time.monotonic()
        assert [receiver.poll_and_apply(timeout) for timeout in (0, 0.2)] == [False, False]
        assert time.monotonic() - begun >= 0.2
        assert greedy(llm) == fresh[0]
        sender.register_model(models[1])
        with meanwhile(sender.update_weights, after_s=SOON_S):
            assert receiver.poll_and_apply(timeout=TIMEOUT_S) is True
        assert (greedy(llm), version_reported(llm)) == (fresh[1], "1")
        assert [receiver.poll_and_apply(timeout) for timeout in (0, 0.1)] == [False, False]
        # Prompts that are longer than a block stay in the prefix cache until the weights change.
        assert [cached > 0 for cached in cached_tokens(llm)] == [False, False, True, True]
        sender.update_weights(models[2])
        assert receiver.poll_and_apply()
        assert cached_tokens(llm) == [0, 0, 0, 0]
        assert (greedy(llm), version_reported(llm)) == (fresh[2], "2")

        apply_by_hand(scheme, receiver, sender, llm, models, fresh)
        assert list(store.parent.iterdir()) == [store]
        sender.update_weights(misfit(models[1]))
        with pytest.raises(dbuffer.EngineUpdateError, match=HEAD):
            receiver.poll_and_apply(timeout=TIMEOUT_S)
        assert greedy(llm) == fresh[2]
        sender.update_weights(models[1])
        assert receiver.poll_and_apply(timeout=TIMEOUT_S)
        assert greedy(llm) == fresh[1]
        receiver.shutdown()  # and again at the end of the block
        another = scheme.create_receiver(llm)
        assert another.poll_and_apply(timeout=0.1) is False, "the engine has these weights"
        another.shutdown()


def apply_by_hand(
    scheme: Any, receiver: Any, sender: Any, llm: Any, models: Models, fresh: Fresh
) -> None:
    sender.update_weights(models[1])
    with contextlib.closing(scheme.create_transport()) as transport:
        receiver.apply_weights(transport.receive_weights())
    assert greedy(llm) == fresh[1]
    for seed, weights in (
        (2, models[2]),
        (1, TensorDict(models[1].state_dict()).unflatten_keys(".")),
    ):
        receiver.apply_weights(weights)
        # No version of the store has them.
        assert (greedy(llm), version_reported(llm)) == (fresh[seed], "unknown")
    sender.update_weights(models[2])
    assert receiver.poll_and_apply(timeout=0) is True
    assert greedy(llm) == fresh[2]
    with pytest.raises(dbuffer.OptionError):
        receiver.apply_weights(None, inplace=False)


def send_to_holders(store: Path, llm: Any, models: Models, fresh: Fresh) -> None:
    from torchrl.modules.llm import vLLMWrapper
    from torchrl.modules.llm.backends.vllm import LocalLLMWrapper
    from torchrl.modules.llm.policies import Tokens

    tokenizer = make_tokenizer()
    tokenizer.pad_token = "word0"  # which is in no prompt: others are cut out of them
    wrapper = vLLMWrapper(
        llm,
        tokenizer=tokenizer,
        input_mode="tokens",
        pad_output=True,
        generate_kwargs={"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
    )
    scheme = VLLMDoubleBufferSyncScheme(str(store))
    for seed, holder in ((2, wrapper), (1, LocalLLMWrapper(llm, 1, "model"))):
        with both_ends(scheme, holder) as (receiver, sender):
            sender.update_weights(models[seed])
            assert receiver.poll_and_apply(timeout=TIMEOUT_S) is True
            assert greedy(llm) == fresh[seed]
    prompt = Tokens(prompt=torch.tensor([PROMPTS[0]]), batch_size=1)
    response = wrapper(TensorDict(tokens=prompt, batch_size=1))["tokens"].response
    assert response[0].tolist() == fresh[1][0]


def push(store: Path, llm: Any, models: Models, fresh: Fresh) -> None:
    """Send weights to an engine that is not polled: it has them when `update_weights` returns.

    It has the weights of seed 1 before.
    """
    scheme = VLLMWeightSyncScheme(remote_addr=str(store))
    metadata = get_model_metadata(models[2])
    with both_ends(scheme, llm) as (receiver, sender):
        receiver.init_all_workers_group(metadata)
        for wrong, (name, _) in WRONG_METADATA.items():
            with pytest.raises(dbuffer.WeightsMismatchError, match=re.escape(name)):
                receiver.init_all_workers_group(wrong_metadata(metadata, wrong))
        assert greedy(llm) == fresh[1]
        begun = time.monotonic()
        assert receiver.poll_and_apply() is False
        assert 0.1 <= time.monotonic() - begun < 5.0
        sender.update_weights(models[2])
        assert receiver.poll_and_apply(timeout=0) is True
        assert greedy(llm) == fresh[2]
    sender = scheme.create_sender()
    sender.register_model(models[1])
    sender.init_all_workers_group(metadata, vllm_engine=llm)
    sender.update_weights()
    assert greedy(llm) == fresh[1]
    with pytest.raises(dbuffer.EngineUpdateError, match=HEAD):
        sender.update_weights(misfit(models[2]))
    assert greedy(llm) == fresh[1]
    sender.update_weights(models[2])
    assert greedy(llm) == fresh[2]
    sender.shutdown()


async def update_async_llm(directory: Path, models: Models, fresh: Fresh) -> None:
    engine = start_async_llm(directory / "qwen3-0", how="none")
    has_begun = asyncio.Event()

    async def respond(prompt: list[int], num_tokens: int) -> Any:
        request = {"prompt_token_ids": prompt}
        parameters = greedy_parameters(num_tokens)
        async for output in engine.generate(request, parameters, str(time.monotonic_ns())):
            response = output.outputs[0]
            if len(response.token_ids) > 10:
                has_begun.set()
        return response

    async def require(seed: int, version: str) -> None:
        responses = await asyncio.gather(*(respond(prompt, NUM_TOKENS) for prompt in PROMPTS))
        assert [list(response.token_ids) for response in responses] == fresh[seed]
        assert {response.weight_versions[0].version for response in responses} == {version}

    def poll(timeout: float) -> Any:
        return asyncio.to_thread(receiver.poll_and_apply, timeout)

    scheme = VLLMDoubleBufferSyncScheme(str(directory / "async"))
    receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
    assert await poll(0) is False
    await require(0, "default")
    sender.update_weights(models[1])
    with pytest.raises(dbuffer.EngineBusyError):
        receiver.poll_and_apply(0)
    assert [await poll(10), await poll(0)] == [True, False]
    await require(1, "1")
    has_begun.clear()
    # Published before: while the request runs there is to be time for the switch.
    sender.update_weights(models[2])
    in_flight = asyncio.create_task(respond(PROMPTS[2], 200))
    await has_begun.wait()
    assert await poll(10) is True
    kept = await in_flight
    assert [span.version for span in kept.weight_versions] == ["1", "2"]
    assert len(kept.token_ids) == 200
    await require(2, "2")
    with pytest.raises(dbuffer.EngineBusyError):
        receiver.shutdown()
    await asyncio.to_thread(receiver.shutdown)
    sender.shutdown()
    pushing = VLLMWeightSyncScheme(remote_addr=str(directory / "async pushed"))
    receiver, sender = pushing.create_receiver(engine), pushing.create_sender()
    sender.init_all_workers_group(get_model_metadata(models[1]))
    await asyncio.to_thread(sender.update_weights, models[1])
    await require(1, "1")
    assert await poll(0) is False
    await asyncio.to_thread(receiver.shutdown)
    sender.shutdown()
    engine.shutdown()


# With engines in Ray actors.


class UserEngine:
    def __init__(self, **arguments: Any) -> None:
        import vllm

        self.llm = vllm.LLM(**arguments)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm.generate(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


def run_ray(directory: Path, session: str) -> None:
    import ray
    from torchrl.modules.llm.backends.vllm import RayLLMWorker, make_async_vllm_engine

    models, fresh = start_fresh(directory)
    ray.init(
        num_cpus=4,
        num_gpus=2,  # only counted, not looked for
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=session,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    arguments = engine_arguments(directory / "qwen3-0", how="none")
    user_class = ray.remote(num_cpus=1, max_restarts=1)(UserEngine)
    own = user_class.remote(**arguments)
    model = arguments.pop("model")
    service = make_async_vllm_engine(
        model_name=model, num_replicas=2, compile=False, enable_prefix_caching=True, **arguments
    )
    assert len(service.actors) == 2
    poll_hosted(directory / "own", own, [own], models, fresh)
    poll_hosted(directory / "service", service, service.actors, models, fresh)
    poll_hosted(directory / "worker", RayLLMWorker(own, 1, model), [own], models, fresh)
    service.shutdown()
    lose_an_actor(directory / "lost", own, models, fresh)
    ray.shutdown()


def responses_of(actor: Any) -> list[Any]:
    import ray

    parameters = greedy_parameters()
    references = [
        actor.generate.remote({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
        for prompt in PROMPTS
    ]
    outputs = ray.get(references)
    return [(output[0] if isinstance(output, list) else output).outputs[0] for output in outputs]


def answers_of(actor: Any) -> Answers:
    return [list(response.token_ids) for response in responses_of(actor)]


def version_of(responses: list[Any]) -> str:
    [version] = {span.version for response in responses for span in response.weight_versions}
    return str(version)


def poll_hosted(store: Path, engine: Any, actors: list[Any], models: Models, fresh: Fresh) -> None:
    with both_ends(VLLMDoubleBufferSyncScheme(str(store)), engine) as (receiver, sender):
        assert receiver.poll_and_apply(timeout=0) is False
        for actor in actors:
            answers_of(actor)  # fills caches that must not outlive the weights
        for seed in (1, 2):
            sender.update_weights(models[seed])
            assert receiver.poll_and_apply(timeout=TIMEOUT_S) is True
            assert receiver.poll_and_apply(timeout=0) is False
            for actor in actors:
                responses = responses_of(actor)
                assert [list(response.token_ids) for response in responses] == fresh[seed]
                assert version_of(responses) == str(seed)


def lose_an_actor(store: Path, actor: Any, models: Models, fresh: Fresh) -> None:
    import ray

    def answers_again() -> int | None:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            return int(ray.get(actor.pid.remote()))
        return None

    with both_ends(VLLMDoubleBufferSyncScheme(str(store)), actor) as (receiver, sender):
        sender.update_weights(models[1])
        assert receiver.poll_and_apply(timeout=TIMEOUT_S)
        sender.update_weights(misfit(models[1]))
        with pytest.raises(dbuffer.EngineUpdateError, match=HEAD):
            receiver.poll_and_apply(timeout=TIMEOUT_S)
        assert answers_of(actor) == fresh[1]
        sender.update_weights(models[2])
        assert receiver.poll_and_apply(timeout=TIMEOUT_S)
        before = answers_again()
        ray.kill(actor, no_restart=False)
        until("another actor", lambda: answers_again() not in (before, None), TIMEOUT_S)
        assert receiver.poll_and_apply(timeout=TIMEOUT_S) is True
        assert answers_of(actor) == fresh[2]
        ray.kill(actor)
        with contextlib.suppress(ray.exceptions.RayActorError):
            while True:  # it may answer until it is dead
                ray.get(actor.__ray_ready__.remote())
        sender.update_weights(models[1])
        with pytest.raises((dbuffer.EngineEndedError, dbuffer.EngineUnreachableError)):
            receiver.poll_and_apply(timeout=TIMEOUT_S)


if __name__ == "__main__":
    judge(run_local if len(sys.argv) == 2 else run_ray)
