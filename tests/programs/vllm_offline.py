"""A store's weights in real vLLM engines in one process, against fresh engines on those weights.

Two ways in (the backend, and no option at all), four kinds of models, two dtypes, with linear
layers packed as vLLM does on a CPU and with live parameters as on a GPU: each of these, and in a
soak every combination. Then come what vLLM's own trainers call, patches, versions that do not
fit, a busy engine, and engines that start from a store or from a local copy of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import dbuffer
from dbuffer.engine.contract import UNKNOWN_VERSION
from dbuffer.integrations.vllm import follow, versions_of
from dbuffer.integrations.vllm.follow_vllm import LaunchedFollower
from dbuffer.testing.conformance import Client
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.engines.broken_backends import require_conformance
from tests.support.engines.misfits import (
    BIAS,
    EMBEDDING,
    K_PROJ,
    MISFITS,
    Q_PROJ,
)
from tests.support.engines.patch_trainers import all_of, require_patched, trainer_engine
from tests.support.engines.tiny_models import make_model, save_model, version_of
from tests.support.engines.vllm_engines import (
    IS_BEFORE_0_32,
    PROMPTS,
    counted_reloads,
    greedy,
    greedy_parameters,
    judge,
    model_of,
    set_packing,
    start_llm,
    vllm_release,
)
from tests.support.soak import is_soak
from tests.support.stores import number_in, receiver_records
from tests.support.waiting import error_of

# vLLM makes what experts need when its first engine has some, so that one comes first.
FAMILIES = ("qwen3-moe", "qwen3", "llama", "tied-qwen2")
LAYERS = ("packed", "live")
DTYPES = ("float32", "bfloat16")
EVERY = [
    f"{family} {dtype} {layers}" for family in FAMILIES for dtype in DTYPES for layers in LAYERS
]
COMPILED = "qwen3 float32 compiled"
"""With live parameters, as compiled code reads them; it takes a minute to compile."""
MANY = "qwen3 float32 packed"
PATCHED = "qwen3 bfloat16 live"
# Each family, and each dtype with each kind of layers.
SWAPS = ["qwen3-moe bfloat16 packed", MANY, PATCHED]
if not IS_BEFORE_0_32:  # what does not depend on the vLLM is tried with the newest
    SWAPS += ["llama float32 live", "tied-qwen2 bfloat16 packed"]
if is_soak():
    SWAPS = [*EVERY, COMPILED]
WITH_HEAD = {**MISFITS, "head missing": lambda weights: weights.pop("lm_head.weight")}
NAMED = {
    "too many rows": [Q_PROJ],
    "one part of a fused parameter missing": ["layers.1.self_attn.qkv_proj"],
    "bias": [f"no place for {BIAS}"],
    "layer too many, tied to another": ["no place for model.layers.2."],
    "layer too many": [f"no place for {K_PROJ.replace('1', '2')}"],
    "padded vocabulary": [
        f"{EMBEDDING} float32[512, 64] does not fit",
        "has 500 rows in the engine (its vocabulary), but 512 rows were published",
    ],
}


@dataclass(frozen=True)
class Pair:
    llm: Any
    fresh: list[list[list[int]]]


def run(directory: Path) -> None:
    pairs = {swap: switch_pair(directory, swap) for swap in SWAPS}
    set_packing(packed=False)
    patched = pairs[PATCHED]
    require_patched(directory / "patches", patched.llm, lambda llm: str(told_by(llm)[0]))
    assert greedy(patched.llm) == patched.fresh[1]
    require_conformance(directory / "conformance", patched.llm)
    set_packing(packed=True)
    pair, base = pairs[MANY], directory / "qwen3-0"
    patch_without_source(directory / "sourceless", base, pair)
    update_by_stock_calls(directory / "stock", pair)
    lose_the_weights_of_launched_ranks()
    refuse_misfits(directory / "refusals", pair.llm)
    for more in ({}, {"load_format": "dummy"}):
        settings = {"dbuffer": {"store": str(directory / MANY / "store")}}
        started = start_llm(base, additional_config=settings, **more)
        assert greedy(started) == pair.fresh[1]
    follow_a_local_copy(directory / MANY, base, pair.fresh)


def switch_pair(directory: Path, swap: str) -> Pair:
    """Switch two engines, each to what the other was started on."""
    family, dtype, layers = swap.split()
    set_packing(layers == "packed")
    checkpoints = [save_model(family, seed, directory) for seed in (0, 1)]
    more = {"dtype": dtype, "enforce_eager": swap != COMPILED}
    by_backend, by_nothing = (
        start_llm(checkpoint, how=how, **more)
        for checkpoint, how in zip(checkpoints, ("backend", "none"), strict=True)
    )
    # oneDNN has no kernel for bfloat16 where there is no AVX-512: vLLM packs nothing then.
    has_kernel = dtype != "bfloat16" or torch.cpu._is_avx512_supported()
    parameters = dict(model_of(by_backend).named_parameters())
    is_live = parameters["model.layers.0.self_attn.qkv_proj.weight"].numel() > 0
    assert is_live != (layers == "packed" and has_kernel)
    reported = [told_by(by_backend)]
    fresh = [greedy(by_backend), greedy(by_nothing)]
    assert all(old != new for old, new in zip(*fresh, strict=True))
    store = directory / swap / "store"
    with dbuffer.WeightSender(store, checksum=True) as sender:
        # As a checkpoint, and as a module in the trainer's own dtype.
        with follow(by_backend, store, verify=True) as follower:
            sender.wait_applied(switch(follower, sender, checkpoints[1]), timeout_s=TIMEOUT_S)
            assert greedy(by_backend) == fresh[1]
            reported.append(told_by(by_backend))
            switch(follower, sender, make_model(family, 0))
            assert greedy(by_backend) == fresh[0]
            reported.append(told_by(by_backend))
            for checkpoint in reversed(checkpoints):  # of another layout than a module's
                switch(follower, sender, checkpoint)
            with counted_reloads(by_backend) as reloads:
                for seed in (1, 0):
                    switch(follower, sender, checkpoints[seed])
                    assert greedy(by_backend) == fresh[seed]
            # Experts are always packed on a CPU. vLLM 0.29 and 0.30 pack other layers into a form
            # that has no image: the plan says so, and leaves the model with the reload.
            is_packed = "bfloat16 packed" in swap and has_kernel
            has_no_image = is_packed and (0, 29) <= vllm_release() < (0, 31)
            assert reloads.count("of all") == (2 if has_no_image else 0)
        if swap == MANY:
            require_acknowledged_once(store)
            if IS_BEFORE_0_32:
                assert reported == [[None] * 3, [1, None, None], [2, None, None]]
            else:
                assert reported == [
                    [None, {}, False],
                    [1, {"step": 0}, True],
                    [2, {"step": 1}, True],
                ]
        with follow(by_nothing, store, staging="copy", plan=False) as follower:
            follower.sync()
            assert greedy(by_nothing) == fresh[0]
        sender.send(checkpoints[1])
    return Pair(by_backend, fresh)


def require_acknowledged_once(store: Path) -> None:
    (engine, _), (rank, of_rank) = sorted(receiver_records(store).items())
    assert rank == f"{engine}.rank-0"
    until("it acknowledges", lambda: number_in(receiver_records(store)[engine], "applied") == 6)
    assert of_rank["applied"] is None
    assert of_rank["part_of"] == engine


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
    [output] = llm.generate([{"prompt_token_ids": [7]}], greedy_parameters(4), use_tqdm=False)
    if hasattr(output.outputs[0], "weight_versions"):
        [span] = versions_of(output)
        assert (span.start, span.end) == (0, 4)
        return [span.version, span.metadata, span.run is not None]
    label = llm.llm_engine.get_weight_version()  # before 0.32, answers do not tell
    return [version_of(label) or None, None, None]


def update_by_stock_calls(store: Path, pair: Pair) -> None:
    """What a trainer written for vLLM's own backends calls: newest, exact, and nothing twice."""
    llm, fresh = pair.llm, pair.fresh

    def update(**info: Any) -> str | None:
        llm.start_weight_update()
        error = error_of(lambda: llm.update_weights({"update_info": info}))
        assert llm.llm_engine.get_weight_version() == UNKNOWN_VERSION
        if error is None:
            llm.finish_weight_update("mine")
        llm.reset_prefix_cache()
        return error

    llm.init_weight_transfer_engine({"init_info": {"store": str(store)}})
    transfer = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    assert transfer.parse_update_info({"version": 3}).version == 3
    error = str(error_of(lambda: transfer.parse_update_info({"names": ["x"]})))
    assert error.startswith(("ValueError: ", "OptionError: "))
    assert "names ['x']" in error
    for error in (
        error_of(lambda: llm.init_weight_transfer_engine({"init_info": {}})),
        update(version=0),
    ):
        assert str(error).startswith("OptionError: ")
    with dbuffer.WeightSender(store) as sender:
        sender.send(make_model("qwen3", 1))
        assert update(update_kind="dense") is None
        assert greedy(llm) == fresh[1]
        assert "num_updates_list" in str(update(update_kind="sparse_flat"))
        assert update(update_kind="sparse_flat", num_updates_list=[1]) is None
        assert update(version=1) is None
        assert greedy(llm) == fresh[1]
        sender.send(make_model("qwen3", 0))
        sender.send(make_model("qwen3", 1))
        assert update(version=2) is None
        assert greedy(llm) == fresh[0]
        assert "versions never go back" in str(update(version=1))
        sender.send(make_model("qwen3", 1))
        sender.send(make_model("qwen3", 1))
        assert re.search("version 3 .*is not in", str(update(version=3)))
    if hasattr(llm, "shutdown_weight_transfer_engine"):  # from 0.32 on
        llm.shutdown_weight_transfer_engine()


def lose_the_weights_of_launched_ranks() -> None:
    """Ranks of torchrun's know what the engine has after a sync that failed; with no engine."""
    orders: list[dict[str, Any]] = []
    failing = Mock(applied=None, **{"sync.side_effect": dbuffer.WaitTimeoutError("not ready")})
    leading = Mock(is_open=True, share=lambda _, order: [orders.append(order)])
    for leader, agreement in (
        (failing, leading),
        (None, Mock(is_open=True, share=lambda *_: orders[:1])),
    ):
        follower = object.__new__(LaunchedFollower)
        follower._leader, follower._agreement, follower.applied = leader, agreement, 7
        with pytest.raises(dbuffer.WaitTimeoutError, match="not ready"):
            follower.sync()
        assert follower.applied is None


def refuse_misfits(store: Path, llm: Any) -> None:
    good = {name: tensor.detach() for name, tensor in make_model("qwen3", 1).named_parameters()}
    before = greedy(llm)
    with dbuffer.WeightSender(store) as sender, follow(llm, store) as follower:
        for misfit, spoil in WITH_HEAD.items():
            weights = dict(good)
            spoil(weights)
            sender.send(weights)
            refusal = str(error_of(follower.sync))
            assert refusal.startswith("EngineUpdateError: ")
            assert "WeightsMismatchError" in refusal
            assert ".rank-0" in refusal
            assert all(words in refusal for words in NAMED.get(misfit, ()))
        assert greedy(llm) == before
        finish_the_request_of_a_busy_engine(llm)
        switch(follower, sender, good)
        assert greedy(llm) != before


def finish_the_request_of_a_busy_engine(llm: Any) -> None:
    from dbuffer.integrations.vllm.vllm_engine import OfflineVllm

    engine = llm.llm_engine
    before = greedy(llm)[0]
    engine.add_request("busy", {"prompt_token_ids": PROMPTS[0]}, greedy_parameters())
    engine.step()
    with pytest.raises(dbuffer.EngineBusyError):
        OfflineVllm(llm).pause("keep")
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert list(outputs[0].outputs[0].token_ids) == before


def follow_a_local_copy(directory: Path, checkpoint: Path, fresh: list[list[list[int]]]) -> None:
    """A store on a network is read once a node: by a mirror in one of the engine's processes."""
    remote, local = directory / "remote", directory / "local"
    told = {"store": str(remote), "local_store": str(local), "poll_interval_s": 0.05}
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        sender.send(make_model("qwen3", 1))
    llm = start_llm(checkpoint, additional_config={"dbuffer": told})
    assert greedy(llm) == fresh[1]
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        version = sender.send(make_model("qwen3", 0)).version
        with follow(llm) as follower:
            assert follower.sync(at_least=version).version == version
            # Acknowledgements are carried to the remote store.
            sender.wait_applied(version, receivers=1, timeout_s=TIMEOUT_S)
            assert greedy(llm) == fresh[0]
            sender.send(make_model("qwen3", 0))
    # Its receiver has the last version ready, and the sender maps nothing any more.
    mapped = until("a version is mapped", lambda: mapped_weights(local, remote), 20.0)
    assert mapped == ["local"]


def mapped_weights(*stores: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [store.name for store in stores if f"{store}/" in maps]


def patch_without_source(store: Path, checkpoint: Path, pair: Pair) -> None:
    llm, fresh = pair.llm, pair.fresh
    client, other = Client(llm), make_model("qwen3", 1)
    with pytest.raises(dbuffer.OptionError, match="give either a WeightSource to trainer_init"):
        trainer_engine(store, client)
    engine = trainer_engine(store, client, checkpoint=str(checkpoint))
    follower = trainer_engine(store, None, checkpoint=str(checkpoint), rank=1)
    engine.send_weights()
    assert greedy(llm) != fresh[1]
    for one in (engine, follower):
        one.send_weights(all_of(other))
        assert one.send_weight_chunk([]) is None
    assert follower.send_weight_chunk(all_of(other)) is None
    assert greedy(llm) == fresh[1]
    engine.shutdown()
    follower.shutdown()

    transfer = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    applied: list[Any] = []
    with dbuffer.WeightSender(store, delta=True) as sender:
        sender.send(other)
        patches = list(all_of(make_model("qwen3", 0)))
        version = type(transfer).trainer_send_sparse_weights(patches, {"sender": sender})
        counts = [len(patch.indices) for patch in patches]
        info = {"version": version, "update_kind": "sparse_flat", "num_updates_list": counts}
        transfer.receive_sparse_weights(transfer.parse_update_info(info), applied.extend)
        llm.reset_prefix_cache()
    assert (greedy(llm), applied) == (fresh[0], [])


if __name__ == "__main__":
    judge(run)
