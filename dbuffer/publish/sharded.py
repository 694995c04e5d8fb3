"""`ShardedWeightSender`: all ranks of a trainer publish together, and each rank writes its part.

On one machine all ranks map one weights file. On a network mount each rank writes its own file.
Rank 0 is the store's writer, and commits the version when every rank has written its part.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import distributed

from dbuffer.errors import InvalidWeightsError, OptionError, StoreAccessError
from dbuffer.io.copier import MAX_DEFAULT_THREADS, Copier
from dbuffer.publish.assignment import Assignment
from dbuffer.publish.draft import checked_metadata
from dbuffer.publish.inventory import Inventory, join, take_inventory
from dbuffer.publish.publisher import Publication, Publisher
from dbuffer.publish.sender_options import SenderKeywords, SenderOptions
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options as checks
from dbuffer.runtime.cores import num_cores
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import require_version
from dbuffer.store.liveness import Process
from dbuffer.weights.sources import Source, Weights

DEFAULT_RANK_TIMEOUT_S = 600.0

_ELSEWHERE = torch.empty(0)


class ShardedWeightSender(Publisher):
    """Sender for a trainer with several ranks: FSDP2, HSDP, TP, ZeRO-3, pipeline stages.

    Make a sender on every rank, and make each call on every rank, with the rank's own model: all
    methods are collective. A call that fails on one rank raises on all ranks.

    Args:
        store: the store's directory; made with mode 0700 if it does not exist.
        group: the ranks that hold the weights. Default: all ranks of torch.distributed, which must
            be initialized. Rank 0 of the group is the store's writer.
        rank_timeout_s: how long the ranks wait for a hung rank. A dead rank is noticed at once.
        **options: fields of :class:`SenderOptions`: ``durable``, ``checksum``, ``delta`` and more.

    Raises:
        OptionError: an option is invalid, torch.distributed is not initialized, or the directory
            holds files that are not a store's.
        RankFailedError: a rank was lost, or raised an error that is not one of dbuffer's.
        StoreBusyError: another sender has the store.
        StoreAccessError: the store cannot be used.
    """

    _world: Agreement
    _assignment: Assignment
    _closed_message = (
        "this sender of {store} is closed, has lost a rank, or was made before a fork; make a new "
        "one"
    )

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        group: distributed.ProcessGroup | None = None,
        rank_timeout_s: float = DEFAULT_RANK_TIMEOUT_S,
        **options: Unpack[SenderKeywords],
    ) -> None:
        with contextlib.ExitStack() as opened:  # is closed again if the constructor fails
            ranks = Agreement(group, timeout_s=_step_timeout_s(rank_timeout_s, options))
            opened.callback(ranks.close)

            with ranks.step("take its options"):
                checks.directory("store", store)
                checks.positive_seconds("rank_timeout_s", rank_timeout_s)
                chosen = SenderOptions.parse(options)
                self._describer = chosen.make_describer(sharded=True)
                buffers = DoubleBuffer(store, allow_shared_store=chosen.allow_shared_store)
                copier = Copier(chosen.num_threads or _share_of_cores(ranks))
                opened.callback(copier.close)

            writer = None
            with ranks.step("open the store") as step:
                if ranks.rank == 0:
                    writer = chosen.open_writer(store)
                    opened.callback(writer.close)
                    hosts = {peer.machine: peer.host for peer in ranks.peers}
                    if len(hosts) > 1 and not writer.medium.reaches_other_hosts:
                        raise StoreAccessError(
                            f"the ranks run on {', '.join(sorted(hosts.values()))}, and "
                            f"{writer.root} is on {writer.medium.filesystem}, which other hosts do "
                            "not see: use a network mount"
                        )
                    hashed = chosen.has_checksums(writer.medium)
                    step.result = [writer.medium.maps_files, writer.rewrites_files, hashed]
            maps_files, rewrites_files, hashed = step.results[0]
            super().__init__(
                buffers,
                ranks,
                copier,
                writer,
                maps_files=maps_files,
                rewrites_files=rewrites_files,
                hashed=hashed,
                has_deltas=chosen.delta,
            )
            opened.pop_all()
        of_job = distributed.get_process_group_ranks(group)
        self._group_rank = {rank: number for number, rank in enumerate(of_job)}
        self._inventory: Inventory | None = None
        self._assignment = Assignment()

    def send(
        self,
        weights: Weights,
        *,
        draft: Weights | None = None,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Publish the weights of all ranks. Call it on every rank.

        Ranks may hold different tensors: the tensors of all ranks are published. If several ranks
        hold a tensor, its shape and dtype must be the same on each. Each rank writes the DTensor
        shards that it holds. A plain tensor must be equal on all ranks that hold it, and one of
        these ranks writes it. Tensors whose shards are not rectangular parts (strided shards,
        partial sums, ZeRO-3) are gathered one by one.

        Args:
            weights: a module, a state dict, a TensorDict, a list of ``(name, tensor)`` pairs, the
                path of a HuggingFace checkpoint or a weight source of vLLM; no iterator. Pass a
                ZeRO-3 model as the module. A rank that holds no weights passes ``{}``.
            draft: weights of a draft model for speculative decoding, on all ranks or on none.
            version: number of the version, equal on all ranks and above all earlier numbers.
                Default: the last number plus one.
            metadata: a mapping that JSON can hold. Only rank 0's metadata is published.

        Returns:
            The publication, equal on all ranks.

        Raises:
            RankFailedError: a rank was lost, or raised an error that is not one of dbuffer's.
            DBufferError: any error of :meth:`WeightSender.send`, on all ranks; an
                `InvalidWeightsError` if the ranks' weights do not fit together.
        """
        with self._world.losing_interrupted(), self._publishing(), self._world.call():
            started = time.monotonic()
            source, number, checked = self._describe(weights, draft, version, metadata)
            layout = self._layout_of(source)
            return self._publish(started, source, layout, number, checked)

    def _describe(
        self,
        weights: Weights,
        draft: Weights | None,
        version: int | None,
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Source, int, dict[str, Any]]:
        """Return the weights of all ranks and, on rank 0, the version's number and metadata.

        Collective. If the tensors changed, assign their parts to ranks again.
        """
        ranks, number, checked = self._world, 0, dict[str, Any]()
        with ranks.step("describe its weights") as step:
            require_version(version)
            source = self._describer.describe(weights, draft)
            if source.stream is not None:
                raise InvalidWeightsError(
                    "an iterator is not supported here, where all ranks publish: give the module, "
                    "or a dict"
                )
            inventory = take_inventory(source, ranks.rank, self._group_rank)
            if ranks.rank == 0:
                number = self._writer.next_version(version)
                checked = checked_metadata(metadata)
            step.result = [version, self._inventory == inventory]
        versions, are_known = zip(*step.results, strict=True)
        if len(set(versions)) > 1:
            with ranks.step("compare the versions"):
                rank = next(rank for rank, other in enumerate(versions) if other != versions[0])
                raise InvalidWeightsError(
                    f"rank {rank} is to publish version {versions[rank]}, and rank 0 version "
                    f"{versions[0]}: every rank must call send with the same version"
                )
        if not all(are_known):
            # On a network mount each rank writes a file of its own, of contiguous boxes.
            self._assignment = join(ranks, source, inventory, rows_only=not self._maps_files)
            # Only after all checks passed: the next publish of these tensors relies on it.
            self._inventory = inventory
            self._part = self._layout = None
        return self._placed(source), number, checked

    def _placed(self, source: Source) -> Source:
        joined = self._assignment
        if source.specs == joined.specs:
            return replace(source, specs=joined.specs, aliases=joined.aliases)
        tensor_of = dict(zip((spec.name for spec in source.specs), source.tensors, strict=True))
        tensors = [tensor_of.get(spec.name, _ELSEWHERE) for spec in joined.specs]
        return replace(source, specs=joined.specs, tensors=tensors, aliases=joined.aliases)


def _step_timeout_s(rank_timeout_s: Any, options: SenderKeywords) -> float:
    """Return how long, in seconds, ranks wait for another rank in a collective step.

    If an option is not a valid time, use its default: the first collective step then refuses the
    option on all ranks.
    """
    reader_timeout_s = options.get("reader_timeout_s", SenderOptions.reader_timeout_s)
    try:
        rank_s = checks.positive_seconds("rank_timeout_s", rank_timeout_s)
        # Rank 0 may wait for readers while the other ranks wait for rank 0.
        return rank_s + checks.seconds("reader_timeout_s", reader_timeout_s)
    except OptionError:
        return DEFAULT_RANK_TIMEOUT_S


def _share_of_cores(ranks: Agreement) -> int:
    machine = Process.here().machine
    ranks_here = sum(peer.machine == machine for peer in ranks.peers)
    # Each rank may be bound to cores of its own, or all ranks may share a container's cores.
    share = max(1, (os.cpu_count() or 1) // ranks_here)
    return min(MAX_DEFAULT_THREADS, num_cores(), share)
