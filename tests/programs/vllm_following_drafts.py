"""Program of `test_following_drafts.py`: an engine whose draft follows, against fresh engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.vllm import follow
from tests.programs.vllm_drafts import CASES, asking, runner_of
from tests.support.engines.tiny_models import weights_in
from tests.support.engines.vllm_engines import counted_reloads, judge, set_packing, start_llm
from tests.support.waiting import error_of

Weights = dict[str, torch.Tensor]

NUM_PROVEN = 4
"""After so many switches of each kind, with a draft and without one, all are copies."""


def is_of_mtp(name: str) -> bool:
    return "mtp" in name


class Engines:
    """Targets 0 and 1, drafts 0 and 1, and fresh engines of any two of them."""

    def __init__(self, directory: Path, name: str) -> None:
        case = CASES[name]
        self.is_mtp = case.draft is None
        self.directory = directory
        self.targets = [case.target(directory, seed) for seed in (0, 1)]
        self.drafts: list[Path] = []
        if case.draft is not None:
            self.drafts = [case.draft(directory / f"draft-{seed}", seed) for seed in (2, 3)]
        self.speculates = case.speculates
        self.answers: dict[tuple[int, int], Any] = {}

    def start(self, target: int, draft: int, **more: Any) -> tuple[Any, Callable[[], Any]]:
        if self.is_mtp:
            path, config = self.mixed(target, draft), self.speculates
        else:
            path = self.targets[target]
            config = self.speculates | {"model": str(self.drafts[draft])}
        llm = start_llm(path, speculative_config=config, **more)
        return llm, asking(llm)

    def mixed(self, target: int, draft: int) -> Path:
        """A checkpoint of a target with the layers of another one's draft."""
        from safetensors.torch import save_file

        path = self.directory / f"mixed-{target}-{draft}"
        path.mkdir(exist_ok=True)
        config = (self.targets[target] / "config.json").read_text()
        (path / "config.json").write_text(config)
        weights = self.version(target, draft)[0]
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return path

    def fresh(self, target: int, draft: int) -> Any:
        """The tokens and proposals of a fresh engine."""
        if (target, draft) not in self.answers:
            self.answers[target, draft] = self.start(target, draft)[1]()
        return self.answers[target, draft]

    def version(self, target: int, draft: int | None) -> tuple[Weights, Weights | None]:
        weights = weights_in(self.targets[target])
        if not self.is_mtp:
            return weights, None if draft is None else weights_in(self.drafts[draft])
        rest = {name: tensor for name, tensor in weights.items() if not is_of_mtp(name)}
        if draft is None:
            return rest, None
        others = weights_in(self.targets[draft])
        return rest | {n: t for n, t in others.items() if is_of_mtp(n)}, None


def run(directory: Path, name: str, packed: str) -> dict[str, int]:
    set_packing(packed=packed == "packed")
    engines = Engines(directory, name)
    llm, ask = engines.start(0, 0)
    assert ask() == engines.fresh(0, 0)
    assert engines.fresh(0, 0)[1] != engines.fresh(0, 1)[1]
    store = directory / "store"
    with dbuffer.WeightSender(store, keep=9) as sender, follow(llm, store) as follower:

        def send(target: int, draft: int | None) -> Any:
            weights, of_draft = engines.version(target, draft)
            sender.send(weights, draft=of_draft)
            return error_of(follower.sync)

        # With a draft and without one: such a version leaves the draft.
        kept = 0
        for place, (target, draft) in enumerate([(1, 1), (0, None), (0, 0), (1, None)] * 4):
            with counted_reloads(llm) as reloads:
                assert send(target, draft) is None
            kept = kept if draft is None else draft
            assert ask() == engines.fresh(target, kept), (place, target, draft)
            assert place < 2 * NUM_PROVEN or not reloads, (place, reloads)
        assert send(1, 1) is None
        served = ask()
        refuse_misfits(engines, sender, follower)
        assert ask() == served == engines.fresh(1, 1)
        assert runner_of(llm).model is not runner_of(llm).drafter.model
        go_back(llm, lambda: send(0, 0))
        assert ask() == engines.fresh(1, 1)
        # Back to a version without a draft: the draft becomes the one of the start.
        assert send(1, None) is None
        go_back(llm, lambda: send(0, 1))
        assert ask() == engines.fresh(1, 0)
        assert send(1, 1) is None
        assert ask() == engines.fresh(1, 1)
        load_without_a_follower(engines, sender)
    return {"switches of engines that speculate": 20}


def refuse_misfits(engines: Engines, sender: Any, follower: Any) -> None:
    """A tensor of another shape, one too few, one too many."""
    weights, draft = engines.version(0, 0)
    part = weights if draft is None else draft
    names = [n for n, t in part.items() if t.dim() == 2 and (draft is not None or is_of_mtp(n))]
    name = next(n for n in names if "embed" not in n and "lm_head" not in n)
    prefix = "" if engines.is_mtp else "__draft__."
    narrow = {**part, name: part[name][:, :-1].contiguous()}
    fewer = {n: t for n, t in part.items() if n != name}
    more = {**part, f"{name}_of_none": torch.ones(3)}
    for changed, told in ((narrow, prefix + name), (fewer, "were published"), (more, "of_none")):
        if changed is more and engines.is_mtp:
            continue
        parts = (changed, None) if draft is None else (weights, changed)
        sender.send(parts[0], draft=parts[1])
        error = error_of(follower.sync)
        assert error is not None, told
        assert told in str(error), error


def load_without_a_follower(engines: Engines, sender: Any) -> None:
    """At an engine's start, and in vLLM's own session for a draft."""
    options = {"dbuffer": {"store": str(sender.store)}}
    llm, ask = engines.start(0, 0, additional_config=options)
    assert ask() == engines.fresh(1, 1)
    assert llm.llm_engine.collective_rpc("supports_draft_weight_updates") == [True]
    weights, draft = engines.version(0, 0)
    sender.send(weights, draft=draft)
    llm.start_draft_weight_update()
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    assert ask() == engines.fresh(0, 0)


def go_back(llm: Any, send: Callable[[], Any]) -> None:
    """A load that fails after all of a version was loaded."""
    from dbuffer.engine.endpoint import RankEndpoint

    model: Any = RankEndpoint.of(runner_of(llm).model).receiver._model  # type: ignore[union-attr]
    load, num_loads = model.load, 0

    def fail_once(staged: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        load(staged)
        if num_loads == 1:
            raise RuntimeError("out of luck")

    model.load = fail_once
    try:
        error = send()
    finally:
        del model.load
    assert "all ranks went back" in str(error), error
    assert num_loads == 2


if __name__ == "__main__":
    judge(run)
