"""Inter-token latency of streams while an engine gets new weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dbuffer
from benchmarks import engines, models, plot, report
from benchmarks.engines import Checkpoint, Model
from benchmarks.processes import child, finish, reply, scratch_folder

NOTHING, OURS, THEIRS = "no new weights", "dbuffer", "vLLM, from safetensors"

_NUM_STREAMS = 8
_TOKENS = 100
"""Number of tokens in an answer."""
_PROMPT = list(range(200, 220))
_EVERY_S = 2.0
"""Time from the end of a switch to the next publish."""
_STRETCH_S, _ROUNDS = 16.0, 3
_QUICK_STRETCH_S, _QUICK_ROUNDS = 6.0, 1
_WARMING = 3
"""Switches before the measured ones: dbuffer verifies its plan, and vLLM allocates memory."""
_SHARES = (0.5, 0.9, 0.99, 0.999)
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """Measurements of all streams while new weights came in one way."""

    versions: int = 0
    lasted_s: float = 0.0
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Times between two tokens of an answer."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all streams together."""
        return self.num_tokens / self.lasted_s

    def shares_ms(self) -> dict[str, float]:
        """Return percentiles of the gaps in milliseconds, and the longest gap as ``most``."""
        gaps_ms = sorted(1e3 * gap_s for gap_s in self.gaps_s)
        shares = {f"{share:.1%}": gaps_ms[int(share * len(gaps_ms))] for share in _SHARES}
        return shares | {"most": gaps_ms[-1]}

    def buckets(self) -> Counter[int]:
        """Return the number of gaps by bucket: below 1 ms, 1 to 2 ms, 2 to 4 ms, and so on."""
        return Counter(int(1e3 * gap_s).bit_length() for gap_s in self.gaps_s)


def main(options: Namespace) -> int:
    """Measure and print."""
    environment = report.begin(options.dir[:1], engines.versions())
    width = 0.25 if options.quick else 0.5
    model = Model(
        "Qwen2.5-0.5B's shape, narrowed",
        models.qwen2_0_5b(width=width),
        head_size=32 if options.quick else 64,
    )
    with scratch_folder(options.dir[0]) as folder, child(_train, folder, model) as trainer:
        reply(trainer)
        results = asyncio.run(_measure(folder, model, trainer, quick=options.quick))
        finish(trainer)
    title = f"{model.title}, {_NUM_STREAMS} streams, a version {_EVERY_S:g} s after each switch"
    print(f"\n{title}\n\n{_shares_table(results)}\n\n{_histogram_table(results)}")
    if options.json:
        found = {way: asdict(seen) for way, seen in results.items()}
        options.json.write_text(json.dumps({"environment": environment} | found, indent=1))
    if options.plot:
        shares_ms = {way: seen.shares_ms() for way, seen in results.items()}
        caption = f"{title}\n{plot.caption(environment)}"
        plot.save_latencies(shares_ms, options.plot, caption)
    return 0


def _train(connection: Connection, folder: Path, model: Model) -> None:
    """Run as the trainer's process: publish, or save a checkpoint, at each request."""
    both = [model.weights(seed) for seed in (0, 1)]
    checkpoint = Checkpoint(folder / "checkpoint", model)
    checkpoint.save(both[0])
    with dbuffer.WeightSender(folder / "store") as sender:
        connection.send("ready")
        for number in itertools.count(1):
            way = connection.recv()
            if way == OURS:
                connection.send(sender.send(both[number % 2]).version)
            elif way == THEIRS:
                checkpoint.save(both[number % 2])
                connection.send("saved")
            else:
                return


async def _measure(
    folder: Path, model: Model, trainer: Connection, *, quick: bool
) -> dict[str, Seen]:
    checkpoint = Checkpoint(folder / "checkpoint", model)
    engine = engines.start_async_engine(checkpoint, max_num_seqs=_NUM_STREAMS)
    from dbuffer.integrations.vllm import follow

    results = {way: Seen() for way in (NOTHING, OURS, THEIRS)}
    try:
        async with follow(engine, folder / "store") as follower:
            updates = Updates(engine, follower, trainer, checkpoint)
            for way, _ in itertools.product((OURS, THEIRS), range(_WARMING)):
                await updates.bring(way)
            for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
                for way, seen in results.items():
                    await _stretch(updates, way, seen, _QUICK_STRETCH_S if quick else _STRETCH_S)
    finally:
        engine.shutdown()
    return results


class Updates:
    """Brings versions from the trainer to the engine, in any of the ways."""

    def __init__(
        self, engine: Any, follower: Any, trainer: Connection, checkpoint: Checkpoint
    ) -> None:
        self.engine = engine
        self._follower = follower
        self._trainer = trainer
        self._path = str(checkpoint.directory)

    async def bring(self, way: str) -> None:
        """Let the trainer publish a version, and wait until the engine serves it."""
        self._trainer.send(way)
        version = await asyncio.to_thread(reply, self._trainer)
        if way == OURS:
            await self._follower.wait_applied_async(version, timeout_s=_TIMEOUT_S)
            return
        await self.engine.pause_generation(mode="keep")
        try:
            await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": self._path})
        finally:
            await self.engine.resume_generation()


async def _stretch(updates: Updates, way: str, seen: Seen, lasts_s: float) -> None:
    """Run all streams for ``lasts_s`` seconds, while new versions come."""
    deadline = time.monotonic() + lasts_s
    async with streams(updates.engine, _NUM_STREAMS, seen):
        while way != NOTHING and time.monotonic() + _EVERY_S < deadline:
            await asyncio.sleep(_EVERY_S)
            await updates.bring(way)
            seen.versions += 1
        await asyncio.sleep(max(0.0, deadline - time.monotonic()))


@contextlib.asynccontextmanager
async def streams(engine: Any, num_streams: int, seen: Seen) -> AsyncIterator[None]:
    """Run streams, each with one request after another, until the ``with`` block ends."""
    started = time.monotonic()
    asking = [asyncio.create_task(_ask(engine, number, seen)) for number in range(num_streams)]
    try:
        yield
    finally:
        seen.lasted_s += time.monotonic() - started
        for stream in asking:
            stream.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("a stream failed") from outcome


async def _ask(engine: Any, number: int, seen: Seen) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0,
        max_tokens=_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    # Prompts have different lengths, so that answers do not begin and end together.
    prompt = {"prompt_token_ids": _PROMPT[number:]}
    while True:
        at = None
        async for output in engine.generate(prompt, parameters, f"{number}-{time.monotonic()}"):
            now = time.monotonic()
            seen.num_tokens += len(output.outputs[0].token_ids)  # several if the output came late
            if at is not None:
                seen.gaps_s.append(now - at)
            at = now


def _shares_table(results: dict[str, Seen]) -> str:
    rows = []
    for way, seen in results.items():
        shares = seen.shares_ms()
        rate = f"{seen.tokens_per_s:.0f}"
        rows.append((way, str(seen.versions), rate, *(f"{ms:.1f}" for ms in shares.values())))
    header = ("ms to the next token", "versions", "tokens/s", *shares)
    return report.table(header, rows)


def _histogram_table(results: dict[str, Seen]) -> str:
    buckets = [seen.buckets() for seen in results.values()]
    last = max(map(max, buckets))
    rows = [
        (f"below {2**bucket} ms", *(str(counts[bucket]) for counts in buckets))
        for bucket in range(min(map(min, buckets)), last + 1)
    ]
    return report.table(("tokens that came", *results), rows)
