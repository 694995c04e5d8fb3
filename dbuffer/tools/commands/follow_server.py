"""``dbuffer follow-server``: switch an inference server to each new version."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dbuffer.errors import OptionError, UnsupportedError, WaitTimeoutError
from dbuffer.tools.commands import shared
from dbuffer.tools.terminal import progress
from dbuffer.weights.names import NameMap

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
    rename: shared.RenameOption = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's API key.",
            metavar="KEY",
            show_default="for a vLLM server: the variable VLLM_API_KEY",
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
        typer.Option(help="Serve this version and stay on it, instead of each newest one."),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="Accept versions that hold a part of the model (vLLM only)."
        ),
    ] = False,
    unused_tensors: Annotated[
        Literal["refuse", "warn"],
        typer.Option(
            help="Versions with tensors that the server's model has no place for: refuse them, or "
            "warn once and leave those tensors out."
        ),
    ] = "refuse",
    count: shared.CountOption = None,
    timeout_s: shared.TimeoutOption = None,
    receiver_id: shared.ReceiverOption = None,
    verify: shared.VerifyOption = False,
    forked: shared.ForkedOption = "follow",
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
) -> None:
    """Keep an inference server on the newest version, and print each switch and how long it took.

    With --version, the server is switched to that version and stays on it. The server must see the
    store under the same path. It is resumed after each switch; a server that was restarted is
    switched again.
    """
    if engine == "sglang" and partial:
        raise OptionError("--partial has no effect on an SGLang server, which takes whole models")
    from dbuffer.engine.background import follow_for_ever
    from dbuffer.engine.engine_options import EngineOptions
    from dbuffer.engine.follower import Follower
    from dbuffer.engine.reporting import Switch

    engine_options = EngineOptions(
        store=str(store),
        version=version,
        engine_id=receiver_id,
        verify=verify or "auto",
        allow_shared_store=allow_shared_store,
        partial=partial,
        unused_tensors=unused_tensors,
        forked=forked,
    )
    server = _server(engine, url, rename, api_key)
    follower = Follower(server, engine_options, pause=pause)
    last = time.monotonic()
    # A switch that has begun must end with the server resumed, even after a signal.
    with (
        shared.stopped_by_signals() as stop,
        progress(f"{url} follows {store}"),
        follower,
    ):
        follower.require_followable()
        shared.explain_wait(store)
        for outcome in follow_for_ever(follower, stop):
            if isinstance(outcome, Switch):
                last = time.monotonic()
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
            elif timeout_s is not None and time.monotonic() - last > timeout_s:
                raise WaitTimeoutError(
                    f"no switch of {url} for {timeout_s:g} s: {outcome or 'nothing new'}"
                )


def _server(engine: str, url: str, rename: Path | None, api_key: str | None) -> EngineServer:
    if engine == "sglang":
        from dbuffer.integrations.sglang.sglang_engine import SglangServer

        names = None if rename is None else NameMap.read(rename)
        return SglangServer(url, names, api_key=api_key)
    if rename is not None:
        raise OptionError(
            "--rename has no effect on a vLLM server, which takes its checkpoint's names: rename "
            "where you publish"
        )
    from dbuffer.integrations.vllm.vllm_engine import VllmServer

    return VllmServer(url, api_key=api_key or os.environ.get("VLLM_API_KEY"))
