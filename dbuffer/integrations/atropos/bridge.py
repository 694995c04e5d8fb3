"""`VLLMWeightBridge`: brings a trainer's weights to inference servers after each update."""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack
from urllib.parse import urlsplit

import torch
from torch import distributed, nn

from dbuffer.errors import NotReadyError, OptionError, RankFailedError, WaitTimeoutError
from dbuffer.integrations.atropos.config import BridgeConfig
from dbuffer.integrations.atropos.mapping import (
    ParameterMapping,
    get_name_conversions,
    mapping_path,
    notify,
    wait_for_mapping,
)
from dbuffer.integrations.default_store import default_store
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.publish.publisher import SenderKeywords, SenderOptions
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.ranks.agreement import Agreement
from dbuffer.ranks.world import World
from dbuffer.runtime import options as checks
from dbuffer.runtime.messages import first_line, listed
from dbuffer.weights.conversion import as_checkpoint
from dbuffer.weights.named_tensors import clean_names, is_same_memory, module_tensors
from dbuffer.weights.sources import Describer

logger = logging.getLogger(__name__)

Sender: TypeAlias = WeightSender | ShardedWeightSender
Weights: TypeAlias = nn.Module | Mapping[str, torch.Tensor]


class VLLMWeightBridge:
    """Brings a trainer's weights to inference servers through a store.

    If ``world_size`` is above 1, every rank makes a bridge, and all ranks make the same calls.

    Args:
        config: see :class:`BridgeConfig`.
        store: the store's directory. Default in local mode (``num_inference_nodes=0``): a directory
            in shared memory. Otherwise: ``dbuffer-atropos`` in ``log_dir`` or ``LOGDIR``.
        rank_timeout_s: how long ranks wait for a missing or hung rank, in addition to the
            ``timeout_seconds`` of an update.
        **sender: fields of :class:`dbuffer.SenderOptions`. If you pass ``rename``, it replaces the
            names in the mapping file that Atropos' servers write.
    """

    def __init__(
        self,
        config: BridgeConfig,
        *,
        store: str | os.PathLike[str] | None = None,
        rank_timeout_s: float = 300.0,
        **sender: Unpack[SenderKeywords],
    ) -> None:
        self.config = config
        SenderOptions.parse(sender)
        self._sender_options = sender
        self._rank_timeout_s = checks.positive_seconds("rank_timeout_s", rank_timeout_s)
        self.store = _default_store(config) if store is None else checks.directory("store", store)
        self.device = torch.device(config.device)
        self.shared_state_dict: Mapping[str, torch.Tensor] = {}
        self.nccl_group: None = None
        self.gloo_group: None = None
        self._ranks = World()
        self._owns_group = False
        self._server: VllmServer | None = None
        self._mapping = ParameterMapping(mapping_path(config.directory))
        self._sender: Sender | None = None
        self._model: nn.Module | None = None
        self._update_count = 0
        self._version: int | None = None
        """Number of the newest version, or None before the first version. In local mode, also None
        as soon as the server has applied the newest version."""

    @property
    def param_mappings(self) -> dict[str, Any]:
        return self._mapping.entries

    @property
    def name_conversions(self) -> dict[str, list[str]]:
        return get_name_conversions(self.param_mappings)

    def initialize(self) -> None:
        """Open the store, and read the parameter mapping once its file exists.

        Raises:
            NotReadyError: (a ``RuntimeError``) the mapping was not written in time.
            OptionError: (a ``ValueError``) the mapping cannot be read or does not fit the attached
                tensors, or ``init_method`` is invalid.
            RankFailedError: (a ``RuntimeError``) the trainer's ranks did not connect in time.
        """
        if self._sender is not None:
            return
        try:
            self._join_ranks()
            if self.config.is_local_mode and self.config.trainer_rank == 0:
                self._server = VllmServer(self.config.vllm_api_url)
            with self._ranks.step("read the parameter mapping") as step:
                if self._ranks.rank == 0:
                    step.result = wait_for_mapping(self.config, self._server)
            self._mapping = ParameterMapping(self._mapping.path, step.results[0])
            if self._weights is not None:
                self._mapping.check(_named(self._weights))
            options = SenderKeywords(rename=self._mapping.names) | self._sender_options
            if self.config.world_size == 1:
                self._sender = WeightSender(self.store, **options)
            else:
                self._sender = ShardedWeightSender(
                    self.store, rank_timeout_s=self._rank_patience_s, **options
                )
        except BaseException:
            self.cleanup()
            raise
        logger.info("publishing into %s", self.store)

    def attach_to_vllm_weights(self, vllm_state_dict: Mapping[str, torch.Tensor]) -> None:
        """Publish the tensors of ``vllm_state_dict`` at each update.

        Call this method if the trainer loads its model itself. ``vllm_state_dict`` has the
        trainer's tensors by the trainer's names, for instance ``dict(model.named_parameters())``.

        Raises:
            InvalidWeightsError: a tensor cannot be published.
            OptionError: (a ``ValueError``) the parameter mapping does not fit the tensors.
        """
        if self._model is not None:
            raise OptionError(
                "this bridge publishes the model of get_trainable_model() already: call "
                "attach_to_vllm_weights() before get_trainable_model(), or do not call it"
            )
        Describer(sharded=self.config.world_size > 1).describe(vllm_state_dict)
        self._mapping.check(vllm_state_dict)
        self.shared_state_dict = vllm_state_dict

    def get_trainable_model(self) -> nn.Module:
        """Return the model ``config.model_name`` to train, which each update publishes.

        If :meth:`attach_to_vllm_weights` was called, the model's parameters have the values and
        dtypes of the attached tensors. Parameters on the tensors' device share the tensors' memory;
        parameters on another device are copies. All calls return the same model.

        Raises:
            OptionError: (a ``ValueError``) the parameter mapping or the attached tensors do not fit
                the model, or the device does not exist.
        """
        if self._model is None:
            self._require_sender()
            if self.device.type == "cuda" and not torch.cuda.is_available():
                raise OptionError(
                    f"invalid device {self.config.device!r} (Atropos' default): this host has no "
                    'GPU; use BridgeConfig(device="cpu")'
                )
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.config.model_name, dtype="auto")
            if self.shared_state_dict:
                _take_over(model, self.shared_state_dict)
            model = model.to(self.device).train()
            self._mapping.check(_named(model))
            self._model = model
        return self._model

    def notify_update(self) -> None:
        """Call :meth:`broadcast_weights_to_inference`, then :meth:`barrier`."""
        self.broadcast_weights_to_inference()
        self.barrier()

    def broadcast_weights_to_inference(self) -> None:
        """Publish the weights, without waiting for servers.

        Raises:
            NotReadyError: (a ``RuntimeError``) the bridge was not initialized, or has no weights.
        """
        sender, weights = self._require_sender(), self._weights
        if weights is None:
            raise NotReadyError(
                "this bridge has no weights to publish: train the model of get_trainable_model(), "
                "or pass yours to attach_to_vllm_weights(dict(model.named_parameters()))"
            )
        metadata = {"update_count": self._update_count + 1}
        publication = sender.send(self._permuted(weights), metadata=metadata)
        self._update_count += 1
        self._version = publication.version

    def barrier(self) -> None:
        """Wait until the engines of all inference nodes have applied the newest version.

        In local mode, rank 0 first notifies the server. A second call for the same version returns
        at once.

        Raises:
            WaitTimeoutError: some engine did not apply the version within ``timeout_seconds``.
            EngineUnreachableError: (local mode) the server does not answer.
            EngineUpdateError: (local mode) the server answers the notification with an error.
        """
        sender, version = self._require_sender(), self._version
        if version is None:
            return
        deadline = time.monotonic() + self.config.timeout_seconds
        if self.config.is_local_mode:
            with self._ranks.step("notify the server"):
                if self._server is not None:
                    notification = {
                        "update_count": self._update_count,
                        "trainer_rank": self.config.trainer_rank,
                        "timestamp": time.time(),
                    }
                    notify(self._server, notification, self.config.timeout_seconds)
        try:
            sender.wait_applied(
                version,
                receivers=self.config.num_inference_nodes or 1,
                timeout_s=max(0.0, deadline - time.monotonic()),
            )
        except WaitTimeoutError as error:
            where = self.config.vllm_api_url if self.config.is_local_mode else "each node"
            raise WaitTimeoutError(
                f"{error}. The server at {where} must follow {self.store} by itself, with the "
                "middleware dbuffer.integrations.vllm.FollowStore"
            ) from None
        if self.config.is_local_mode:
            self._version = None

    def cleanup(self) -> None:
        for part in (self._server, self._sender, self._ranks):
            if part is not None:
                part.close()
        self._server, self._sender, self._ranks = None, None, World()
        if self._owns_group:
            distributed.destroy_process_group()
            self._owns_group = False

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cleanup()

    def _require_sender(self) -> Sender:
        if self._sender is None:
            raise NotReadyError("this bridge is not open: call initialize()")
        return self._sender

    # Process group of the trainer's ranks

    @property
    def _rank_patience_s(self) -> float:
        """Seconds that a rank waits for other ranks, including rank 0's wait for servers."""
        return self.config.timeout_seconds + self._rank_timeout_s

    def _join_ranks(self) -> None:
        rank, size = self.config.trainer_rank, self.config.world_size
        if size == 1:
            return
        if not distributed.is_initialized():
            where = self.config.init_method
            timeout = datetime.timedelta(seconds=self._rank_patience_s)
            try:
                distributed.init_process_group(
                    "gloo", init_method=where, rank=rank, world_size=size, timeout=timeout
                )
            except ValueError as error:
                raise OptionError(f"invalid init_method {where!r}: {first_line(error)}") from error
            except RuntimeError as error:
                raise RankFailedError(
                    f"rank {rank} of {size} could not connect to the other ranks at {where} within "
                    f"{self._rank_patience_s:g} s: {first_line(error)}; check that every rank runs "
                    "with the same init_method and world_size"
                ) from error
            self._owns_group = True
        self._ranks = Agreement(None, timeout_s=self._rank_patience_s)

    # Weights to publish

    @property
    def _weights(self) -> Weights | None:
        return self._model if self._model is not None else self.shared_state_dict or None

    def _permuted(self, weights: Weights) -> Weights:
        if not self._mapping.permuted:
            return weights
        from transformers import AutoConfig

        shape = AutoConfig.from_pretrained(self.config.model_name).get_text_config()
        heads = shape.num_attention_heads, shape.num_key_value_heads
        return self._mapping.permute(_named(weights), *heads)


def _default_store(config: BridgeConfig) -> Path:
    if config.is_local_mode:
        return default_store("atropos", urlsplit(config.vllm_api_url).port or 80)
    if config.directory is None:
        raise OptionError(
            "several nodes need a directory that all of them see: set log_dir (or LOGDIR), or pass "
            "store= to the bridge"
        )
    return checks.directory("log_dir", config.directory) / "dbuffer-atropos"


def _named(weights: Weights) -> Mapping[str, torch.Tensor]:
    if not isinstance(weights, nn.Module):
        return weights
    return as_checkpoint(weights, module_tensors(weights))


def _take_over(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters of a model, without a copy or cast.

    For parameters that are tied together, ``tensors`` needs only one of their names. A buffer that
    is missing in ``tensors`` keeps its value.
    """
    attached = dict(zip(clean_names(tensors), tensors.values(), strict=True))
    try:
        missing, unknown = model.load_state_dict(attached, strict=False, assign=True)
    except RuntimeError as error:  # shapes differ
        raise OptionError(
            f"the attached tensors do not fit {type(model).__name__}: {error}"
        ) from None
    model.tie_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(parameters[name]) for name in attached.keys() & parameters.keys()}
    problems = [f"{name} is not one of the model's tensors" for name in unknown]
    problems += [
        f"{name} is missing"
        for name in parameters.keys() & set(missing)
        if id(parameters[name]) not in filled
    ]
    problems += [
        f"{name} is tied to another tensor of the model, but has other values"
        for name, tensor in attached.items()
        if (parameter := parameters.get(name, tensor)) is not tensor
        if not (is_same_memory(parameter, tensor) or parameter.equal(tensor))
    ]
    if problems:
        raise OptionError(
            f"the attached tensors do not match {type(model).__name__}, {len(problems)} "
            f"difference(s): {listed(problems, '; ')}"
        )


def create_bridge_from_training_config(config: Any) -> VLLMWeightBridge:
    """Return an initialized bridge for Atropos' ``TrainingConfig`` or an object like it."""
    bridge = VLLMWeightBridge(BridgeConfig.from_training_config(config))
    bridge.initialize()
    return bridge
