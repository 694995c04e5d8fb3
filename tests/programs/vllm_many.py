"""Program of `test_many.py`, which says what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dbuffer.integrations.vllm import follow
from tests.support.engines.vllm_engines import greedy, start_llm

NUM_PROGRAMS, NUM_ENGINES = 4, 4


def run(directory: Path, number: int) -> None:
    llms = [start_llm(directory / "model") for _ in range(NUM_ENGINES)]
    ids = [f"engine-{number}-{one}" for one in range(NUM_ENGINES)]
    followers = [
        follow(llm, str(directory / "store"), engine_id=name)
        for llm, name in zip(llms, ids, strict=True)
    ]
    with (directory / f"seen-{number}.jsonl").open("a") as seen:
        while True:
            for one, (llm, follower) in enumerate(zip(llms, followers, strict=True)):
                follower.sync()
                tokens = [token for answer in greedy(llm, 4) for token in answer]
                seen.write(json.dumps((one, follower.applied, tokens)) + "\n")
                seen.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
