"""`RankEndpoint`: the object in each worker of an engine that answers a follower's requests.

The endpoint must also notice if other code writes or discards the weights. So an integration calls
`watch` for each engine function that does so. The function then runs in a context manager:
`loading` if it loads weights, `falling_asleep` if it puts them to sleep, and `waking_up` if it
wakes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import msgspec
import torch

from dbuffer import errors
from dbuffer.engine.contract import (
    ENDPOINT_ATTR,
    WEIGHTS,
    EngineRank,
    ModelState,
    RankAnswer,
    RankRequest,
    as_answer,
    unknown_request,
)
from dbuffer.engine.engine_options import NO_STORE_YET, EngineOptions, UpdateRequest
from dbuffer.engine.rank_receiver import RankReceiver, by_rank
from dbuffer.engine.shape_check import no_places
from dbuffer.runtime.messages import described

logger = logging.getLogger(__name__)

_IS_WATCHED = "is_watched_by_dbuffer"


def capture_answer(call: Callable[[], RankAnswer]) -> RankAnswer:
    """Call a function; return its answer, or its error as an answer. Never raise an error."""
    try:
        return call()
    except Exception as error:  # every rank must answer
        if not isinstance(error, errors.DBufferError):
            logger.warning("a request of the follower failed", exc_info=True)
        return as_answer(error)


class RankEndpoint:
    """Answers a follower's requests on one rank. All ranks get the same requests in the same order.

    Call the methods in the worker's main thread, between two steps of the engine.
    """

    def __init__(self) -> None:
        self.receiver: RankReceiver | None = None
        """Receiver that follows a store, or None if this rank follows no store."""
        self.state = ModelState()
        self._rank: EngineRank | None = None
        self._draft: RankEndpoint | None = None
        """Endpoint of the draft model, or None if the draft never followed a store of its own."""

    @classmethod
    def of(cls, model: Any) -> RankEndpoint:
        """Return the endpoint of a model; the first call makes the endpoint.

        The endpoint notices each call of ``load_weights`` outside a switch, on the model or on a
        part of the model, such as the language model of a multimodal model.
        """
        endpoint = getattr(model, ENDPOINT_ATTR, None)
        if endpoint is None:
            endpoint = cls()
            setattr(model, ENDPOINT_ATTR, endpoint)
            for part in model.modules() if isinstance(model, torch.nn.Module) else (model,):
                watch(part, "load_weights", lambda *_, **__: loading(lambda: model, "load_weights"))
        return endpoint

    # Weights written or moved by other code

    def note_foreign_load(self, cause: str) -> None:
        # Skip dbuffer's own loads. Also skip calls after the first, because some loaders cause a
        # call for each tensor.
        if self.state.is_updating or self.state.must_reload:
            return
        if self.receiver is not None:
            self.receiver.note_foreign_load(cause)
        else:
            self.state.note_foreign_load()

    def note_asleep(self, parts: Collection[str] = (WEIGHTS,), *, is_lost: bool) -> None:
        """Stop using ``parts`` of the engine's memory, and free dbuffer's memory on the device.

        Call this method before the engine puts these parts to sleep. ``is_lost``: whether the
        engine then discards the weights without keeping a copy.
        """
        self.state.asleep |= set(parts)
        if self.receiver is not None:
            self.receiver.note_asleep()
        if self._draft is not None:
            self._draft.note_asleep(parts, is_lost=is_lost)
        if is_lost:
            self.note_foreign_load("going to sleep without a copy of the weights")

    def note_awake(self, parts: Collection[str] | None = None) -> None:
        """Allow dbuffer to use ``parts`` of the engine's memory again. None means all parts."""
        were_asleep = self.state.is_asleep
        self.state.asleep -= self.state.asleep if parts is None else set(parts)
        if self.receiver is not None:
            self.receiver.note_awake(weights=were_asleep and not self.state.is_asleep)
        if self._draft is not None:
            self._draft.note_awake(parts)

    # Requests

    def do(self, request: RankRequest, make_rank: Callable[[], EngineRank]) -> RankAnswer:
        """Serve a request; return the answer or raise an error.

        ``make_rank`` makes this rank's :class:`EngineRank`, for requests that need it.
        """
        if request.of_draft:
            if self._draft is None:
                raise errors.UnsupportedError(NO_STORE_YET)
            return self._draft.do(msgspec.structs.replace(request, of_draft=False), make_rank)
        match request:
            case RankRequest(call="begin", options=EngineOptions() as options):
                self.begin(make_rank, options, takes_over=request.takes_over)
                return self.following().engine_record
            case RankRequest(call="reserve", update=UpdateRequest() as update):
                self.following().reserve(update)
            case RankRequest(call="update", update=UpdateRequest() as update):
                receiver = self.following()
                receiver.update(update)
                return receiver.engine_record
            case RankRequest(call="acknowledge" | "attest" | "accept"):
                receiver = self.following()
                if request.call == "accept":
                    receiver.accept()
                if request.call == "attest" and not receiver.attest():
                    return receiver.engine_record
                # The engine is generating, and must not wait for a disk.
                threading.Thread(target=receiver.acknowledge, name="dbuffer-acknowledge").start()
                return receiver.engine_record
            case RankRequest(call="check"):
                rank = self._rank or make_rank()
                unused = rank.make_check()(request.tensors).unused
                if unused and not rank.is_pipeline_stage and not request.allows_unused:
                    raise errors.WeightsMismatchError(no_places(unused))
            case RankRequest(call="forget"):
                self.following()
                self.note_foreign_load("a request to load it again")
            case RankRequest(call="awake"):
                self.state.require_awake()
            case RankRequest(call="end"):
                self.end()
            case _:
                raise unknown_request(request)
        return None

    def begin(
        self,
        make_rank: Callable[[], EngineRank],
        options: EngineOptions,
        *,
        takes_over: bool = True,
    ) -> None:
        """Make all ranks follow a store. If a rank cannot follow it, no rank does.

        If all ranks follow the store already, they only write their receivers' records again. If a
        rank follows with other options, these are replaced, or with ``takes_over=False`` refused.
        A failure raises :class:`UnsupportedError` if a retry cannot help, else
        :class:`EngineUpdateError`.
        """
        rank = self._rank = self._rank or make_rank()
        options = replace(
            options,
            engine_id=rank.engine_id(options),
            instance_id=options.instance_id or rank.instance_id,
        )
        is_same = self.receiver is not None and self.receiver.options == options
        try:
            # All ranks begin, or none: a rank that began alone would wait for the others.
            answers = rank.ranks.gather((is_same, self.receiver is not None), begins=True)
            if all(is_same for is_same, _ in answers):
                self.following().write_records()
                return
            if not takes_over and any(follows for _, follows in answers):
                raise errors.EngineUpdateError(
                    f"{options.engine_id} no longer follows {options.store}: another follower made "
                    "the engine follow another store, or changed its options. An engine must have "
                    "only one follower: close one of the two, and make the other again"
                )
            self.end()
            self._start(rank, options)
        except errors.RankFailedError as failure:
            raise errors.EngineUpdateError(
                f"the engine cannot follow {options.store}: {failure}"
            ) from failure

    def _start(self, rank: EngineRank, options: EngineOptions) -> None:
        problem, is_final = None, False
        try:
            self.receiver = RankReceiver(rank, options, self.state)
            if options.draft_store is not None and self._draft is None:
                self._draft = self._endpoint_of(rank.draft_rank())
        except Exception as error:
            logger.warning("cannot follow %s", options.store, exc_info=True)
            problem = described(error)
            # After these errors, a retry would fail in the same way.
            is_final = isinstance(error, errors.UnsupportedError | errors.OptionError)
        try:
            answers = rank.ranks.gather((problem, is_final))
            problems, finals = zip(*answers, strict=True)
            if any(problems):
                kind = errors.UnsupportedError if any(finals) else errors.EngineUpdateError
                raise kind(f"the engine cannot follow {options.store}: {by_rank(problems)}")
        except BaseException:
            self.end()
            raise

    def _endpoint_of(self, draft: EngineRank) -> RankEndpoint:
        endpoint = RankEndpoint.of(draft.module)
        endpoint._rank = draft  # noqa: SLF001 - of this class
        endpoint.state.asleep = set(self.state.asleep)
        return endpoint

    def following(self) -> RankReceiver:
        """Return the receiver, or raise :class:`UnsupportedError` if the rank follows no store."""
        if self.receiver is None:
            raise errors.UnsupportedError(NO_STORE_YET)
        return self.receiver

    def end(self) -> None:
        if self._draft is not None:
            self._draft.end()
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            receiver.close()


def watch(
    owner: Any,
    name: str,
    around: Callable[..., AbstractContextManager[None]],
    function: Callable[..., Any] | None = None,
) -> bool:
    """Wrap the function ``name`` of ``owner``, so that each call runs in a context manager.

    ``around`` makes the context manager from the call's arguments. If ``function`` is given, the
    wrapper calls it instead of the owner's function. Wrapping a function twice has no further
    effect. Return whether the owner has a function of this name.
    """
    current = getattr(owner, name, None)
    called = function or current
    if called is None or hasattr(current, _IS_WATCHED):
        return called is not None

    @functools.wraps(called)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return called(*args, **kwargs)

    setattr(watched, _IS_WATCHED, True)
    setattr(owner, name, watched)
    return True


@contextlib.contextmanager
def loading(model_of: Callable[[], Any], cause: str) -> Iterator[None]:
    """Let other code load a model's weights in the ``with`` block; then treat them as unknown.

    ``cause`` names the load in the log.
    """
    try:
        yield
    finally:
        RankEndpoint.of(model_of()).note_foreign_load(cause)


@contextlib.contextmanager
def falling_asleep(model: Any, parts: Collection[str], *, is_lost: bool) -> Iterator[None]:
    """Make dbuffer stop using engine memory before a ``with`` block puts parts of it to sleep.

    ``parts`` are names, such as ``"weights"``. ``is_lost``: whether the engine discards the weights
    without keeping a copy.
    """
    endpoint = RankEndpoint.of(model)
    endpoint.note_asleep(parts, is_lost=is_lost)
    try:
        yield
    except BaseException:
        endpoint.note_awake(parts)
        raise


@contextlib.contextmanager
def waking_up(model_of: Callable[[], Any], parts: Collection[str] | None) -> Iterator[None]:
    """Note, after a ``with`` block, that the engine woke ``parts`` of its memory in the block.

    None means all parts. dbuffer uses these parts again after the block.
    """
    yield
    RankEndpoint.of(model_of()).note_awake(parts)
