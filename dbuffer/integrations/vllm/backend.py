"""``backend="dbuffer"``: vLLM's weight transfer, out of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.errors import OptionError
from dbuffer.integrations.vllm.callback_loading import (
    ApplyPatches,
    CallbackLoader,
    LoadWeights,
)
from dbuffer.integrations.vllm.config import options_of
from dbuffer.integrations.vllm.rank import WorkerRank, raising_once
from dbuffer.integrations.vllm.sparse_patches import (
    trainer_send_sparse_weights,
    trainer_send_weights,
)
from dbuffer.runtime import options as checks


class DBufferInitInfo(EngineOptions, WeightTransferInitInfo):  # type: ignore[misc]
    """``init_info``: ``{"store": directory}``, and maybe more; see :class:`EngineOptions`."""


class DBufferUpdateInfo(UpdateRequest, WeightTransferUpdateInfo):  # type: ignore[misc]
    """``update_info``: ``{}`` for the newest, or ``{"version": 7}``; see :class:`UpdateRequest`.

    A sparse update has the counts of vLLM 0.23: ``num_updates_list``, the number of places that are
    patched in each tensor, and maybe ``names`` of these. They are checked as vLLM checks them, and
    not used otherwise.

    Raises:
        OptionError: (a ``ValueError``) a value is invalid.
    """

    # A frozen dataclass cannot inherit from vLLM's base, which is not frozen.
    def __init__(
        self,
        *,
        names: list[str] | None = None,
        num_updates_list: list[int] | None = None,
        **request: Any,
    ) -> None:
        super().__init__(**request)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "num_updates_list", num_updates_list)
        if self.update_kind == "dense":
            for name in _COUNTS:
                if (value := getattr(self, name)) is not None:
                    checks.refuse(name, value, "it with update_kind='sparse_flat' only")
            return
        counts = num_updates_list
        if counts is None or not _is_list_of(int, counts) or min(counts, default=-1) < 0:
            checks.refuse("num_updates_list", counts, "the number of patches of each tensor")
        if names is not None and not (_is_list_of(str, names) and len(names) == len(counts)):
            checks.refuse("names", names, f"the tensors' names, of which there are {len(counts)}")

    @classmethod
    def parse(cls, values: Mapping[str, Any], also: Collection[str] = ()) -> Self:
        counts: dict[str, Any] = {}
        if isinstance(values, Mapping):
            counts = {name: values[name] for name in _COUNTS if name in values}
            values = {name: value for name, value in values.items() if name not in counts}
        return cls(**vars(UpdateRequest.parse(values, also=[*_COUNTS, *also])), **counts)


_COUNTS = ("names", "num_updates_list")
"""Fields of a sparse update."""


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


_ARGUMENTS = ("vllm_config", "device", "model")
"""Arguments besides ``config``, since vLLM 0.25."""


class DBufferWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receiving half, in each worker: vLLM's names for the calls of :class:`RankEndpoint`.

    A worker follows its store from ``init_transfer_engine`` on, or, where the engine's
    ``additional_config["dbuffer"]`` names a store, from its own start on the newest version in it.
    Weights change in ``update_weights``, all at once; ``start_weight_update`` and
    ``finish_weight_update`` have nothing to do, so between them the engine may serve. A follower
    needs neither, and is not hindered by a session that a killed trainer has left open.

    vLLM 0.23 and 0.24 start and finish an update themselves, and call ``receive_weights`` or
    ``receive_sparse_weights`` with a function that loads: it is called with the store's tensors.

    Args:
        config: vLLM's ``WeightTransferConfig``.
        *args, **kwargs: ``vllm_config``, ``device`` and ``model``; before vLLM 0.25,
            ``parallel_config`` and ``model``.
    """

    init_info_cls = DBufferInitInfo
    update_info_cls = DBufferUpdateInfo
    supports_draft_weight_update = False

    # The trainer's half, where releases before 0.26 look for it.
    trainer_send_weights = staticmethod(trainer_send_weights)
    trainer_send_sparse_weights = staticmethod(trainer_send_sparse_weights)

    _callback_loader: CallbackLoader | None = None
    """Hands tensors to the caller's callbacks, as vLLM before 0.25 passes them."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if "parallel_config" in kwargs or len(args) + len(kwargs) < len(_ARGUMENTS):
            self._init_before_0_25(config, *args, **kwargs)
        else:
            super().__init__(config, *args, **kwargs)
            self._endpoint = RankEndpoint.of(self.model)
            options = options_of(self.vllm_config.additional_config)
            if options is not None:
                self._begin(options)
                self._endpoint.following().catch_up()

    def _init_before_0_25(self, config: Any, parallel_config: Any, model: Any) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model
        self._callback_loader = CallbackLoader(parallel_config)

    def parse_init_info(self, init_dict: dict[str, Any]) -> DBufferInitInfo | None:
        """Check ``init_info``; return None on ranks that must not raise."""
        with self._raising():
            return DBufferInitInfo.parse(init_dict)
        return None

    def _raising(self) -> AbstractContextManager[None]:
        """Let an error out on one of vLLM's workers only, or to a caller of ours."""
        return nullcontext() if self._callback_loader else raising_once(self.vllm_config)

    def parse_update_info(self, update_dict: dict[str, Any]) -> DBufferUpdateInfo:
        """Check ``update_info`` by the rules of vLLM 0.23: a sparse one has counts of patches."""
        return DBufferUpdateInfo.parse(update_dict)

    def init_transfer_engine(self, init_info: DBufferInitInfo | None) -> None:
        if init_info is None:
            return
        with self._raising():
            if self._callback_loader is not None:
                self._callback_loader.begin(init_info)
            else:
                self._begin(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: all that can fail precedes the load, in ``update_weights``."""

    def finish_weight_update(self) -> None:
        """Do nothing more: the weights changed in ``update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to a version; see :meth:`RankReceiver.update`.

        A rank that was given an invalid request takes part with the error: the others wait for it.
        """
        with raising_once(self.vllm_config):
            receiver = self._endpoint.following()
            # Later releases know no counts, so a sparse update needs none here.
            has_counts = isinstance(update_info, Mapping) and "num_updates_list" in update_info
            kind = DBufferUpdateInfo if has_counts else UpdateRequest
            request: UpdateRequest | OptionError
            try:
                request = kind.parse(update_info, also=() if has_counts else _COUNTS)
            except OptionError as error:
                request = error
            receiver.update(request)

    def receive_weights(
        self, update_info: DBufferUpdateInfo, load_weights: LoadWeights | None = None
    ) -> None:
        """Switch to a version; before vLLM 0.25, by ``load_weights``."""
        if self._callback_loader is None:
            self._update(update_info)
        elif load_weights is None:
            raise OptionError("there is nothing to load the weights with: pass load_weights")
        else:
            self._callback_loader.load(update_info, load_weights)

    def receive_sparse_weights(
        self, update_info: DBufferUpdateInfo, apply_patches: ApplyPatches
    ) -> None:
        """Switch to a version that came by patches; before vLLM 0.25, by ``apply_patches``."""
        if self._callback_loader is None:
            self._update(update_info)
        else:
            self._callback_loader.patch(update_info, apply_patches)

    def shutdown(self) -> None:
        if self._callback_loader is not None:
            self._callback_loader.end()
        else:
            self._endpoint.end()

    def _begin(self, options: EngineOptions) -> None:
        make_rank = partial(WorkerRank, self.vllm_config, self.model, self.device)
        self._endpoint.begin(make_rank, options)

    def _update(self, request: DBufferUpdateInfo) -> None:
        with raising_once(self.vllm_config):
            self._endpoint.following().update(request)
