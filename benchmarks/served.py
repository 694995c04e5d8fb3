"""Time from a trainer's `send` to the first token of the new weights; throughput and memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import os
import select
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dbuffer
from benchmarks import engines, models, report
from benchmarks.copying import HalvesCopy
from benchmarks.engines import Checkpoint, Model
from benchmarks.latency import Seen, streams
from benchmarks.measure import median, percentile, timed
from benchmarks.memory import NodeMemory
from benchmarks.processes import child, finish, reply, scratch_folder
from benchmarks.publishing import note_flips
from benchmarks.steps import Marks
from benchmarks.targets import Check, at_least, at_most
from dbuffer.engine.contract import PauseMode
from dbuffer.format.places import POINTER_FILE

IDLE, BUSY = "an idle engine", "16 streams"
WHOLE, DELTA, ELSEWHERE = "whole", "1 % changed", "published, not followed"
COPY, COMPARE, PAUSE = ALONE = (
    "memcpy of the whole",
    "only compare all words",
    "only a pause, to the first token",
)
NOTHING, RESETS, FOLLOWED = "no new weights", "pauses without new weights", "dbuffer"
PARTS = (
    "publish",
    "notice",
    "stage",
    "see that it is staged",
    "wait for the step's end, drop caches",
    "load",
    "label, resume",
    "first token",
)
_NUM_STREAMS = 16
_WARMING = 4
"""Switches before the measured ones: they fill the buffers and verify the plan."""
_ROUNDS, _QUICK_ROUNDS = 10, 4
_EVERY_S = 1.0
_STRETCH_S, _QUICK_STRETCH_S = 8.0, 4.0
_STRETCHES, _QUICK_STRETCHES = 3, 1
_RANKS = 2
_TIMEOUT_S = 120.0
_PAUSES: dict[PauseMode, dict[str, Any]] = {
    "keep": {},
    "in_place": {"enable_prefix_caching": False},
}
"""Pause modes that keep requests in flight, and the engine's arguments for each mode."""
_LIVE = "benchmarks.live_worker.LiveWorker"
_IN_MOVED_TO = 0x80


class Sent(NamedTuple):
    """Published version, with times by `time.monotonic`."""

    version: int
    called_at: float
    flipped_at: float
    delta_bytes: int | None


@dataclass(slots=True)
class Found:
    """All measurements of a run."""

    model: Model
    streamed: Model
    divided: Model
    """Model of the engine with several ranks, among which its heads are divided."""
    parts_s: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    alone_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Times of necessary steps alone, measured in turn with switches."""
    notices_s: list[float] = field(default_factory=list)
    bare_notices_s: list[float] = field(default_factory=list)
    """Delays until a process that only waits notices a version. Warm-up versions count, too."""
    rates: dict[str, dict[str, Seen]] = field(default_factory=dict)
    """Throughput by pause mode, and by the event that happens every second."""
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def part_s(self, key: str, part: str) -> float:
        """Return the median time of one part."""
        return median([parts[part] for parts in self.parts_s[key]])

    def served_s(self, key: str) -> float:
        """Return the median time from the call of `send` to the first token."""
        return median([sum(parts.values()) for parts in self.parts_s[key]])

    def alone(self, key: str, step: str) -> float:
        """Return the median time of a step alone."""
        return median(self.alone_s[key][step])


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if a target was missed."""
    environment = report.begin(options.dir[:1], engines.versions())
    quick = options.quick
    wide, narrow = ((0.25, 32), (0.25, 32)) if quick else ((1.0, 64), (0.5, 64))
    found = Found(_model(*wide), _model(*narrow), _model(0.5, 32))
    with scratch_folder(options.dir[0]) as folder:
        asyncio.run(_measure_served(folder / "served", found, _QUICK_ROUNDS if quick else _ROUNDS))
        print(f"\n{found.model.title}, live layers\n\n{_served_table(found)}", flush=True)
        for pause in _PAUSES:
            asyncio.run(_measure_rates(folder / pause, found, pause, quick=quick))
            table = _rates_table(pause, found.rates[pause])
            print(f"\n{found.streamed.title}, live layers\n\n{table}", flush=True)
        if torch.cuda.device_count() == 1:
            print("\nOne GPU has no room for two ranks: a node's memory is not measured.")
        else:
            asyncio.run(_measure_memory(folder / "memory", found))
            print(f"\n{found.divided.title}, live layers\n\n{_memory_table(found)}", flush=True)
    title = f"Targets{', sizes too small to judge by' if quick else ''}"
    titles = {name: getattr(found, name).title for name in ("model", "streamed", "divided")}
    as_json = asdict(found) | titles
    return report.conclude(
        environment,
        _checks(found),
        as_json,
        options.json,
        title=title,
        reference=report.LIMIT,
    )


def _model(width: float, head_size: int) -> Model:
    return Model("Qwen2.5-0.5B's shape", models.qwen2_0_5b(width=width), head_size)


def _train(connection: Connection, folder: Path, model: Model) -> None:
    """Run as the trainer's process: publish, copy or compare the weights, at each request."""
    weights, others = model.weights(0), model.weights(1)
    Checkpoint(folder / "checkpoint", model).save(weights)
    halves = HalvesCopy(models.warm_destination(model.shapes))
    flipped_ns = note_flips()
    stores = {WHOLE: folder / "store", DELTA: folder / "store", ELSEWHERE: folder / "elsewhere"}
    senders: dict[str, dbuffer.WeightSender] = {}
    connection.send("ready")
    while (what := connection.recv()) in (COPY, COMPARE, *stores):
        if what == COPY:
            connection.send(timed(functools.partial(halves, weights)))
            continue
        if what == COMPARE:
            connection.send(timed(functools.partial(_compare, weights, others)))
            continue
        if what not in senders:
            if what == DELTA:
                senders.pop(WHOLE).close()
                others = {name: models.nudged(tensor) for name, tensor in weights.items()}
            senders[what] = dbuffer.WeightSender(stores[what], delta=what == DELTA)
        weights, others = others, weights  # each version differs from the one before
        called_at = time.monotonic()
        sent = senders[what].send(weights)
        connection.send(Sent(sent.version, called_at, flipped_ns[-1] / 1e9, sent.delta_bytes))
    for sender in senders.values():
        sender.close()


def _note_moves(connection: Connection, store: Path) -> None:
    """Note the times at which a store's pointer is replaced; send them at the first request."""
    store.mkdir(mode=0o700)
    system = ctypes.CDLL(None, use_errno=True)
    inotify = system.inotify_init1(os.O_CLOEXEC)
    if system.inotify_add_watch(inotify, os.fsencode(store), _IN_MOVED_TO) < 0:
        raise OSError(ctypes.get_errno(), "no inotify", str(store))
    connection.send("ready")
    moved_at: list[float] = []
    while connection not in (ready := select.select([inotify, connection], [], [])[0]):
        assert inotify in ready
        at = time.monotonic()
        if POINTER_FILE.encode() in os.read(inotify, 1 << 16):
            moved_at.append(at)
    connection.send(moved_at)


def _compare(before: models.Weights, after: models.Weights) -> None:
    """Compare all words of 8 bytes: a lower bound of finding a delta."""
    for name, old in before.items():
        torch.ne(*(each.reshape(-1).view(torch.int64) for each in (old, after[name])))


class Followed:
    """Engine that follows a store, and the trainer that publishes into the store."""

    def __init__(
        self, engine: Any, follower: Any, trainer: Connection, pause: PauseMode = "keep"
    ) -> None:
        self.engine = engine
        self._follower = follower
        self._trainer = trainer
        self._pause: PauseMode = pause
        self.version = 0
        self.flipped_at: list[float] = []
        self._marks = _follower_marks()

    async def ask_trainer(self, what: str) -> Any:
        """Send a request to the trainer, and return its answer."""
        self._trainer.send(what)
        return await asyncio.to_thread(reply, self._trainer)

    async def publish(self, what: str) -> Sent:
        """Publish a version, and wait until the engine serves it."""
        sent: Sent = await self.ask_trainer(what)
        await self._follower.wait_applied_async(sent.version, _TIMEOUT_S)
        self.version = sent.version
        self.flipped_at.append(sent.flipped_at)
        return sent

    async def bring(self, what: str) -> dict[str, float]:
        """Publish a version, wait for the first token, and return the seconds of each part."""
        sent = await self.publish(what)
        first_token_at = await self.first_token()
        [rank] = await self.engine.collective_rpc("benchmark_marks")
        staging_at, staged_at = rank["_stage"]
        marks = self._marks.last
        ends = (
            sent.flipped_at,
            staging_at,
            staged_at,
            marks["pause"][0],
            marks["pause"][1],
            marks["_load"][1],
            marks["resume"][1],
            first_token_at,
        )
        starts = (sent.called_at, *ends)
        return {part: end - start for part, start, end in zip(PARTS, starts, ends, strict=False)}

    async def pause(self) -> None:
        """Pause, drop caches (except in mode ``in_place``), and resume, as each switch does."""
        from dbuffer.integrations.vllm.vllm_engine import AsyncVllm

        driven = AsyncVllm(self.engine)
        await asyncio.to_thread(driven.pause, self._pause)
        await asyncio.to_thread(driven.resume)

    async def first_token(self) -> float:
        """Request a token, which must be of the newest version; return the time when it came."""
        from vllm import SamplingParams

        from dbuffer.integrations.vllm import versions_of

        parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        prompt = {"prompt_token_ids": [1, 2, 3]}
        answer = self.engine.generate(prompt, parameters, f"first-{time.monotonic_ns()}")
        outputs = [(time.monotonic(), output) async for output in answer]
        came_at, last = outputs[-1]
        if [span.version for span in versions_of(last)] != [self.version]:
            raise RuntimeError(f"the first token after the switch is not of version {self.version}")
        return came_at


def _follower_marks() -> Marks:
    from dbuffer.engine.follower import Follower
    from dbuffer.integrations.vllm.vllm_engine import AsyncVllm

    marks = Marks()
    for function in (AsyncVllm.pause, AsyncVllm.resume):
        marks.watch(AsyncVllm, function)
    marks.watch(Follower, Follower._load)  # noqa: SLF001
    return marks


@contextlib.asynccontextmanager
async def _engine(folder: Path, model: Model, **more: Any) -> AsyncIterator[tuple[Any, Connection]]:
    """Start an engine with live layers, and a trainer."""
    folder.mkdir()
    with child(_train, folder, model) as trainer:
        reply(trainer)
        checkpoint = Checkpoint(folder / "checkpoint", model)
        more |= {"max_num_seqs": _NUM_STREAMS + 1, "worker_extension_cls": _LIVE}
        engine = engines.start_async_engine(checkpoint, **more)
        try:
            yield engine, trainer
        finally:
            engine.shutdown()
        finish(trainer)


@contextlib.asynccontextmanager
async def _following(
    folder: Path, model: Model, found: Found, pause: PauseMode = "keep", **more: Any
) -> AsyncIterator[Followed]:
    store = folder / "store"
    async with _engine(folder, model, **more) as (engine, trainer):
        from dbuffer.integrations.vllm import follow

        with child(_note_moves, store) as bare:
            reply(bare)
            async with follow(engine, store, pause=pause) as follower:
                followed = Followed(engine, follower, trainer, pause)
                yield followed
            bare.send("finish")
            moved_at = reply(bare)
        for flipped_at in followed.flipped_at:
            found.bare_notices_s.append(min(at for at in moved_at if at > flipped_at) - flipped_at)


async def _measure_served(folder: Path, found: Found, rounds: int) -> None:
    async with _following(folder, found.model, found) as followed:
        for what, load in itertools.product((WHOLE, DELTA), (IDLE, BUSY)):
            key = f"{what}, {load}"
            async with _load(followed.engine, load):
                if load == IDLE:
                    for _ in range(_WARMING):
                        await followed.bring(what)
                parts = found.parts_s.setdefault(key, [])
                alone = found.alone_s.setdefault(key, {step: [] for step in ALONE})
                for _ in range(rounds):
                    parts.append(await followed.bring(what))
                    found.notices_s.append(parts[-1]["notice"])
                    for step in (COPY, COMPARE):
                        alone[step].append(await followed.ask_trainer(step))
                    paused_at = time.monotonic()
                    await followed.pause()
                    served_at = await followed.first_token()
                    alone[PAUSE].append(served_at - paused_at)


def _load(engine: Any, load: str) -> Any:
    if load == IDLE:
        return contextlib.nullcontext()
    return streams(engine, _NUM_STREAMS, Seen())


async def _measure_rates(folder: Path, found: Found, pause: PauseMode, *, quick: bool) -> None:
    rates = found.rates.setdefault(pause, {})
    async with _following(folder, found.streamed, found, pause, **_PAUSES[pause]) as followed:
        for what in (ELSEWHERE,) * 2 + (WHOLE,) * _WARMING:
            if what == WHOLE:
                await followed.bring(what)
            else:
                await followed.ask_trainer(what)
        lasts_s = _QUICK_STRETCH_S if quick else _STRETCH_S
        ways: dict[str, Callable[[], Awaitable[Any]] | None] = {
            NOTHING: None,
            ELSEWHERE: lambda: followed.ask_trainer(ELSEWHERE),
            RESETS: followed.pause,
            FOLLOWED: lambda: followed.bring(WHOLE),
        }
        for _ in range(_QUICK_STRETCHES if quick else _STRETCHES):
            for way, act in ways.items():
                seen = rates.setdefault(way, Seen())
                async with streams(followed.engine, _NUM_STREAMS, seen):
                    await _every_second(act, seen, lasts_s, found)


async def _every_second(act: Any, seen: Seen, lasts_s: float, found: Found) -> None:
    end = time.monotonic() + lasts_s
    while (now := time.monotonic()) < end:
        if act is not None:
            parts = await act()
            seen.versions += 1
            if isinstance(parts, dict):
                found.notices_s.append(parts["notice"])
        await asyncio.sleep(min(now + _EVERY_S, end) - time.monotonic())


async def _measure_memory(folder: Path, found: Found) -> None:
    """Sample the memory of an engine of two ranks, with a local copy of the trainer's store."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    before = _descendants(os.getpid())
    async with _engine(folder, found.divided, tensor_parallel_size=_RANKS) as (engine, trainer):
        from dbuffer.integrations.vllm import follow

        local = folder / "local"
        node = NodeMemory([os.getpid(), *_descendants(os.getpid()) - before], local)
        found.memory_bytes["engine alone"] = node.in_use()
        async with follow(engine, folder / "store", local_store=str(local)) as follower:
            followed = Followed(engine, follower, trainer)
            for when in ("first versions", "later versions"):
                with node.sampled():
                    for _ in range(_WARMING):
                        await followed.publish(WHOLE)
                found.memory_bytes[when] = node.peak_bytes
        added_bytes = node.peak_bytes - found.memory_bytes["engine alone"]
        found.memory_bytes["added by following"] = added_bytes
        found.memory_bytes["of which the local store"] = node.store_bytes()


def _descendants(pid: int) -> set[int]:
    """Return the ids of a process's descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, added = set[int](), {pid}
    while added:
        added = {child for child, parent in parents.items() if parent in added}
        found |= added
    return found


def _served_table(found: Found) -> str:
    rows = [
        (part, *(f"{1e3 * found.part_s(key, part):.1f}" for key in found.parts_s)) for part in PARTS
    ]
    rows.append(("all", *(f"{1e3 * found.served_s(key):.1f}" for key in found.parts_s)))
    rows += [
        (step, *(f"{1e3 * found.alone(key, step):.1f}" for key in found.parts_s)) for step in ALONE
    ]
    return report.table(("median ms", *found.parts_s), rows)


def _rates_table(pause: PauseMode, rates: dict[str, Seen]) -> str:
    without = rates[NOTHING].tokens_per_s
    rows = [
        (way, str(seen.versions), f"{seen.tokens_per_s:.0f}", f"{seen.tokens_per_s / without:.2f}")
        for way, seen in rates.items()
    ]
    return report.table(
        (f"{_NUM_STREAMS} streams, {pause}", "times", "tokens/s", "of without"), rows
    )


def _memory_table(found: Found) -> str:
    model_bytes = models.num_bytes(found.divided.shapes)
    rows = [
        (when, f"{num_bytes / 1e6:.0f}", f"{num_bytes / model_bytes:.2f}")
        for when, num_bytes in found.memory_bytes.items()
    ]
    return report.table((f"memory of a node, {_RANKS} ranks, at most", "MB", "of the model"), rows)


def _checks(found: Found) -> list[Check]:
    checks = []
    for load in (IDLE, BUSY):
        whole, delta = (f"{what}, {load}" for what in (WHOLE, DELTA))
        whole_s, delta_s = found.served_s(whole), found.served_s(delta)
        two_s = 2 * found.alone(whole, COPY)
        compared_s = found.alone(delta, COMPARE)
        checks += [
            replace(
                at_most(f"publish to served, {load}", "of two memcpys", whole_s / two_s, 2.0),
                limit=f"{(two_s + found.alone(whole, PAUSE)) / two_s:.2f}",
            ),
            replace(
                at_most(delta, "of the whole", delta_s / whole_s, 0.35),
                limit=f"{(compared_s + found.alone(delta, PAUSE)) / whole_s:.2f}",
            ),
        ]
    notice_ms, bare_ms = (
        1e3 * percentile(noticed, 0.99) for noticed in (found.notices_s, found.bare_notices_s)
    )
    notice = at_most(f"notice, {len(found.notices_s)} versions", "ms, p99", notice_ms, 5.0)
    checks.append(replace(notice, limit=f"{bare_ms:.2f}"))
    for pause, rates in found.rates.items():
        without = rates[NOTHING].tokens_per_s
        paused, following = (rates[way].tokens_per_s / without for way in (RESETS, FOLLOWED))
        check = at_least(f"tokens, a version a second, {pause}", "of without", following, 0.95)
        checks.append(replace(check, limit=f"{paused:.2f}"))
    return checks
