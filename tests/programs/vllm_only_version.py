"""Program of `test_only_version.py`, which says what it shows."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import greedy, judge, start_llm
from tests.support.waiting import until

KEPT = 2
"""Version that the engine stays on; its weights are of this seed."""
NUM_LOOKS = 4
PUBLISH_INTERVAL_S = 0.05
"""Far less than a look takes."""


def run(directory: Path) -> None:
    store = directory / "store"
    base = save_model("qwen3", 0, directory)
    fresh = greedy(start_llm(save_model("qwen3", KEPT, directory)))
    evaluated, newest = start_llm(base), start_llm(base)
    assert greedy(evaluated) != fresh
    newest_of_store = {"store": str(store)}
    with dbuffer.WeightSender(store, keep=1) as sender:
        for seed in (1, KEPT, 3, 4):
            sender.send(make_model("qwen3", seed))
        kept.pin(DoubleBuffer(store), KEPT)
        with (
            follow(evaluated, store, version=KEPT) as stays,
            follow(newest, store) as follows,
        ):
            with training(sender):
                assert stays.sync().version == KEPT
                for _ in range(NUM_LOOKS):
                    before = follows.applied or 0
                    until("a newer version", lambda: follows.sync() is not None)
                    assert follows.applied > before
                    assert (stays.sync(), stays.applied) == (None, KEPT)
                    assert serves(evaluated) == (str(KEPT), fresh)
            follows.sync()
            fresh_newest = greedy(start_from(base, newest_of_store))
            assert greedy(newest) == fresh_newest != fresh
        restarted = start_from(base, newest_of_store | {"version": KEPT})
        with follow(restarted) as follower:
            assert follower.sync() is None
            assert serves(restarted) == (str(KEPT), fresh)
        with follow(newest, store, version=KEPT) as follower:  # and goes back
            follower.sync()
            assert serves(newest) == (str(KEPT), fresh)
        with follow(newest, store) as follower:
            follower.sync()
            assert greedy(newest) == fresh_newest
        with pytest.raises(dbuffer.VersionError, match=r"version 1 .*is not in "):
            follow(newest, store, version=1)
        with pytest.raises(dbuffer.OptionError, match="local_store"):
            follow(newest, store, version=KEPT, local_store=str(directory / "local"))
        with pytest.raises(Exception, match=r"version 1 .*is not in "):
            start_from(base, newest_of_store | {"version": 1})


@contextlib.contextmanager
def training(sender: dbuffer.WeightSender) -> Iterator[None]:
    """Publish again and again, in a thread, for as long as the block lasts."""
    models = [make_model("qwen3", seed) for seed in (5, 3, 4)]
    must_end = threading.Event()

    def train() -> None:
        for model in itertools.cycle(models):
            sender.send(model)
            if must_end.wait(PUBLISH_INTERVAL_S):
                return

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        yield
    finally:
        must_end.set()
        trainer.join()


def start_from(base: Path, options: dict[str, Any]) -> Any:
    return start_llm(base, additional_config={"dbuffer": options})


def serves(llm: Any) -> tuple[str, list[list[int]]]:
    """Return the label of an engine, and its answers."""
    return str(llm.llm_engine.get_weight_version()), greedy(llm)


if __name__ == "__main__":
    judge(run)
