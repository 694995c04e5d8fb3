"""`CallbackLoader`: loads versions through a function of the caller.

vLLM 0.23 and 0.24 make a weight transfer's engine of a model and its parallel configuration, and
give each update a function that loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dbuffer.engine.engine_options import NO_STORE_YET, EngineOptions, UpdateRequest
from dbuffer.errors import EngineUpdateError, UnsupportedError, VersionError
from dbuffer.format.lineage import Lineage, Relation, VersionId, describe_fork, relation
from dbuffer.publish.patches import SparsePatch
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

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
        self._loaded: Lineage | None = None
        """Version that was loaded last."""

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
            VersionError: there is no such version, the newest does not follow it, or the last one
                that was loaded is later.
            VersionRegressedError: the store forked from the version that was loaded last, and the
                options refuse that.
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
            self._receiver = self._loaded = None

    @contextmanager
    def _opened(self, request: UpdateRequest) -> Iterator[Snapshot]:
        receiver, options = self._receiver, self._options
        if receiver is None or options is None:
            raise UnsupportedError(NO_STORE_YET)
        request = options.admit(request)
        least = request.version or request.at_least
        after, wait_s = (least - 1, options.timeout_s) if least else (None, 0.0)
        follows = options.forked == "follow"
        has_any = not follows or receiver.wait_or_follow_fork(after, wait_s) is not None
        # After a fork, the newest version may have a lower number.
        if not has_any or receiver.wait_for_version(after, wait_s) is None:
            raise VersionError(
                f"version {least} of {options.store} was not published within {wait_s:g} s"
                if least
                else f"nothing was published in {options.store} yet"
            )
        with receiver.open(version=request.goal if request.version else None) as snapshot:
            self._require_loadable(snapshot.lineage, request.goal, options)
            yield snapshot
            loaded = snapshot.lineage
        self._loaded = loaded

    def _require_loadable(
        self, opened: Lineage, goal: int | VersionId | None, options: EngineOptions
    ) -> None:
        if isinstance(goal, VersionId) and not opened.reaches(goal):
            raise VersionError(
                f"version {goal.number} of run {goal.run} does not lead to version "
                f"{opened.id.number} of run {opened.id.run}, which {options.store} holds"
            )
        loaded = self._loaded
        if loaded is not None and relation(loaded, opened) is Relation.AHEAD:
            raise VersionError(
                f"version {loaded.id.number} is loaded, and versions never go back: version "
                f"{opened.id.number} is not loaded"
            )
        if loaded is not None and options.has_forked(loaded, opened):
            fork = describe_fork(options.store, loaded.id, opened.id)
            logger.warning("%s: loading the latter in place of the former", fork)


def _named(snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = snapshot.tensors
    yield from tensors.items()
    yield from ((alias, tensors[name]) for alias, name in snapshot.aliases.items())
