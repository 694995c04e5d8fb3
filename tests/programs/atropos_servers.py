"""Training with a server that has Atropos' routes, and with a stock one, through a bridge each.

The model reveals its version: an answer's tokens say from which weights each of them came.

Atropos' own server cannot be started here: that of atroposlib 0.4.0 imports modules of vLLM
(`vllm.entrypoints.launcher`) that 0.32 does not have. So its routes are served by a server of ours,
with the requests and replies that its source has; see :func:`serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from tests.support.engines import preforked
from tests.support.engines.tiny_models import revealing_weights, save_revealing
from tests.support.engines.vllm_engines import (
    EXTENSION,
    engine_arguments,
)

WAIT_S = 300
ANSWER_TOKENS = 8
VERSIONS = (1, 2, 3, 4)
NOTIFICATION = {"update_count": int, "trainer_rank": int, "timestamp": float}


def serve(directory: Path, port: int) -> None:
    """``example_trainer/vllm_api_server.py`` of Atropos, as far as a trainer asks anything of it.

    It follows the store by itself, which takes two lines: ``additional_config`` of the engine, and
    the middleware.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from dbuffer.integrations.vllm import FollowStore

    state = {"update_count": 0, "last_update_time": 0.0}

    async def health(request: Request) -> Response:
        return Response()

    async def notify_update(request: Request) -> Response:
        body = await request.json()
        if {name: type(value) for name, value in body.items()} != NOTIFICATION:
            return JSONResponse({"detail": "Atropos' server refuses this too"}, 422)
        state["update_count"] = body["update_count"]
        state["last_update_time"] = body["timestamp"]
        count = state["update_count"]
        return JSONResponse({"status": "ok", "update_count": count, "server_time": time.time()})

    async def info(request: Request) -> Response:
        known = {"enabled": False, "rendezvous_info": {}, "model_name": "policy", "device": "cpu"}
        return JSONResponse(known | state)

    async def generate(request: Request) -> Response:
        body = await request.json()
        prompt: Any = body.pop("prompt")
        parameters = SamplingParams(**body, ignore_eos=True, detokenize=False)
        async for output in app.state.engine_client.generate(prompt, parameters, uuid.uuid4().hex):
            last = output
        return JSONResponse(
            {
                "text": [one.text for one in last.outputs],
                "finish_reasons": [one.finish_reason for one in last.outputs],
                "prompt_token_ids": last.prompt_token_ids,
                "token_ids": [list(one.token_ids) for one in last.outputs],
            }
        )

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/generate", generate, methods=["POST"]),
            Route("/bridge/info", info),
            Route("/bridge/notify_update", notify_update, methods=["POST"]),
        ]
    )
    app.add_middleware(FollowStore)

    async def main() -> None:
        options = engine_arguments(
            directory / "revealing-0",
            additional_config={"dbuffer": {"store": str(directory / "routes")}},
        )
        app.state.engine_client = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        try:
            await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()
        finally:
            app.state.engine_client.shutdown()

    asyncio.run(main())


class WithRoutes:
    """That server, in a process of its own."""

    def __init__(self, directory: Path) -> None:
        import httpx

        from tests.support.ports import free_port

        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (directory / "routes.log").open("wb") as log:
            self._process = preforked.start(
                [__file__, str(directory), "serve", str(port)], env=dict(os.environ), output=log
            )
        self._client = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def answer(self) -> list[int]:
        question = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": ANSWER_TOKENS}
        response = self._client.post("/generate", json=question | {"temperature": 0})
        assert response.status_code == 200, response.text
        (tokens,) = response.json()["token_ids"]
        return list(tokens)

    def update_count(self) -> int:
        return int(self._client.get("/bridge/info").json()["update_count"])

    def close(self) -> None:
        self._client.close()
        self._process.kill()  # the engine's processes notice, and end with the group at the latest
        self._process.wait(WAIT_S)


# Training through a bridge


def set_weights(model: torch.nn.Module, version: int) -> None:
    model.load_state_dict(revealing_weights(version), strict=False)


def train_with_routes(directory: Path, server: WithRoutes) -> dict[str, Any]:
    """As Atropos' trainer does: it loads its model itself, and attaches its parameters."""
    from tests.support.engines.tiny_models import make_model

    model = make_model("qwen3", 0)
    config = BridgeConfig(vllm_api_url=server.url, device="cpu", timeout_seconds=WAIT_S)
    seen: dict[str, Any] = {"answers": {}, "updates": []}
    with VLLMWeightBridge(config, store=directory / "routes") as bridge:
        bridge.attach_to_vllm_weights(dict(model.named_parameters()))
        for version in VERSIONS:
            set_weights(model, version)
            bridge.notify_update()
            seen["answers"][version] = server.answer()
            seen["updates"].append(server.update_count())
    return seen


def train_with_stock(directory: Path, server: Any) -> dict[str, Any]:
    """With the model of the bridge; then with tensors that do not fit the engine."""
    config = BridgeConfig(
        vllm_api_url=server.url,
        device="cpu",
        model_name=str(directory / "revealing-0"),
        timeout_seconds=WAIT_S,
    )
    seen: dict[str, Any] = {"answers": {}, "versions": []}
    with VLLMWeightBridge(config, store=directory / "stock") as bridge:
        model = bridge.get_trainable_model()
        seen["publisher"] = type(bridge._sender).__name__
        for version in VERSIONS:
            set_weights(model, version)
            if version == VERSIONS[0]:  # before any notify_update()
                bridge.broadcast_weights_to_inference()
                bridge.barrier()
            else:
                bridge.notify_update()
            seen["answers"][version] = server.answer()
            seen["versions"].append(server.version())
    weights = revealing_weights(5)
    # As a trainer leaves it that is killed in an update.
    server.client.post("/pause", params={"mode": "keep"})
    with VLLMWeightBridge(config, store=directory / "stock") as bridge:
        seen["paused for the next trainer"] = server.is_paused()
        seen["answer to the next trainer"] = server.answer()
        bridge.attach_to_vllm_weights({n: t for n, t in weights.items() if "lm_head" not in n})
        began = time.monotonic()
        try:
            bridge.notify_update()
        except dbuffer.DBufferError as error:
            seen["misfit"] = type(error).__name__, str(error)
        seen["misfit took s"] = time.monotonic() - began
        seen["answer with a misfit"] = server.answer()
        bridge.attach_to_vllm_weights(weights)
        bridge.notify_update()
        seen["answer after a misfit"] = server.answer()
    return seen


@contextlib.contextmanager
def stock_server(directory: Path) -> Iterator[Any]:
    from tests.support.engines.vllm_servers import Server
    from tests.support.ports import free_port

    flags = ("--worker-extension-cls", EXTENSION, "--api-key", "secret")
    log = directory / "stock.log"
    checkpoint = directory / "revealing-0"
    server = Server(checkpoint, log, *flags, port=free_port(), development=True)
    try:
        yield server
    finally:
        server.kill()


def observe_all(directory: Path) -> dict[str, Any]:
    save_revealing(0, directory)
    with contextlib.closing(WithRoutes(directory)) as routes, stock_server(directory) as stock:
        # Neither is ready: the bridge waits for them.
        return {
            "routes": train_with_routes(directory, routes),
            "stock": train_with_stock(directory, stock),
        }


if __name__ == "__main__":
    target, role = Path(sys.argv[1]), sys.argv[2]
    if role == "serve":
        serve(target, int(sys.argv[3]))
    else:
        (target / "observed.json").write_text(json.dumps(observe_all(target)))
