"""Program of `test_only_version.py`, which says what it shows."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import dbuffer
from dbuffer.integrations.vllm import follow
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import greedy, leave, start_llm
from tests.support.waiting import error_of, until

KEPT = 2
"""Version that the engine stays on; its weights are of this seed."""
NUM_LOOKS = 4
PUBLISH_INTERVAL_S = 0.05
"""Far less than a look takes."""


def run(directory: Path) -> dict[str, Any]:
    store = directory / "store"
    base = save_model("qwen3", 0, directory)
    seen: dict[str, Any] = {"fresh": greedy(start_llm(save_model("qwen3", KEPT, directory)))}
    evaluated, newest = start_llm(base), start_llm(base)
    seen["base"] = greedy(evaluated)
    models = [make_model("qwen3", seed) for seed in range(6)]
    must_end = threading.Event()
    with dbuffer.WeightSender(store, keep=1) as sender:
        for seed in (1, KEPT, 3, 4):
            sender.send(models[seed])
        kept.pin(DoubleBuffer(store), KEPT)

        def train() -> None:
            for seed in itertools.cycle((5, 3, 4)):
                sender.send(models[seed])
                if must_end.wait(PUBLISH_INTERVAL_S):
                    return

        trainer = threading.Thread(target=train)
        with (
            follow(evaluated, store, version=KEPT) as stays,
            follow(newest, store) as follows,
        ):
            trainer.start()
            switch = stays.sync()
            seen["switched to"] = switch and switch.version
            seen["looks"] = [look(evaluated, stays, follows) for _ in range(NUM_LOOKS)]
            must_end.set()
            trainer.join()
            follows.sync()
            seen["newest"] = greedy(newest)
        newest_of_store = {"store": str(store)}
        restarted = start_from(base, newest_of_store | {"version": KEPT})
        with follow(restarted) as follower:
            seen["restarted"] = [follower.sync(), label_of(restarted), greedy(restarted)]
        seen["fresh newest"] = greedy(start_from(base, newest_of_store))
        # It goes back from a version of its own.
        with follow(newest, store, version=KEPT) as follower:
            follower.sync()
            seen["went back"] = [label_of(newest), greedy(newest)]
        with follow(newest, store) as follower:
            follower.sync()
            seen["went on"] = greedy(newest)
        seen["gone"] = error_of(lambda: follow(newest, store, version=1))
        seen["local copy"] = error_of(
            lambda: follow(newest, store, version=KEPT, local_store=str(directory / "local"))
        )
        gone = newest_of_store | {"version": 1}
        seen["started on what is gone"] = error_of(lambda: start_from(base, gone))
    return seen


def start_from(base: Path, options: dict[str, Any]) -> Any:
    return start_llm(base, additional_config={"dbuffer": options})


def label_of(llm: Any) -> str:
    return str(llm.llm_engine.get_weight_version())


def look(llm: Any, stays: Any, follows: Any) -> list[Any]:
    """Let the other engine follow on; return what this one says and answers."""
    before = follows.applied or 0
    until("a newer version", lambda: follows.sync() is not None)
    return [follows.applied > before, stays.sync(), stays.applied, label_of(llm), greedy(llm)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    leave(target, run(target))
