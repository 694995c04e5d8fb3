"""A KV connector for a real server, whose cache a switch can reset."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ResettingConnector(ExampleConnector):
    def reset_cache(self) -> bool:
        path = Path(self._storage_path)
        shutil.rmtree(path)
        path.mkdir()
        return True
