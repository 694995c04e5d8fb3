"""A checkpoint engine for NeMo-RL over a dbuffer store: copy it into your package.

A refit's version has the first policy rank's name and the refit's number in its metadata, and a
rollout worker loads only this version. Tested only with NeMo-RL's base class, with two ranks on
each side. In NeMo-RL's configuration::

    policy.generation.refit_transport: "my_package.refit:StoreEngine"
    refit_cfg: {"my_package.refit:StoreEngine": {store: /mnt/shared/policy}}
"""

# ruff: noqa: ARG002 - the arguments are NeMo-RL's.

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

import dbuffer


class StoreEngine(CheckpointEngine):  # type: ignore[misc]
    """Publish each refit in a store, and load exactly that refit's version."""

    sender: dbuffer.WeightSender | None = None
    receiver: dbuffer.WeightReceiver | None = None

    def __init__(self, bucket_size: int, store: str, **settings: Any) -> None:
        self.store = store  # NeMo-RL passes more settings

    def prepare(self) -> dict[str, str]:
        """Return a name for this rank. NeMo-RL puts the names of policy ranks first."""
        return {"name": secrets.token_hex(8)}

    def init_policy_process_group(
        self, *, worker_rank: int, metadata: list[dict[str, Any]], **sizes: Any
    ) -> None:
        self.name, self.number = metadata[0]["name"], 0
        if worker_rank == 0 and self.sender is None:
            self.sender = dbuffer.WeightSender(self.store)

    def init_rollout_process_group(self, *, metadata: list[dict[str, Any]], **sizes: Any) -> None:
        self.name, self.number = metadata[0]["name"], 0
        self.receiver = self.receiver or dbuffer.WeightReceiver(self.store)

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.number += 1
        try:
            if self.sender is not None:
                self.sender.send(weights, metadata={"refit": [self.name, self.number]})
        finally:
            for _ in weights:  # all ranks gather each tensor together, even after an error
                pass

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        self.number += 1
        assert self.receiver is not None
        seen: int | None = None
        refit = None
        while seen is None or refit != [self.name, self.number]:
            with self.receiver.open(seen, timeout_s=600, acknowledge=False) as snapshot:
                seen, refit = snapshot.version, snapshot.metadata.get("refit")
                if refit == [self.name, self.number]:
                    yield list(snapshot.tensors.items())
        self.receiver.acknowledge(seen)
