"""`CallbackEngine`: the weight transfer of vLLM 0.23 and 0.24, which load by a function of theirs.

The engine is made of a model and its parallel configuration, for one rank. What it loads is not
checked against the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dbuffer.engine.engine_options import NO_STORE_YET, EngineOptions
from dbuffer.errors import EngineUpdateError, OptionError, UnsupportedError, VersionError
from dbuffer.format.lineage import VersionId
from dbuffer.integrations.vllm.backend import DBufferUpdateInfo, DBufferWeightTransferEngine
from dbuffer.publish.patches import SparsePatch
from dbuffer.receive.receiver import WeightReceiver

_MAX_INDEX = torch.iinfo(torch.int32).max


class CallbackEngine(DBufferWeightTransferEngine):
    """Reads a store, and hands each version to the caller's function, tensor by tensor.

    Raises:
        UnsupportedError: the engine has several ranks, or a ``local_store`` is named.
    """

    def __init__(self, config: Any, parallel_config: Any, model: Any) -> None:
        if parallel_config.world_size != 1:
            raise UnsupportedError(
                f"this engine has {parallel_config.world_size} ranks, and is made as vLLM before "
                "0.25 makes it: nothing would let them load the same version"
            )
        self.config, self.parallel_config, self.model = config, parallel_config, model
        self._options: EngineOptions | None = None
        self._receiver: WeightReceiver | None = None
        self._loaded = 0
        """Number of the version that was loaded last."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> EngineOptions:
        return EngineOptions.parse(init_dict)

    def init_transfer_engine(self, init_info: EngineOptions | None) -> None:
        assert init_info is not None  # noqa: S101 - it is parsed here
        if init_info.local_store is not None:
            raise UnsupportedError(
                "this engine is made as vLLM before 0.25 makes it, and takes no local_store: give "
                "the store alone, or `dbuffer mirror` it and give the copy as the store"
            )
        self.shutdown()
        self._options = init_info
        self._receiver = WeightReceiver(
            init_info.store,
            receiver_id=init_info.engine_id,
            verify=init_info.verify,
            poll_interval_s=init_info.poll_interval_s,
            allow_shared_store=init_info.allow_shared_store,
        )
        self._receiver.record.set(only_version=init_info.version)

    def receive_weights(
        self, update_info: DBufferUpdateInfo, load_weights: Callable[..., Any] | None = None
    ) -> None:
        """Load a version by ``load_weights``, under all names of each tensor.

        Raises:
            UnsupportedError: no store was named.
            WaitTimeoutError: there is no such version yet.
            VersionError: the version is gone, or a later one was loaded before.
            VersionRegressedError: the store forked from the version that was loaded last.
            SnapshotEvictedError: the sender did not wait for this: discard the loaded tensors.
        """
        if load_weights is None:
            raise OptionError("there is nothing to load the weights with: pass load_weights")
        with self._opened(update_info) as tensors:
            for name, tensor in tensors:
                load_weights([(name, tensor.clone())])

    def receive_sparse_weights(
        self, update_info: DBufferUpdateInfo, apply_patches: Callable[..., Any]
    ) -> None:
        """Load a version by ``apply_patches``, as :meth:`receive_weights` does.

        Each patch covers its tensor, since a version in a store is complete.

        Raises:
            EngineUpdateError: a tensor has more elements than vLLM's 32-bit indices reach.
        """
        with self._opened(update_info) as tensors:
            for name, tensor in tensors:
                if tensor.numel() > _MAX_INDEX:
                    raise EngineUpdateError(
                        f"{name} has {tensor.numel()} elements, and patches of vLLM's reach "
                        f"{_MAX_INDEX}: update it as dense"
                    )
                indices = torch.arange(tensor.numel(), dtype=torch.int32)
                values, shape = tensor.flatten().clone(), tuple(tensor.shape)
                apply_patches([SparsePatch(name, indices, values, shape)])

    @contextmanager
    def _opened(self, info: DBufferUpdateInfo) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """Open a version; yield the name and tensor of each parameter, also of tied ones."""
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
                    f"version {self._loaded} is loaded, and versions never go back: version "
                    f"{version.id.number} is not loaded"
                )
            tensors = snapshot.tensors
            aliases = ((alias, tensors[name]) for alias, name in snapshot.aliases.items())
            yield itertools.chain(tensors.items(), aliases)
            self._loaded = version.id.number

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._loaded = None, 0
