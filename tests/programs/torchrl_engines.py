"""TorchRL's vLLM classes over a store, with an `LLM` and an `AsyncLLM`, or with Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import (
    NUM_TOKENS,
    PROMPTS,
    engine_arguments,
    greedy,
    greedy_parameters,
    leave,
)

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
"""What is wrong with them: a name, and what is said of it instead; None: nothing."""
SWITCHES_UNDER_LOAD = 12
SETTLE_S = 0.05


def wrong_metadata(metadata: Mapping[str, Any], wrong: str) -> dict[str, Any]:
    name, said = WRONG_METADATA[wrong]
    others = {key: value for key, value in metadata.items() if key != name}
    return others if said is None else others | {name: said}


@contextlib.contextmanager
def publishing_soon(publish: Callable[[], object], times: dict[str, float]) -> Iterator[None]:
    """Publish in another thread, a while after this has begun."""

    def run() -> None:
        times["published"] = time.monotonic()
        publish()

    # Nothing tells that somebody is waiting already: this only has to be later than they began.
    timer = threading.Timer(0.3, run)
    times["begun"] = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        timer.join()


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (dbuffer.DBufferError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def counted_loads(llm: Any) -> list[int]:
    """A list that grows whenever weights are loaded into an engine of this process."""
    [model] = llm.apply_model(lambda model: model)
    loads: list[int] = []
    load_weights = model.load_weights

    def count_and_load(*args: Any, **kwargs: Any) -> Any:
        loads.append(1)
        return load_weights(*args, **kwargs)

    model.load_weights = count_and_load
    return loads


def version_reported(llm: Any) -> str:
    outputs = llm.generate([{"prompt_token_ids": [7]}], greedy_parameters(4), use_tqdm=False)
    [span] = outputs[0].outputs[0].weight_versions
    return str(span.version)


def cached_tokens(llm: Any) -> list[int]:
    """How much of each prompt was found in the prefix cache."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, greedy_parameters(2), use_tqdm=False)
    return [output.num_cached_tokens for output in outputs]


def spoilt(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, HEAD: weights[HEAD][:, :5].clone()}


def observe_llm(place: Path, llm: Any, models: dict[int, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {"versions reported": [version_reported(llm)]}
    scheme = VLLMDoubleBufferSyncScheme(str(place / "llm" / "store"))
    receiver, sender = scheme.create_receiver(llm), scheme.create_sender()
    begun = time.monotonic()
    seen["before the first write"] = [receiver.poll_and_apply(timeout) for timeout in (0, 0.2)]
    seen["waited before the first write, s"] = time.monotonic() - begun
    seen["started"] = greedy(llm)
    sender.register_model(models[1])
    loads = counted_loads(llm)
    times: dict[str, float] = {}
    with publishing_soon(sender.update_weights, times):
        seen["came while waiting"] = receiver.poll_and_apply(timeout=60.0)
    seen["published while waiting"] = times["published"] > times["begun"]
    seen["first"] = greedy(llm)
    seen["versions reported"].append(version_reported(llm))

    seen["loads for something new"] = len(loads)
    loads.clear()
    seen["nothing new"] = [receiver.poll_and_apply(timeout) for timeout in (0, 0.1)]
    seen["loads for nothing new"] = len(loads)
    seen["cached before"] = cached_tokens(llm)
    sender.update_weights(models[2])
    assert receiver.poll_and_apply()
    seen["cached after"] = cached_tokens(llm)
    seen["second"] = greedy(llm)
    seen["versions reported"].append(version_reported(llm))
    seen |= observe_apply_weights(place, llm, models, scheme, receiver, sender)

    sender.update_weights(spoilt(models[1].state_dict()))
    seen["misfit"] = error_of(lambda: receiver.poll_and_apply(timeout=10))
    seen["after the misfit"] = greedy(llm)
    sender.update_weights(models[1])
    assert receiver.poll_and_apply(timeout=10)
    seen["after the next good one"] = greedy(llm)
    receiver.shutdown()
    receiver.shutdown()
    loads.clear()
    another = scheme.create_receiver(llm)
    seen["another receiver"] = another.poll_and_apply(timeout=0.1)
    seen["loads for another receiver"] = len(loads)
    another.shutdown()
    seen |= observe_holders(llm, models, scheme, sender)
    sender.shutdown()
    seen["both sides"] = observe_both_sides(llm, models, scheme)
    return seen


def observe_apply_weights(
    place: Path, llm: Any, models: dict[int, Any], scheme: Any, receiver: Any, sender: Any
) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    transport = scheme.create_transport()
    sender.update_weights(models[1])
    receiver.apply_weights(transport.receive_weights())
    seen["applied, received"] = greedy(llm)
    seen["poll after that"] = receiver.poll_and_apply(timeout=0)
    transport.close()
    by_hand = seen["applied by hand"] = {}
    for kind, seed, weights in (
        ("module", 2, models[2]),
        ("tensordict", 1, TensorDict(models[1].state_dict()).unflatten_keys(".")),
        ("state dict", 2, models[2].state_dict()),
    ):
        receiver.apply_weights(weights)
        by_hand[kind] = [seed, greedy(llm), version_reported(llm)]
    sender.update_weights(models[2])
    receiver.apply_weights(models[1])
    receiver.apply_weights(None)
    seen["applied, newest"] = greedy(llm)
    seen["beside the store"] = sorted(path.name for path in (place / "llm").iterdir())
    seen["out of place"] = error_of(lambda: receiver.apply_weights(None, inplace=False))
    return seen


def observe_holders(llm: Any, models: dict[int, Any], scheme: Any, sender: Any) -> dict[str, Any]:
    """What TorchRL's users have instead of an engine."""
    from torchrl.modules.llm import vLLMWrapper
    from torchrl.modules.llm.backends.vllm import LocalLLMWrapper
    from torchrl.modules.llm.policies import Tokens

    wrapper = vLLMWrapper(
        llm,
        tokenizer=tiny_tokenizer(),
        input_mode="tokens",
        pad_output=True,
        generate_kwargs={"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
    )
    seen: dict[str, Any] = {"holders": {}}
    for seed, holder in ((2, wrapper), (1, LocalLLMWrapper(llm, 1, "model"))):
        receiver = scheme.create_receiver(holder)
        sender.update_weights(models[seed])
        polled = receiver.poll_and_apply(timeout=10)
        seen["holders"][type(holder).__name__] = [seed, polled, greedy(llm)]
        receiver.shutdown()
    prompt = Tokens(prompt=torch.tensor([PROMPTS[0]]), batch_size=1)
    response = wrapper(TensorDict(tokens=prompt, batch_size=1))["tokens"].response
    seen["wrapper's response"] = [1, response[0].tolist()]
    return seen


def tiny_tokenizer() -> Any:
    """A tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{token}": token for token in range(3, 500)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def observe_both_sides(llm: Any, models: dict[int, Any], scheme: Any) -> dict[str, Any]:
    """One scheme, pickled for the other side, as collectors do."""
    seen: dict[str, Any] = {"before": error_of(scheme.receive), "seed": 2}
    trainer = pickle.loads(pickle.dumps(scheme))
    scheme.init_on_receiver(model_id="policy", context=SimpleNamespace(policy=llm))
    trainer.init_on_sender("policy", SimpleNamespace(policy=models[2]))
    trainer.send()
    seen["received"] = [scheme.receive(timeout=10), scheme.receive(timeout=0)]
    seen["tokens"] = greedy(llm)
    trainer.shutdown()
    scheme.shutdown()
    return seen


def observe_collective(place: Path, llm: Any, models: dict[int, Any]) -> dict[str, Any]:
    """`VLLMWeightReceiver` and `VLLMWeightSender`; the engine has the weights of seed 2."""
    seen: dict[str, Any] = {"seed before": 2, "wrong metadata": {}}
    scheme = VLLMWeightSyncScheme(remote_addr=str(place / "collective"))
    metadata = get_model_metadata(models[1])

    def check(receiver: Any, when: str) -> str:
        refusals = seen["wrong metadata"][when] = {}
        for wrong in WRONG_METADATA:
            other = wrong_metadata(metadata, wrong)
            refusals[wrong] = error_of(functools.partial(receiver.init_all_workers_group, other))
        return error_of(lambda: receiver.init_all_workers_group(metadata))

    receiver, sender = scheme.create_receiver(llm), scheme.create_sender()
    seen["right metadata"] = [check(receiver, "before anything is published")]
    seen["tokens after checks"] = greedy(llm)
    begun = time.monotonic()
    seen["polled without news"] = receiver.poll_and_apply()
    seen["polled for, s"] = time.monotonic() - begun
    sender.update_weights(models[1])
    seen["pushed"] = [greedy(llm), receiver.poll_and_apply(timeout=0)]
    seen["right metadata"].append(check(receiver, "with a version in the store"))
    seen["misfit"] = error_of(lambda: sender.update_weights(spoilt(models[1].state_dict())))
    seen["after the misfit"] = greedy(llm)
    seen["while it generates"] = observe_pushes_under_load(llm, models, sender)

    receiver.shutdown()
    sender.register_model(models[2])
    sender.init_all_workers_group(metadata, vllm_engine=llm)
    sender.update_weights()
    seen["sent to the engine"] = greedy(llm)
    sender.shutdown()
    return seen


def observe_pushes_under_load(llm: Any, models: dict[int, Any], sender: Any) -> dict[str, Any]:
    """Publish in another thread while this one generates, one generation right after the other."""
    seeds: list[int] = []

    def push() -> None:
        for seed in (2, 1, 2):
            sender.update_weights(models[seed])
            seeds.append(seed)

    trainer = threading.Thread(target=push)
    trainer.start()
    answers = []
    while trainer.is_alive():
        before = len(seeds)
        answers.append([before, greedy(llm), len(seeds)])
    trainer.join()
    return {"answers": answers, "last": greedy(llm), "seeds": seeds}


def observe_addresses(place: Path, llm: Any, models: dict[int, Any]) -> dict[str, Any]:
    """``there`` is where a trainer writes, under the name that another host has for it."""
    seen: dict[str, Any] = {}
    there = place / "there" / "store"
    sender = VLLMDoubleBufferSyncScheme(str(there)).create_sender()
    for name in ("empty", "mounted", "late"):
        (place / name).mkdir(parents=True)

    def receiver_of(remote: Path, local: Path | None) -> Any:
        return VLLMDoubleBufferSyncScheme(
            str(remote), None if local is None else str(local)
        ).create_receiver(llm)

    def follow(receiver: Any, seed: int) -> list[Any]:
        sender.update_weights(models[seed])
        return [seed, receiver.poll_and_apply(timeout=10), greedy(llm)]

    receiver = receiver_of(place / "empty" / "store", there)
    seen["there only"] = [follow(receiver, 1), follow(receiver, 2)]
    receiver.shutdown()
    receiver = receiver_of(place / "mounted" / "store", there)
    seen["there, then here as well"] = [follow(receiver, 1)]
    (place / "mounted").rmdir()
    (place / "mounted").symlink_to(there.parent)
    seen["there, then here as well"].append(follow(receiver, 2))
    receiver.shutdown()
    seen["beside the trainer's"] = sorted(path.name for path in there.iterdir())
    receiver = receiver_of(there, place / "memory" / "store")
    seen["here and mirrored"] = [follow(receiver, 1), follow(receiver, 2)]
    receiver.shutdown()
    seen["beside the mirror"] = sorted(path.name for path in (place / "memory/store").iterdir())
    sender.shutdown()

    times: dict[str, float] = {}
    sender = VLLMDoubleBufferSyncScheme(str(place / "unmounted" / "store")).create_sender()
    sender.update_weights(models[1])
    sender.shutdown()
    receiver = receiver_of(place / "late" / "store", place / "late-memory" / "store")
    with publishing_soon(lambda: (place / "unmounted").rename(place / "late"), times):
        seen["mounted later"] = [receiver.poll_and_apply(timeout=60.0), greedy(llm)]
    seen["mounted while waiting"] = times["published"] > times["begun"]
    receiver.shutdown()

    left, new = place / "left" / "store", place / "new" / "store"
    with dbuffer.Mirror(place / "late" / "store", left).start() as mirror:
        mirror.wait_until_current()
    receiver = receiver_of(new, left)
    polled = [receiver.poll_and_apply(timeout=0.2)]
    sender = VLLMDoubleBufferSyncScheme(str(new)).create_sender()
    sender.update_weights(models[2])
    seen["refused"] = error_of(receiver.poll_and_apply)
    shutil.rmtree(left)  # as the error says
    polled.append(receiver.poll_and_apply(timeout=20.0))
    seen["left behind"] = [*polled, greedy(llm)]
    receiver.shutdown()
    sender.shutdown()
    return seen


async def observe_async_llm(place: Path, models: dict[int, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(place.parent / "qwen3-0", how="none")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    scheme = VLLMDoubleBufferSyncScheme(str(place / "async"))
    receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
    seen: dict[str, Any] = {"versions reported": []}

    async def respond(prompt: list[int], num_tokens: int, request_id: str) -> Any:
        request = {"prompt_token_ids": prompt}
        async for output in engine.generate(request, greedy_parameters(num_tokens), request_id):
            response = output.outputs[0]
            if len(response.token_ids) > 10:
                started.set()
        return response

    async def answers(name: str) -> list[list[int]]:
        calls = (respond(prompt, NUM_TOKENS, f"{name} {i}") for i, prompt in enumerate(PROMPTS))
        responses = await asyncio.gather(*calls)
        seen["versions reported"] += {r.weight_versions[0].version for r in responses}
        return [list(response.token_ids) for response in responses]

    async def poll(timeout: float) -> bool:
        polled: bool = await asyncio.to_thread(receiver.poll_and_apply, timeout)
        return polled

    try:
        started = asyncio.Event()
        seen["before the first write"] = await poll(0)
        seen["started"] = await answers("started")
        sender.update_weights(models[1])
        seen["in the loop"] = error_of(lambda: receiver.poll_and_apply(0))
        seen["polled"] = [await poll(10), await poll(0)]
        seen["first"] = await answers("first")
        started.clear()
        # Published before: while the request runs there is to be time for the switch.
        sender.update_weights(models[2])
        in_flight = asyncio.create_task(respond(PROMPTS[2], 200, "in flight"))
        await started.wait()
        seen["polled"].append(await poll(10))
        kept = await in_flight
        seen["in flight, versions"] = [span.version for span in kept.weight_versions]
        seen["in flight, tokens"] = len(kept.token_ids)
        seen["second"] = await answers("second")
        await asyncio.to_thread(receiver.shutdown)
        sender.shutdown()
        reported = list(seen["versions reported"])
        pushing = VLLMWeightSyncScheme(remote_addr=str(place / "pushed"))
        receiver, sender = pushing.create_receiver(engine), pushing.create_sender()
        await asyncio.to_thread(sender.update_weights, models[1])
        seen["pushed"] = [await answers("pushed"), await poll(0)]
        seen["versions reported"] = reported
        await asyncio.to_thread(receiver.shutdown)
        sender.shutdown()
    finally:
        engine.shutdown()
    return seen


def run_local(place: Path) -> dict[str, Any]:
    import vllm

    models = {seed: make_model("qwen3", seed) for seed in (1, 2)}
    checkpoints = [save_model("qwen3", seed, place.parent) for seed in (0, 1, 2)]
    engines = [vllm.LLM(**engine_arguments(path, how="none")) for path in checkpoints]
    seen: dict[str, Any] = {"fresh": {seed: greedy(llm) for seed, llm in enumerate(engines)}}
    followed = vllm.LLM(**engine_arguments(checkpoints[0], how="none"))
    seen["llm"] = observe_llm(place, followed, models)
    seen["collective"] = observe_collective(place, followed, models)
    seen["addresses"] = observe_addresses(place / "addresses", followed, models)
    seen["async"] = asyncio.run(observe_async_llm(place, models))
    return seen


# The program with engines in Ray actors.


class UserEngine:
    """What a user writes; TorchRL and dbuffer know nothing of it."""

    def __init__(self, **arguments: Any) -> None:
        import vllm

        self.llm = vllm.LLM(**arguments)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm.generate(*args, **kwargs)

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm.collective_rpc(*args, **kwargs)

    def reset_prefix_cache(self, **kwargs: Any) -> Any:
        return self.llm.reset_prefix_cache(**kwargs)

    def pid(self) -> int:
        return os.getpid()


class TrainerActor:
    """The trainer of TorchRL's tests, with ours in the place of its classes."""

    def use(self, scheme: Any, seed: int) -> None:
        self.model = make_model("qwen3", seed)
        self.sender = scheme.create_sender()
        self.sender.register_model(self.model)

    def get_model_metadata(self) -> Any:
        return get_model_metadata(self.model)

    def init(self, vllm_engine: Any) -> None:
        self.sender.init_all_workers_group(get_model_metadata(self.model), vllm_engine=vllm_engine)

    def update_weights(self) -> None:
        self.sender.update_weights()

    def shutdown(self) -> None:
        self.sender.shutdown()


class ReceiverActor:
    """The receiver of TorchRL's tests, which is beside the engine's actors, not in them."""

    def use(self, scheme: Any, engine: Any) -> None:
        self.receiver = scheme.create_receiver(engine)

    def init(self) -> None:
        import ray

        trainer = ray.get_actor("Trainer")
        self.receiver.init_all_workers_group(ray.get(trainer.get_model_metadata.remote()))

    def poll_and_apply(self, timeout: float) -> Any:
        return self.receiver.poll_and_apply(timeout)


def responses_of(actor: Any) -> list[Any]:
    """To all prompts, by the actor's own method: some answer a prompt with a list of one."""
    import ray

    parameters = greedy_parameters()
    references = [
        actor.generate.remote({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
        for prompt in PROMPTS
    ]
    outputs = ray.get(references)
    return [(output[0] if isinstance(output, list) else output).outputs[0] for output in outputs]


def tokens_of(actor: Any) -> list[list[int]]:
    return [list(response.token_ids) for response in responses_of(actor)]


def observe_hosted(store: Path, engine: Any, actors: list[Any], models: Any) -> dict[str, Any]:
    scheme = VLLMDoubleBufferSyncScheme(str(store))
    receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
    replicas: list[dict[str, Any]] = [{"versions reported": []} for _ in actors]
    seen: dict[str, Any] = {"replicas": replicas}
    seen["before the first write"] = receiver.poll_and_apply(timeout=0)
    seen["polled"] = []
    for actor in actors:
        tokens_of(actor)  # fills caches that must not outlive the weights
    for seed, name in ((1, "first"), (2, "second")):
        sender.update_weights(models[seed])
        seen["polled"].append(receiver.poll_and_apply(timeout=20))
        if seed == 1:
            seen["polled"].append(receiver.poll_and_apply(timeout=0))
        for actor, replica in zip(actors, replicas, strict=True):
            responses = responses_of(actor)
            replica[name] = [list(response.token_ids) for response in responses]
            [version] = {span.version for r in responses for span in r.weight_versions}
            replica["versions reported"].append(version)
    receiver.shutdown()
    sender.shutdown()
    return seen


def observe_load(store: Path, actor: Any, models: dict[int, Any]) -> dict[str, Any]:
    """Ask all the time, from two threads, while the engine switches."""
    import ray

    scheme = VLLMDoubleBufferSyncScheme(str(store))
    receiver, sender = scheme.create_receiver(actor), scheme.create_sender()
    answers: list[Any] = []
    stop = threading.Event()
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def ask() -> None:
        while not stop.is_set():
            outputs = ray.get(actor.generate.remote(prompts, greedy_parameters(), use_tqdm=False))
            responses = [output.outputs[0] for output in outputs]
            versions = {span.version for r in responses for span in r.weight_versions}
            answers.append(["+".join(versions), [list(r.token_ids) for r in responses]])

    seeds = {}
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for round_number in range(SWITCHES_UNDER_LOAD):
        seed = 1 + round_number % 2
        sender.update_weights(models[seed])
        seeds[str(round_number + 1)] = seed
        assert receiver.poll_and_apply(timeout=20)
        if not round_number:
            for thread in threads:
                thread.start()
        asked = len(answers)
        while len(answers) == asked:
            time.sleep(SETTLE_S)
    stop.set()
    for thread in threads:
        thread.join()
    receiver.shutdown()
    sender.shutdown()
    return {"answers": answers, "seeds": seeds}


def observe_failures(store: Path, actor: Any, models: dict[int, Any]) -> dict[str, Any]:
    """Weights that do not fit; an actor that is killed and restarted; one that is dead."""
    import ray

    scheme = VLLMDoubleBufferSyncScheme(str(store))
    receiver, sender = scheme.create_receiver(actor), scheme.create_sender()
    sender.update_weights(models[1])
    assert receiver.poll_and_apply(timeout=20)
    sender.update_weights(spoilt(models[1].state_dict()))
    misfit = {"error": error_of(lambda: receiver.poll_and_apply(timeout=20)), "seed": 1}
    misfit["tokens"] = tokens_of(actor)
    sender.update_weights(models[2])
    assert receiver.poll_and_apply(timeout=20)
    restart(actor)
    restarted: dict[str, Any] = {"seed": 2, "polled": receiver.poll_and_apply(timeout=1)}
    restarted["tokens"] = tokens_of(actor)
    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:  # it may answer until it is dead
            ray.get(actor.__ray_ready__.remote())
    sender.update_weights(models[1])
    dead = error_of(lambda: receiver.poll_and_apply(timeout=20))
    receiver.shutdown()
    sender.shutdown()
    return {"misfit": misfit, "restarted": restarted, "dead": dead}


def restart(actor: Any) -> None:
    """Kill an actor, and wait until there is another in its place; its calls fail until then."""
    import ray

    before = now = ray.get(actor.pid.remote())
    ray.kill(actor, no_restart=False)
    while now == before:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            now = ray.get(actor.pid.remote())
        time.sleep(SETTLE_S)


def observe_two_actors(place: Path, service: Any) -> dict[str, Any]:
    """What TorchRL's own tests do, who have trainer and receiver in actors of their own."""
    import ray

    trainer = ray.remote(num_cpus=0)(TrainerActor).options(name="Trainer").remote()
    receiver = ray.remote(num_cpus=0)(ReceiverActor).remote()
    scheme: Any = VLLMDoubleBufferSyncScheme(str(place / "double"), strategy="state_dict")
    ray.get([trainer.use.remote(scheme, 1), receiver.use.remote(scheme, service)])
    polled = [ray.get(receiver.poll_and_apply.remote(0))]
    ray.get(trainer.update_weights.remote())
    polled.append(ray.get(receiver.poll_and_apply.remote(20)))
    double = {"polled": polled, "tokens": [tokens_of(actor) for actor in service.actors]}
    ray.get(trainer.shutdown.remote())

    scheme = VLLMWeightSyncScheme(remote_addr=str(place / "collective"), num_replicas=2)
    ray.get([trainer.use.remote(scheme, 2), receiver.use.remote(scheme, service)])
    ray.get([trainer.init.remote(service), receiver.init.remote()])
    ray.get(trainer.update_weights.remote())
    collective = {"tokens": [tokens_of(actor) for actor in service.actors]}
    ray.get(trainer.shutdown.remote())
    return {"double buffer, two actors": double, "collective, two actors": collective}


def run_ray(place: Path, session: str) -> dict[str, Any]:
    import ray

    ray.init(
        num_cpus=4,
        num_gpus=2,  # only counted, not looked for
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=session,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        return observe_ray(place)
    finally:
        ray.shutdown()


def observe_ray(place: Path) -> dict[str, Any]:
    import ray
    from torchrl.modules.llm.backends.vllm import RayLLMWorker, make_async_vllm_engine

    checkpoint = save_model("qwen3", 0, place)
    models = {seed: make_model("qwen3", seed) for seed in (1, 2)}
    arguments = engine_arguments(checkpoint, how="none")
    user_class = ray.remote(num_cpus=1, max_restarts=1)(UserEngine)
    own = user_class.remote(**arguments)
    model = arguments.pop("model")
    service = make_async_vllm_engine(
        model_name=model, num_replicas=2, compile=False, enable_prefix_caching=True, **arguments
    )
    seen = {"own actor": observe_hosted(place / "own", own, [own], models)}
    seen["AsyncVLLM"] = observe_hosted(place / "service", service, service.actors, models)
    worker = RayLLMWorker(own, 1, model)
    seen["RayLLMWorker"] = observe_hosted(place / "worker", worker, [own], models)
    seen["under load"] = observe_load(place / "load", own, models)
    seen |= observe_two_actors(place, service)
    service.shutdown()
    return seen | observe_failures(place / "failures", own, models)


if __name__ == "__main__":
    target, role = Path(sys.argv[1]), sys.argv[2]
    leave(target, {"local": run_local, "ray": run_ray}[role](target, *sys.argv[3:]))
