"""`Follower`: keeps an engine on a store's newest version.

One switch is: wait until every rank has the version ready, which costs the engine nothing; pause;
forget all caches; let the ranks agree and load; tell the engine which version it reports; resume.
Caches go first, because that can fail, and a failure must come before the weights change; nothing
fills them while the engine is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dbuffer.buffer import DoubleBuffer
from dbuffer.errors import (
    ClosedError,
    DBufferError,
    EngineBrokenError,
    EngineUnreachableError,
    EngineUpdateError,
    OptionError,
    VersionTimeoutError,
)
from dbuffer.integrations.engine.metrics import EngineMetrics
from dbuffer.integrations.engine.options import (
    HALF_LOADED,
    PAUSE_MODES,
    SERVES_ON,
    EngineOptions,
)
from dbuffer.integrations.engine.protocol import Engine, EngineFacts, PauseMode
from dbuffer.manifest import BUFFERS, ReceiverRecord
from dbuffer.receiver import WeightReceiver

logger = logging.getLogger(__name__)

_LOOK_S = 0.002
"""How often to look whether all ranks have a version ready: a few small files, in memory mostly."""
UNKNOWN_VERSION = "unknown"
"""What an engine reports when it may have switched, and nobody could learn to which version."""

_BACKOFF_MIN_S = 0.5
_BACKOFF_MAX_S = 30.0
_BACKOFF_AWAY_MAX_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An engine has switched."""

    version: int
    stage_s: float
    """Making it ready on the slowest rank, while the engine served."""
    wait_s: float
    """From seeing it in the store to its being ready on all ranks."""
    pause_s: float
    """From the order to pause to the engine's going on; draining requests included."""
    load_s: float
    """The part of the pause in which ranks agree and load."""
    num_bytes: int


class Follower:
    """Switches one engine when told to. Made by :func:`follow`.

    It serves one thread. The engine must not be followed by anyone else.
    """

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions | None = None,
        *,
        pause: PauseMode = "keep",
    ) -> None:
        if pause not in PAUSE_MODES:
            raise OptionError(f"pause is {pause!r}, and may be {', '.join(PAUSE_MODES)}")
        self._engine = engine
        self._given = options
        self._pause_mode: PauseMode = pause
        self._session: _Session | None = None
        self._is_new = True
        self._is_lost = True
        self._owes_resume = False
        self._failed: int | None = None
        self.identity = secrets.token_hex(8)
        """By which another process knows this one again."""
        self.applied: int | None = None
        """The version that the engine serves; None: what it was started with."""

    @property
    def engine_id(self) -> str:
        """The engine's name among the store's receivers; known from :meth:`start` on."""
        return self._session.engine_id if self._session is not None else "the engine"

    def start(self) -> None:
        """Let the engine's workers follow; again, after the engine has been started again.

        Raises:
            OptionError: (a ``ValueError``) neither this nor the engine names a store.
            EngineUnsupportedError: the engine was not started in a way that lets it follow.
            EngineUnreachableError: (a server) it does not answer.
        """
        self._is_lost = True  # until all of this is done
        facts = self._engine.facts()
        was_paused = self._engine.is_paused()
        options = self._given or facts.configured
        if options is None:
            raise OptionError(
                "which store? Give one, or start a vLLM engine with "
                "additional_config={'dbuffer': {'store': directory}}"
            )
        if self._session is not None:
            self._session.close()
        engine_id = options.engine_id or self._engine.default_id(facts)
        self._session = session = _Session(facts, options, engine_id)
        # Those that follow since their start need not be told, unless they have been lost sight of.
        if not facts.has_backend or options != facts.configured or not self._is_new:
            self._start_workers(session)
        record = session.record(engine_id)
        self.applied = record.applied_version if record is not None else None
        if self.applied is not None:
            self._report(str(self.applied))
        if was_paused and self._is_new and self._engine.is_server:
            # Left over by a follower that was killed in a switch; nobody else would end it.
            logger.warning("the server was paused when following began: resuming it")
            self._engine.resume()
        self._is_lost = self._is_new = False

    def sync(
        self,
        *,
        at_least: int | None = None,
        timeout_s: float | None = None,
        stop_event: threading.Event | None = None,
    ) -> Switch | None:
        """Switch to the newest version, if the engine does not have it; else None.

        Args:
            at_least: a version that is known to be published, and may be on its way to a local
                store: it is waited for.
            timeout_s: how long ranks may take to have it ready. Default: the option's.
            stop_event: set it to stop waiting for that.

        Raises:
            EngineBusyError: (an ``LLM``) it has unfinished requests; it was not touched.
            EngineUpdateError: it serves on with the weights that it had; the message says why.
            EngineBrokenError: its weights are half loaded, and it refuses to serve.
            EngineUnreachableError: (a server) it does not answer.
            VersionTimeoutError: some rank did not have it ready in time.
        """
        session = self._started()
        if self._owes_resume:
            self._resume()
        version = session.newer_than(self.applied, at_least)
        if version is None:
            return None
        timeout_s = session.options.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        try:
            session.wait_ready(version, self.applied, timeout_s, stop_event)
            with self._as_ours(f"switch to version {version}"):
                return self._switch(session, version, time.monotonic() - started)
        except DBufferError as error:
            self._failed = version
            self._is_lost = self._is_lost or isinstance(error, EngineUnreachableError)
            session.metrics.add("failures")
            raise

    def has_restarted(self) -> bool:
        """Whether the engine is another one than the one that was switched last; only a server can.

        Raises:
            EngineUnreachableError: it does not answer.
        """
        return self._session is not None and self._has_restarted(self._session)

    def is_ready(self, at_least: int | None = None) -> bool:
        """Whether :meth:`sync` would return, or raise, without waiting for a rank."""
        session = self._started()
        version = session.newer_than(self.applied, at_least)
        if version is None:
            return True
        try:
            session.wait_ready(version, self.applied, 0.0, None)
        except VersionTimeoutError:
            return False
        except DBufferError:
            return True
        return True

    def misfits(self, tensors: list[tuple[str, str, list[int]]]) -> list[str]:
        """What speaks against loading such tensors, rank by rank; empty if they fit.

        Args:
            tensors: name, dtype (``"bfloat16"``) and shape of each.
        """
        with self._as_ours("check the tensors"):
            answers = self._engine.rpc("dbuffer_check", tensors=tensors)
        return [answer for answer in answers if answer is not None]

    def apply_once(self, store: str) -> None:
        """Load the newest version of another store, then follow this one again.

        What the engine has then is in no version of the store that it follows; it gets the next.

        Raises:
            EngineUpdateError, EngineBrokenError: see :meth:`sync`.
        """
        options = replace(self._started().options, store=store, local_store=None)
        other = Follower(self._engine, options, pause=self._pause_mode)
        try:
            other.sync()
        finally:
            if other._session is not None:
                other._session.close()
            self.start()
        self._report(UNKNOWN_VERSION)

    def wait_to_retry(self, timeout_s: float, stop_event: threading.Event) -> None:
        """Wait until something newer is there than what failed, or the time is over."""
        if self._session is not None:
            self._session.metrics.add("retries")
            with contextlib.suppress(DBufferError):
                self._session.receiver.wait_for_version(self._failed or 0, timeout_s, stop_event)
                return
        stop_event.wait(timeout_s)

    def wait_for_version(self, stop_event: threading.Event) -> int | None:
        """Wait a poll interval for a version that the engine does not have; None: there is none."""
        assert self._session is not None  # noqa: S101 - there was a sync before
        return self._session.receiver.wait_for_version(
            self.applied, self._session.options.poll_interval_s, stop_event
        )

    def stop_workers(self) -> None:
        """Let the engine's workers look at the store no more. The engine keeps its weights."""
        if self._session is not None and not self._session.facts.has_backend:
            self._call("stop following", "dbuffer_shutdown")
        self._is_lost = True  # a later sync must begin anew

    def close(self) -> None:
        """Stop following. The engine keeps its weights; its workers go on looking at the store."""
        if self._session is not None:
            self._session.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _started(self) -> _Session:
        if self._session is None or self._is_lost or self._has_restarted(self._session):
            self.start()
        assert self._session is not None  # noqa: S101 - by start()
        return self._session

    def _has_restarted(self, session: _Session) -> bool:
        """Whether a server is another one than the one that was switched last."""
        if not self._engine.is_server:
            return False
        if self.applied is not None:
            return self._engine.weight_version() != str(self.applied)
        return self._engine.facts().instance_id != session.facts.instance_id

    def _start_workers(self, session: _Session) -> None:
        record = session.record(session.engine_id)
        if session.facts.has_backend and record is not None and record.in_session:
            # Of a follower that was killed in it. Ranks on which it has ended already say so.
            with contextlib.suppress(DBufferError):
                self._call("end the last update", "finish_weight_update")
        info = asdict(session.options) | {"engine_id": session.engine_id}
        name = "init_weight_transfer_engine" if session.facts.has_backend else "dbuffer_init"
        self._call("follow the store", name, init_info=info)

    def _resume(self) -> None:
        self._engine.resume()
        self._owes_resume = False

    def _switch(self, session: _Session, version: int, wait_s: float) -> Switch:
        # A pause that somebody else began is theirs to end.
        self._owes_resume = not self._engine.is_paused()
        started = time.monotonic()
        try:
            self._engine.pause(self._pause_mode)
            loading = time.monotonic()
            with self._labelled_unknown_if_lost():
                self._update(session, version)
                load_s = time.monotonic() - loading
                record = session.applied_record(version)
                self._report(str(record.applied_version))
            self.applied = record.applied_version
        finally:
            if self._owes_resume:
                self._resume()
        switch = Switch(
            version=record.applied_version or version,
            stage_s=record.stats.get("stage_s", 0.0),
            wait_s=wait_s,
            pause_s=time.monotonic() - started,
            load_s=load_s,
            num_bytes=int(record.stats.get("bytes", 0)),
        )
        session.count_switch(switch)
        return switch

    @contextlib.contextmanager
    def _labelled_unknown_if_lost(self) -> Iterator[None]:
        """Never let new weights answer under the old version, whatever goes wrong."""
        try:
            yield
        except BaseException as error:
            # Its workers say so if they have what they had. Else it may have anything: an answer
            # may be lost on its way, and a full disk may have kept it from leaving word.
            if SERVES_ON not in str(error):
                self._is_lost = True
                with self._as_ours("report"), contextlib.suppress(DBufferError):
                    self._report(UNKNOWN_VERSION)
            raise

    def _update(self, session: _Session, version: int) -> None:
        info = {"at_least": version}
        what = f"switch to version {version}"
        if not session.facts.has_backend:
            self._call(what, "dbuffer_update", update_info=info)
            return
        self._call(what, "start_weight_update")
        try:
            self._call(what, "update_weights", update_info=info)
        except DBufferError:
            # Ends vLLM's session on the ranks that had no reason to raise; the others have none.
            with contextlib.suppress(DBufferError):
                self._call(what, "finish_weight_update")
            raise
        self._call(what, "finish_weight_update")

    def _call(self, what: str, method: str, **arguments: Any) -> None:
        with self._as_ours(what):
            self._engine.rpc(method, **arguments)

    @contextlib.contextmanager
    def _as_ours(self, what: str) -> Iterator[None]:
        try:
            yield
        # From other processes comes whatever vLLM raises, with the worker's message in it.
        except Exception as error:
            if isinstance(error, DBufferError) and HALF_LOADED not in str(error):
                raise
            kind = EngineBrokenError if HALF_LOADED in str(error) else EngineUpdateError
            raise kind(f"{self.engine_id} could not {what}: {error}") from error

    def _report(self, version: str) -> None:
        if self._engine.weight_version() != version:
            self._engine.set_weight_version(version)


class _Session:
    """What is known of an engine from one start of it to the next, and of its store."""

    def __init__(self, facts: EngineFacts, options: EngineOptions, engine_id: str) -> None:
        self.facts = facts
        self.options = options
        self.engine_id = engine_id
        self.metrics = EngineMetrics(engine_id)
        self._mirror = options.start_mirror()
        self._store = DoubleBuffer(
            options.read_store, allow_shared_store=options.allow_shared_store
        )
        # It only waits for the pointer, holds nothing, and so leaves no record.
        self.receiver = WeightReceiver(
            options.read_store,
            poll_interval_s=options.poll_interval_s,
            allow_shared_store=options.allow_shared_store,
        )
        self._seen_stats: dict[str, dict[str, float]] = {}

    def close(self) -> None:
        """Stop watching the store."""
        self.receiver.close()
        if self._mirror is not None:
            self._mirror.close()

    def record(self, receiver_id: str) -> ReceiverRecord | None:
        """What a receiver says of itself."""
        return self._store.receiver(receiver_id)

    def applied_record(self, version: int) -> ReceiverRecord:
        """The engine's own record, which must tell of ``version`` or a later one."""
        record = self.record(self.engine_id)
        if record is None or (record.applied_version or 0) < version:
            raise EngineUpdateError(
                f"{self.engine_id} says nothing of version {version} in {self.options.store}: do "
                "its workers see the same directory, and may they write there?"
            )
        return record

    def newer_than(self, applied: int | None, at_least: int | None = None) -> int | None:
        """The newest version, or ``at_least``, if it is above the one applied.

        Raises:
            VersionRegressedError: the store is another one than the one that was applied.
        """
        if not self._store.exists() and applied is None:
            return at_least
        pointer = self._store.newest_pointer(not_below=applied or 0)
        newest = max(0 if pointer is None else pointer.version, at_least or 0)
        version = newest if newest > (applied or 0) else None
        self._measure_lag(version, applied)
        return version

    def wait_ready(
        self,
        version: int,
        applied: int | None,
        timeout_s: float,
        stop_event: threading.Event | None,
    ) -> None:
        """Wait until every rank has this version ready, or a later one.

        Raises:
            EngineUpdateError: some rank says that it cannot.
            VersionTimeoutError: some rank says nothing for so long.
            ClosedError: the stop event was set.
        """
        deadline = time.monotonic() + timeout_s
        ids = [f"{self.engine_id}.rank-{rank}" for rank in range(self.facts.num_ranks)]
        serves_on = f"the engine serves on with version {applied}"
        while True:
            records = [self.record(receiver_id) for receiver_id in ids]
            ready = [r for r in records if r is not None and (r.staged_version or 0) >= version]
            if len(ready) == len(ids):
                self._measure_ranks(ready)
                return
            for record in records:
                if record is not None and record.has_problem_with(version):
                    raise EngineUpdateError(
                        f"{record.receiver} cannot get ready: {record.problem}; {serves_on}"
                    )
            if stop_event is not None and stop_event.is_set():
                raise ClosedError("told to stop following")
            if time.monotonic() > deadline:
                behind = set(ids) - {record.receiver for record in ready}
                raise VersionTimeoutError(
                    f"version {version} of {self.options.store} was not ready within "
                    f"{timeout_s:g} s on {', '.join(sorted(behind))}; {serves_on}"
                )
            time.sleep(_LOOK_S)

    def count_switch(self, switch: Switch) -> None:
        """For the metrics, and the log."""
        logger.info("%s: %s", self.engine_id, switch)
        self.metrics.observe("pause_seconds", switch.pause_s)
        self.metrics.add("bytes", switch.num_bytes)
        self.newer_than(switch.version)

    def _measure_lag(self, newer: int | None, applied: int | None) -> None:
        available = newer or applied or 0
        age_s = 0.0
        if newer is not None:
            manifests = [self._store.manifest(buffer) for buffer in BUFFERS]
            published = [m.published_at for m in manifests if m is not None and m.version == newer]
            age_s = max(0.0, time.time() - max(published, default=time.time()))
        self.metrics.set("version_available", available)
        self.metrics.set("version_applied", applied or 0)
        self.metrics.set("lag_versions", available - (applied or 0))
        self.metrics.set("lag_seconds", age_s)

    def _measure_ranks(self, records: list[ReceiverRecord]) -> None:
        """Carry what ranks count over into this process's metrics."""
        for record in records:
            before = self._seen_stats.get(record.receiver, {})
            self._seen_stats[record.receiver] = record.stats
            gained = {name: value - before.get(name, 0) for name, value in record.stats.items()}
            self.metrics.add("evictions", gained.get("evictions", 0))
            self.metrics.add("failures", gained.get("failures", 0))
            if gained.get("staged", 0) > 0:
                self.metrics.observe("stage_seconds", gained["stage_s"] / gained["staged"])


class BackgroundFollower:
    """Follows in a thread of its own, until it is closed. Made by :func:`follow`.

    Whatever fails is logged and counted, the engine serves on with what it has, and the next
    attempt follows after a while. It ends with the engine.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._stop = threading.Event()
        self._condition = threading.Condition()
        self._has_begun = threading.Event()
        self.error: Exception | None = None
        """Why the last attempt failed; None if it did not."""
        self._thread = threading.Thread(target=self._run, name="dbuffer-follower", daemon=True)
        self._thread.start()

    @property
    def engine_id(self) -> str:
        """The engine's name among the store's receivers."""
        return self._follower.engine_id

    @property
    def applied(self) -> int | None:
        """The version that the engine serves; None: what it was started with."""
        return self._follower.applied

    def wait_applied(self, version: int, timeout_s: float = 60.0) -> int:
        """Wait until the engine serves this version or a later one; which one.

        Raises:
            VersionTimeoutError: it does not, in time; the message says what went wrong last.
        """
        with self._condition:
            done = self._condition.wait_for(
                lambda: (self.applied or 0) >= version or not self._thread.is_alive(), timeout_s
            )
        if not done or self.applied is None or self.applied < version:
            raise VersionTimeoutError(
                f"{self.engine_id} has version {self.applied}, and not {version} within "
                f"{timeout_s:g} s; last problem: {self.error or 'none'}"
            )
        return self.applied

    async def wait_applied_async(self, version: int, timeout_s: float = 60.0) -> int:
        """The same, in an event loop."""
        return await asyncio.to_thread(self.wait_applied, version, timeout_s)

    def close(self) -> None:
        """Stop following, after the switch that is under way. Not for the engine's event loop."""
        self._stop.set()
        self._thread.join()
        self._follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """The same, in an event loop: a switch needs that loop to end."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def wait_started_async(self) -> None:
        """Wait until the engine serves what was there when following began.

        Raises:
            DBufferError: what hinders it.
        """
        await asyncio.to_thread(self._has_begun.wait)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            for outcome in follow_for_ever(self._follower, self._stop):
                with self._condition:
                    self.error = outcome if isinstance(outcome, DBufferError) else None
                    self._condition.notify_all()
                self._has_begun.set()
        # vLLM's own, a dead engine most likely: there is nothing left to follow with.
        except Exception as error:
            logger.exception("%s is followed no longer", self.engine_id)
            self.error = error
        finally:
            self._has_begun.set()
            with self._condition:
                self._condition.notify_all()


def follow_for_ever(
    follower: Follower, stop_event: threading.Event
) -> Iterator[Switch | DBufferError | None]:
    """Switch whenever there is something newer; every switch, every failure, None when up to date.

    Ends when ``stop_event`` is set. After a failure it waits, for longer and longer, and tries
    again; a server that was restarted is told again to follow, and switched at once.
    """
    backoff_s = _BACKOFF_MIN_S
    while not stop_event.is_set():
        try:
            switch = follower.sync(stop_event=stop_event)
        except ClosedError as error:
            if not stop_event.is_set():
                yield error
            return
        except DBufferError as error:
            logger.error("%s; trying again in %g s", error, backoff_s)
            yield error
            follower.wait_to_retry(backoff_s, stop_event)
            # A server that comes back must not serve its old weights for long.
            is_away = isinstance(error, EngineUnreachableError)
            backoff_s = min(2 * backoff_s, _BACKOFF_AWAY_MAX_S if is_away else _BACKOFF_MAX_S)
            continue
        backoff_s = _BACKOFF_MIN_S
        yield switch
        if switch is None:
            follower.wait_for_version(stop_event)
