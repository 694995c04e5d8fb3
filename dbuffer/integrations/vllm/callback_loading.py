"""`CallbackLoader`: loads versions through a function of the caller.

vLLM 0.23 and 0.24 make a weight transfer's engine of a model and its parallel configuration, and
give each update a function that loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dbuffer.engine.engine_options import NO_STORE_YET, EngineOptions, UpdateRequest
from dbuffer.errors import EngineUpdateError, UnsupportedError, VersionError
from dbuffer.format.lineage import VersionId
from dbuffer.publish.patches import SparsePatch
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], object]
ApplyPatches = Callable[[list[SparsePatch]], object]

_MAX_INDEX = torch.iinfo(torch.int32).max


class CallbackLoader:
    """Reads a store for one process. What is loaded is not checked against a model."""

    def __init__(self, parallel_config: Any) -> None:
        if parallel_config.world_size != 1:
            raise UnsupportedError(
                f"this engine has {parallel_config.world_size} ranks, and is made as vLLM before "
                "0.25 makes it: nothing would let them load the same version"
            )
        self._options: EngineOptions | None = None
        self._receiver: WeightReceiver | None = None
        self._loaded = 0
        """Number of the version that was loaded last."""

    def begin(self, options: EngineOptions) -> None:
        """Read this store from now on.

        Raises:
            UnsupportedError: ``local_store`` is given.
        """
        if options.local_store is not None:
            raise UnsupportedError(
                "this engine is made as vLLM before 0.25 makes it, and takes no local_store: give "
                "the store alone, or `dbuffer mirror` it and give the copy as the store"
            )
        self.end()
        self._options = options
        self._receiver = WeightReceiver(
            options.store,
            receiver_id=options.engine_id,
            verify=options.verify,
            poll_interval_s=options.poll_interval_s,
            allow_shared_store=options.allow_shared_store,
        )
        self._receiver.record.set(only_version=options.version)

    def load(self, request: UpdateRequest, load_weights: LoadWeights) -> None:
        """Hand a version's tensors over, one by one, each under all of its names.

        Raises:
            UnsupportedError: no store was named.
            VersionError: there is no such version, or a later version was loaded before.
            VersionRegressedError: the store forked from the version that was loaded last.
            SnapshotEvictedError: loading took longer than the sender waits; what was loaded must
                not be used.
            Exception: what ``load_weights`` raised.
        """
        with self._opened(request) as snapshot:
            for name, tensor in _named(snapshot):
                load_weights([(name, tensor.clone())])

    def patch(self, request: UpdateRequest, apply_patches: ApplyPatches) -> None:
        """Hand a version over as patches: a version in a store is whole, and so is each patch.

        Raises:
            EngineUpdateError: a tensor has more elements than vLLM's 32-bit indices reach.
            Exception: see :meth:`load`.
        """
        with self._opened(request) as snapshot:
            for name, tensor in _named(snapshot):
                if tensor.numel() > _MAX_INDEX:
                    raise EngineUpdateError(
                        f"{name} has {tensor.numel()} elements, and patches of vLLM's reach "
                        f"{_MAX_INDEX}: update it as dense"
                    )
                indices = torch.arange(tensor.numel(), dtype=torch.int32)
                values, shape = tensor.flatten().clone(), tuple(tensor.shape)
                apply_patches([SparsePatch(name, indices, values, shape)])

    def end(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._loaded = None, 0

    @contextmanager
    def _opened(self, request: UpdateRequest) -> Iterator[Snapshot]:
        receiver, options = self._receiver, self._options
        if receiver is None or options is None:
            raise UnsupportedError(NO_STORE_YET)
        request = options.admit(request)
        goal = request.goal
        least = request.version or request.at_least
        after, wait_s = (least - 1, options.timeout_s) if least else (None, 0.0)
        if receiver.wait_for_version(after, wait_s) is None:
            what = f"version {least}" if least else "a version"
            raise VersionError(f"{what} of {receiver.store} was not published within {wait_s:g} s")
        with receiver.open(version=goal if request.version else None) as snapshot:
            opened = snapshot.lineage
            if isinstance(goal, VersionId) and not opened.reaches(goal):
                raise VersionError(f"version {least} of run {goal.run} is not in {receiver.store}")
            if opened.id.number < self._loaded:
                raise VersionError(
                    f"version {self._loaded} is loaded, and versions never go back: version "
                    f"{opened.id.number} is not loaded"
                )
            yield snapshot
            self._loaded = opened.id.number


def _named(snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = snapshot.tensors
    yield from tensors.items()
    yield from ((alias, tensors[name]) for alias, name in snapshot.aliases.items())
