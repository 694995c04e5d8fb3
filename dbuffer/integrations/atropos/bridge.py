"""`VLLMWeightBridge`: from a trainer's steps to the weights that inference servers answer with."""

from __future__ import annotations

import datetime
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import distributed, nn

from dbuffer.errors import (
    AcknowledgementTimeoutError,
    ClosedError,
    DBufferError,
    OptionError,
    ResidencyError,
)
from dbuffer.integrations.atropos.config import BridgeConfig
from dbuffer.integrations.atropos.mapping import ParameterMapping
from dbuffer.integrations.atropos.server import BridgeServer
from dbuffer.integrations.atropos.slurm import inference_nodes
from dbuffer.names import NameMap
from dbuffer.resident import ResidentModel
from dbuffer.sender import WeightSender
from dbuffer.sharded import ShardedWeightSender
from dbuffer.sources import Describer, module_tensors

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a store there belongs to one user, and is checked
STORE_NAME = "dbuffer-atropos"

_RANKS_LAG_S = 60.0
"""Ranks wait for one that waits for the servers, and for so long in addition."""

Publisher: TypeAlias = WeightSender | ShardedWeightSender | ResidentModel


def default_store(config: BridgeConfig) -> Path:
    """Where the store is if nobody says.

    Local mode: in shared memory, because nobody else need see it, and there a model can live in it;
    with the user, the SLURM job if any, and the server's port in its name, so that a trainer that
    starts again finds it. Several nodes: in ``log_dir``, which all of them see.

    Raises:
        OptionError: (a ``ValueError``) several nodes, and no ``log_dir``.
    """
    if config.is_local_mode:
        directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        job = os.environ.get("SLURM_JOB_ID")
        url = urlsplit(config.vllm_api_url)
        parts = [STORE_NAME, str(os.getuid()), *([f"job{job}"] if job else []), f"{url.port or 80}"]
        return directory / "-".join(parts)
    if not config.log_dir:
        raise OptionError(
            "several nodes need a directory that all of them see: set log_dir (or LOGDIR), or give "
            "the bridge a store"
        )
    return Path(config.log_dir) / STORE_NAME


class VLLMWeightBridge:
    """Brings a trainer's weights to inference servers through a store.

    In place of Atropos' class of this name::

        bridge = VLLMWeightBridge(config)
        bridge.initialize()
        model = bridge.get_trainable_model()
        ...
        optimizer.step()
        bridge.notify_update()  # the server answers with the new weights from here on

    With a ``world_size`` above 1, every rank makes a bridge, and makes all its calls.

    Args:
        config: see :class:`BridgeConfig`.
        store: the store's directory. Default: see :func:`default_store`.
    """

    def __init__(
        self, config: BridgeConfig, *, store: str | os.PathLike[str] | None = None
    ) -> None:
        self.config = config
        self.store = Path(store).absolute() if store is not None else default_store(config)
        """The store's directory; what servers that follow by themselves are to be given."""
        self.inference_nodes: list[str] = []
        """With several nodes: those whose engines are waited for."""
        self._publisher: Publisher | None = None
        self._server: BridgeServer | None = None
        self._mapping: ParameterMapping | None = None
        self._weights: nn.Module | Mapping[str, torch.Tensor] | None = None
        self._made: nn.Module | None = None
        self._owns_group = False
        self._update_count = 0
        self._version: int | None = None

    def initialize(self) -> None:
        """Open the store, and read the parameter mapping, if there is one. The servers may be away.

        Raises:
            OptionError: (a ``ValueError``) too few nodes, or a mapping that cannot be read.
            WriterActiveError, StoreInsecureError, StoreAccessError: see `WeightSender`.
        """
        if self._publisher is not None:
            return
        if not self.config.is_local_mode:
            self.inference_nodes = inference_nodes(self.config.num_inference_nodes)
        self._mapping = ParameterMapping.find(self.config.log_dir)
        try:
            self._join_ranks()
            self._publisher = self._open_sender()
            if self.config.is_local_mode and self.config.trainer_rank == 0:
                self._server = BridgeServer(self.config.vllm_api_url, self.store)
        except BaseException:
            self.cleanup()
            raise
        logger.info("publishing into %s", self.store)

    def attach_to_vllm_weights(self, vllm_state_dict: Mapping[str, torch.Tensor]) -> None:
        """Publish these tensors from now on; for a trainer that has loaded its model itself.

        Atropos' trainer gives its own ``dict(model.named_parameters())``, and so does this take the
        trainer's tensors, under the trainer's names. They are read at each update: a server sees
        what is written into them after :meth:`notify_update`, not before. No memory is shared with
        an engine, on a GPU or elsewhere.

        Raises:
            InvalidWeightsError: something of it cannot be published.
            OptionError: (a ``ValueError``) the parameter mapping is not for them.
        """
        if self._made is not None:
            raise OptionError("this bridge publishes the model of get_trainable_model() already")
        Describer(sharded=self.config.world_size > 1).describe(vllm_state_dict)
        self._check_mapping(vllm_state_dict)
        self._weights = vllm_state_dict

    def get_trainable_model(self) -> nn.Module:
        """The model ``config.model_name``, to be trained; each update publishes it as it is then.

        On the CPU, with one process, and a store on a local mount, its parameters live in the
        store, so that publishing copies nothing (see `ResidentModel`). Elsewhere it is an ordinary
        model, and the reason is logged.

        Returns:
            The same one each time.

        Raises:
            ClosedError: the bridge was not initialised.
            OptionError: (a ``ValueError``) the parameter mapping is not for it.
        """
        if self._made is None:
            self._opened()
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.config.model_name, dtype="auto")
            self._made = self._weights = self._settle(model.to(self.config.device).train())
        return self._made

    def notify_update(self) -> None:
        """Publish the weights, and return when the server answers with them.

        With several nodes, when the engines of all inference nodes do.

        Raises:
            ClosedError: the bridge was not initialised, or has nothing to publish.
            EngineUnreachableError, EngineUpdateError, VersionTimeoutError,
                AcknowledgementTimeoutError: a server does not serve them within
                ``timeout_seconds``, or cannot; the message says why. They are published.
            DBufferError: they could not be published; see `WeightSender.send`.
        """
        version = self._publish()
        if not self.config.is_local_mode:
            self.barrier()
            return

        def bring() -> None:
            if self._server is not None:
                notification = {
                    "update_count": self._update_count,
                    "trainer_rank": self.config.trainer_rank,
                    "timestamp": time.time(),
                }
                self._server.bring_to(version, notification, self.config.timeout_seconds)

        self._on_first_rank(bring)

    def broadcast_weights_to_inference(self) -> None:
        """Publish the weights, and do not wait for anybody; see :meth:`barrier`.

        Raises:
            ClosedError, DBufferError: as :meth:`notify_update`.
        """
        self._publish()

    def barrier(self) -> None:
        """Wait until the engines of all inference nodes have applied what was published last.

        In local mode, until the one engine has.

        Raises:
            AcknowledgementTimeoutError: they have not, within ``timeout_seconds``.
            ClosedError: the bridge was not initialised.
        """
        publisher = self._opened()
        if self._version is None:
            return
        engines = max(1, self.config.num_inference_nodes)
        try:
            publisher.wait_applied(
                self._version, receivers=engines, timeout_s=self.config.timeout_seconds
            )
        except AcknowledgementTimeoutError as error:
            nodes = ", ".join(self.inference_nodes) or self.config.vllm_api_url
            raise AcknowledgementTimeoutError(f"{error}; engines are expected on {nodes}") from None

    def cleanup(self) -> None:
        """Give the store and the server up. The last version stays; the model keeps its values."""
        server, self._server = self._server, None
        publisher, self._publisher = self._publisher, None
        if server is not None:
            server.close()
        if publisher is not None:
            publisher.close()
        if self._owns_group:
            distributed.destroy_process_group()
            self._owns_group = False

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise ClosedError("this bridge is not open: call initialize()")
        return self._publisher

    def _join_ranks(self) -> None:
        if self.config.world_size > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                "gloo",
                init_method=self.config.init_method,
                rank=self.config.trainer_rank,
                world_size=self.config.world_size,
                timeout=datetime.timedelta(seconds=self.config.timeout_seconds + _RANKS_LAG_S),
            )
            self._owns_group = True

    def _open_sender(self) -> WeightSender | ShardedWeightSender:
        if self.config.world_size == 1:
            return WeightSender(self.store, rename=self._rename)
        wait_s = self.config.timeout_seconds + _RANKS_LAG_S
        return ShardedWeightSender(self.store, rename=self._rename, rank_timeout_s=wait_s)

    @property
    def _rename(self) -> NameMap | None:
        return None if self._mapping is None else self._mapping.names

    def _check_mapping(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._mapping is not None:
            self._mapping.check(tensors)

    def _settle(self, model: nn.Module) -> nn.Module:
        """Let a model live in the store, if it can."""
        self._check_mapping(module_tensors(model))
        if reason := self._reason_not_to_reside():
            logger.info("an ordinary model, copied at each update: %s", reason)
            return model
        self._opened().close()
        try:
            self._publisher = ResidentModel(model, self.store, rename=self._rename)
        except ResidencyError as error:
            logger.info("an ordinary model, copied at each update: %s", error)
            self._publisher = self._open_sender()
        return model

    def _reason_not_to_reside(self) -> str | None:
        if self.config.world_size > 1:
            return f"the trainer has {self.config.world_size} processes"
        if self._mapping is not None and self._mapping.permuted:
            return f"{self._mapping.path} wants tensors in another layout than the trainer's"
        return None

    def _publish(self) -> int:
        publisher = self._opened()
        if self._weights is None:
            raise ClosedError(
                "this bridge has nothing to publish: train the model of get_trainable_model(), or "
                "give your own with attach_to_vllm_weights(dict(model.named_parameters()))"
            )
        metadata = {"update_count": self._update_count + 1}
        if isinstance(publisher, ResidentModel):
            publication = publisher.publish(metadata=metadata)
        else:
            publication = publisher.send(self._laid_out(self._weights), metadata=metadata)
        self._update_count += 1
        self._version = publication.version
        return publication.version

    def _laid_out(
        self, weights: nn.Module | Mapping[str, torch.Tensor]
    ) -> nn.Module | Mapping[str, torch.Tensor]:
        """The weights as the servers want them."""
        if self._mapping is None or not self._mapping.permuted:
            return weights
        from transformers import AutoConfig

        shape = AutoConfig.from_pretrained(self.config.model_name).get_text_config()
        tensors = module_tensors(weights) if isinstance(weights, nn.Module) else weights
        return self._mapping.permute(tensors, shape.num_attention_heads, shape.num_key_value_heads)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; what it raises is raised on all."""
        outcome: list[DBufferError | None] = [None]
        if self.config.trainer_rank == 0:
            try:
                action()
            except DBufferError as error:
                outcome = [error]
        if self.config.world_size > 1:
            distributed.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise outcome[0]


def create_bridge_from_training_config(config: Any) -> VLLMWeightBridge:
    """An initialised bridge, from Atropos' ``TrainingConfig`` or what has its attributes.

    Raises:
        DBufferError: see :class:`BridgeConfig` and :meth:`VLLMWeightBridge.initialize`.
    """
    bridge = VLLMWeightBridge(BridgeConfig.from_training_config(config))
    bridge.initialize()
    return bridge
