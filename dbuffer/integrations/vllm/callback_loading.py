"""`CallbackLoader`: loads versions through a function of the caller, outside of vLLM's workers.

vLLM 0.23 and 0.24 make a weight transfer's engine of a model and its parallel configuration, and
give each update a function that loads. In their own workers more is known: :func:`calling_worker`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dbuffer.errors import EngineUpdateError, UnsupportedError, VersionError
from dbuffer.format.lineage import Lineage, Relation, VersionId, describe_fork, relation
from dbuffer.integrations.engine.engine_options import NO_STORE_YET, EngineOptions, UpdateRequest
from dbuffer.publish.patches import SparsePatch
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], object]
ApplyPatches = Callable[[list[SparsePatch]], object]

_MAX_INDEX = torch.iinfo(torch.int32).max


def calling_worker(parallel_config: Any) -> Any | None:
    """Return the worker of vLLM's that is making an engine for this configuration, or None.

    It knows the rest of the configuration, which those releases do not hand on.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way to the caller
    while frame is not None:
        caller = frame.f_locals.get("self")
        known = vars(caller) if hasattr(caller, "__dict__") else {}
        config = known.get("vllm_config") if "device" in known else None
        if getattr(config, "parallel_config", None) is parallel_config:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def leave_layers_alone(worker: Any) -> None:
    """Let a worker of vLLM 0.23 or 0.24 begin an update without preparing layers for its reload.

    It would take their weights away, until something is loaded, under a thread that looks at them;
    and an update that fails would leave them so.
    """
    start: Callable[..., None] = worker.start_weight_update

    def start_weight_update(is_checkpoint_format: bool = True) -> None:  # noqa: ARG001
        start(is_checkpoint_format=False)

    worker.start_weight_update = start_weight_update


class CallbackLoader:
    """Reads a store for one process. What is loaded is not checked against a model."""

    def __init__(self, parallel_config: Any) -> None:
        if parallel_config.world_size != 1:
            raise UnsupportedError(
                f"this engine has {parallel_config.world_size} ranks, and is made by no worker of "
                "vLLM's: nothing would let them load the same version"
            )
        self._options: EngineOptions | None = None
        self._receiver: WeightReceiver | None = None
        self._loaded: Lineage | None = None
        """Version that was loaded last."""
        self._base: VersionId | None = None
        """Version of the weights, or None if they are of no version."""

    def begin(self, options: EngineOptions) -> None:
        """Read this store from now on.

        Raises:
            UnsupportedError: ``local_store`` is given.
        """
        if options.local_store is not None:
            raise UnsupportedError(
                "local_store needs one of vLLM's workers, and none of them makes this engine: give "
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
        with self._opened(request) as (snapshot, _):
            for name, _, tensor in _named(snapshot):
                load_weights([(name, tensor.clone())])

    def patch(self, request: UpdateRequest, apply_patches: ApplyPatches) -> None:
        """Hand over what a version changes since the one that was loaded last.

        If that is not known, as on a local mount, each patch is a whole tensor.

        Raises:
            EngineUpdateError: a tensor has more elements than vLLM's 32-bit indices reach.
            Exception: see :meth:`load`.
        """
        with self._opened(request) as (snapshot, base):
            changed = None if base is None else snapshot.changed_since(base)
            for name, stored_name, tensor in _named(snapshot):
                if changed is not None and stored_name not in changed:
                    continue
                if tensor.numel() > _MAX_INDEX:
                    raise EngineUpdateError(
                        f"{name} has {tensor.numel()} elements, and patches of vLLM's reach "
                        f"{_MAX_INDEX}: update it as dense"
                    )
                indices = torch.arange(tensor.numel())
                if changed is not None:
                    indices = torch.from_numpy(changed[stored_name])
                values = tensor.reshape(-1)[indices]
                shape = tuple(tensor.shape)
                apply_patches([SparsePatch(name, indices.to(torch.int32), values, shape)])

    def end(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = self._base = self._loaded = None

    @contextmanager
    def _opened(self, request: UpdateRequest) -> Iterator[tuple[Snapshot, VersionId | None]]:
        """Open a version; yield it, and the version that the weights are."""
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
            base, self._base = self._base, None  # until this is loaded, they are no version
            yield snapshot, base
            loaded = snapshot.lineage
        self._base, self._loaded = loaded.id, loaded

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


def _named(snapshot: Snapshot) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each tensor under each of its names, with the name that it is stored by."""
    tensors = snapshot.tensors
    yield from ((name, name, tensor) for name, tensor in tensors.items())
    yield from ((alias, name, tensors[name]) for alias, name in snapshot.aliases.items())
