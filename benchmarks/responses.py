"""How much longer a vLLM server takes for a response because it follows a store.

Two servers of one model, one with the middleware and one that knows nothing of dbuffer, are asked
in turns, so that what else the machine does meets both. A response of one token is the shortest
there is; a stream passes the middleware once a token.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import dbuffer
from benchmarks import engines, models, report
from benchmarks.engines import Checkpoint, Model
from benchmarks.measure import median
from benchmarks.processes import scratch_folder
from tests.support.ports import free_port

PLAIN, FOLLOWS, TOLD = "no dbuffer", "follows", "follows, spans asked for"
_KINDS = {"one token": 1, "a stream of 32": 32}
_PAIRS, _QUICK_PAIRS = 80, 20
_WARMING = 10
_READY_S = 300.0
_SAMPLES = 1000
"""Of the bootstrap."""


def main(options: Namespace) -> int:
    """Measure and print."""
    environment = report.begin(options.dir[:1], engines.versions())
    model = Model("Qwen2.5-0.5B's shape, narrowed", models.qwen2_0_5b(width=0.25), head_size=32)
    with scratch_folder(options.dir[0]) as folder:
        times = _times_s(model, folder, _QUICK_PAIRS if options.quick else _PAIRS)
    print(f"\n{model.title}\n\n{_table(times)}")
    if options.json:
        found = {f"{kind}, {way}": times for (kind, way), times in times.items()}
        options.json.write_text(json.dumps({"environment": environment} | found, indent=1))
    return 0


def _times_s(model: Model, folder: Path, pairs: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each response, by its kind and the way that its server works."""
    import httpx

    checkpoint, store = Checkpoint(folder / "checkpoint", model), folder / "store"
    weights = model.weights(0)
    checkpoint.save(weights)
    with dbuffer.WeightSender(store) as sender:
        sender.send(weights, metadata={"step": 1})
    settings = json.dumps({"dbuffer": {"store": str(store)}})
    middleware = ("--middleware", "dbuffer.integrations.vllm.FollowStore")
    follows = ("--additional-config", settings, *middleware)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        _Server(checkpoint, folder / "plain.log", plugins="") as plain,
        _Server(checkpoint, folder / "follows.log", *follows) as following,
        httpx.Client(timeout=_READY_S) as client,
    ):
        ways: dict[str, tuple[str, dict[str, str]]] = {
            PLAIN: (plain.url, {}),
            FOLLOWS: (following.url, {}),
            TOLD: (following.url, {"X-Weight-Versions": "true"}),
        }
        for server in (plain, following):
            server.wait_ready(client)
        for number, (kind, tokens) in itertools.product(range(pairs + _WARMING), _KINDS.items()):
            order = random.sample(list(ways), len(ways))
            for way in order:
                url, headers = ways[way]
                took_s = _ask(client, url, tokens, headers)
                if number >= _WARMING:
                    times[kind, way].append(took_s)
    return times


def _ask(client: Any, url: str, tokens: int, headers: dict[str, str]) -> float:
    body = {
        "model": "policy",
        "prompt": [1, 2, 3],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": tokens > 1,
    }
    started = time.perf_counter()
    response = client.post(f"{url}/v1/completions", json=body, headers=headers)
    took_s = time.perf_counter() - started
    response.raise_for_status()
    return took_s


class _Server:
    """A vLLM server in a process of its own; ``plugins``: those that it loads (default: all)."""

    def __init__(
        self, checkpoint: Checkpoint, log: Path, *flags: str, plugins: str | None = None
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(checkpoint.directory), "--served-model-name", "policy"]
        command += ["--port", str(port), "--skip-tokenizer-init", "--enforce-eager"]
        command += ["--max-model-len", "256", "--max-num-seqs", "4", "--block-size", "32"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), *flags]
        env = os.environ | {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        if plugins is not None:
            env["VLLM_PLUGINS"] = plugins
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def wait_ready(self, client: Any) -> None:
        import httpx

        deadline = time.monotonic() + _READY_S
        while True:
            try:
                client.get(f"{self.url}/health").raise_for_status()
            except httpx.HTTPError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"a server does not start: {self._log.read_text()[-2000:]}")
                time.sleep(0.5)
            else:
                return


def _table(times: dict[tuple[str, str], list[float]]) -> str:
    rows = []
    for kind, way in itertools.product(_KINDS, (PLAIN, FOLLOWS, TOLD)):
        taken_s = times[kind, way]
        least, most = _interval(taken_s, times[kind, PLAIN])
        ratio = median(taken_s) / median(times[kind, PLAIN])
        rows.append(
            (kind, way, f"{1e3 * median(taken_s):.2f}", f"{ratio:.3f}", f"{least:.3f}-{most:.3f}")
        )
    return report.table(("", "", "ms, median", "of no dbuffer", "95 % of the ratio"), rows)


def _interval(ours_s: list[float], theirs_s: list[float]) -> tuple[float, float]:
    """Return the interval in which the ratio of the medians lies, by a bootstrap over pairs."""
    pairs, rng = list(zip(ours_s, theirs_s, strict=True)), random.Random(0)
    ratios = []
    for _ in range(_SAMPLES):
        ours, theirs = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(median(list(ours)) / median(list(theirs)))
    ratios.sort()
    return ratios[_SAMPLES // 40], ratios[-_SAMPLES // 40]
