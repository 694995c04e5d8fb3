"""`follow`, and `Engine` implementations for SGLang: an ``sglang.Engine``, and a server.

SGLang passes only tensors to its ``custom_weight_loader``. So dbuffer encodes a request as the name
of an empty tensor, and each rank then reads the weights from the store.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import (
    Engine,
    EngineFacts,
    PauseMode,
    RankAnswer,
    RankRequest,
    WeightLabel,
)
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.engine.server import EngineServer
from dbuffer.errors import EngineBusyError, EngineUpdateError, OptionError, UnsupportedError
from dbuffer.format.manifest import host_in_id

LOADER = "dbuffer.integrations.sglang.load_from_store"

SglangPause = Literal["keep", "abort"]

_PAUSES: dict[PauseMode, str] = {"keep": "retract", "abort": "abort"}
"""Names of dbuffer's pause modes in SGLang, which has no mode that waits for requests to finish."""

# dbuffer updates an engine in SGLang's update session. In a session for the target model, SGLang
# would restore the weights at the start and pack them at the end. But dbuffer's ranks do both in
# one call. So the session is for a draft model: the engine has none, so SGLang changes nothing.
_SESSION = "draft"


def to_tensors(request: RankRequest | None) -> list[tuple[str, torch.Tensor]]:
    """Encode a request as tensors. None stands for a request to do nothing."""
    command = {"request": None if request is None else request.as_json()}
    return [(json.dumps(command), torch.empty(0, dtype=torch.uint8))]


def from_tensors(tensors: list[tuple[str, torch.Tensor]]) -> RankRequest | None:
    """Decode a request of :func:`to_tensors`. Return None if the request is to do nothing."""
    try:
        [(text, _)] = tensors
        request = json.loads(text)["request"]
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"{LOADER!r} is for requests of dbuffer, and cannot load other tensors ({error}): do "
            "not pass it as load_format"
        ) from None
    return None if request is None else RankRequest.parse(request)


def _facts(info: Mapping[str, Any], name: str) -> EngineFacts:
    if LOADER not in (info.get("custom_weight_loader") or []):
        raise UnsupportedError(
            f"this engine was not started for dbuffer: start an Engine with custom_weight_loader="
            f"[{LOADER!r}], or a server with --custom-weight-loader {LOADER}"
        )
    for option in ("dp_size", "pp_size"):
        if info[option] > 1:
            raise UnsupportedError(
                f"an engine with {option} above 1 cannot follow a store: use tp_size, and a "
                "separate engine for each replica"
            )
    if info.get("speculative_algorithm") is not None:
        raise UnsupportedError(
            "an SGLang engine with a draft model cannot follow a store: dbuffer would load only "
            "the target model; start the engine without speculative decoding"
        )
    return EngineFacts(
        # A restarted engine is another instance: its start-up time differs, and usually its seed.
        instance_id=json.dumps([info.get("random_seed"), info.get("startup_time")]),
        name=name,
        num_ranks=info["tp_size"],
    )


class _Sglang(Engine):
    """Common code of SGLang's engines.

    SGLang does not return its ranks' answers, so the follower reads results from the store.
    """

    pauses = tuple(_PAUSES)

    def call(self, request: RankRequest) -> list[RankAnswer]:
        if request.call == "check":
            raise UnsupportedError("SGLang's ranks cannot check whether tensors fit")
        # Do not send these requests: `load_from_store` has acknowledged the version already, and
        # "reserve" is useless without the ranks' answers, which SGLang does not return.
        if request.call in ("acknowledge", "reserve"):
            return [None]
        self._send(request)
        # Return only a refusal of the options. The follower reads from the engine's record whether
        # an update succeeded.
        return [None if request.options is None else _refusal(request.options)]

    def _send(self, request: RankRequest | None, *, flush_cache: bool = False) -> None:
        raise NotImplementedError

    def _flush_caches(self) -> None:
        """Make SGLang flush its caches, by an update that loads nothing.

        SGLang's own route for flushing takes longer: it also collects garbage (0.3 s), or releases
        GPU memory that the next step has to allocate again.
        """
        self._send(None, flush_cache=True)


def _refusal(options: EngineOptions) -> RankAnswer:
    store = options.buffer_of(options.read_store)
    if not store.exists():
        return None
    record = store.record(options.engine_id or "", options.record_token)
    # If a load failed halfway (`is_broken`), refuse nothing, so that the follower continues: its
    # next update repairs the weights.
    if record is None or record.problem is None or record.is_broken:
        return None
    return UnsupportedError(record.problem)


class OfflineEngine(_Sglang):
    """``Engine`` of an ``sglang.Engine``, which computes only during its calls.

    `pause` therefore only flushes the engine's caches.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def facts(self) -> EngineFacts:
        return _facts(self._engine.get_server_info(), f"sglang-{host_in_id()}-{os.getpid()}")

    def _send(self, request: RankRequest | None, *, flush_cache: bool = False) -> None:
        self._require_idle()
        # Do not check the result: if an interrupted follower left an update session open, SGLang
        # refuses to begin another one, and this update uses the open session.
        self._engine.begin_weight_update(selector=_SESSION)
        try:
            success, message = self._engine.update_weights_from_tensor(
                to_tensors(request), load_format=LOADER, flush_cache=flush_cache
            )
        finally:
            self._engine.end_weight_update()
        if not success:
            raise EngineUpdateError(message)

    def pause(self, mode: PauseMode) -> None:  # noqa: ARG002
        try:
            self._flush_caches()
        except EngineUpdateError as error:
            raise EngineBusyError(
                f"wait until the engine's requests have finished, then sync: {error}"
            ) from error

    def weight_version(self) -> str:
        return str(self._engine.get_model_info()["weight_version"])

    def set_weight_version(self, label: WeightLabel) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=label.version, abort_all_requests=False)
        manager = self._engine.tokenizer_manager
        self._engine.loop.run_until_complete(manager.update_weight_version(request))

    def _require_idle(self) -> None:
        if self._engine.loop.is_running():
            raise EngineBusyError(
                "the engine's event loop is running: call sync() between generations and outside "
                "of the event loop, or run the engine as a server"
            )


class ServerEngine(_Sglang, EngineServer):
    """``Engine`` of an SGLang server; see :class:`~dbuffer.engine.server.EngineServer`."""

    IS_WHAT = "SGLang"
    WITHOUT_ROUTE = (
        "it is no SGLang server, or its SGLang is too old (dbuffer is tested with 0.5.23)"
    )

    _num_ranks = 1
    _has_paused = False

    def facts(self) -> EngineFacts:
        info = self._body(self.request("GET", "/server_info"))
        facts = _facts(info, f"sglang-{self._name()}")
        self._num_ranks = facts.num_ranks
        return facts

    def _send(self, request: RankRequest | None, *, flush_cache: bool = False) -> None:
        # A server that is not paused updates only after all its requests have ended. So pause the
        # server first, "in_place", which keeps the requests in flight.
        is_ours = not self._has_paused
        try:
            if is_ours:
                self.request("POST", "/pause_generation", json={"mode": "in_place"})
            self._update_in_session(request, flush_cache=flush_cache)
        finally:
            if is_ours:
                self.resume()

    def _update_in_session(self, request: RankRequest | None, *, flush_cache: bool) -> None:
        # Plain pickle, because torch's pickling for other processes sends shared memory instead of
        # data.
        payload = base64.b64encode(pickle.dumps(to_tensors(request))).decode()
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": flush_cache,
            "selector": "target",
        }
        self._begin_session()
        try:
            self.request("POST", "/update_weights_from_tensor", json=body, timeout=self._long)
        finally:
            self.request("POST", "/end_weight_update", json={})

    def _begin_session(self) -> None:
        begin = {"selector": _SESSION}
        try:
            self.request("POST", "/begin_weight_update", json=begin)
        except EngineUpdateError:
            # A killed follower left its update session open: close the session, and begin a new
            # one.
            self.request("POST", "/end_weight_update", json={})
            self.request("POST", "/begin_weight_update", json=begin)

    def pause(self, mode: PauseMode) -> None:
        self._has_paused = True
        body = {"mode": _PAUSES[mode]}
        self.request("POST", "/pause_generation", json=body, timeout=self._long)
        self._flush_caches()

    def resume(self) -> None:
        # Clear the flag even if the request fails: the server may have restarted, and a restarted
        # server is not paused.
        self._has_paused = False
        self._request_resume("/continue_generation", json={"torch_empty_cache": False})

    def weight_version(self) -> str:
        return str(self._get("/model_info", "weight_version"))

    def set_weight_version(self, label: WeightLabel) -> None:
        body = {"new_version": label.version, "abort_all_requests": False}
        self.request("POST", "/update_weight_version", json=body)


def sglang_engine_of(target: Any, *, api_key: str | None = None) -> OfflineEngine | ServerEngine:
    """Return the `Engine` of an ``sglang.Engine``, or of a server given by its URL."""
    if isinstance(target, str):
        return ServerEngine(target, api_key=api_key)
    if hasattr(target, "tokenizer_manager") and hasattr(target, "update_weights_from_tensor"):
        return OfflineEngine(target)
    raise UnsupportedError(f"a {type(target).__name__} is not an engine of SGLang")


@overload
def follow(
    engine: str,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    **options: Any,
) -> Follower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower | BackgroundFollower:
    """Keep an SGLang engine on a store's newest version.

    Args:
        engine: an ``sglang.Engine`` or the URL of a server, which must have been started with
            ``custom_weight_loader=["dbuffer.integrations.sglang.load_from_store"]``. For an
            ``Engine``, call the follower's ``sync()`` between generations. A server is switched in
            the background, until ``close()``.
        store: the store's directory, as this process and the engine's processes see it.
        pause: treatment of requests in flight during a switch of a server. ``"keep"``: they
            continue with the new weights, after SGLang has recomputed their caches (SGLang's
            ``retract``). ``"abort"``: they are aborted.
        api_key: API key of a server.
        **options: fields of :class:`EngineOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
        VersionError: the ``version`` to serve is no longer in the store.
        UnsupportedError: the engine, as it was started, cannot follow.
    """
    chosen = EngineOptions.parse({"store": store, **options})
    driven = sglang_engine_of(engine, api_key=api_key)
    follower = Follower(driven, chosen, pause=pause)
    if not isinstance(driven, OfflineEngine):
        return BackgroundFollower(follower)
    follower.start()
    return follower
