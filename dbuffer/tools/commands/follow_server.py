"""``dbuffer follow --vllm`` and ``--sglang``: a server is switched to each new version."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dbuffer.errors import DBufferError, OptionError, UnsupportedError, WaitTimeoutError
from dbuffer.tools.commands import shared
from dbuffer.weights.names import NameMap

if TYPE_CHECKING:
    from dbuffer.integrations.engine.engine_options import EngineOptions
    from dbuffer.integrations.engine.follower import Follower
    from dbuffer.integrations.engine.server import EngineServer


class Server(NamedTuple):
    """The server to follow with."""

    url: str
    is_sglang: bool
    api_key: str | None
    pause: str
    rename: Path | None

    def follower(self, options: EngineOptions) -> Follower:
        """What switches it.

        Raises:
            DBufferError: a package that it needs is not installed.
            OptionError: ``pause`` or ``rename`` is not for this kind of server.
        """
        try:
            from dbuffer.integrations.engine.follower import Follower

            server = self._engine()
            return Follower(server, options, pause=self.pause)  # type: ignore[arg-type]  # checked there
        except ModuleNotFoundError as error:
            raise DBufferError(f"this needs {error.name}: pip install '{error.name}'") from error

    def _engine(self) -> EngineServer:
        if self.is_sglang:
            from dbuffer.integrations.sglang.sglang_engine import SglangServer

            names = None if self.rename is None else NameMap.read(self.rename)
            return SglangServer(self.url, names, api_key=self.api_key)
        from dbuffer.integrations.vllm.vllm_engine import VllmServer

        return VllmServer(self.url, api_key=self.api_key)


def follow_server(
    server: Server,
    store: Path,
    *,
    count: int | None,
    timeout_s: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Switch a server until ``count`` switches were made, or this process is asked to stop.

    Raises:
        WaitTimeoutError: there was no switch for ``timeout_s``.
        UnsupportedError, OptionError: it cannot follow, which trying again does not change.
    """
    from dbuffer.integrations.engine.background import follow_for_ever
    from dbuffer.integrations.engine.engine_options import EngineOptions
    from dbuffer.integrations.engine.reporting import Switch

    last = time.monotonic()
    with (
        # A switch that has begun must end with the server resumed, also when this is asked to stop.
        shared.stopped_by_signals() as stop,
        server.follower(EngineOptions(store=str(store.absolute()), **options)) as follower,
    ):
        follower.require_followable()
        shared.explain_wait(store)
        for outcome in follow_for_ever(follower, stop):
            if isinstance(outcome, Switch):
                last = time.monotonic()
                text = (
                    f"version {outcome.version}: {server.url} switched, ready after "
                    f"{1e3 * outcome.wait_s:.1f} ms, paused for {1e3 * outcome.pause_s:.1f} ms"
                )
                shared.report(outcome, text, as_json=as_json)
                count = None if count is None else count - 1
                if count == 0:
                    return
            elif isinstance(outcome, UnsupportedError | OptionError):
                raise outcome
            elif timeout_s is not None and time.monotonic() - last > timeout_s:
                raise WaitTimeoutError(
                    f"no switch of {server.url} for {timeout_s:g} s: {outcome or 'nothing new'}"
                )
