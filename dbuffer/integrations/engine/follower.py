"""`Follower`: switches an engine to a store's newest version, call by call.

One switch is: wait until every rank has the version ready, which costs the engine nothing; pause;
drop all caches; let the ranks agree and load; tell the engine which version it reports; resume.
Caches go first, because that can fail, and a failure must come before the weights change; nothing
fills them while the engine is paused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

from dbuffer import errors
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.engine_rank import AppliedVersion
from dbuffer.integrations.engine.messages import (
    AwakeRequest,
    BeginRequest,
    EndRequest,
    ForgetRequest,
    specs_of,
)
from dbuffer.integrations.engine.protocol import (
    UNKNOWN_VERSION,
    Engine,
    EngineFacts,
    PauseMode,
)
from dbuffer.integrations.engine.reporting import Failure, FollowerReport, Switch
from dbuffer.integrations.engine.states import FollowerEvent, FollowerState
from dbuffer.integrations.engine.store_view import StoreView
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.translated import TranslatedErrors

logger = logging.getLogger(__name__)

_followers: weakref.WeakValueDictionary[tuple[str, str], Follower] = weakref.WeakValueDictionary()
"""Last follower in this process that began with each engine."""

_MIN_WAIT_S = 0.5
"""Between two attempts, also when a newer version came at once after the one that failed."""


class Follower(Closing):
    """Switches one engine when told to. Made by :func:`follow`.

    It serves one thread. The engine must not be followed by anyone else. What it knows of the
    engine is its :class:`FollowerState`, drawn there.
    """

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions | None = None,
        *,
        pause: PauseMode = "keep",
    ) -> None:
        checks.choice("pause", pause, engine.pauses)
        self._engine = engine
        self._given = options
        self._pause_mode: PauseMode = pause
        self._state = FollowerState.NEW
        self._view: StoreView | None = None
        self._served: AppliedVersion | None = None
        self._failure: Failure | None = None
        self.identity = secrets.token_hex(8)
        """By which another process recognises this follower."""

    @property
    def applied(self) -> int | None:
        """The version that the engine serves; None: what it was started with."""
        return None if self._served is None else self._served.version

    def has_applied(self, version: int) -> bool:
        """Whether the engine serves this version, or a later one, of what the store holds now."""
        if self._view is None or self._served is None or self._served.version < version:
            return False
        return not self._served.is_of_another_run(self._view.history_now())

    @property
    def engine_id(self) -> str:
        """The engine's name among the store's receivers; known from :meth:`start` on."""
        return self._view.name if self._view is not None else "the engine"

    @property
    def engine_and_store(self) -> tuple[str, str] | None:
        """The engine's name and the store that it follows; None before :meth:`start`."""
        if self._view is None:
            return None
        return self._view.engine_id, os.path.realpath(self._view.options.read_store)

    def _note(self, event: FollowerEvent) -> None:
        self._state = self._state.after(event)

    # Beginning

    def require_followable(self) -> None:
        """Raise at once what no waiting will mend. A server that does not answer may do so later.

        Raises:
            OptionError, UnsupportedError, StoreBusyError: see :meth:`start`.
        """
        with contextlib.suppress(errors.EngineUnreachableError, errors.EngineUpdateError):
            facts = self._engine.facts()
            self._require_alone(facts, self._options_for(facts))

    def start(self) -> None:
        """Let the engine's ranks follow; again, after the engine has been restarted.

        Raises:
            OptionError: (a ``ValueError``) neither this nor the engine names a store.
            UnsupportedError: the engine was not started in a way that lets it follow.
            StoreBusyError: another follower in this process has it follow this store.
            EngineUpdateError: its ranks cannot follow the store now.
            EngineUnreachableError: (a server) it does not answer.
        """
        self._note(FollowerEvent.LOST)  # until all of this is done
        is_first = self._state is FollowerState.NEW
        facts = self._engine.facts()
        was_paused = self._engine.is_paused()
        options = self._options_for(facts)
        self._require_alone(facts, options)
        _followers[_key_of(facts)] = self
        view = self._look_anew(facts, options)
        # Ranks that follow since the engine's start need not begin again, unless they were lost.
        if_idle = is_first and options == facts.configured
        with self._paused_if(facts.begins_paused and not was_paused):
            self._begin(view, if_idle=if_idle)
        view.note_ranks()
        self._served = _served_by(view.engine_record())
        if self.applied is not None:
            self._label(str(self.applied))
        may_be_left = was_paused and is_first and self._engine.may_be_left_paused
        if may_be_left and self._is_awake():
            # Left over by a follower that was killed in a switch; nobody else would end it.
            logger.warning("%s was paused when following began: resuming it", view.engine_id)
            self._engine.resume()
        self._note(FollowerEvent.STARTED)
        serves = "what it was started with" if self.applied is None else f"version {self.applied}"
        logger.info("%s follows %s, and serves %s", view.engine_id, options.read_store, serves)

    def _require_alone(self, facts: EngineFacts, options: EngineOptions) -> None:
        """Raise if another follower in this process has the engine follow the same store."""
        other = _followers.get(_key_of(facts), self)
        engine_id, store = _engine_id(facts, options), os.path.realpath(options.read_store)
        if other is not self and other.engine_and_store == (engine_id, store):
            raise errors.StoreBusyError(
                f"another follower in this process has {engine_id} follow {store}: each would miss "
                "what the other does; use that one, or close it first"
            )

    def _is_awake(self) -> bool:
        """Whether a resume would not let the engine compute with weights that are asleep."""
        try:
            self._engine.do(AwakeRequest())
        except errors.EngineBusyError:
            return False
        return True

    def _options_for(self, facts: EngineFacts) -> EngineOptions:
        options = self._given or facts.configured
        if options is None:
            raise errors.OptionError(
                "no store given: name one, or start a vLLM engine with "
                "additional_config={'dbuffer': {'store': directory}}"
            )
        return options

    def _look_anew(self, facts: EngineFacts, options: EngineOptions) -> StoreView:
        if self._view is not None:
            self._view.close()
        engine_id = _engine_id(facts, options)
        self._view = StoreView(facts, options, engine_id, FollowerReport(engine_id))
        return self._view

    def _begin(self, view: StoreView, *, if_idle: bool) -> None:
        # The ranks know themselves of which replica they are.
        shared = view.engine_id.removesuffix(view.facts.replica)
        options = replace(view.options, engine_id=shared, instance_id=view.facts.instance_id)
        with self._in_our_terms("follow the store"):
            self._engine.do(BeginRequest(options=options, if_idle=if_idle))

    @contextlib.contextmanager
    def _paused_if(self, must_pause: bool) -> Iterator[None]:
        """Keep the engine paused meanwhile, if it must be."""
        if not must_pause:
            yield
            return
        self._note(FollowerEvent.PAUSED)
        try:
            with self._in_our_terms("pause"):
                self._engine.pause("keep")
            yield
        finally:
            self._resume()

    def _started(self) -> StoreView:
        self._engine.require_alive()
        if self._view is not None and self._state.is_known:
            self._note_foreign_loads(self._view)
        if self._view is None or not self._state.is_known or self.has_restarted():
            self.start()
        assert self._view is not None  # noqa: S101 - by start()
        return self._view

    def _note_foreign_loads(self, view: StoreView) -> None:
        """Learn from the engine's own record whether it still has what it was switched to."""
        record: ReceiverRecord | None = None
        with contextlib.suppress(errors.DBufferError, OSError):
            record = view.engine_record()
        if record is None or _served_by(record) == self._served:
            return
        with self._in_our_terms("report its version"):
            version = record.applied_version
            self._label(UNKNOWN_VERSION if version is None else str(version))
        self._served = _served_by(record)

    def has_restarted(self) -> bool:
        """Whether this is another engine than was switched last; only a server can be."""
        if self._view is None or not self._engine.is_server:
            return False
        if self.applied is not None:
            return self._engine.weight_version() != str(self.applied)
        return self._engine.facts().instance_id != self._view.facts.instance_id

    # Switching

    def sync(
        self,
        *,
        at_least: int | None = None,
        timeout_s: float | None = None,
        force: bool = False,
        stop_event: threading.Event | None = None,
    ) -> Switch | None:
        """Switch to the newest version, if the engine does not have it; else None.

        Args:
            force: load the newest version also if the engine has it, whole and through its own
                reload: after something wrote to its weights that dbuffer cannot notice.
            at_least: a version that is known to be published, and may be on its way to a local
                store: it is waited for.
            timeout_s: how long ranks may take to have it ready. Default: the option's.
            stop_event: set it to stop waiting for that.

        Raises:
            EngineBusyError: its weights are asleep, or (an ``LLM``) it has unfinished requests; it
                was not touched.
            EngineUpdateError: it serves on with the weights that it had; the message says why.
            EngineBrokenError: its weights are half loaded, and it refuses to serve.
            EngineUnreachableError: (a server) it does not answer.
            WaitTimeoutError: some rank did not have it ready in time.
        """
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        goal: AppliedVersion | None = None
        switch: Switch | None = None
        try:
            try:
                view = self._started()
            finally:
                # Also where it cannot be followed now: whatever it has is whole, or it refuses.
                if self._state.owes_resume:
                    self._resume_as_unknown()
            if force and view.newer_than(None) is not None:
                self._forget(view)
            goal = view.newer_than(self._served, at_least)
            if goal is not None:
                switch = self._switch_when_ready(view, goal, timeout_s, stop_event)
        except Exception as error:
            if stop_event is None or not stop_event.is_set():
                self._note_failure(error, None if goal is None else goal.version)
            raise
        self._failure = None
        view.report.following()
        return switch

    def _forget(self, view: StoreView) -> None:
        with self._in_our_terms("forget its weights"):
            self._engine.do(ForgetRequest())
        self._note_foreign_loads(view)

    def is_ready(self, at_least: int | None = None) -> bool:
        """Whether :meth:`sync` would return, or raise, without waiting for a rank."""
        view = self._started()
        goal = view.newer_than(self._served, at_least)
        if goal is None:
            return True
        try:
            view.wait_ready(goal, self._served, 0.0, None)
        except errors.WaitTimeoutError:
            return False
        except errors.DBufferError:
            return True
        return True

    def _switch_when_ready(
        self,
        view: StoreView,
        goal: AppliedVersion,
        timeout_s: float | None,
        stop_event: threading.Event | None,
    ) -> Switch:
        timeout_s = view.options.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        view.wait_ready(
            goal, self._served, timeout_s, stop_event, require_alive=self._engine.require_alive
        )
        with self._in_our_terms(f"switch to version {goal.version}"):
            return self._switch(view, goal, time.monotonic() - started)

    def _switch(self, view: StoreView, goal: AppliedVersion, wait_s: float) -> Switch:
        # A pause that somebody else began is theirs to end.
        if not self._engine.is_paused():
            self._note(FollowerEvent.PAUSED)
        started = time.monotonic()
        try:
            self._engine.pause(self._pause_mode)
            record, load_s = self._load(view, goal)
            self._served = _served_by(record)
        except errors.EngineBusyError:
            # It fell asleep, and goes on when it is woken: a resume would let it compute before.
            self._note(FollowerEvent.RESUMED)
            raise
        finally:
            if self._state.owes_resume:
                self._resume()
        switch = Switch(
            version=record.applied_version or goal.version,
            stage_s=record.stats.get("stage_s", 0.0),
            wait_s=wait_s,
            pause_s=time.monotonic() - started,
            load_s=load_s,
            num_bytes=int(record.stats.get("bytes", 0)),
        )
        view.report.switched(switch)
        # It has switched, whatever has become of the store meanwhile: the next look tells.
        with contextlib.suppress(errors.DBufferError, OSError):
            view.newer_than(self._served)
        return switch

    def _load(self, view: StoreView, goal: AppliedVersion) -> tuple[ReceiverRecord, float]:
        """Load, on all ranks; what the engine says it has, and how long that took, in seconds."""
        started = time.monotonic()
        attempt = secrets.token_hex(8)
        request = UpdateRequest(at_least=goal.version, history=goal.history, attempt=attempt)
        with self._learning_what_it_has(view, attempt):
            self._engine.do(request)
            load_s = time.monotonic() - started
            record = view.acknowledgement(goal)
            self._label(str(record.applied_version))
        return record, load_s

    def _resume_as_unknown(self) -> None:
        """End our pause of an earlier attempt, as of no version unless it is known which it has."""
        if not self._state.is_known:
            self._label(UNKNOWN_VERSION)
        self._resume()

    def _resume(self) -> None:
        self._engine.resume()
        self._note(FollowerEvent.RESUMED)

    def _learning_what_it_has(self, view: StoreView, attempt: str) -> TranslatedErrors:
        """Never let new weights answer under the old version, whatever goes wrong.

        Raises:
            EngineBrokenError: in the place of an error after which the engine refuses to serve.
        """

        def learn(error: BaseException) -> None:
            # Its first rank records how the attempt ended. Without that the engine may have
            # anything: an answer may be lost on its way, and a full disk may prevent the record.
            record = view.outcome_of(attempt)
            is_serving = record is not None and record.state == "serving"
            if is_serving and _served_by(record) == self._served:
                return
            self._note(FollowerEvent.LOST)
            with contextlib.suppress(errors.DBufferError), self._in_our_terms("report its version"):
                self._label(UNKNOWN_VERSION)
            is_broken = record is not None and record.state == "broken"
            if is_broken and isinstance(error, errors.EngineUpdateError):
                raise errors.EngineBrokenError(str(error)) from error

        return TranslatedErrors(learn)

    def _label(self, version: str) -> None:
        if self._engine.weight_version() != version:
            self._engine.set_weight_version(version)

    def _in_our_terms(self, what: str) -> TranslatedErrors:
        def translate(error: BaseException) -> None:
            if isinstance(error, Exception) and not isinstance(error, errors.DBufferError):
                # From another process: whatever the engine raises, with the worker's message in it.
                raise errors.EngineUpdateError(
                    f"{self.engine_id} could not {what}: {error}"
                ) from error

        return TranslatedErrors(translate)

    def misfits(self, tensors: list[tuple[str, str, list[int]]]) -> list[str]:
        """Why such tensors do not fit, for each rank on which they do not; empty if they fit.

        Args:
            tensors: name, dtype (``"bfloat16"``) and shape of each.
        """
        with self._in_our_terms("check the tensors"):
            return self._engine.misfits(specs_of(tensors))

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
            if other._view is not None:
                other._view.close()
            if other._state.owes_resume:
                self._note(FollowerEvent.PAUSED)
            self.start()
        self._label(UNKNOWN_VERSION)

    # Between two attempts

    def _note_failure(self, error: Exception, version: int | None) -> None:
        if isinstance(error, errors.EngineUnreachableError):
            self._note(FollowerEvent.LOST)
        failure = Failure(version)
        if self._view is not None:
            self._view.report.failed(failure, self._failure, is_engine_known=self._state.is_known)
        self._failure = failure

    def wait_to_retry(self, timeout_s: float, stop_event: threading.Event) -> None:
        """Wait until something newer is there than the version that failed, or the time is over.

        Half a second is waited in any case: a store that is in trouble may call anything newer.
        """
        end = time.monotonic() + timeout_s
        stop_event.wait(min(timeout_s, _MIN_WAIT_S))
        failed = None if self._failure is None else self._failure.version
        if self._view is not None:
            self._view.report.retried()
            if failed is not None and not stop_event.is_set():
                left_s = max(0.0, end - time.monotonic())
                with contextlib.suppress(errors.DBufferError, OSError):
                    if self._view.wait_for_version(failed, left_s, stop_event) is not None:
                        return
        stop_event.wait(max(0.0, end - time.monotonic()))

    def wait_for_version(self, stop_event: threading.Event) -> int | None:
        """Wait a poll interval for a version that the engine does not have; None: there is none."""
        assert self._view is not None  # noqa: S101 - there was a sync before
        try:
            return self._view.wait_for_version(
                self.applied, self._view.options.poll_interval_s, stop_event
            )
        except Exception as error:
            self._note_failure(error, None)
            raise

    # Ending

    def stop_workers(self) -> None:
        """Let the engine's ranks look at the store no more. The engine keeps its weights."""
        if self._view is not None:
            with self._in_our_terms("stop following"):
                self._engine.do(EndRequest())
        self._note(FollowerEvent.LOST)  # a later sync must begin anew

    def close(self) -> None:
        """Stop following. The engine keeps its weights; its ranks go on looking at the store.

        A pause that this follower began and could not end is ended, if the engine answers now.
        """
        if self._state.owes_resume:
            try:
                self._resume_as_unknown()
            except errors.EngineEndedError:
                pass  # so it does not stand still
            except (errors.DBufferError, OSError) as error:
                logger.error("%s is left paused: %s", self.engine_id, error)
        for key in [key for key, follower in _followers.items() if follower is self]:
            del _followers[key]
        if self._view is not None:
            self._view.report.ended()
            self._view.close()
        self._engine.close()


def _key_of(facts: EngineFacts) -> tuple[str, str]:
    return facts.instance_id, facts.replica


def _engine_id(facts: EngineFacts, options: EngineOptions) -> str:
    return (options.engine_id or facts.name) + facts.replica


def _served_by(record: ReceiverRecord | None) -> AppliedVersion | None:
    """What an engine says it has; None: what it was started with."""
    if record is None or record.applied_version is None:
        return None
    return AppliedVersion(record.applied_version, record.history)
