"""Program of `test_many.py`, which says what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dbuffer.integrations.vllm import follow
from tests.support.engines.vllm_engines import PROMPTS

NUM_PROGRAMS, NUM_ENGINES = 4, 4


def run(directory: Path, number: int) -> None:
    import vllm

    from tests.support.engines.vllm_engines import engine_arguments, greedy_parameters

    llms = [vllm.LLM(**engine_arguments(directory / "model")) for _ in range(NUM_ENGINES)]
    ids = [f"engine-{number}-{one}" for one in range(NUM_ENGINES)]
    followers = [
        follow(llm, str(directory / "store"), engine_id=name)
        for llm, name in zip(llms, ids, strict=True)
    ]
    with (directory / f"seen-{number}.jsonl").open("a") as seen:
        while True:
            for one, (llm, follower) in enumerate(zip(llms, followers, strict=True)):
                follower.sync()
                prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
                outputs = llm.generate(prompts, greedy_parameters(4), use_tqdm=False)
                tokens = [token for output in outputs for token in output.outputs[0].token_ids]
                seen.write(json.dumps((one, follower.applied, tokens)) + "\n")
                seen.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
