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

from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from tests.support.engines import preforked
from tests.support.engines.tiny_models import (
    make_model,
    revealing_weights,
    save_revealing,
    token_of,
)
from tests.support.engines.vllm_engines import engine_arguments, judge
from tests.support.engines.vllm_servers import BACKEND_FLAGS, Server
from tests.support.ports import free_port

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
    def __init__(self, directory: Path) -> None:
        import httpx

        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        program = [__file__, str(directory), str(port)]
        log = directory / "routes.log"
        self._process = preforked.start(program, env=dict(os.environ), output=log)
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


def answer_of(version: int) -> list[int]:
    return [token_of(version)] * ANSWER_TOKENS


def train_with_routes(directory: Path, server: WithRoutes) -> None:
    """Train as Atropos' trainer does: it loads its model itself, and attaches its parameters."""
    model = make_model("qwen3", 0)
    config = BridgeConfig(vllm_api_url=server.url, device="cpu", timeout_seconds=WAIT_S)
    with VLLMWeightBridge(config, store=directory / "routes") as bridge:
        bridge.attach_to_vllm_weights(dict(model.named_parameters()))
        for version in VERSIONS:
            set_weights(model, version)
            bridge.notify_update()
            assert (server.answer(), server.update_count()) == (answer_of(version), version)


def train_with_stock(directory: Path, server: Any) -> None:
    config = BridgeConfig(
        vllm_api_url=server.url,
        device="cpu",
        model_name=str(directory / "revealing-0"),
        timeout_seconds=WAIT_S,
    )
    with VLLMWeightBridge(config, store=directory / "stock") as bridge:
        model = bridge.get_trainable_model()
        for version in VERSIONS:
            set_weights(model, version)
            if version == VERSIONS[0]:
                bridge.broadcast_weights_to_inference()
                bridge.barrier()
            else:
                bridge.notify_update()
            assert server.answer() == answer_of(version)


@contextlib.contextmanager
def stock_server(directory: Path) -> Iterator[Any]:
    settings = {"dbuffer": {"store": str(directory / "stock")}}
    flags = (
        *BACKEND_FLAGS,
        *("--additional-config", json.dumps(settings)),
        *("--middleware", "dbuffer.integrations.vllm.FollowStore"),
    )
    checkpoint = directory / "revealing-0"
    server = Server(checkpoint, directory / "stock.log", *flags, port=free_port())
    try:
        yield server
    finally:
        server.kill()


def run(directory: Path) -> None:
    save_revealing(0, directory)
    with contextlib.closing(WithRoutes(directory)) as routes, stock_server(directory) as stock:
        # Neither is ready: the bridge waits for them.
        train_with_routes(directory, routes)
        train_with_stock(directory, stock)


if __name__ == "__main__":
    if sys.argv[2:]:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        judge(run)
