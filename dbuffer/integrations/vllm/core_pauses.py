"""Let vLLM's engine core tell dbuffer's pause for a switch from pauses that others begin.

vLLM's pause is one flag: any pause sets it, and any resume clears it. During a switch, the engine
stands still; pauses and resumes that others call take effect when the switch ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dbuffer.engine.contract import ASLEEP
from dbuffer.errors import EngineBusyError, EngineUpdateError
from dbuffer.runtime.messages import counted

HOLD, RELEASE = "dbuffer_hold", "dbuffer_release"
"""Methods of the core that pause it for a switch, and end that pause."""

_HOLD = "dbuffer_current_hold"
_REFUSED = "the engine cannot be held: "
"""Beginning of a refusal; vLLM passes an error's words on to the caller, and not its type."""
NOT_RESET = "the engine could not reset its prefix cache, or the cache of its KV connector"
_UNTIL_THE_INPUT_ENDS = "with streamed input: the switch is made when the input has ended"


@dataclass(slots=True)
class _Hold:
    """Pause for a switch, and the pauses that others begin meanwhile."""

    other_pause: Any
    """vLLM's state of a pause that others have begun, or None."""
    deferred: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)
    """Calls that pause the engine when the switch ends, and their results."""


def refusal_in(error: Exception) -> str | None:
    """Return why a core refused to be held, or None if the caller's error says something else."""
    _, mark, refusal = str(error).partition(_REFUSED)
    return refusal if mark else None


def add_pauses(process: Any, in_step: Any) -> None:
    """Add them to cores in processes of their own (``EngineCoreProc``, ``DPEngineCoreProc``)."""
    if hasattr(process, HOLD):
        return
    for name in ("pause_scheduler", "sleep"):
        setattr(process, name, _deferring(getattr(process, name)))
    for kind in (process, in_step):
        kind.resume_scheduler = _resuming(kind.resume_scheduler)
    setattr(process, HOLD, _hold)
    setattr(process, RELEASE, _release)


def _hold(core: Any, mode: str, drops_caches: bool) -> Any:
    """Pause a core for a switch, and drop its caches; or return why it sleeps on.

    Raises:
        EngineBusyError: it cannot be held now. It was not touched, unless it steps with others: it
            is then paused as they are, until :data:`RELEASE`.
    """
    if "weights" in core.model_executor.sleeping_tags:
        # A step would compute with weights that may be gone. Not raised: an engine may sleep for
        # long, and vLLM logs a traceback for each error.
        return ASLEEP
    hold: _Hold | None = vars(core).get(_HOLD)
    hold = hold or _Hold(core.scheduler.pause_state if core.is_scheduler_paused() else None)
    other_pause = getattr(hold.other_pause, "name", None)
    if (refusal := _refusal(core, mode, other_pause, drops_caches)) is not None:
        # Raised, and not returned: of several cores' answers, which may differ here, vLLM has the
        # first alone.
        error = EngineBusyError(f"{_REFUSED}{refusal}")
        if not _steps_with_others(core) or core.is_scheduler_paused():
            raise error
        # The others that step with it need it to be paused.
        paused = core.pause_scheduler("keep", False)
        setattr(core, _HOLD, hold)
        return _after(paused, functools.partial(_raise, error))
    if other_pause == "PAUSED_NEW":
        mode = "wait"  # it may still wait for its requests, and any other mode would end that
    elif other_pause is not None and mode == "wait":
        mode = "keep"  # no request is in flight, and none may begin
    vars(core).pop(_HOLD, None)
    try:
        paused = _pause(core, mode)
    finally:
        setattr(core, _HOLD, hold)
    return _after(paused, functools.partial(_drop_caches, core)) if drops_caches else paused


def _drop_caches(core: Any) -> None:
    """Drop all caches of the present weights.

    Requests that are kept lose theirs too: it is recomputed, so that no token comes from two
    versions.
    """
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineUpdateError(NOT_RESET)
    core.reset_encoder_cache()


def _pause(core: Any, mode: str) -> Any:
    """Pause a core, or wait for the end of a pause that has begun."""
    if not _steps_with_others(core) or not core.is_scheduler_paused():
        return core.pause_scheduler(mode, False)
    # Paused anew, it would make one more step, and wait for the others in it. They make none if
    # they were paused anew before the first pause was complete, and have ended both with it.
    core._pause_complete = lambda: not core.has_work()  # noqa: SLF001
    try:
        return core.pause_scheduler(mode, False)
    finally:
        del core._pause_complete  # noqa: SLF001


def _steps_with_others(core: Any) -> bool:
    """Whether a core makes each step together with others, and agrees with them on pauses."""
    return hasattr(core, "pending_pause")


def _refusal(core: Any, mode: str, other_pause: str | None, drops_caches: bool) -> str | None:
    """Return the reason that a core which is awake cannot be held now, or None."""
    requests = core.scheduler.requests.values()
    num_open = sum(getattr(request, "resumable", False) for request in requests)
    if mode == "abort" and num_open:
        # Its next part would be answered without the parts before.
        return f"vLLM cannot abort {counted(num_open, 'session')} {_UNTIL_THE_INPUT_ENDS}"
    num_waiting = getattr(core.scheduler, "num_waiting_for_streaming_input", 0)
    if num_waiting and drops_caches:
        sessions = counted(num_waiting, "waiting session")
        return f"vLLM cannot drop the caches of {sessions} {_UNTIL_THE_INPUT_ENDS}"
    # Preempted requests have begun, too.
    num_begun = sum(
        bool(request.num_computed_tokens or request.num_output_tokens) for request in requests
    )
    if mode == "wait" and other_pause == "PAUSED_ALL" and num_begun:
        return (
            f"another program has paused {counted(num_begun, 'request')} in flight, which "
            'pause="wait" lets finish first: the switch is made when the engine was resumed'
        )
    return None


def _release(core: Any) -> None:
    """End the switch's pause; the engine goes on unless others have paused it."""
    hold: _Hold | None = vars(core).pop(_HOLD, None)
    if hold is None:
        return
    try:
        if hold.other_pause is not None:
            core.scheduler.set_pause_state(hold.other_pause)
        elif not hold.deferred and not core.model_executor.is_sleeping:
            core.resume_scheduler()
    except BaseException:
        setattr(core, _HOLD, hold)
        raise
    for pause, result in hold.deferred:
        _pass_on(pause, result)


def _after(paused: Future[Any] | None, call: Callable[[], Any]) -> Any:
    """Make a call once a core is paused; return its result, or a future for that."""
    if paused is None:
        return call()
    result: Future[Any] = Future()

    def make_call(done: Future[Any]) -> Any:
        done.result()  # or raise what kept it from pausing
        return call()

    paused.add_done_callback(lambda done: _pass_on(functools.partial(make_call, done), result))
    return result


def _pass_on(call: Callable[[], Any], result: Future[Any]) -> None:
    """Make a call, which may return a future, and let ``result`` have its outcome."""
    with contextlib.suppress(InvalidStateError):  # its caller has given the result up
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001 - for the process that has called
            result.set_exception(error)
            return
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda done: _pass_on(done.result, result))
        else:
            result.set_result(outcome)


def _raise(error: Exception) -> NoReturn:
    raise error


def _deferring(pause: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pause)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        hold: _Hold | None = vars(core).get(_HOLD)
        if hold is None:
            return pause(core, *args, **kwargs)
        result: Future[Any] = Future()
        hold.deferred.append((functools.partial(pause, core, *args, **kwargs), result))
        return result

    return call


def _resuming(resume: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resume)
    def call(core: Any) -> Any:
        hold: _Hold | None = vars(core).get(_HOLD)
        if hold is None:
            return resume(core)
        hold.other_pause = None
        ended, hold.deferred = hold.deferred, []
        error = RuntimeError("resumed before this pause began")
        for _, result in ended:
            _pass_on(functools.partial(_raise, error), result)
        return None

    return call
