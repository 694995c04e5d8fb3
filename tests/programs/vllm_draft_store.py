"""Program of `test_drafts.py`: an engine whose draft follows a store of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.integrations.vllm import follow, versions_of
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import until
from tests.programs.vllm_drafts import Engines, misfits, runner_of
from tests.support.engines import preforked
from tests.support.engines.tiny_models import weights_in
from tests.support.engines.vllm_engines import (
    PROMPTS,
    greedy_parameters,
    judge,
    set_packing,
    start_llm,
)
from tests.support.waiting import error_of

WAIT_S = 120.0
ID = "engine.draft"
"""Name of the draft among the receivers of its store."""


def run(directory: Path, *arguments: str) -> None:
    if arguments[0] == "trainer":
        train(directory, *map(Path, arguments[1:]))
    else:
        follow_both(directory, *arguments)


def train(store: Path, *drafts: Path) -> None:
    """Publish drafts until killed."""
    weights = [weights_in(draft) for draft in drafts]
    with dbuffer.WeightSender(store) as sender:
        for number in itertools.count():
            sender.send(weights[number % 2], metadata={"draft": number % 2})


def follow_both(directory: Path, name: str, form: str) -> None:
    dtype, layers = form.split()
    set_packing(packed=layers == "packed")
    engines = Engines(directory, name, dtype)
    llm, ask = engines.start(0, 0)
    store, drafts = directory / "store", directory / "drafts"
    if engines.is_mtp:
        refusal = error_of(lambda: follow(llm, store, draft_store=drafts))
        assert "MTP draft is loaded with the target's weights" in str(refusal)
        return
    alone = start_llm(engines.targets[0])
    assert "this engine has none" in str(error_of(lambda: follow(alone, store, draft_store=drafts)))
    with (
        dbuffer.WeightSender(store, keep=9) as sender,
        follow(llm, store, draft_store=drafts, engine_id="engine") as follower,
    ):
        draft: Any = follower._draft

        def switch_target(number: int) -> None:
            version = sender.send(weights_in(engines.targets[number])).version
            assert follower.sync().version == version
            assert follower.applied == version

        # Before the draft's store exists.
        switch_target(1)
        assert ask() == engines.fresh(1, 0)
        for _ in range(2):
            before = draft.applied or 0
            trainer = start_trainer(drafts, *engines.drafts)
            until("it has one", lambda before=before: synced(follower, draft) > before, WAIT_S)
            for place in range(4):
                if place == 2:
                    trainer.kill()
                    trainer.wait(WAIT_S)
                switch_target(place % 2)
                assert ask() == engines.fresh(place % 2, draft.applied_metadata["draft"]), place
        output = llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy_parameters())[0]
        assert {span.version for span in versions_of(output)} == {follower.applied}
        with dbuffer.WeightSender(drafts) as sender_of_drafts:
            judge_versions(engines, ask, follower, sender_of_drafts)
            refuse_misfits(engines, ask, follower, sender, sender_of_drafts)
            lose_weights(engines, llm, ask, follower, sender_of_drafts)


def start_trainer(store: Path, *drafts: Path) -> preforked.Process:
    command = [__file__, *map(str, (store, "trainer", *drafts))]
    return preforked.start(command, env=dict(os.environ), output=store.with_suffix(".log"))


def synced(follower: Any, draft: Any) -> int:
    follower.sync()
    return draft.applied or 0


def judge_versions(
    engines: Engines, ask: Callable[[], Any], follower: Any, trainer: dbuffer.WeightSender
) -> None:
    """Each draft, until it is copied; the acknowledgement is for the draft's store alone."""
    for number in (0, 1) * 2:
        version = trainer.send(weights_in(engines.drafts[number])).version
        until("it has it", lambda: synced(follower, follower._draft) == version, WAIT_S)  # noqa: B023
        trainer.wait_applied(version, receivers=ID, timeout_s=WAIT_S)
        assert ask() == engines.fresh(1, number)
    records = DoubleBuffer(trainer.store).receivers()
    assert {record.receiver for record in records} == {ID, f"{ID}.rank-0"}
    store = DoubleBuffer(follower._view.options.store)
    assert {record.receiver for record in store.receivers()} == {"engine", "engine.rank-0"}


def refuse_misfits(
    engines: Engines, ask: Callable[[], Any], follower: Any, sender: Any, trainer: Any
) -> None:
    """Refuse what does not fit, and a tensor of the target's; the target goes on."""
    draft = weights_in(engines.drafts[0])
    cases = misfits(draft)
    if not any("embed" in n for n in draft):
        shared = weights_in(engines.targets[0])["model.embed_tokens.weight"]
        cases.append(({**draft, "embed_tokens.weight": shared}, "embed_tokens"))
    served = follower._draft.applied
    for number, (misfit, told) in enumerate(cases):
        version = trainer.send(misfit).version
        with pytest.raises(dbuffer.ReceiverFailedError, match=told):
            trainer.wait_applied(version, receivers=ID, timeout_s=WAIT_S)
        sender.send(weights_in(engines.targets[number % 2]))
        assert error_of(follower.sync) is None
        assert told in follower._draft_problem
        assert follower._draft.applied == served
        assert ask() == engines.fresh(number % 2, 1)
    sender.send(weights_in(engines.targets[0]), draft=draft)
    refusal = error_of(follower.sync)
    assert f"__draft__.{next(iter(draft))} belongs to a draft" in str(refusal)
    sender.send(weights_in(engines.targets[0]))
    assert error_of(follower.sync) is None


def lose_weights(
    engines: Engines, llm: Any, ask: Callable[[], Any], follower: Any, trainer: Any
) -> None:
    """A load of the draft that fails, and one by another program."""
    endpoint: Any = RankEndpoint.of(runner_of(llm).model)
    model, draft = endpoint._draft.receiver._model, follower._draft
    load = model.load

    def fail(staged: Any) -> None:
        load(staged)
        raise RuntimeError("out of luck")

    model.load = fail
    version = trainer.send(weights_in(engines.drafts[0])).version
    until("it is broken", lambda: synced(follower, draft) == 0, WAIT_S)
    assert "half-loaded weights" in follower._draft_problem
    assert ask()[0] == engines.fresh(0, 0)[0]  # the target goes on with any draft
    del model.load
    until("it is over it", lambda: synced(follower, draft) == version, WAIT_S)
    assert ask() == engines.fresh(0, 0)
    others = iter(weights_in(engines.drafts[1]).items())
    error_of(lambda: runner_of(llm).drafter.model.load_weights(others))  # packed layers raise
    assert endpoint._draft.state.version is None
    assert endpoint.state.version is not None
    until("it has it again", lambda: synced(follower, draft) == version, WAIT_S)
    assert ask() == engines.fresh(0, 0)


if __name__ == "__main__":
    judge(run)
