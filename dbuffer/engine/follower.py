"""`Follower`: switches an engine to a store's newest version, call by call.

`Follower.sync` makes a switch in its caller's thread:

1. `_wait_ready` waits, while the engine serves, until each rank has the version ready to load. The
   ranks reserve the version, so that no newer version replaces it.
2. `_pause` stops the engine, and drops the engine's caches. Dropping them can fail, so it happens
   before the weights change.
3. `_load`: the ranks agree on the version and load it (`RankReceiver.update`). The first rank
   returns a record with the version that the engine serves now. Only this record decides whether
   the switch succeeded.
4. `_label_and_resume` gives the engine the version's label, and ends the pause.
5. `_acknowledge` lets the first rank write the record into the store, where senders wait for it.
   Then each rank compares its weights with the staged version (attestation), and releases it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dbuffer import errors
from dbuffer.engine.contract import (
    Call,
    Engine,
    EngineFacts,
    PauseMode,
    RankRequest,
    Switch,
    WeightLabel,
    describe_weights,
    served_by,
    worst_of,
)
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.engine.reporting import FollowerReport
from dbuffer.engine.store_view import StoreView, engine_id_of
from dbuffer.format.layout import TensorSpec
from dbuffer.format.lineage import Lineage, VersionId, number_of
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.messages import described
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import TranslatedErrors

logger = logging.getLogger(__name__)

_followers: weakref.WeakValueDictionary[tuple[str, str], Follower] = weakref.WeakValueDictionary()
"""This process's followers. Key: the engine's ``instance_id``, and the replica's suffix."""


class _State(enum.IntEnum):
    """State of a follower. Only the events in :data:`_AFTER` change it."""

    NEW = 0
    """Following has not begun."""
    SERVING = 1
    """The engine serves the version that its record names."""
    PAUSED = 2
    """The engine has the version that its record names, and this follower has paused the engine."""
    UNKNOWN = 3
    """The engine may serve any weights, or follow no store: the follower must start again."""
    LOADING = 4
    """The engine may have any weights, and this follower has paused the engine."""


_NEW, _SERVING, _PAUSED, _UNKNOWN, _LOADING = _State

_AFTER = {
    # before:   NEW       SERVING   PAUSED    UNKNOWN   LOADING
    "known": (_SERVING, _SERVING, _PAUSED, _SERVING, _PAUSED),
    "lost": (_NEW, _UNKNOWN, _LOADING, _UNKNOWN, _LOADING),
    "paused": (_LOADING, _PAUSED, _PAUSED, _LOADING, _LOADING),
    "resumed": (_UNKNOWN, _SERVING, _SERVING, _UNKNOWN, _UNKNOWN),
}
"""State after each event, by the state before it.

* ``known``: the ranks follow the store, and the engine's record is right about its weights;
* ``lost``: it has become uncertain whether the record is right;
* ``paused``: this follower began a pause;
* ``resumed``: this follower's pause has ended, or is no longer this follower's to end.
"""


class Follower(Closing):
    """Switches one engine to a store's newest versions. Made by :func:`follow`.

    An engine has one follower. Use the follower from a single thread.
    """

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions | None = None,
        *,
        pause: PauseMode = "keep",
        canary: Callable[[], str | None] | None = None,
        of_draft: bool = False,
    ) -> None:
        engine.require_pause(pause)
        self._canary = canary
        self._of_draft = of_draft
        """Whether this follower switches the engine's draft model, and not its target."""
        self._accepted: VersionId | None = None
        self._engine = engine
        self._options = options
        self._pause_mode: PauseMode = pause
        self._view: StoreView | None = None
        self._report = FollowerReport()
        self._state = _NEW
        self._record: ReceiverRecord | None = None
        self._set_label: WeightLabel | None = None
        """Label of the engine's responses that this follower set last."""
        self._failed: int | None = None
        """Version that the last attempt failed to switch to, or None."""
        self._done_with: Lineage | None = None
        """Version that the engine served at the last call of :meth:`done`, or None."""
        self._draft: Follower | None = None
        """Follower of the engine's draft model, with the option ``draft_store``."""
        self._draft_problem: str | None = None

    def _note(self, event: str) -> None:
        self._state = _AFTER[event][self._state]

    @property
    def _is_certain(self) -> bool:
        return self._state in (_SERVING, _PAUSED)

    @property
    def _owes_resume(self) -> bool:
        return self._state in (_PAUSED, _LOADING)

    @property
    def _applied(self) -> Lineage | None:
        return served_by(self._record)

    @property
    def applied(self) -> int | None:
        """Number of the version that the engine serves, or None if it serves no version."""
        return None if self._applied is None else self._applied.id.number

    @property
    def applied_metadata(self) -> dict[str, Any]:
        """Metadata of the version :attr:`applied`. If above 1,024 bytes in all, only ``step``."""
        return self._record.metadata if self._record and self._applied else {}

    @property
    def weights(self) -> str:
        return describe_weights(self._applied)

    def has_applied(self, version: int) -> bool:
        """Whether the engine serves ``version`` or a later one, and the store has not forked since.

        This reads the engine's record again, because the engine may have lost its weights.
        """
        view, applied = self._view, self._applied
        if view is None or applied is None:
            return False
        record = view.readable_record()
        # If the stored record is older than this follower's record, ranks are writing a new one.
        is_older = record is not None and self._is_earlier(record)
        recorded = applied if is_older else served_by(record)
        return (
            recorded is not None
            and min(applied.id.number, recorded.id.number) >= version
            and view.options.version in (None, applied.id.number)
            and view.leads_on(applied)
            and not (record and record.state == "on_trial")
        )

    @property
    def engine_id(self) -> str:
        """The engine's name among the store's receivers. Before :meth:`start`: "the engine"."""
        return self._view.engine_id if self._view is not None else "the engine"

    @property
    def drives_server(self) -> bool:
        return self._engine.is_server

    # Beginning

    def require_followable(self) -> None:
        """Raise the errors of :meth:`start` that a retry cannot fix."""
        with contextlib.suppress(errors.EngineUnreachableError, errors.EngineUpdateError):
            facts = self._engine.facts()
            options = self._options_for(facts)
            self._require_alone(facts)
            if options.version is not None:
                with contextlib.closing(StoreView(facts, options)) as view:
                    view.require_version()

    def start(self) -> None:
        """Make the engine's ranks follow the store. After a restart of the engine, call this again.

        Raises:
            OptionError, UnsupportedError, StoreBusyError, VersionError: a retry cannot help.
            EngineUpdateError, EngineUnreachableError: the ranks cannot follow the store now.
        """
        is_new = self._state is _NEW
        self._note("lost")  # until the ranks have begun
        facts = self._engine.facts()
        if self._of_draft:
            facts = replace(facts, replica=f"{facts.replica}.draft")
        was_paused = self._engine.is_paused()
        options = self._options_for(facts)
        self._require_alone(facts)
        _followers[facts.instance_id, facts.replica] = self
        if self._view is not None:
            self._view.close()
        self._report.begin(engine_id_of(facts, options))
        self._view = view = StoreView(facts, options)
        view.require_version()
        if options.draft_store is not None:
            self._draft = draft = self._draft or Follower(
                self._engine,
                options.of_other(options.draft_store),
                pause=self._pause_mode,
                of_draft=True,
            )
            draft._note("lost")  # noqa: SLF001 - until its next sync
        record = self._begin_ranks("follow the store", facts, options, was_paused=was_paused)
        self._record = None
        # The record in the store is older if it could not be written. SGLang answers without it.
        self._adopt_and_label(record or view.engine_record())
        if is_new and view.has_replaced(self._applied):
            self._ask("forget", "leave a version of another run")
            self._refresh_applied(view)
        is_in_use = self._applied is not None and self._applied != self._done_with
        view.is_kept = options.until_done and is_in_use
        if self._applied is None and WeightLabel(self._engine.weight_version()).number is not None:
            self._label(WeightLabel())  # the label was of another store, or of lost weights
        if was_paused and is_new:
            self._end_pause_left(view.engine_id)
        self._note("known")
        until = "" if self._applied else " until a version is there and loaded"
        message = "%s follows %s, and serves %s%s"
        logger.info(message, view.engine_id, options.read_store, self.weights, until)

    def _require_alone(self, facts: EngineFacts) -> None:
        view = _followers.get((facts.instance_id, facts.replica), self)._view  # noqa: SLF001
        if view is not None and view is not self._view:
            raise errors.StoreBusyError(
                f"{view.engine_id} has another follower in this process, for "
                f"{view.options.store}, and an engine has one follower: use the other follower, "
                "or close it first"
            )

    def _end_pause_left(self, engine_id: str) -> None:
        """End the pause that a killed follower left: no other process would end it."""
        if self._engine.has_own_pause:
            self._engine.resume()
        elif self._engine.is_server and not self._of_draft:
            # If the weights are asleep, stay paused: a resumed engine would compute with them.
            with contextlib.suppress(errors.EngineBusyError):
                self._ask("awake", "tell whether its weights are awake")
                logger.warning("%s was paused when following began: resuming it", engine_id)
                self._engine.resume()

    def _options_for(self, facts: EngineFacts) -> EngineOptions:
        """Return the options. Fill in the engine's name, its instance id, and its canary."""
        options = self._options or facts.configured
        if options is None:
            raise errors.OptionError(
                "no store given: name one, or start a vLLM engine with "
                "additional_config={'dbuffer': {'store': directory}}"
            )
        engine_id = options.engine_id or facts.name
        canary = options.canary if self._canary is None else True
        if canary is True and self._canary is None:
            raise errors.OptionError(
                "the option canary is true, but this follower has no function that tests a "
                "version: pass a function as canary=, or set the option to prompts"
            )
        if isinstance(canary, Mapping) and not self._engine.scores_prompts:
            raise errors.UnsupportedError(
                "this engine cannot test versions with prompts (the option canary): that needs a "
                "vLLM engine that generates, without data-parallel replicas and without torchrun"
            )
        instance_id = facts.instance_id
        return replace(options, engine_id=engine_id, instance_id=instance_id, canary=canary)

    def _ensure_started(self) -> StoreView:
        self._engine.require_alive()
        view = self._view
        if view is not None and self._is_certain:
            self._refresh_applied(view)
        if view is None or not self._is_certain or self._has_restarted(view):
            self.start()
        elif view.has_lost_records():  # the store was replaced, or its ranks do not follow it
            doing, was_paused = "follow the store again", self._engine.is_paused()
            self._begin_ranks(
                doing, view.facts, view.options, was_paused=was_paused, takes_over=False
            )
            self._refresh_applied(view)
        assert self._view is not None  # noqa: S101 - by start()
        return self._view

    def _ask(self, call: Call, doing: str, **fields: Any) -> ReceiverRecord | None:
        """Send a :class:`RankRequest` with these ``fields`` to all ranks; see :meth:`Engine.do`.

        ``doing`` names this step in errors.
        """
        with self._translating(doing):
            return self._engine.do(RankRequest(call, of_draft=self._of_draft, **fields))

    def _begin_ranks(
        self,
        doing: str,
        facts: EngineFacts,
        options: EngineOptions,
        *,
        was_paused: bool | None,
        takes_over: bool = True,
    ) -> ReceiverRecord | None:
        """Make the ranks follow the store. Pause the engine meanwhile if ``facts`` require it."""
        with contextlib.ExitStack() as pause:
            if facts.begins_paused and (self._engine.has_own_pause or not was_paused):
                self._note("paused")
                pause.callback(self._resume)
                with self._translating("pause"):
                    self._engine.pause("keep")
            return self._ask("begin", doing, options=options, takes_over=takes_over)

    def _resume(self) -> None:
        self._engine.resume()
        self._note("resumed")

    def _refresh_applied(self, view: StoreView) -> None:
        """Read the engine's record again, to see whether the engine still has its version."""
        record = view.readable_record()
        if record is None or self._is_earlier(record):
            return
        with self._translating("report its version"):
            if served_by(record) != self._applied:
                # Another program may have loaded weights. vLLM's core then ignores labels until a
                # request reaches the ranks, so send a request. Then read the record again: it now
                # describes the weights after that load.
                self._engine.call(RankRequest("awake", of_draft=self._of_draft))
                record = view.readable_record() or record
            self._adopt_and_label(record)

    def _is_earlier(self, record: ReceiverRecord) -> bool:
        """Whether a record is older than the record that this follower received last.

        A restored store can have such a record.
        """
        return self._record is not None and record.updated_at < self._record.updated_at

    def _adopt_and_label(self, record: ReceiverRecord | None) -> None:
        """Keep the engine's newest record. If its version is new, label the engine with it."""
        applied = served_by(record)
        if applied != self._applied:
            self._label(WeightLabel.of(applied, record.metadata if record else {}))
        self._record = record

    def _has_restarted(self, view: StoreView) -> bool:
        """Whether the engine was restarted since following began.

        Only a server can be restarted.
        """
        if self._of_draft or not self._engine.is_server:
            return False
        if self.applied is not None:
            return self._engine.weight_version() != str(self.applied)
        return self._engine.facts().instance_id != view.facts.instance_id

    # Switching

    def sync(
        self,
        *,
        at_least: int | None = None,
        timeout_s: float | None = None,
        force: bool = False,
        stop_event: threading.Event | None = None,
    ) -> Switch | None:
        """Switch to the newest version. Return the switch, or None if the engine has the version.

        Args:
            at_least: number of a published version. If the local store does not have the version
                yet, wait until it is mirrored.
            timeout_s: longest wait until all ranks have the version ready. Default: the option
                ``timeout_s``.
            force: load all of the newest version through the engine's own reload, even if the
                engine has it. Use it after a write to the weights that dbuffer cannot notice.
            stop_event: set it to end the wait for the ranks.

        Raises:
            VersionError: the version of the option ``version`` is no longer in the store.
            EngineBusyError: the weights are asleep, or an ``LLM`` has unfinished requests.
            EngineUpdateError: the switch failed, and the engine serves its old version. If it had
                no version of this store, it serves the weights of its start. The message says why.
            EngineBrokenError: the weights are half loaded, and the engine refuses to serve.
            EngineUnreachableError: a server, or the event loop of an ``AsyncLLM``, does not answer.
            WaitTimeoutError: a rank did not have the version ready in time.
            ClosedError: ``stop_event`` was set.
        """
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        try:
            return self._sync(at_least, timeout_s, stop_event, force=force)
        finally:
            self._sync_draft(stop_event)

    def _sync(
        self,
        at_least: int | None,
        timeout_s: float | None,
        stop_event: threading.Event | None,
        *,
        force: bool,
    ) -> Switch | None:
        goal: int | VersionId | None = None
        switch: Switch | None = None
        try:
            try:
                view = self._ensure_started()
            finally:
                # If an earlier attempt left the engine paused, resume it. This is safe: the weights
                # are of one version, or the model refuses to serve.
                if self._owes_resume:
                    self._label_and_resume()
            if force and view.newer_than(None) is not None:
                self._ask("forget", "forget its weights")
                self._refresh_applied(view)
            self._learn_attested()
            goal = self._find_goal(view, at_least)
            self._correct_label(goal)
            if goal is not None:
                version, wait_s = self._wait_ready(view, goal, timeout_s, stop_event)
                with self._translating(f"switch to version {version.number}"):
                    switch = self._switch(view, version, wait_s)
            if view.options.canary is not None:
                self._judge(view, timeout_s, stop_event)
        except Exception as error:
            if stop_event is None or not stop_event.is_set():
                self._note_failure(error, None if goal is None else number_of(goal))
            raise
        self._failed = None
        self._report.following()
        return switch

    def _sync_draft(self, stop_event: threading.Event | None) -> None:
        """Switch the draft model to its newest version, if all ranks have the version ready.

        Log a failure once: the engine then serves with the draft that it has.
        """
        draft = self._draft
        if draft is None or self._owes_resume:
            return
        problem = None
        try:
            draft._label_and_resume()  # noqa: SLF001 - an earlier attempt may have paused the engine
            if self._state is _SERVING and draft.is_ready():
                draft.sync(timeout_s=0.0, stop_event=stop_event)
        except errors.WaitTimeoutError:
            return  # a newer version came
        except (errors.DBufferError, OSError) as error:
            problem = str(error)
            if problem != self._draft_problem:
                logger.warning("the draft keeps its weights for now: %s", problem)
        self._draft_problem = problem

    def _judge(
        self,
        view: StoreView,
        timeout_s: float | None,
        stop_event: threading.Event | None,
    ) -> None:
        """Wait for the canary's verdict on the version that the engine serves on trial.

        Raises:
            EngineUpdateError: the canary refused the version. The engine has switched to the newest
                version that no canary refused.
        """
        refused: dict[VersionId, str] = {}
        while self._record is not None and self._record.state == "on_trial" and self._applied:
            version = self._applied.id
            refusal = None if version == self._accepted else view.options.refusal(version)
            if refusal is None and version != self._accepted:
                refusal = self._verdict(view.options)
            if refusal is None:
                self._adopt_and_label(self._ask("accept", "accept its version"))
                self._accepted = version
                break
            refused[version] = refusal
            view.refuse(version, refusal)
            self._ask("forget", "leave its version")
            self._refresh_applied(view)
            goal = self._find_goal(view)
            if goal is None or goal in refused:  # a network mount can show the refusal late
                break
            version, wait_s = self._wait_ready(view, goal, timeout_s, stop_event)
            with self._translating(f"go back to version {version.number}"):
                self._switch(view, version, wait_s)
        if refused:
            store = view.options.store
            reasons = "; ".join(
                f"version {v.number} of {store} {reason}" for v, reason in refused.items()
            )
            raise errors.EngineUpdateError(f"{reasons}; the engine has {self.weights}")

    def _verdict(self, options: EngineOptions) -> str | None:
        """Return the canary's reason to refuse the engine's weights, or None if it accepts them."""
        probe = self._canary
        if isinstance(options.canary, Mapping):
            probe = partial(_judge_by_prompts, self._engine, **options.canary)
        assert probe is not None  # noqa: S101 - see _options_for
        try:
            reason = probe()
        except (errors.EngineUnreachableError, errors.EngineEndedError):
            raise  # this says nothing about the version
        except Exception as error:
            logger.warning("the probe of %s failed", self.engine_id, exc_info=True)
            reason = described(error)
        return None if reason is None else f"was refused by {self.engine_id}: {reason}"

    def _learn_attested(self) -> None:
        """Ask the ranks whether their weights equal the version, if this is not known yet."""
        record = self._record
        if record is None or not record.is_attestable or self._engine.is_idle():
            return
        if self._view is not None and self._view.facts.begins_paused:
            return  # the engine's ranks can exchange results only in a pause
        record = self._ask("attest", "compare its weights")
        if record is not None:
            self._adopt_and_label(record)

    def _find_goal(self, view: StoreView, at_least: int | None = None) -> int | VersionId | None:
        goal = view.newer_than(self._applied, at_least)
        newest = None if goal is None else view.manifest_of(goal)
        is_attested = self._record is not None and self._record.attested_at is not None
        self._report.lag(
            self._applied, self.applied_metadata, goal, newest, is_attested=is_attested
        )
        return goal

    def is_ready(self, at_least: int | None = None) -> bool:
        """Whether :meth:`sync` would return or raise an error without waiting for the ranks."""
        view = self._ensure_started()
        goal = view.newer_than(self._applied, at_least)
        try:
            if goal is not None:
                view.wait_ready(goal, self._applied, 0.0, None)
        except errors.WaitTimeoutError:
            return False
        except errors.DBufferError:
            pass  # sync() raises this error at once
        return True

    def _wait_ready(
        self,
        view: StoreView,
        goal: int | VersionId,
        timeout_s: float | None,
        stop_event: threading.Event | None,
    ) -> tuple[VersionId, float]:
        """Wait until all ranks have the version ready; return its id, and the seconds waited."""
        timeout_s = view.options.timeout_s if timeout_s is None else timeout_s
        require_alive = self._engine.require_alive
        started, left_s = time.monotonic(), timeout_s
        while True:
            version = view.wait_ready(
                goal, self._applied, left_s, stop_event, require_alive=require_alive
            )
            # While the engine's event loop is not running, a background follower waits, and reports
            # no failure.
            while stop_event is not None and self._engine.is_idle():
                if stop_event.wait(TIMING.stop_check_s):
                    raise errors.ClosedError("following was stopped")
            left_s = max(0.0, started + timeout_s - time.monotonic())
            # Reserve the version. Otherwise a rank could drop it for a newer version, and prepare
            # the newer version in the pause. If a rank is already preparing a newer version, wait
            # again.
            reserve = RankRequest("reserve", of_draft=self._of_draft, update=_update_to(version))
            with self._translating("keep the version that is ready"):
                try:
                    self._engine.do(reserve)
                    break
                except errors.EngineUpdateError as refusal:  # from a rank, not the engine's own
                    if not left_s:
                        raise errors.WaitTimeoutError(
                            f"version {version.number} of {view.options.store} was replaced by a "
                            f"newer version, which was not ready within {timeout_s:g} s: {refusal}"
                        ) from refusal
            time.sleep(min(left_s, TIMING.look_s))
        return version, time.monotonic() - started

    def _switch(self, view: StoreView, goal: VersionId, wait_s: float) -> Switch:
        started = time.monotonic()
        try:
            self._pause()
            record, load_s = self._load(view, goal)
        except BaseException as error:
            if isinstance(error, errors.EngineBusyError) and not self._engine.has_own_pause:
                # Do not resume the engine. Either it fell asleep, and must not compute before it
                # wakes up, or another program has resumed it already.
                self._note("resumed")
            # Raise the load's error, which says more than an error from resuming.
            try:
                self._label_and_resume()
            except Exception as later:  # noqa: BLE001 - the next attempt resumes again
                logger.warning("%s is left paused for now: %s", self.engine_id, str(later))
            raise
        self._label_and_resume()
        switch = Switch(
            version=record.applied_version or goal.number,
            stage_s=record.stats.get("stage_s", 0.0),
            wait_s=wait_s,
            pause_s=time.monotonic() - started,
            load_s=load_s,
            num_bytes=int(record.stats.get("bytes", 0)),
        )
        self._report.switched(switch)
        view.is_kept = view.options.until_done
        self._acknowledge()
        # Report the lag. Ignore errors of the store, because this switch has succeeded. The next
        # attempt to switch raises them.
        with contextlib.suppress(errors.DBufferError, OSError):
            self._find_goal(view)
        return switch

    def _pause(self) -> None:
        """Pause the engine for a switch; dbuffer never ends a pause that it did not start."""
        engine = self._engine
        if engine.has_own_pause or not engine.is_paused():
            self._note("paused")  # before the call: even if it fails, the pause may have begun
        else:
            # Another program has paused the engine, perhaps in another mode. Pause it in this
            # follower's mode, too, unless the weights are asleep.
            self._ask("awake", "tell whether its weights are awake")
        engine.pause(self._pause_mode)
        if not engine.has_own_pause and engine.is_paused() is False:
            raise errors.EngineBusyError("another program resumed the engine before the load")

    def _load(self, view: StoreView, goal: VersionId) -> tuple[ReceiverRecord, float]:
        """Load the version on all ranks; return the engine's record, and the duration in seconds.

        After an error, the engine has the version that its record names, unknown weights, or a
        model that refuses to serve.
        """
        attempt = secrets.token_hex(8)
        update = _update_to(goal, attempt)
        self._note("lost")  # until the record says how the attempt ended
        started = time.monotonic()
        error: Exception | None = None
        record: ReceiverRecord | None = None
        try:
            record = self._ask("update", f"switch to version {goal.number}", update=update)
        except Exception as raised:  # noqa: BLE001 - the record decides
            error = raised
        load_s = time.monotonic() - started
        record = self._outcome_of(view, attempt, record)
        if record is None:
            raise error or errors.EngineUpdateError(
                f"{view.engine_id} did not acknowledge version {goal.number} in "
                f"{view.options.store}: check that its workers see the same directory, and have "
                "permission to write there"
            )
        if view.has_applied(record, goal) and not record.is_broken:
            if error is not None:
                logger.warning(
                    "%s switched, and its answer was lost: %s", self.engine_id, str(error)
                )
            return record, load_s
        if error is None:  # the engine did not pass on the failed rank's error
            kind = errors.EngineBrokenError if record.is_broken else errors.EngineUpdateError
            raise kind(record.problem or f"{view.engine_id} did not switch, and gave no reason")
        if record.is_broken and isinstance(error, errors.EngineUpdateError):
            raise errors.EngineBrokenError(str(error)) from error
        raise error

    def _outcome_of(
        self, view: StoreView, attempt: str, record: ReceiverRecord | None
    ) -> ReceiverRecord | None:
        """Return the engine's record if it names this attempt to switch, else None.

        ``record`` is the ranks' answer. If the answer was lost, read the record in the store. If
        that record does not name the attempt, ask the ranks again.
        """
        record = record or view.readable_record()
        if record is None or record.attempt != attempt:
            with contextlib.suppress(Exception):  # the update's own error says more
                record = self._ask("acknowledge", "tell its version")
        if record is None or record.attempt != attempt:
            return None
        self._adopt_and_label(record)
        if not record.is_broken:
            self._note("known")
        return record

    def _acknowledge(self) -> None:
        self._note("lost")  # until all ranks have answered
        self._ask("acknowledge", "acknowledge its version")
        self._note("known")

    def _label_and_resume(self) -> None:
        """End this follower's pause. If the weights are uncertain, first label them as unknown.

        If the label cannot be set, the engine stays paused.
        """
        if not self._is_certain:
            self._label(WeightLabel())
        if self._owes_resume:
            self._resume()

    def _label(self, label: WeightLabel) -> None:
        if self._of_draft:
            return  # responses carry the target's label
        # Compare whole labels: versions of two runs can have the same number.
        if label != self._set_label or self._engine.weight_version() != label.version:
            self._engine.set_weight_version(label)
            self._set_label = label

    def _correct_label(self, goal: int | VersionId | None) -> None:
        """Set the engine's label again if it is out of date.

        For instance, another program changed it, a new run began, or the weights were attested.
        """
        if self._applied is None or self._engine.is_idle():
            return
        with contextlib.suppress(errors.EngineUnreachableError):  # the event loop is stopping
            attested_at = None if self._record is None else self._record.attested_at
            label = WeightLabel.of(
                self._applied, self.applied_metadata, goal, attested_at=attested_at
            )
            self._label(label)

    def _translating(self, step: str) -> TranslatedErrors:
        def translate(error: BaseException) -> None:
            if isinstance(error, Exception) and not isinstance(error, errors.DBufferError):
                # An error from another process can have any class: raise dbuffer's, with its text.
                raise errors.EngineUpdateError(
                    f"{self.engine_id} could not {step}: {error}"
                ) from error

        return TranslatedErrors(translate)

    def mismatches(self, tensors: Sequence[TensorSpec]) -> list[str]:
        """Check name, dtype and shape of tensors; return the message of each rank that refuses."""
        with self._translating("check the tensors"):
            may_warn = self._options_for(self._engine.facts()).unused_tensors == "warn"
            answers = self._engine.call(
                RankRequest("check", tensors=(*tensors,), allows_unused=may_warn)
            )
            worst = worst_of(answers)
        if worst is not None and not isinstance(worst, errors.WeightsMismatchError):
            raise worst
        return [str(answer) for answer in answers if answer is not None]

    def apply_once(self, store: str) -> None:
        """Load the newest version of another store once, then follow this follower's store again.

        The next :meth:`sync` switches the engine back to a version of this follower's store.
        """
        following = self._ensure_started().options
        options = following.of_other(store)
        once = Follower(self._engine, options, pause=self._pause_mode)
        self._forget()
        try:
            once.sync()
        finally:
            once._forget()
            if once._view is not None:
                once._view.close()
            if once._owes_resume:
                self._note("paused")
            self.start()

    def done(self) -> None:
        """Let the engine switch again, if the option ``until_done`` made it keep its version.

        Any thread may call this method.
        """
        self._done_with = self._applied
        if self._view is not None:
            self._view.is_kept = False

    # Between two attempts

    def _note_failure(self, error: Exception, version: int | None) -> None:
        if isinstance(error, errors.EngineUnreachableError) and self._engine.is_server:
            self._note("lost")  # the server may have been restarted
        self._failed = version
        self._report.failed(version, is_engine_known=self._is_certain)

    def wait_to_retry(self, timeout_s: float, stop_event: threading.Event) -> None:
        """Wait until the store has a newer version than the failed one, or until the timeout."""
        end = time.monotonic() + timeout_s
        stop_event.wait(min(timeout_s, TIMING.retry_min_s))
        if self._view is not None and self._failed and not stop_event.is_set():
            left_s = max(0.0, end - time.monotonic())
            with contextlib.suppress(errors.DBufferError, OSError):
                if self._view.wait_for_version(self._failed, left_s, stop_event) is not None:
                    return
        stop_event.wait(max(0.0, end - time.monotonic()))

    def wait_for_version(self, stop_event: threading.Event) -> int | None:
        """Wait for a newer version, at most for a poll interval; return its number, or None."""
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
        """Make the engine's ranks stop following the store. The engine keeps its weights."""
        if self._view is not None:
            self._ask("end", "stop following")
        self._note("lost")  # a later sync must start again

    def close(self) -> None:
        """Stop switching the engine, which keeps its weights.

        Its ranks still stage new versions, for the next follower; see :meth:`stop_workers`.
        """
        if self._owes_resume:
            try:
                self._label_and_resume()
                self._acknowledge()
            except errors.EngineEndedError:
                pass  # a dead engine is not paused
            except (errors.DBufferError, OSError) as error:
                state = "left paused" if self._owes_resume else "not acknowledged"
                logger.error("%s is %s: %s", self.engine_id, state, str(error))
        if self._draft is not None:
            self._draft.close()
        self._forget()
        self._report.ended()
        if self._view is not None:
            self._view.close()
        if not self._of_draft:
            self._engine.close()

    def _forget(self) -> None:
        for key in [key for key, follower in _followers.items() if follower is self]:
            del _followers[key]


def _judge_by_prompts(
    engine: Engine, prompts: Sequence[str] | Sequence[list[int]], min_mean_logprob: float
) -> str | None:
    """Return why to refuse weights that give prompts too low a probability; None to accept them."""
    logprobs = engine.prompt_logprobs(prompts)
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else math.nan
    if mean >= min_mean_logprob and math.isfinite(mean):
        return None
    return (
        f"the mean log-probability of its prompts' {len(logprobs)} tokens is {mean:.4g}, and must "
        f"be at least {min_mean_logprob:g}"
    )


def _update_to(goal: VersionId, attempt: str | None = None) -> UpdateRequest:
    return UpdateRequest(at_least=goal.number, run=goal.run, attempt=attempt)
