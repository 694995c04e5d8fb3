"""dbuffer's labels and pauses in vLLM's engine core.

Labels tell which weights generated each token of an output. vLLM's engine core attaches its weight
version to the outputs of each step, and vLLM's front end turns these versions into spans of tokens.
dbuffer makes the core attach an encoded :class:`WeightLabel` instead. The front end decodes the
label, so that vLLM's own routes and fields show the plain version.

Before a call that writes or discards weights without dbuffer, the core sets its label to unknown.
If a method of a worker extension writes weights, the follower sets the label to unknown at its next
poll.

vLLM has one pause flag: every pause sets the flag, and every resume clears it. dbuffer adds its own
pause, the *hold*, for the switch to a new version. If another program pauses or resumes the engine
during a hold, the call takes effect when the hold ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from dbuffer.engine.contract import ASLEEP, UNKNOWN_VERSION, WeightLabel
from dbuffer.engine.endpoint import watch
from dbuffer.errors import EngineBusyError, EngineUpdateError
from dbuffer.integrations.vllm.config import CALL, has_backend
from dbuffer.runtime.messages import counted

KEEPS_WEIGHTS = 1
"""Highest sleep level at which vLLM keeps a copy of the weights."""
RELOADS = ("reload_weights", "reset_weights")
TRANSFERS = ("start_weight_update", "update_weights", "finish_weight_update")
_WRITES = {True: (*RELOADS, "update_weights"), False: (*RELOADS, *TRANSFERS)}
"""Methods of workers after which the version that responses name is unknown. The entry True is for
dbuffer's weight transfer backend, which names the new version in ``finish_weight_update``."""

LABEL = "dbuffer_label"
READY = "dbuffer_ready"
"""Method of the core that returns whether the engine is ready. The argument True makes it ready."""

ADAPTER = "dbuffer_adapter"
"""Attribute of a LoRA request: name and label of an adapter that follows a store."""

ADMITTED = "dbuffer_label"
"""Attribute of vLLM's outputs: encoded label of the weights that generated the first token."""


HOLD, RELEASE = "dbuffer_hold", "dbuffer_release"

_REFUSED = "the engine cannot be held: "
"""Prefix of a refusal's message. vLLM passes an error's text to the caller, without its type."""

NOT_RESET = "the engine could not reset its prefix cache, or the cache of its KV connector"

_UNTIL_THE_INPUT_ENDS = "with streamed input: the switch is made when the input has ended"


@dataclass(slots=True)
class _CoreState:
    label: str | None = None
    label_of_outputs: str | None = None
    """Encoded label for the engine's outputs. It lacks the label's `newest_run`, which concerns the
    store and not an output."""
    is_followed: bool = False
    is_void: bool = False
    """Whether vLLM wrote weights after the last call of a follower to the workers."""
    is_ready: bool = False
    hold: _Hold | None = None


def _state_of(core: Any) -> _CoreState:
    state: _CoreState = vars(core).setdefault("dbuffer_state", _CoreState())
    return state


def label_cores(core: Any) -> None:
    """Make ``EngineCore`` keep a weight label, and attach it to the outputs of each step.

    Before a call that writes weights without dbuffer, the core sets the label to unknown.
    ``core`` is vLLM's class ``EngineCore``.
    """
    set_version = core.set_weight_version

    def set_weight_version(core: Any, weight_version: str) -> None:
        state, label = _state_of(core), WeightLabel.decode(weight_version)
        if label.run is not None and state.is_void:
            label = WeightLabel()
        set_version(core, label.version)
        state.label = label.encode()
        state.label_of_outputs = replace(label, newest_run=None).encode()

    def get_label(core: Any) -> str:
        return str(_state_of(core).label or core.get_weight_version())

    def attach_label(core: Any, outputs: dict[int, Any]) -> None:
        label = _state_of(core).label_of_outputs or core.get_weight_version()
        for output in outputs.values():
            output.weight_version = label

    def is_ready(core: Any, is_ready: bool = False) -> bool:
        state = _state_of(core)
        state.is_ready |= is_ready
        return state.is_ready

    core.set_weight_version = set_weight_version
    setattr(core, LABEL, get_label)
    setattr(core, READY, is_ready)
    if hasattr(core, "_attach_weight_version"):
        core._attach_weight_version = attach_label  # noqa: SLF001
    watch(core, "sleep", _sleeping)
    watch(core, "collective_rpc", _calling)


def _sleeping(core: Any, level: int = 1, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if level > KEEPS_WEIGHTS:
        _drop_label(core)
    return nullcontext()


def _calling(core: Any, method: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
    if method == CALL:  # a follower asks the workers for their version
        state = _state_of(core)
        state.is_followed, state.is_void = True, False
    elif method in _WRITES[has_backend(core.vllm_config)]:
        _drop_label(core)
    return nullcontext()


def _drop_label(core: Any) -> None:
    state = _state_of(core)
    if state.is_followed or has_backend(core.vllm_config):
        core.set_weight_version(UNKNOWN_VERSION)
        state.is_void = True


def tell_labels(request_state: Any) -> None:
    """Decode the labels of versions that vLLM's front end puts into its outputs.

    ``request_state`` is vLLM's class ``RequestState``, which makes the outputs.
    """
    if not hasattr(request_state, "track_weight_version"):  # before vLLM 0.32
        return
    make_output, make_state = request_state._new_completion_output, request_state.__init__  # noqa: SLF001

    def make_named_state(state: Any, *args: Any, **kwargs: Any) -> None:
        make_state(state, *args, **kwargs)
        # Use the adapter's plain name in vLLM's metrics. The request's name contains the version,
        # and would add a series to the metrics for each version.
        state.lora_name, _ = getattr(state.lora_request, ADAPTER, (state.lora_name, None))

    def make_labeled_output(state: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_output(state, *args, **kwargs)
        _, of_adapter = getattr(state.lora_request, ADAPTER, (None, None))
        if state.weight_version_starts:
            encoded = of_adapter.encode() if of_adapter else state.weight_version_starts[0][0]
            setattr(output, ADMITTED, encoded)
        if output.weight_versions:
            output.weight_versions = _decoded(output.weight_versions, of_adapter)
        return output

    request_state.__init__ = make_named_state
    request_state._new_completion_output = make_labeled_output  # noqa: SLF001


def _decoded(spans: list[Any], of_adapter: WeightLabel | None) -> list[Any]:
    """Decode the labels in the spans of an output, and join spans of one version.

    vLLM begins a span when the label changes, so also when the version has been attested.
    """
    joined: list[Any] = []
    for span in spans:
        label = of_adapter or WeightLabel.decode(span.version)
        span.version, span.run, span.metadata = label.version, label.run, label.metadata
        if joined and (joined[-1].version, joined[-1].run) == (span.version, span.run):
            joined[-1].end = span.end
        else:
            joined.append(span)
    return joined


@dataclass(slots=True)
class _Hold:
    other_pause: Any
    """Pause state that other programs requested from vLLM, or None if they requested no pause."""
    deferred: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)
    """Other programs' calls to pause the engine, made after dbuffer's pause, with their futures."""


def refusal_in(error: Exception) -> str | None:
    """Return why a core refused dbuffer's pause, or None if the error has another cause."""
    _, mark, refusal = str(error).partition(_REFUSED)
    return refusal if mark else None


def add_pauses(process: Any, in_step: Any) -> None:
    """Add holds (pauses for a switch) to ``process``, vLLM's ``EngineCoreProc``.

    ``in_step`` is vLLM's subclass ``DPEngineCoreProc``, whose cores step together.
    """
    for name in ("pause_scheduler", "sleep"):
        setattr(process, name, _unless_held(getattr(process, name), _defer))
    for kind in (process, in_step):
        kind.resume_scheduler = _unless_held(kind.resume_scheduler, _drop_deferred)
    setattr(process, HOLD, _hold)
    setattr(process, RELEASE, _release)


def _hold(core: Any, mode: str, drops_caches: bool) -> Any:
    """Pause a core for a switch. Return :data:`ASLEEP` if its weights are asleep.

    Raises:
        EngineBusyError: the core cannot be paused for a switch now. A core that steps together with
            other cores (data parallelism) stays paused after this error, until the caller calls
            :data:`RELEASE`.
    """
    if "weights" in core.model_executor.sleeping_tags:
        # Return a value, because vLLM would log a traceback for each error, and the follower tries
        # again for as long as the engine sleeps.
        return ASLEEP
    state = _state_of(core)
    hold = state.hold or _Hold(core.scheduler.pause_state if core.is_scheduler_paused() else None)
    other_pause = getattr(hold.other_pause, "name", None)
    if (refusal := _refusal(core, mode, other_pause, drops_caches)) is not None:
        # Raise an error, because vLLM passes on the return value of the first core only.
        error = EngineBusyError(f"{_REFUSED}{refusal}")
        if not _steps_with_others(core) or core.is_scheduler_paused():
            raise error
        # Pause this core before it raises: the pauses of the other cores wait for its pause.
        paused = core.pause_scheduler("keep", False)
        state.hold = hold
        return _after(paused, functools.partial(_raise, error))
    if other_pause == "PAUSED_NEW":
        mode = "wait"  # other modes would stop requests that may still finish
    elif other_pause is not None and mode == "wait":
        mode = "keep"  # no request has begun, so none must finish
    state.hold = None
    try:
        paused = _pause(core, mode)
    finally:
        state.hold = hold
    return _after(paused, functools.partial(_drop_caches, core)) if drops_caches else paused


def _drop_caches(core: Any) -> None:
    """Drop all caches with results of the current weights, including the caches of paused requests.

    When paused requests continue, vLLM recomputes their KV cache. So no cache mixes two versions.
    """
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineUpdateError(NOT_RESET)
    core.reset_encoder_cache()


def _pause(core: Any, mode: str) -> Any:
    """Pause a core. Return a future that completes with the pause, or None if it is complete."""
    if not _steps_with_others(core) or not core.is_scheduler_paused():
        return core.pause_scheduler(mode, False)
    # This core is already paused. To complete a second pause, vLLM would make this core step and
    # wait for the other cores. If another core got both pauses before it stepped, that one step
    # completed both, and this core would wait forever. So complete this pause without a step.
    core._pause_complete = lambda: not core.has_work()  # noqa: SLF001
    try:
        return core.pause_scheduler(mode, False)
    finally:
        del core._pause_complete  # noqa: SLF001


def _steps_with_others(core: Any) -> bool:
    return hasattr(core, "pending_pause")


def _refusal(core: Any, mode: str, other_pause: str | None, drops_caches: bool) -> str | None:
    requests = core.scheduler.requests.values()
    num_open = sum(request.resumable for request in requests)
    if mode == "abort" and num_open:
        # After an abort, the client can send its session more input, which vLLM would answer
        # without the earlier input.
        return f"vLLM cannot abort {counted(num_open, 'session')} {_UNTIL_THE_INPUT_ENDS}"
    num_waiting = core.scheduler.num_waiting_for_streaming_input
    if num_waiting and drops_caches:
        sessions = counted(num_waiting, "waiting session")
        return f"vLLM cannot drop the caches of {sessions} {_UNTIL_THE_INPUT_ENDS}"
    # Requests that have begun, including preempted ones. The pause mode "wait" lets them finish.
    num_begun = sum(
        bool(request.num_computed_tokens or request.num_output_tokens) for request in requests
    )
    if mode == "wait" and other_pause == "PAUSED_ALL" and num_begun:
        return (
            f"another program has paused {counted(num_begun, 'request')} in flight, which "
            'pause="wait" lets finish first: the switch must wait until that program resumes them'
        )
    return None


def _release(core: Any) -> None:
    state = _state_of(core)
    hold, state.hold = state.hold, None
    if hold is None:
        return
    try:
        if hold.other_pause is not None:
            core.scheduler.set_pause_state(hold.other_pause)
        elif not hold.deferred and not core.model_executor.is_sleeping:
            core.resume_scheduler()
    except BaseException:
        state.hold = hold
        raise
    for pause, result in hold.deferred:
        _pass_on(pause, result)


def _after(paused: Future[Any] | None, call: Callable[[], Any]) -> Any:
    if paused is None:
        return call()
    result: Future[Any] = Future()

    def make_call(done: Future[Any]) -> Any:
        done.result()  # raises if pausing failed
        return call()

    paused.add_done_callback(lambda done: _pass_on(functools.partial(make_call, done), result))
    return result


def _pass_on(call: Callable[[], Any], result: Future[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller cancelled ``result``
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001 - the caller gets the error
            result.set_exception(error)
            return
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda done: _pass_on(done.result, result))
        else:
            result.set_result(outcome)


def _raise(error: Exception) -> NoReturn:
    raise error


def _unless_held(
    function: Callable[..., Any], if_held: Callable[[_Hold, Callable[[], Any]], Any]
) -> Callable[..., Any]:
    """Wrap a method of vLLM's engine core: ``if_held`` handles its calls during a switch."""

    @functools.wraps(function)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        held = functools.partial(function, core, *args, **kwargs)
        hold = _state_of(core).hold
        return held() if hold is None else if_held(hold, held)

    return call


def _defer(hold: _Hold, pause: Callable[[], Any]) -> Future[Any]:
    result: Future[Any] = Future()
    hold.deferred.append((pause, result))
    return result


def _drop_deferred(hold: _Hold, _resume: Callable[[], Any]) -> None:
    hold.other_pause = None
    ended, hold.deferred = hold.deferred, []
    error = RuntimeError("the engine was resumed before this request to pause it took effect")
    for _, result in ended:
        _pass_on(functools.partial(_raise, error), result)
