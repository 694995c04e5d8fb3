"""Program of `test_vllm.py`, which says what it shows."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow, versions_of
from tests.support.engines.misfits import BIAS, MISFITS, layer_too_many
from tests.support.engines.patch_trainers import observe_trainers_without_source, observe_versions
from tests.support.engines.tiny_models import make_model, save_model, version_of
from tests.support.engines.vllm_engines import (
    PROMPTS,
    counted_reloads,
    greedy,
    greedy_parameters,
    leave,
    model_of,
    set_packing,
    start_llm,
    vllm_release,
)
from tests.support.soak import is_soak
from tests.support.stores import receiver_records
from tests.support.waiting import error_of, until

# vLLM makes what experts need when its first engine has some, so that one comes first.
FAMILIES = ("qwen3-moe", "qwen3", "llama", "tied-qwen2")
LAYERS = ("packed", "live")
DTYPES = ("float32", "bfloat16")
# Each family with each dtype and each kind of layers, and each dtype with each kind of layers.
PAIRS = [
    f"{family} {dtype} {LAYERS[(index + other) % 2]}"
    for index, family in enumerate(reversed(FAMILIES))
    for other, dtype in enumerate(DTYPES)
]
EVERY = [
    f"{family} {dtype} {layers}" for family in FAMILIES for dtype in DTYPES for layers in LAYERS
]
EXPERTS = "qwen3-moe bfloat16 packed"
if () < vllm_release() < (0, 32):  # what does not depend on the vLLM is tried with the newest
    PAIRS = [pair for pair in PAIRS if pair.startswith("qwen3 ") or pair == EXPERTS]
COMPILED = "qwen3 float32 compiled"
"""With live parameters, as compiled code reads them; it takes a minute to compile."""
SWAPS = [*EVERY, COMPILED] if is_soak() else sorted(PAIRS, key=EVERY.index)
MANY = "qwen3 float32 packed"
PATCHED = "qwen3 bfloat16 live"
WITH_HEAD = {**MISFITS, "head missing": lambda weights: weights.pop("lm_head.weight")}


def run(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    engines = {swap: observe_swap(directory, swap, seen) for swap in SWAPS}
    set_packing(packed=False)
    store = directory / "patches"
    seen["patches"] = observe_versions(store, engines[PATCHED], lambda llm: str(told_by(llm)[0]))
    seen["after patches"] = greedy(engines[PATCHED])
    set_packing(packed=True)
    llm, base = engines[MANY], directory / "qwen3-0"
    store = directory / "sourceless"
    seen["no source"] = observe_trainers_without_source(store, base, llm, greedy)
    observe_stock_calls(directory / "stock", llm, seen)
    observe_refusals(directory / "refusals", llm, seen)
    for name, more in (
        ("started from the store", {}),
        ("started with dummy weights", {"load_format": "dummy"}),
    ):
        settings = {"dbuffer": {"store": str(directory / MANY / "store")}}
        seen[name] = greedy(start_llm(base, additional_config=settings, **more))
    seen["local copy"] = observe_local_copy(directory / MANY, base)
    return seen


def observe_swap(directory: Path, swap: str, seen: dict[str, Any]) -> Any:
    """Switch two engines, each to what the other was started on; the first of them."""
    family, dtype, layers = swap.split()
    set_packing(layers == "packed")
    checkpoints = [save_model(family, seed, directory) for seed in (0, 1)]
    ways, more = ("backend", "none"), {"dtype": dtype, "enforce_eager": swap != COMPILED}
    pair = [
        start_llm(checkpoint, how=how, **more)
        for checkpoint, how in zip(checkpoints, ways, strict=True)
    ]
    found: dict[str, Any] = {"parameters are live": has_live_parameters(pair[0])}
    reported = [told_by(pair[0])]
    for llm, how in zip(pair, ways, strict=True):
        found[f"{how}, fresh"] = greedy(llm)
    store = directory / swap / "store"
    with dbuffer.WeightSender(store, checksum=True) as sender:
        # As a checkpoint, and as a module in the trainer's own dtype.
        with follow(pair[0], store, verify=True) as follower:
            sender.wait_applied(switch(follower, sender, checkpoints[1]), timeout_s=10)
            found["backend, switched"] = greedy(pair[0])
            reported.append(told_by(pair[0]))
            switch(follower, sender, make_model(family, 0))
            found["backend, switched back"] = greedy(pair[0])
            reported.append(told_by(pair[0]))
            for checkpoint in reversed(checkpoints):  # of another layout than a module's
                switch(follower, sender, checkpoint)
            with counted_reloads(pair[0]) as reloads:
                switch(follower, sender, checkpoints[1])
                found["on the way there"] = greedy(pair[0])
                switch(follower, sender, checkpoints[0])
                found["after two more"] = greedy(pair[0])
            found["reloads of two switches"] = reloads.count("of all")
        if swap == MANY:
            seen["records"] = receiver_records(store)
            seen["versions reported"] = reported
        with follow(pair[1], store, staging="copy", plan=False) as follower:
            follower.sync()
            found["none, switched"] = greedy(pair[1])
        sender.send(checkpoints[1])
    seen[swap] = found
    return pair[0]


def has_live_parameters(llm: Any) -> bool:
    parameters = dict(model_of(llm).named_parameters())
    return parameters["model.layers.0.self_attn.qkv_proj.weight"].numel() > 0


def switch(follower: Any, sender: dbuffer.WeightSender, weights: Any) -> int:
    metadata = {"step": sender.stats["versions"]}
    version = sender.send(weights, metadata=metadata).version
    done = follower.sync()
    assert done is not None
    assert follower.applied_metadata == metadata
    assert done.version == version
    assert done.pause_s >= done.load_s > 0
    assert follower.sync() is None
    return version


def told_by(llm: Any) -> list[Any]:
    """The version, and what it was published with, that an answer tells."""
    [output] = llm.generate([{"prompt_token_ids": [7]}], greedy_parameters(4), use_tqdm=False)
    if hasattr(output.outputs[0], "weight_versions"):
        [span] = versions_of(output)
        assert (span.start, span.end, span.is_exact) == (0, 4, True)
        return [span.version, span.metadata, span.history is not None]
    label = llm.llm_engine.get_weight_version()  # before 0.32, answers do not tell
    return [version_of(label) or None, None, None]


def observe_stock_calls(store: Path, llm: Any, seen: dict[str, Any]) -> None:
    """What a trainer written for vLLM's own backends calls."""

    def update(**info: Any) -> str | None:
        llm.start_weight_update()
        error = error_of(lambda: llm.update_weights({"update_info": info}))
        if error is None:
            llm.finish_weight_update("mine")
        llm.reset_prefix_cache()
        return error

    llm.init_weight_transfer_engine({"init_info": {"store": str(store)}})
    transfer = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    seen["parsed"] = transfer.parse_update_info({"version": 3}).version
    seen["not parsed"] = error_of(lambda: transfer.parse_update_info({"names": ["x"]}))
    seen["bad stock calls"] = {
        "no store": error_of(lambda: llm.init_weight_transfer_engine({"init_info": {}})),
        "unknown option": error_of(
            lambda: llm.init_weight_transfer_engine({"init_info": {"store": "x", "port": 1}})
        ),
        "version zero": update(version=0),
        "unknown key": update(names=["x"]),
    }
    with dbuffer.WeightSender(store) as sender:
        sender.send(make_model("qwen3", 1))
        assert update(update_kind="dense") is None
        seen["stock newest"] = greedy(llm)
        assert update(update_kind="sparse_flat") is None
        assert update(version=1) is None
        seen["stock again"] = greedy(llm)
        sender.send(make_model("qwen3", 0))
        sender.send(make_model("qwen3", 1))
        assert update(version=2) is None
        seen["stock exact"] = greedy(llm)
        seen["stock back"] = update(version=1)
        sender.send(make_model("qwen3", 1))
        sender.send(make_model("qwen3", 1))
        seen["stock gone"] = update(version=3)
    if hasattr(llm, "shutdown_weight_transfer_engine"):  # from 0.32 on
        llm.shutdown_weight_transfer_engine()


def observe_refusals(store: Path, llm: Any, seen: dict[str, Any]) -> None:
    good = {name: tensor.detach() for name, tensor in make_model("qwen3", 1).named_parameters()}
    seen["refusals"] = {}
    seen["before refusals"] = greedy(llm)
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        for misfit, spoil in WITH_HEAD.items():
            weights = dict(good)
            spoil(weights)
            sender.send(weights)
            seen["refusals"][misfit] = error_of(follower.sync)
        seen["after refusals"] = greedy(llm)
        observe_busy(llm, follower, seen)
        switch(follower, sender, good)
        seen["after a good one"] = greedy(llm)
    observe_surplus(store, llm, good, seen)


def observe_surplus(store: Path, llm: Any, good: dict[str, Any], seen: dict[str, Any]) -> None:
    """Tensors whose names vLLM passes over, and others that it refuses."""
    surplus = {name: tensor.clone() for name, tensor in layer_too_many(good).items()}
    logger = logging.getLogger("dbuffer.integrations.engine")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    seen["with surplus tensors"] = []
    with (
        dbuffer.WeightSender(store) as sender,
        follow(llm, store, unused_tensors="warn") as follower,
    ):
        for _ in range(2):
            switch(follower, sender, {BIAS: torch.ones(64)} | good | surplus)
            seen["with surplus tensors"].append(greedy(llm))
    logger.removeHandler(handler)
    seen["surplus warnings"] = [each for each in warnings if "no place" in each]


def observe_busy(llm: Any, follower: Any, seen: dict[str, Any]) -> None:
    engine = llm.llm_engine
    seen["before busy"] = greedy(llm)[0]
    engine.add_request("busy", {"prompt_token_ids": PROMPTS[0]}, greedy_parameters())
    engine.step()
    from dbuffer.integrations.vllm.vllm_engine import OfflineVllm

    seen["busy"] = error_of(lambda: OfflineVllm(llm).pause("keep"))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    seen["finished when busy"] = list(outputs[0].outputs[0].token_ids)


def observe_local_copy(directory: Path, checkpoint: Path) -> dict[str, Any]:
    """An engine that is told of a store and where to copy it; and TorchRL's way of saying so."""
    from dbuffer.integrations.torchrl import VLLMDoubleBufferSyncScheme

    remote, local = directory / "remote", directory / "local"
    told = {"store": str(remote), "local_store": str(local), "poll_interval_s": 0.05}
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        sender.send(make_model("qwen3", 1))
    llm = start_llm(checkpoint, additional_config={"dbuffer": told})
    found: dict[str, Any] = {"started": greedy(llm)}
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        version = sender.send(make_model("qwen3", 0)).version
        with follow(llm) as follower:
            assert follower.sync(at_least=version).version == version
            sender.wait_applied(version, receivers=1, timeout_s=10)  # carried to the remote store
            found["followed"] = greedy(llm)
            sender.send(make_model("qwen3", 0))
    # Its receiver has the last version ready, and the sender maps nothing any more.
    mapped = until("a version is mapped", lambda: mapped_weights(local, remote), 20.0)
    found["mapped"] = mapped
    scheme = VLLMDoubleBufferSyncScheme(str(remote), str(local), poll_interval_s=0.05)
    receiver, sender = scheme.create_receiver(llm), scheme.create_sender()
    model = make_model("qwen3", 1)
    sender.register_model(model)
    sender.update_weights()
    found["polled"] = [receiver.poll_and_apply(timeout=0.0), receiver.poll_and_apply(timeout=0.0)]
    found["after polling"] = greedy(llm)
    receiver.shutdown()
    sender.shutdown()
    return found


def mapped_weights(*stores: Path) -> list[str]:
    """Which of these stores this process has weights mapped from."""
    maps = Path("/proc/self/maps").read_text()
    return [store.name for store in stores if f"{store}/" in maps]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
