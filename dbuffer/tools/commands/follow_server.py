"""``dbuffer follow-server``: switch an inference server to each new version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress

if TYPE_CHECKING:
    from dbuffer.engine.server import EngineServer


def follow_server(
    store: shared.StoreArgument,
    url: Annotated[
        str,
        typer.Argument(help="The server's address, such as http://localhost:8000.", metavar="URL"),
    ],
    engine: Annotated[
        Literal["vllm", "sglang"],
        typer.Option(
            help="A vLLM server runs with VLLM_SERVER_DEV_MODE=1; an SGLang server with "
            "--custom-weight-loader dbuffer.integrations.sglang.load_from_store."
        ),
    ] = "vllm",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's API key; default for a vLLM server: VLLM_API_KEY.", metavar="KEY"
        ),
    ] = None,
    pause: Annotated[
        Literal["keep", "abort", "wait"],
        typer.Option(
            help="Requests in flight during a switch: keep them, abort them, or wait for their end "
            "(vLLM only)."
        ),
    ] = "keep",
    version: Annotated[
        int | None,
        typer.Option(
            help="Serve this version and stay on it, instead of each newest one.",
            metavar="VERSION",
        ),
    ] = None,
    count: shared.CountOption = None,
    receiver_id: shared.ReceiverOption = None,
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Keep an inference server on the newest version, and print each switch and how long it took.

    With --version, the server is switched to that version and stays on it. The server must see the
    store under the same path. It is resumed after each switch; a server that was restarted is
    switched again.
    """
    from dbuffer.engine.background import follow_for_ever
    from dbuffer.engine.engine_options import EngineOptions
    from dbuffer.engine.follower import Follower
    from dbuffer.engine.reporting import Switch

    engine_options = EngineOptions(
        store=str(store),
        version=version,
        engine_id=receiver_id,
        allow_shared_store=allow_shared_store,
    )
    follower = Follower(_server(engine, url, api_key), engine_options, pause=pause)
    # A switch that has begun must end with the server resumed, even after a signal.
    with shared.stopped_by_signals() as stop, progress(f"{url} follows {store}"), follower:
        follower.require_followable()
        for outcome in follow_for_ever(follower, stop):
            if isinstance(outcome, Switch):
                text = (
                    f"version {outcome.version}: {url} switched, ready after "
                    f"{1e3 * outcome.wait_s:.1f} ms, paused for {1e3 * outcome.pause_s:.1f} ms"
                )
                shared.report(outcome, text, as_json=as_json)
                count = None if count is None else count - 1
                if count == 0:
                    return
            elif isinstance(outcome, UnsupportedError | OptionError):
                raise outcome


def _server(engine: str, url: str, api_key: str | None) -> EngineServer:
    if engine == "sglang":
        from dbuffer.integrations.sglang.sglang_engine import SglangServer

        return SglangServer(url, api_key=api_key)
    from dbuffer.integrations.vllm.vllm_engine import VllmServer

    return VllmServer(url, api_key=api_key or os.environ.get("VLLM_API_KEY"))
