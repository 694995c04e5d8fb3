"""Program of `test_atropos.py`: training through a bridge, with a server that has Atropos' routes.

The model reveals its version: an answer's tokens say from which weights each of them came.

Atropos' own server cannot be started here: that of atroposlib 0.4.0 imports modules of vLLM
(`vllm.entrypoints.launcher`) that 0.32 does not have. So its routes are served by a server of ours,
with the requests and replies that its source has; see :func:`serve`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from dbuffer.integrations.atropos import BridgeConfig, VLLMWeightBridge
from tests.support.engines import preforked
from tests.support.engines.async_engines import start_async_llm
from tests.support.engines.tiny_models import make_model, revealing_weights, save_revealing
from tests.support.engines.vllm_engines import judge
from tests.support.engines.vllm_servers import ANSWER_TOKENS, WAIT_S, EngineServer, tokens_of
from tests.support.ports import free_port

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
        return JSONResponse({"token_ids": [list(one.token_ids) for one in last.outputs]})

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
        app.state.engine_client = start_async_llm(
            directory / "revealing-0",
            additional_config={"dbuffer": {"store": str(directory / "store")}},
        )
        try:
            await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()
        finally:
            app.state.engine_client.shutdown()

    asyncio.run(main())


class WithRoutes(EngineServer):
    def __init__(self, directory: Path) -> None:
        port, log = free_port(), directory / "server.log"
        command = [__file__, str(directory), str(port)]
        super().__init__(preforked.start(command, env=dict(os.environ), output=log), log, port, {})

    def answer(self) -> list[int]:
        question = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": ANSWER_TOKENS}
        response = self.client.post("/generate", json=question | {"temperature": 0})
        assert response.status_code == 200, response.text
        (tokens,) = response.json()["token_ids"]
        return list(tokens)

    def update_count(self) -> int:
        return int(self.client.get("/bridge/info").json()["update_count"])


def run(directory: Path) -> None:
    """Train as Atropos' trainer does: it loads its model itself, and attaches its parameters.

    The server is not ready at first: the bridge waits for it.
    """
    save_revealing(0, directory)
    model = make_model("qwen3", 0)
    server = WithRoutes(directory)
    config = BridgeConfig(vllm_api_url=server.url, device="cpu", timeout_seconds=WAIT_S)
    with VLLMWeightBridge(config, store=directory / "store") as bridge:
        bridge.attach_to_vllm_weights(dict(model.named_parameters()))
        for version in VERSIONS:
            model.load_state_dict(revealing_weights(version), strict=False)
            bridge.notify_update()
            assert (server.answer(), server.update_count()) == (tokens_of(version), version)
    server.kill()


if __name__ == "__main__":
    if sys.argv[2:]:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        judge(run)
