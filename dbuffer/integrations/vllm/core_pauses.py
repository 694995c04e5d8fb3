"""A pause of vLLM's engine core for a switch, which pauses of other programs do not end.

vLLM's pause is one flag: any pause sets it, and any resume clears it. dbuffer adds a pause of its
own, the *hold*. If another program pauses or resumes the engine during a hold, the call takes
effect when the hold ends.
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

_HOLD = "dbuffer_current_hold"
_REFUSED = "the engine cannot be held: "
"""Prefix of refusals. vLLM passes the text of an error to the caller, and not its type."""
NOT_RESET = "the engine could not reset its prefix cache, or the cache of its KV connector"
_UNTIL_THE_INPUT_ENDS = "with streamed input: the switch is made when the input has ended"


@dataclass(slots=True)
class _Hold:
    other_pause: Any
    """vLLM's pause state by other programs, or None if they have not paused the engine."""
    deferred: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)
    """Pauses that other programs requested during the hold, to begin when it ends, with results."""


def refusal_in(error: Exception) -> str | None:
    """Return a core's reason to refuse a hold, or None if the error has another cause."""
    _, mark, refusal = str(error).partition(_REFUSED)
    return refusal if mark else None


def add_pauses(process: Any, in_step: Any) -> None:
    """Add holds to the classes of cores that run in their own process.

    The cores of ``in_step``, vLLM's ``DPEngineCoreProc``, step together.
    """
    if hasattr(process, HOLD):
        return
    for name in ("pause_scheduler", "sleep"):
        setattr(process, name, _deferring(getattr(process, name)))
    for kind in (process, in_step):
        kind.resume_scheduler = _resuming(kind.resume_scheduler)
    setattr(process, HOLD, _hold)
    setattr(process, RELEASE, _release)


def _hold(core: Any, mode: str, drops_caches: bool) -> Any:
    """Pause a core for a switch, and drop its caches. Return a refusal if its weights are asleep.

    Raises:
        EngineBusyError: the core cannot be held now. If it steps together with others, it was
            paused anyway, as they were, until :data:`RELEASE`.
    """
    if "weights" in core.model_executor.sleeping_tags:
        # Returned, not raised: vLLM logs a traceback for each error, and an engine can sleep long.
        return ASLEEP
    hold: _Hold | None = vars(core).get(_HOLD)
    hold = hold or _Hold(core.scheduler.pause_state if core.is_scheduler_paused() else None)
    other_pause = getattr(hold.other_pause, "name", None)
    if (refusal := _refusal(core, mode, other_pause, drops_caches)) is not None:
        # Raised, not returned: of the values of several cores, vLLM returns only the first.
        error = EngineBusyError(f"{_REFUSED}{refusal}")
        if not _steps_with_others(core) or core.is_scheduler_paused():
            raise error
        # The other cores wait until this one is paused too.
        paused = core.pause_scheduler("keep", False)
        setattr(core, _HOLD, hold)
        return _after(paused, functools.partial(_raise, error))
    if other_pause == "PAUSED_NEW":
        mode = "wait"  # requests of the other pause may still finish; other modes would stop them
    elif other_pause is not None and mode == "wait":
        mode = "keep"  # nothing to wait for: no request has begun
    vars(core).pop(_HOLD, None)
    try:
        paused = _pause(core, mode)
    finally:
        setattr(core, _HOLD, hold)
    return _after(paused, functools.partial(_drop_caches, core)) if drops_caches else paused


def _drop_caches(core: Any) -> None:
    """Drop all caches that the present weights computed, also for kept requests.

    vLLM recomputes the KV cache of kept requests, so that no token comes from two versions.
    """
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineUpdateError(NOT_RESET)
    core.reset_encoder_cache()


def _pause(core: Any, mode: str) -> Any:
    """Pause a core; return a future of the complete pause, or None if it is complete already."""
    if not _steps_with_others(core) or not core.is_scheduler_paused():
        return core.pause_scheduler(mode, False)
    # Pausing a paused core again makes it step once more, and wait for the other cores in this
    # step. They do not step if their second pause ended together with the first.
    core._pause_complete = lambda: not core.has_work()  # noqa: SLF001
    try:
        return core.pause_scheduler(mode, False)
    finally:
        del core._pause_complete  # noqa: SLF001


def _steps_with_others(core: Any) -> bool:
    """Whether a core makes its steps, and begins its pauses, together with other cores."""
    return hasattr(core, "pending_pause")


def _refusal(core: Any, mode: str, other_pause: str | None, drops_caches: bool) -> str | None:
    requests = core.scheduler.requests.values()
    num_open = sum(getattr(request, "resumable", False) for request in requests)
    if mode == "abort" and num_open:
        # vLLM would answer the session's next part without the parts before it.
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
    """Make a call as soon as a core is paused; return the result, or a future for it."""
    if paused is None:
        return call()
    result: Future[Any] = Future()

    def make_call(done: Future[Any]) -> Any:
        done.result()  # raises if pausing failed
        return call()

    paused.add_done_callback(lambda done: _pass_on(functools.partial(make_call, done), result))
    return result


def _pass_on(call: Callable[[], Any], result: Future[Any]) -> None:
    """Make a call, and set its result or error in ``result``. The call may return a future."""
    with contextlib.suppress(InvalidStateError):  # the caller has cancelled ``result``
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001 - the calling process gets it
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
