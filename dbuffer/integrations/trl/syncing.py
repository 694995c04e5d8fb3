"""`WeightSync`: what one trainer's generation calls to bring the weights to vLLM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import DistributedType, is_peft_model

from dbuffer.errors import AcknowledgementTimeoutError
from dbuffer.integrations.engine.background import InBackground
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import DEFAULT_RANK_TIMEOUT_S, ShardedWeightSender
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options as checks
from dbuffer.weights.sources import Weights


@dataclass(frozen=True, slots=True)
class WeightSyncOptions:
    """As `over_store` describes them."""

    store: Path
    receivers: int | str | Collection[str]
    timeout_s: float
    delta: bool
    dtype: torch.dtype | None

    @classmethod
    def checked(
        cls,
        store: str | os.PathLike[str],
        *,
        receivers: int | str | Collection[str],
        timeout_s: float,
        delta: bool,
        dtype: torch.dtype | None,
    ) -> Self:
        """Options of which each may be what it is.

        Raises:
            OptionError: (a ``ValueError``) one may not.
        """
        place = checks.directory("store", store).absolute()
        checks.names("receivers", receivers)
        checks.positive_seconds("timeout_s", timeout_s)
        return cls(place, receivers, timeout_s, checks.flag("delta", delta), dtype)


class WeightSync:
    """Publishes a trainer's weights, and waits until vLLM has them. Made by :func:`over_store`.

    Every rank has one, and makes every call. A model that is whole is published from where it
    lies. Of a sharded one each rank writes what it holds, and nothing is gathered (of ZeRO-3: one
    tensor at a time). A peft model is published as the model that it acts as, and stays as it is.
    """

    def __init__(self, trainer: Any, options: WeightSyncOptions) -> None:
        self._trainer = trainer
        self._generation = trainer.vllm_generation
        self._options = options
        self._opened = contextlib.ExitStack()
        self._follower: Any = None
        self._agreement: Agreement | None = None
        self.version: int | None = None
        """The last one that vLLM has."""
        self.sender = self._open_sender()
        """What publishes: for `sender_metrics`, among others."""

    def sync_weights(self) -> None:
        """Publish the trainer's weights, and return when vLLM generates with them.

        TRL calls it before it generates, if it has trained since. Call it yourself after the last
        step, if the servers are to have what came of that too.

        Raises:
            InvalidWeightsError, TrainerUnsupportedError: the weights cannot be published: adapters
                of a sharded model, or a way to shard that is not known here.
            StoreFullError, StoreAccessError, WriterSupersededError: as `WeightSender.send`.
            AcknowledgementTimeoutError: (server mode) too few engines have the version in time.
            ReceiverFailedError: (server mode) one of those named cannot apply it, or has ended.
            EngineUpdateError, VersionTimeoutError: (colocate mode) the engine could not switch.
            EngineBrokenError: (colocate mode) its weights are half loaded.
            RankFailedError: a rank was lost.
        """
        self._wake()
        metadata = {"step": self._trainer.state.global_step}
        version = self.sender.send(self._weights(), metadata=metadata).version
        if self._generation.mode == "server":
            self._wait_for_servers(version)
        elif self._agreement is not None:
            self._agreement.each("switch its engine", lambda: self._switch(version))
        else:
            self._switch(version)
        self.version = version

    def close(self) -> None:
        """Give the store up. The last version stays published, and vLLM keeps its weights."""
        self._opened.close()

    def _open_sender(self) -> WeightSender | ShardedWeightSender:
        store, delta, dtype = self._options.store, self._options.delta, self._options.dtype
        if self._generation.accelerator.distributed_type == DistributedType.NO:
            return self._opened.enter_context(WeightSender(store, delta=delta, dtype=dtype))
        # Ranks wait for one that waits for engines.
        timeout_s = DEFAULT_RANK_TIMEOUT_S + self._options.timeout_s
        self._agreement = Agreement(None, timeout_s=timeout_s)
        self._opened.callback(self._agreement.close)
        sender = ShardedWeightSender(store, delta=delta, dtype=dtype, rank_timeout_s=timeout_s)
        return self._opened.enter_context(sender)

    def _weights(self) -> Weights:
        # Not the trainer's own, which may be wrapped since training began.
        accelerator = self._generation.accelerator
        model = accelerator.unwrap_model(self._generation.model, keep_torch_compile=False)
        if not is_peft_model(model):
            return model
        from dbuffer.integrations.peft import merged_weights

        return merged_weights(model)

    def _wait_for_servers(self, version: int) -> None:
        wanted, timeout_s = self._options.receivers, self._options.timeout_s
        try:
            self.sender.wait_applied(version, receivers=wanted, timeout_s=timeout_s)
        except AcknowledgementTimeoutError as error:
            raise AcknowledgementTimeoutError(
                f"{error}; TRL does not generate with older weights: let its server follow this "
                "very directory (--middleware dbuffer.integrations.vllm.FollowStore), and look at "
                "the server's log"
            ) from error

    def _wake(self) -> None:
        """As TRL does before it loads weights: memory of an engine that sleeps is not there."""
        generation = self._generation
        if generation.mode == "colocate" and generation.enable_sleep_mode:
            from trl.generation.vllm_generation import empty_cache

            empty_cache()
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False  # noqa: SLF001 - else it syncs once more

    def _switch(self, version: int) -> None:
        if self._follower is None:  # and not sooner: the engine may have slept until now
            from dbuffer.integrations.vllm import follow

            store, timeout_s = self._options.store, self._options.timeout_s
            follower = follow(self._generation.llm, store, timeout_s=timeout_s)
            assert not isinstance(follower, InBackground)  # noqa: S101 - it is an LLM
            self._opened.callback(follower.close)
            # Else its ranks would look at a store that may be gone.
            self._opened.callback(follower.stop_workers)
            self._follower = follower
        self._follower.sync(at_least=version)
