"""``backend="dbuffer"``: a weight transfer backend of vLLM that reads versions from a store.

vLLM 0.23 and 0.24 pass the backend a function that loads weights; there the backend is a
`CallbackEngine`, which works with one rank only, and does not check whether published weights fit
the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from msgspec import Meta
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import NO_STORE_YET, EngineOptions, UpdateRequest
from dbuffer.errors import EngineUpdateError, OptionError, UnsupportedError, VersionError
from dbuffer.format.lineage import Count, VersionId
from dbuffer.integrations.vllm.config import options_of, require_droppable
from dbuffer.integrations.vllm.layers import draft_of
from dbuffer.integrations.vllm.rank import WorkerRank, raising_once
from dbuffer.integrations.vllm.sparse_patches import (
    trainer_send_sparse_weights,
    trainer_send_weights,
)
from dbuffer.publish.patches import SparsePatch
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks

_MAX_INDEX = torch.iinfo(torch.int32).max

_COUNTS = "the number of patches of each tensor"
_ARGUMENTS = ("config", "vllm_config", "device", "model")


@dataclass(frozen=True, kw_only=True)
class DBufferUpdateInfo(UpdateRequest):
    """Argument of vLLM's ``update_weights``: ``{}`` for the newest version, or ``{"version": 7}``.

    A sparse update also has two fields of vLLM: the names of the patched tensors, and the number of
    patched elements in each tensor. Both fields are checked as in vLLM, but not used.
    """

    names: Annotated[list[str], Meta(description="the names of tensors")] | None = None
    num_updates_list: Annotated[list[Count], Meta(min_length=1, description=_COUNTS)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names, counts = self.names, self.num_updates_list
        if self.update_kind == "dense":
            for name, value in (("names", names), ("num_updates_list", counts)):
                if value is not None:
                    checks.refuse(name, value, "it with update_kind='sparse_flat' only")
        elif counts is None:
            checks.refuse("num_updates_list", counts, _COUNTS)
        elif names is not None and len(names) != len(counts):
            checks.refuse("names", names, f"the names of {len(counts)} tensors")


class CallbackEngine:
    """Reads versions from a store, and passes each tensor to the caller's loading function."""

    update_info_cls = DBufferUpdateInfo
    parse_init_info = staticmethod(EngineOptions.parse)
    parse_update_info = staticmethod(DBufferUpdateInfo.parse)
    trainer_send_weights = staticmethod(trainer_send_weights)
    trainer_send_sparse_weights = staticmethod(trainer_send_sparse_weights)

    def __init__(self, config: Any, parallel_config: Any, model: Any) -> None:
        if parallel_config.world_size != 1:
            raise UnsupportedError(
                f"this engine has {parallel_config.world_size} ranks, and a backend made with the "
                "arguments of vLLM before 0.25 works with one rank only"
            )
        self.config, self.parallel_config, self.model = config, parallel_config, model
        self._options: EngineOptions | None = None
        self._receiver: WeightReceiver | None = None
        self._loaded = 0

    def init_transfer_engine(self, init_info: EngineOptions) -> None:
        if init_info.local_store is not None or init_info.draft_store is not None:
            raise UnsupportedError(
                "this engine was made with the arguments of vLLM before 0.25, and cannot keep a "
                "local_store or follow a draft_store: use a later vLLM; or run `dbuffer mirror`, "
                "and give its copy as the store"
            )
        self.shutdown()
        self._options = init_info
        self._receiver = init_info.make_receiver(init_info.engine_id)
        self._receiver.record.set(only_version=init_info.version)

    def receive_weights(
        self, update_info: DBufferUpdateInfo, load_weights: Callable[..., Any] | None = None
    ) -> None:
        """Call ``load_weights`` for each tensor of a version, under each name of a tied tensor.

        Raises:
            SnapshotEvictedError: the sender overwrote the version during the call. Do not use the
                tensors that were loaded.
        """
        if load_weights is None:
            raise OptionError("receive_weights needs the function load_weights as an argument")
        with self._opened(update_info) as tensors:
            for name, tensor in tensors:
                load_weights([(name, tensor.clone())])

    def receive_sparse_weights(
        self, update_info: DBufferUpdateInfo, apply_patches: Callable[..., Any]
    ) -> None:
        with self._opened(update_info) as tensors:
            for name, tensor in tensors:
                # torch.arange would wrap to negative positions without an error.
                if tensor.numel() > _MAX_INDEX:
                    raise EngineUpdateError(
                        f"{name} has {tensor.numel()} elements, and patches of vLLM reach only "
                        f"{_MAX_INDEX}: send a dense update"
                    )
                indices = torch.arange(tensor.numel(), dtype=torch.int32)
                values, shape = tensor.flatten().clone(), tuple(tensor.shape)
                apply_patches([SparsePatch(name, indices, values, shape)])

    @contextmanager
    def _opened(self, info: DBufferUpdateInfo) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        receiver, options = self._receiver, self._options
        if receiver is None or options is None:
            raise UnsupportedError(NO_STORE_YET)
        request = options.admit(info)
        goal, number = request.goal, request.version or request.at_least
        newer_than, wait_s = (number - 1, options.timeout_s) if number else (None, 0.0)
        exactly = goal if request.version else None
        with receiver.open(newer_than, wait_s, version=exactly) as snapshot:
            version = snapshot.lineage
            if isinstance(goal, VersionId) and not version.reaches(goal):
                raise VersionError(f"version {goal} is not in {receiver.store}")
            if version.id.number < self._loaded:
                raise VersionError(
                    f"version {version.id.number} is not loaded, because the engine has version "
                    f"{self._loaded}, and versions never go back"
                )
            layout = snapshot.layout.target
            tensors = snapshot.tensors.part(layout)
            aliases = ((alias, tensors[name]) for alias, name in layout.aliases.items())
            yield itertools.chain(tensors.items(), aliases)
            self._loaded = version.id.number

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._loaded = None, 0


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Worker's half of vLLM's weight transfer: passes vLLM's calls to a :class:`RankEndpoint`.

    A worker follows its store after ``init_transfer_engine``, or from its start if the engine's
    ``additional_config["dbuffer"]`` names a store. ``update_weights`` replaces all weights in one
    call, so the engine may serve requests between ``start_weight_update`` and
    ``finish_weight_update``.

    If the constructor gets the arguments of vLLM 0.23 and 0.24 (``config, parallel_config,
    model``), it returns a :class:`.CallbackEngine`.
    """

    init_info_cls = EngineOptions
    update_info_cls = DBufferUpdateInfo

    # vLLM before 0.26 looks for the functions of the trainer in this class.
    trainer_send_weights = staticmethod(trainer_send_weights)
    trainer_send_sparse_weights = staticmethod(trainer_send_sparse_weights)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "parallel_config" in kwargs or len(args) + len(kwargs) < len(_ARGUMENTS):
            return CallbackEngine(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._endpoint = RankEndpoint.of(model)
        self._draft = draft_of()
        self.supports_draft_weight_update = self._draft is not None
        options = options_of(vllm_config.additional_config)
        if options is not None:
            self._begin(options)
            self._endpoint.following().catch_up()

    def _begin(self, options: EngineOptions) -> None:
        require_droppable(self.vllm_config, options)
        make_rank = partial(WorkerRank, self.vllm_config, self.model, self.device, self._draft)
        self._endpoint.begin(make_rank, options)

    def parse_init_info(self, init_dict: dict[str, Any]) -> EngineOptions | None:
        with raising_once(self.vllm_config):
            return EngineOptions.parse(init_dict)
        return None

    def init_transfer_engine(self, init_info: EngineOptions | None) -> None:
        if init_info is not None:
            with raising_once(self.vllm_config):
                self._begin(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: ``update_weights`` performs the complete update."""

    def finish_weight_update(self) -> None:
        """Do nothing: ``update_weights`` has replaced the weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to a version; see :meth:`RankReceiver.update`.

        If this rank's request is invalid, the rank still takes part in the update and reports the
        error there. Otherwise the other ranks would wait for this rank.
        """
        request: UpdateRequest | OptionError
        try:
            request = DBufferUpdateInfo.parse(update_info)
        except OptionError as error:
            request = error
        self._update(request)

    # vLLM before 0.25 passes a function that loads weights or applies patches. The next two methods
    # accept such a function but ignore it, because they load weights through vLLM's reload.

    def receive_weights(
        self, update_info: DBufferUpdateInfo, _load_weights: Callable[..., Any] | None = None
    ) -> None:
        self._update(update_info)

    def receive_sparse_weights(
        self, update_info: DBufferUpdateInfo, _apply_patches: Callable[..., Any]
    ) -> None:
        self._update(update_info)

    def _update(self, request: UpdateRequest | OptionError) -> None:
        with raising_once(self.vllm_config):
            self._endpoint.following().update(request)

    def shutdown(self) -> None:
        self._endpoint.end()
