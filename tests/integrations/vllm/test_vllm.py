"""A store's weights in real vLLM engines in one process, against fresh engines on those weights.

Two ways in (the backend, and no option at all), four kinds of models, two dtypes, with linear
layers packed as vLLM does on a CPU and with live parameters as on a GPU: every pair of these, and
in a soak every combination.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from tests.support.engines.misfits import BIAS, EMBEDDING, K_PROJ, MISFITS, Q_PROJ, layer_too_many
from tests.support.engines.patch_trainers import (
    NUM_STEPS,
    observe_trainers_without_source,
    observe_versions,
)
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    PROMPTS,
    engine_arguments,
    greedy,
    greedy_parameters,
    kept,
    leave,
    observe,
    vllm_release,
)
from tests.support.soak import is_soak
from tests.support.stores import receiver_records

pytestmark = [*NEEDS_VLLM, pytest.mark.soak, pytest.mark.xdist_group("vllm")]

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
if () < vllm_release() < (0, 32):  # what does not depend on the vLLM is tried with the newest
    PAIRS = [pair for pair in PAIRS if "bfloat16" in pair or pair.startswith("qwen3 ")]
COMPILED = "qwen3 float32 compiled"
"""With live parameters, as compiled code reads them; it takes a minute to compile."""
SWAPS = [*EVERY, COMPILED] if is_soak() else sorted(PAIRS, key=EVERY.index)
MANY = "qwen3 float32 packed"
PATCHED = "qwen3 bfloat16 live"
WITH_HEAD = {**MISFITS, "head missing": lambda weights: weights.pop("lm_head.weight")}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(observe(__file__, tmp_path_factory.mktemp("vllm")))


@pytest.mark.parametrize("swap", SWAPS)
def test_switched_engines_answer_as_fresh_ones(observed: dict[str, Any], swap: str) -> None:
    seen = observed[swap]
    # Each engine is the other's measure: one was started on what the other switches to.
    for old, new in zip(seen["backend, fresh"], seen["none, fresh"], strict=True):
        assert old != new
    assert seen["backend, switched"] == seen["none, fresh"]
    assert seen["none, switched"] == seen["backend, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_switching_back_restores_every_token(observed: dict[str, Any], swap: str) -> None:
    assert observed[swap]["backend, switched back"] == observed[swap]["backend, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_switches_are_copies_and_layers_that_were_packed_meanwhile(
    observed: dict[str, Any], swap: str
) -> None:
    """Experts are always packed on a CPU."""
    seen = observed[swap]
    # Into a form that has no image: the plan says so, and leaves the model with the reload.
    is_packed_otherwise = "bfloat16 packed" in swap and () < vllm_release() < (0, 31)
    assert seen["reloads of two switches"] == (2 if is_packed_otherwise else 0)
    assert seen["after two more"] == seen["backend, fresh"]
    assert seen["on the way there"] == seen["none, fresh"]


@pytest.mark.parametrize("swap", SWAPS)
def test_live_parameters_are_what_they_say(observed: dict[str, Any], swap: str) -> None:
    # oneDNN has no kernel for bfloat16 where there is no AVX-512: vLLM packs nothing then.
    has_kernel = "bfloat16" not in swap or torch.cpu._is_avx512_supported()
    assert observed[swap]["parameters are live"] != (swap.endswith("packed") and has_kernel)


def test_responses_carry_the_version(observed: dict[str, Any]) -> None:
    assert observed["versions reported"] == [["default"], ["1"], ["2"]]


def test_the_engine_acknowledges_and_its_rank_does_not(observed: dict[str, Any]) -> None:
    applied = {name: r["applied_version"] for name, r in observed["records"].items()}
    engine, rank = sorted(applied)
    assert rank == f"{engine}.rank-0"
    assert applied == {engine: 6, rank: None}
    assert observed["records"][rank]["part_of"] == engine


@pytest.mark.parametrize("misfit", WITH_HEAD)
def test_misfit_is_refused(observed: dict[str, Any], misfit: str) -> None:
    refusal = observed["refusals"][misfit]
    assert refusal.startswith("EngineUpdateError: ")
    assert "WeightsMismatchError" in refusal
    assert ".rank-0" in refusal


def test_refusals_leave_the_engine_as_it_was(observed: dict[str, Any]) -> None:
    assert observed["after refusals"] == observed["before refusals"]
    assert observed["after a good one"] != observed["before refusals"]


def test_refusal_names_the_tensor(observed: dict[str, Any]) -> None:
    refusals = observed["refusals"]
    assert Q_PROJ in refusals["too many rows"]
    assert "layers.1.self_attn.qkv_proj" in refusals["one part of a fused parameter missing"]
    assert f"no place for {BIAS}" in refusals["bias"]
    assert "no place for model.layers.2." in refusals["layer too many, tied to another"]
    assert f"no place for {K_PROJ.replace('1', '2')}" in refusals["layer too many"]
    padded = refusals["padded vocabulary"]
    assert f"{EMBEDDING} float32[512, 64] does not fit" in padded
    assert "has the 500 rows of its vocabulary, not 512" in padded


def test_surplus_tensors_are_left_out_with_one_warning(observed: dict[str, Any]) -> None:
    assert observed["with surplus tensors"] == [observed["after a good one"]] * 2
    [warning] = observed["surplus warnings"]
    assert BIAS in warning
    assert "model.layers.2." in warning


def test_stock_calls_refuse_what_they_do_not_know(observed: dict[str, Any]) -> None:
    for bad, error in observed["bad stock calls"].items():
        assert error.startswith("OptionError: "), bad


def test_a_request_is_parsed_as_vllm_has_it(observed: dict[str, Any]) -> None:
    refusal = "ValueError: update_info is {'names': ['x']}, and must be an object"
    assert observed["parsed"]["bad"].startswith(refusal)
    assert observed["parsed"]["good"] == 3


def test_stock_calls_take_newest_exact_and_nothing_twice(observed: dict[str, Any]) -> None:
    fresh = observed["qwen3 float32 packed"]
    assert observed["stock newest"] == fresh["none, fresh"]
    assert observed["stock again"] == fresh["none, fresh"]
    assert observed["stock exact"] == fresh["backend, fresh"]
    assert "versions never go back" in observed["stock back"]
    assert "is no longer in" in observed["stock gone"]


def test_each_version_by_patches_is_the_trainers_state(observed: dict[str, Any]) -> None:
    """In the engine's own parameters, fused ones included."""
    seen = observed["patches"]
    assert seen["differences"] == [[]] * (1 + NUM_STEPS)
    versions = [int(version) for version in seen["versions"]]
    # Each fifth step came in two chunks, which are a version each.
    chunked = range(1, 1 + NUM_STEPS, 5)
    assert versions == [1 + n + sum(one <= n for one in chunked) for n in range(1 + NUM_STEPS)]
    assert observed["after patches"] == observed[PATCHED]["none, fresh"]


def test_a_chunk_of_patches_is_there_at_once(observed: dict[str, Any]) -> None:
    later = {"lm_head.weight", "model.embed_tokens.weight"}
    later.add("model.layers.0.self_attn.q_norm.weight")
    assert set(observed["patches"]["after a chunk"]) == later


def test_a_wrong_patch_leaves_the_engine_as_it_was(observed: dict[str, Any]) -> None:
    seen = observed["patches"]
    assert seen["wrong"].startswith("WeightsMismatchError: a patch of 'lm_head', which was not")
    differences, version = seen["after a wrong one"]
    assert differences == []
    assert version in seen["versions"]


def test_patches_follow_a_whole_version(observed: dict[str, Any]) -> None:
    assert observed["patches"]["too early"].startswith("VersionError: ")
    assert "send all weights once" in observed["patches"]["too early"]
    assert observed["no source"]["no base"].startswith("OptionError: ")
    assert "needs a WeightSource, or its init info a checkpoint" in observed["no source"]["no base"]


def test_a_trainer_of_patches_needs_no_source(observed: dict[str, Any]) -> None:
    seen, fresh = observed["no source"], observed[MANY]
    assert seen["sent"] == fresh["none, fresh"]
    assert seen["nothing sent"] != seen["sent"]
    assert seen["other releases"] == [fresh["backend, fresh"], 0]


def test_busy_engine_is_refused_and_finishes_its_request(observed: dict[str, Any]) -> None:
    assert observed["busy"].startswith("EngineBusyError: ")
    assert observed["finished when busy"] == observed["before busy"]


def test_engine_starts_on_the_newest_version(observed: dict[str, Any]) -> None:
    seen = observed[MANY]
    assert observed["started from the store"] == seen["none, fresh"]
    assert observed["started with dummy weights"] == seen["none, fresh"]


def test_engine_starts_and_follows_from_a_local_copy(observed: dict[str, Any]) -> None:
    """A store on a network is read once a node: by a mirror in one of the engine's processes."""
    seen = observed["local copy"]
    assert seen["started"] == observed[MANY]["none, fresh"]
    assert seen["followed"] == observed[MANY]["backend, fresh"]
    assert seen["polled"] == [True, False]
    assert seen["after polling"] == observed[MANY]["none, fresh"]
    assert seen["mapped"] == ["local"]


# From here on, the program that runs in the subprocess.


def run(directory: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    engines = kept
    for swap in SWAPS:
        observe_swap(directory, swap, seen, engines)
    set_packing(packed=False)
    patched = engines[2 * SWAPS.index(PATCHED)]
    store = directory / "patches"
    seen["patches"] = observe_versions(store, patched, lambda llm: versions_reported(llm)[0])
    seen["after patches"] = greedy(patched)
    set_packing(packed=True)
    by_backend = engines[2 * SWAPS.index(MANY)]
    base = directory / "qwen3-0"
    seen["no source"] = observe_trainers_without_source(
        directory / "sourceless", base, by_backend, greedy
    )
    observe_stock_calls(directory / "stock", by_backend, seen)
    observe_refusals(directory / "refusals", by_backend, seen)
    observe_starts(directory / MANY / "store", engines, seen)
    return seen


def observe_swap(directory: Path, swap: str, seen: dict[str, Any], engines: list[Any]) -> None:
    import vllm

    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import make_model, save_model

    family, dtype, layers = swap.split()
    set_packing(layers == "packed")
    checkpoints = [save_model(family, seed, directory) for seed in (0, 1)]
    ways = ("backend", "none")
    pair = [
        vllm.LLM(
            **engine_arguments(checkpoint, dtype=dtype, how=how, enforce_eager=swap != COMPILED)
        )
        for checkpoint, how in zip(checkpoints, ways, strict=True)
    ]
    engines += pair
    found: dict[str, Any] = {"parameters are live": has_live_parameters(pair[0])}
    reported = [versions_reported(pair[0])]
    for llm, how in zip(pair, ways, strict=True):
        found[f"{how}, fresh"] = greedy(llm)
    store = directory / swap / "store"
    with dbuffer.WeightSender(store, checksum=True) as sender:
        # As a checkpoint, and as a module in the trainer's own dtype.
        with follow(pair[0], store, verify=True) as follower:
            sender.wait_applied(switch(follower, sender, checkpoints[1]), timeout_s=10)
            found["backend, switched"] = greedy(pair[0])
            reported.append(versions_reported(pair[0]))
            switch(follower, sender, make_model(family, 0))
            found["backend, switched back"] = greedy(pair[0])
            reported.append(versions_reported(pair[0]))
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


@contextlib.contextmanager
def counted_reloads(llm: Any) -> Iterator[list[str]]:
    """One entry for each reload of the model or of a part, of an engine in this process."""
    from dbuffer.integrations.engine.endpoint import RankEndpoint

    worker = llm.llm_engine.model_executor.driver_worker.worker
    model: Any = RankEndpoint.of(worker.get_model()).receiver._model.serving  # type: ignore[union-attr]
    reloads: list[str] = []

    def load(*arguments: Any, **options: Any) -> None:
        reloads.append("of a part" if options.get("partial") else "of all")
        type(model).load(model, *arguments, **options)

    model.load = load
    try:
        yield reloads
    finally:
        del model.load


def set_packing(packed: bool) -> None:
    """On a GPU parameters stay as they were loaded; here only if oneDNN is out of the way."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = packed


def has_live_parameters(llm: Any) -> bool:
    worker = llm.llm_engine.model_executor.driver_worker.worker
    parameters = dict(worker.get_model().named_parameters())
    return parameters["model.layers.0.self_attn.qkv_proj.weight"].numel() > 0


def switch(follower: Any, sender: dbuffer.WeightSender, weights: Any) -> int:
    version = sender.send(weights).version
    done = follower.sync()
    assert done is not None
    assert done.version == version
    assert done.pause_s >= done.load_s > 0
    assert follower.sync() is None
    return version


def versions_reported(llm: Any) -> list[str]:
    outputs = llm.generate([{"prompt_token_ids": [7]}], greedy_parameters(4), use_tqdm=False)
    answer = outputs[0].outputs[0]
    if hasattr(answer, "weight_versions"):
        return [span.version for span in answer.weight_versions]
    return [llm.llm_engine.get_weight_version()]  # before 0.32, answers do not tell


def observe_stock_calls(store: Path, llm: Any, seen: dict[str, Any]) -> None:
    """What a trainer written for vLLM's own backends calls."""
    from tests.support.engines.tiny_models import make_model

    def update(**info: Any) -> str:
        llm.start_weight_update()
        error = error_of(lambda: llm.update_weights({"update_info": info}))
        if error == "no error":
            llm.finish_weight_update("mine")
        llm.reset_prefix_cache()
        return error

    llm.init_weight_transfer_engine({"init_info": {"store": str(store)}})
    observe_parsing(llm, seen)
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
        assert update(update_kind="dense") == "no error"
        seen["stock newest"] = greedy(llm)
        assert update(update_kind="sparse_flat") == "no error"
        assert update(version=1) == "no error"
        seen["stock again"] = greedy(llm)
        sender.send(make_model("qwen3", 0))
        sender.send(make_model("qwen3", 1))
        assert update(version=2) == "no error"
        seen["stock exact"] = greedy(llm)
        seen["stock back"] = update(version=1)
        sender.send(make_model("qwen3", 1))
        sender.send(make_model("qwen3", 1))
        seen["stock gone"] = update(version=3)
    if hasattr(llm, "shutdown_weight_transfer_engine"):  # from 0.32 on
        llm.shutdown_weight_transfer_engine()


def observe_parsing(llm: Any, seen: dict[str, Any]) -> None:
    transfer = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    seen["parsed"] = {"good": transfer.parse_update_info({"version": 3}).version, "bad": "parsed"}
    try:
        transfer.parse_update_info({"names": ["x"]})
    except ValueError as error:
        seen["parsed"]["bad"] = f"ValueError: {error}"


def observe_refusals(store: Path, llm: Any, seen: dict[str, Any]) -> None:
    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import make_model

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
    from dbuffer.integrations.vllm import follow

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


def observe_starts(store: Path, engines: list[Any], seen: dict[str, Any]) -> None:
    """Engines that are told of their store when they start."""
    import vllm

    checkpoint = store.parent.parent / "qwen3-0"
    settings = {"additional_config": {"dbuffer": {"store": str(store)}}}
    for name, more in (
        ("started from the store", {}),
        ("started with dummy weights", {"load_format": "dummy"}),
    ):
        engines.append(vllm.LLM(**engine_arguments(checkpoint, **settings, **more)))
        seen[name] = greedy(engines[-1])
    observe_local_copy(store.parent, engines, seen)


def observe_local_copy(directory: Path, engines: list[Any], seen: dict[str, Any]) -> None:
    """An engine that is told of a store and where to copy it; and TorchRL's way of saying so."""
    import vllm

    from dbuffer.integrations.torchrl import VLLMDoubleBufferSyncScheme
    from dbuffer.integrations.vllm import follow
    from tests.support.engines.tiny_models import make_model

    remote, local = directory / "remote", directory / "local"
    told = {"store": str(remote), "local_store": str(local), "poll_interval_s": 0.05}
    checkpoint = directory.parent / "qwen3-0"
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        sender.send(make_model("qwen3", 1))
    llm = vllm.LLM(**engine_arguments(checkpoint, additional_config={"dbuffer": told}))
    engines.append(llm)
    found: dict[str, Any] = {"started": greedy(llm)}
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        version = sender.send(make_model("qwen3", 0)).version
        with follow(llm) as follower:
            assert follower.sync(at_least=version).version == version
            sender.wait_applied(version, receivers=1, timeout_s=10)  # carried to the remote store
            found["followed"] = greedy(llm)
            sender.send(make_model("qwen3", 0))
    # Its receiver has the last version ready, and the sender maps nothing any more.
    deadline = time.monotonic() + 20
    while not (mapped := mapped_weights(local, remote)) and time.monotonic() < deadline:
        time.sleep(0.05)
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
    seen["local copy"] = found


def mapped_weights(*stores: Path) -> list[str]:
    """Which of these stores this process has weights mapped from."""
    maps = Path("/proc/self/maps").read_text()
    return [store.name for store in stores if f"{store}/" in maps]


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (dbuffer.DBufferError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
