"""A small HTTP server that answers `GET /ready` as a vLLM server with `FollowStore` does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dbuffer.format.lineage import VersionId


@contextlib.contextmanager
def answering(answer: bytes | Callable[[], bytes], status: int = 200) -> Iterator[str]:
    """Answer each request for `/ready` by the same; yield the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else answer())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def ready(*replicas: dict[str, Any], reason: str | None = None) -> bytes:
    """Return the answer about replicas with these weights."""
    body = {"ready": reason is None, "reason": reason, "replicas": replicas}
    return json.dumps(body).encode()


def weights_of(version: VersionId, *, is_attested: bool) -> dict[str, Any]:
    """Return the weights of a replica that serves a version."""
    from dbuffer.engine.contract import WeightLabel

    attested_at = 1e9 if is_attested else None
    return WeightLabel(str(version.number), version.run, attested_at=attested_at).as_json()
