"""The SGLang engines that can follow a store, behind the calls that a follower makes.

An update is bracketed as SGLang asks for it: pause, flush the caches, ``begin_weight_update``, one
``update_weights_from_tensor`` in which each rank loads all of a version out of the store,
``end_weight_update``, the new version's label, continue.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from dbuffer.buffer import DoubleBuffer
from dbuffer.errors import (
    EngineBusyError,
    EngineUnreachableError,
    EngineUnsupportedError,
    EngineUpdateError,
)
from dbuffer.integrations.engine.options import HALF_LOADED, EngineOptions
from dbuffer.integrations.engine.protocol import EngineFacts, PauseMode
from dbuffer.integrations.engine.server import EngineServer
from dbuffer.integrations.sglang.commands import NOTHING, Command
from dbuffer.manifest import host_in_id
from dbuffer.names import NameMap

LOADER = "dbuffer.integrations.sglang.load_from_store"
"""For ``custom_weight_loader``, with which an engine must be started."""

PAUSE_MODES: dict[str, str] = {"keep": "retract", "abort": "abort"}
"""What SGLang calls them. It has no pause that waits for requests."""

# A session that restores no weights when it opens, nor packs any when it closes: what a rank loads
# it restores and packs itself, in one call, once all ranks have agreed to load.
_SESSION = "draft"

_RESUME_TRIES = 5


def _facts(info: Mapping[str, Any]) -> EngineFacts:
    """How an engine was started, from its server information.

    Raises:
        EngineUnsupportedError: it cannot take weights from a store.
    """
    if LOADER not in (info.get("custom_weight_loader") or []):
        raise EngineUnsupportedError(
            f"this engine takes no weights from a store: start it with custom_weight_loader="
            f"[{LOADER!r}]; a server: --custom-weight-loader {LOADER}"
        )
    for option in ("dp_size", "pp_size"):
        if info[option] > 1:
            raise EngineUnsupportedError(
                f"an engine with {option} above 1 cannot be followed as one: use tp_size, and "
                "one engine for each replica"
            )
    if info.get("speculative_algorithm") is not None:
        raise EngineUnsupportedError(
            "an engine with a draft model cannot be followed: a store holds no weights for it"
        )
    return EngineFacts(
        # Two starts never take equally long, and a seed that was not given is a random one.
        instance_id=json.dumps([info.get("random_seed"), info.get("startup_time")]),
        num_ranks=info["tp_size"],
    )


class _Commands:
    """What both kinds of engine share: telling its ranks something, and learning how it went."""

    def __init__(self, names: NameMap | None) -> None:
        self._rename = None if names is None else names.as_json()
        self._store: DoubleBuffer | None = None
        self._engine_id = ""

    def _command(self, method: str, arguments: dict[str, Any]) -> Command:
        if "init_info" in arguments:
            options = EngineOptions.parse(arguments["init_info"])
            self._engine_id = options.engine_id or ""
            self._store = DoubleBuffer(
                options.read_store, allow_shared_store=options.allow_shared_store
            )
        return Command(
            method=method, engine_id=self._engine_id, arguments=arguments, rename=self._rename
        )

    def _nothing(self) -> Command:
        """An update that changes nothing, for what SGLang does after one: flush its caches.

        Its route that only flushes collects garbage too, for 0.3 s, or gives memory of a GPU back
        that the next step asks for again.
        """
        return Command(method=NOTHING, engine_id=self._engine_id, arguments={})

    def _require_done(self, command: Command) -> None:
        """Raise what the ranks have to say; they must not raise it themselves."""
        if self._store is None or not self._store.exists():
            return
        record = self._store.receiver(self._engine_id)
        if record is None or record.problem is None:
            return
        if command.method == "dbuffer_init":
            # What was half loaded before is mended by an update.
            if HALF_LOADED not in record.problem:
                raise EngineUnsupportedError(record.problem)
        elif (record.applied_version or 0) < command.arguments["update_info"]["at_least"]:
            raise EngineUpdateError(record.problem)


class OfflineEngine(_Commands):
    """An ``sglang.Engine``: nothing runs between two calls of it, so there is nothing to pause."""

    is_server = False

    def __init__(self, engine: Any, names: NameMap | None = None) -> None:
        super().__init__(names)
        self._engine = engine

    def close(self) -> None:
        """There is nothing to let go of."""

    def facts(self) -> EngineFacts:
        """How it was started."""
        return _facts(self._engine.get_server_info())

    def default_id(self, facts: EngineFacts) -> str:  # noqa: ARG002
        """From this process."""
        return f"sglang-{host_in_id()}-{os.getpid()}"

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Let all its ranks do something.

        Raises:
            EngineBusyError: its event loop is running.
            EngineUnsupportedError, EngineUpdateError: they could not.
        """
        command = self._command(method, arguments)
        success, message = self._send(command)
        if not success:
            raise EngineUpdateError(message)
        self._require_done(command)
        return []

    def _send(self, command: Command, *, flush_cache: bool = False) -> tuple[bool, str]:
        self._require_idle()
        # One that is open is of a follower that was interrupted.
        self._engine.begin_weight_update(selector=_SESSION)
        try:
            success, message = self._engine.update_weights_from_tensor(
                command.as_tensors(), load_format=LOADER, flush_cache=flush_cache
            )
        finally:
            self._engine.end_weight_update()
        return success, message

    def is_paused(self) -> bool:
        """Nobody can have."""
        return False

    def pause(self, mode: PauseMode) -> None:  # noqa: ARG002
        """Forget its caches.

        Raises:
            EngineBusyError: it has unfinished requests.
        """
        success, message = self._send(self._nothing(), flush_cache=True)
        if not success:
            raise EngineBusyError(f"wait for the engine's requests, then sync: {message}")

    def resume(self) -> None:
        """There is nothing to resume."""

    def weight_version(self) -> str:
        """What it reports."""
        return str(self._engine.get_model_info()["weight_version"])

    def set_weight_version(self, version: str) -> None:
        """Let it report this."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        manager = self._engine.tokenizer_manager
        self._engine.loop.run_until_complete(manager.update_weight_version(request))

    def _require_idle(self) -> None:
        if self._engine.loop.is_running():
            raise EngineBusyError(
                "the engine's event loop is running: sync between generations, outside of it, or "
                "run the engine as a server"
            )


class ServerEngine(_Commands, EngineServer):
    """An SGLang server; see :class:`~dbuffer.integrations.engine.server.EngineServer`."""

    IS_WHAT = "SGLang"
    WITHOUT_ROUTE = "it is no SGLang server, or an old one; dbuffer is tested with 0.5.23"

    def __init__(
        self,
        url: str,
        names: NameMap | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        _Commands.__init__(self, names)
        EngineServer.__init__(self, url, api_key=api_key, timeout_s=timeout_s)
        self._num_ranks = 1
        self._has_paused = False

    def facts(self) -> EngineFacts:
        """How it was started."""
        facts = _facts(self._body(self._request("GET", "/server_info")))
        self._num_ranks = facts.num_ranks
        return facts

    def default_id(self, facts: EngineFacts) -> str:  # noqa: ARG002
        """From its address."""
        return f"sglang-{self._name()}"

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Let all its ranks do something.

        Raises:
            EngineUnsupportedError, EngineUpdateError: they could not.
        """
        command = self._command(method, arguments)
        # Without a pause, SGLang would wait for all requests first. This one ends no request.
        is_ours = not self._has_paused
        if is_ours:
            self._request("POST", "/pause_generation", json={"mode": "in_place"})
        try:
            self._send(command)
        finally:
            if is_ours:
                self.resume()
        self._require_done(command)
        return []

    def _send(self, command: Command, *, flush_cache: bool = False) -> None:
        payload = base64.b64encode(command.as_payload()).decode()
        body = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": flush_cache,
            "selector": "target",
        }
        self._begin_session()
        try:
            self._request("POST", "/update_weights_from_tensor", json=body, timeout=self._long)
        finally:
            self._request("POST", "/end_weight_update", json={})

    def _begin_session(self) -> None:
        begin = {"selector": _SESSION}
        try:
            self._request("POST", "/begin_weight_update", json=begin)
        except EngineUpdateError:
            # One is open: a follower was killed in it.
            self._request("POST", "/end_weight_update", json={})
            self._request("POST", "/begin_weight_update", json=begin)

    def is_paused(self) -> bool:
        """Not that anybody could know: ``/ready`` says the same of a server that still starts.

        So a pause that somebody else began ends with the next switch.
        """
        return False

    def pause(self, mode: PauseMode) -> None:
        """Let no step begin, and forget whatever was computed with the weights it has."""
        self._has_paused = True
        body = {"mode": PAUSE_MODES[mode]}
        self._request("POST", "/pause_generation", json=body, timeout=self._long)
        self._send(self._nothing(), flush_cache=True)

    def resume(self) -> None:
        """Let it go on; a network that loses one answer must not leave it paused."""
        for left in reversed(range(_RESUME_TRIES)):
            try:
                body = {"torch_empty_cache": False}
                self._request("POST", "/continue_generation", json=body)
            except (EngineUnreachableError, EngineUpdateError):
                if not left:
                    raise
                time.sleep(0.2)
            else:
                self._has_paused = False
                return

    def weight_version(self) -> str:
        """What it reports with its responses."""
        return str(self._get("/model_info", "weight_version"))

    def set_weight_version(self, version: str) -> None:
        """Let it report this with its responses."""
        body = {"new_version": version, "abort_all_requests": False}
        self._request("POST", "/update_weight_version", json=body)


def engine_of(
    target: Any, names: NameMap | None = None, *, api_key: str | None = None
) -> OfflineEngine | ServerEngine:
    """The engine behind an ``sglang.Engine``, or a server's URL.

    Raises:
        EngineUnsupportedError: it is none of them.
    """
    if isinstance(target, str):
        return ServerEngine(target, names, api_key=api_key)
    if hasattr(target, "tokenizer_manager") and hasattr(target, "update_weights_from_tensor"):
        return OfflineEngine(target, names)
    raise EngineUnsupportedError(f"a {type(target).__name__} is no engine of SGLang's")
