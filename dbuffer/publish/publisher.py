"""`Publisher`: base of all senders; `SenderOptions`: their options.

Each version takes the steps of `Publisher._publish`:

1. Describe: the sender's `send` makes a `Source`, and refuses bad input before anything is touched.
   This step gives the layout and this rank's `Part`. A stream's layout is known only at its end.
2. Compare, with deltas: `Deltas.compare`, on a network mount or a GPU.
3. Claim the idle buffer: `Draft.begin`, `BufferWriter.claim`.
4. Write: each rank writes its parts of tensors (`fill`). With deltas, `Deltas.write` also finds
   what changed.
5. Commit: `Deltas.commit` writes the delta; then `Draft.commit` and `BufferWriter.commit` replace
   the version pointer, and receivers see the version.

Several ranks take each step together; rank 0 takes steps 3 and 5 for all. Only a sender with
``delta=True`` has `Deltas`. The trainer may write to its memory at any time. So the sender computes
the delta and the checksums from the file or from its own copy.

One thread at a time publishes or closes. Otherwise one thread could close a file while another
writes to it, and the bytes could go into the next file that gets the descriptor's number. A forked
child does not publish, and closes without the lock: if a thread held it during the fork, the lock
is never released in the child.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import torch

from dbuffer.errors import ClosedError, OptionError, StoreAccessError, StoreBusyError
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import Lag
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import KeptMappings, can_cast_to
from dbuffer.publish.draft import Draft, fill
from dbuffer.publish.part import Assignment, Part, layout_in_parts
from dbuffer.ranks.world import World
from dbuffer.runtime import options as checks
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.store.acknowledgements import receiver_lags, wait_applied
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.sources import Describer, Rename, Source

if TYPE_CHECKING:
    from dbuffer.publish.deltas import Deltas


class SenderKeywords(TypedDict, total=False):
    """Fields of `SenderOptions` as keyword arguments, for type checkers."""

    durable: bool
    checksum: bool | Literal["auto"]
    delta: bool
    dtype: torch.dtype | None
    rename: Rename | None
    as_checkpoint: bool
    num_threads: int | None
    reader_timeout_s: float
    allow_shared_store: bool
    keep: int
    run: str | None
    require_finite: bool


@dataclass(frozen=True, kw_only=True)
class SenderOptions:
    """Options of :class:`dbuffer.WeightSender` and :class:`dbuffer.ShardedWeightSender`.

    Both classes take the options as keyword arguments, as does each integration that makes a
    sender.

    Raises:
        OptionError: a value is invalid.
    """

    durable: bool = False
    """Flush each version to stable storage before it is published, so that it survives a power
    cut. Always on for network mounts, since other hosts see only flushed bytes."""
    checksum: bool | Literal["auto"] = "auto"
    """Write a checksum of every tensor. ``"auto"`` writes checksums on network mounts only."""
    delta: bool = False
    """Publish only the elements that changed since the previous version, if that saves enough.
    Requires the extra ``delta``; iterators are refused. On a network mount the sender keeps a copy
    of the weights in memory. Each rank of a sharded trainer keeps a copy of the part that it
    writes. On a local mount, a `WeightSender` of weights on a GPU keeps a copy on this GPU, if the
    copy takes at most a quarter of the free memory."""
    dtype: torch.dtype | None = None
    """Publish floating-point tensors in this dtype, cast while they are copied. Weights with a
    value that the dtype cannot hold are refused."""
    rename: Rename | None = None
    """A :class:`NameMap`; or a mapping or function from a tensor's name to its published name."""
    as_checkpoint: bool = True
    """Publish a transformers module as ``save_pretrained`` would save it. If False, publish the
    module's own names and tensors, with experts fused as transformers fuses them."""
    num_threads: int | None = None
    """Number of threads that copy, on each rank. Default: the number of cores that the process may
    use, at most 8, and at most the rank's share of the host's cores."""
    reader_timeout_s: float = 60.0
    """Longest wait for receivers that still read the buffer about to be overwritten. After that
    time these receivers are evicted: they lose the version. On a network mount the sender does not
    wait, and keeps an old version for its readers this long."""
    allow_shared_store: bool = False
    """Accept a directory that another user owns, or that other users can write to."""
    keep: int = 0
    """Number of versions to keep besides the newest two, for :meth:`WeightSender.republish` and for
    receivers that open an older version. Each kept version takes as much room as its weights. On a
    local mount, a value above 0 gives each version a new file. Pinned versions do not count."""
    run: str | None = None
    """Name of this run, 1 to 128 printable characters. A run is all versions of one sender. Each
    version records the runs that led to it."""
    require_finite: bool = False
    """Refuse weights and patches that contain a NaN or an infinity. The error names the tensor, and
    nothing is published. The check reads all weights once more, on their device."""

    def __post_init__(self) -> None:
        checks.flag("durable", self.durable)
        checks.choice("checksum", self.checksum, (True, False, "auto"))
        if checks.flag("delta", self.delta):
            from dbuffer.format.delta import require_compression

            require_compression()
        dtype, rename, run = self.dtype, self.rename, self.run
        if dtype is not None and not (isinstance(dtype, torch.dtype) and can_cast_to(dtype)):
            checks.refuse("dtype", dtype, "a floating-point dtype that weights can be cast to")
        if rename is not None and not (callable(rename) or isinstance(rename, Mapping)):
            checks.refuse("rename", rename, "a NameMap, a mapping of names, or a function")
        checks.flag("as_checkpoint", self.as_checkpoint)
        if self.num_threads is not None:
            checks.whole_number("num_threads", self.num_threads)
        checks.seconds("reader_timeout_s", self.reader_timeout_s)
        checks.flag("allow_shared_store", self.allow_shared_store)
        checks.whole_number("keep", self.keep, at_least=0)
        is_name = isinstance(run, str) and 0 < len(run) <= 128 and run.isprintable()
        if not (run is None or is_name):
            checks.refuse("run", run, "1 to 128 printable characters")
        checks.flag("require_finite", self.require_finite)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        names = [option.name for option in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise OptionError(f"unknown options {unknown}; known are {', '.join(names)}")
        return cls(**values)

    def make_describer(self, *, sharded: bool = False) -> Describer:
        return Describer(
            dtype=self.dtype,
            rename=self.rename,
            sharded=sharded,
            as_checkpoint=self.as_checkpoint,
            require_finite=self.require_finite,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Result of publishing a version, by `send`, `send_patches`, `republish` or a mirror."""

    id: VersionId
    num_tensors: int
    num_bytes: int
    """Total size of all tensors, in bytes."""
    duration_s: float
    """Time from the call until receivers can see the version. It includes waits for slow
    readers."""
    delta_bytes: int | None = None
    """Size in bytes of the delta from the previous version, or None if the version has no delta."""

    @property
    def version(self) -> int:
        """Number of the published version."""
        return self.id.number

    @classmethod
    def of(
        cls, version: VersionId, layout: Layout, started: float, delta_bytes: int | None = None
    ) -> Self:
        return cls(
            id=version,
            num_tensors=len(layout.specs),
            num_bytes=layout.num_bytes,
            duration_s=time.monotonic() - started,
            delta_bytes=delta_bytes,
        )


class Publisher(Closing, ProcessBound):
    """Base of all senders: publishes into one store until it is closed.

    Only rank 0 has a `BufferWriter`, and finds out how all ranks write on the mount. A sender on a
    single rank is a world of one rank, which writes all tensors.
    """

    _closed_message: str

    def __init__(
        self,
        store: str | os.PathLike[str],
        options: SenderOptions,
        world: World,
        *,
        num_threads: int | None,
    ) -> None:
        super().__init__()
        # Reentrant: a progress callback, or a signal handler during a publish, may call close().
        self._lock = threading.RLock()
        self._publishing_thread: int | None = None
        self._must_close = False
        names = ("versions", "bytes", "deltas", "delta_bytes", "publish_s")
        self._stats = dict.fromkeys(names, 0.0)
        self._world = world
        self._copier = Copier(num_threads)
        self._writer_on_0: BufferWriter | None = None
        self._mappings = KeptMappings()
        self._deltas: Deltas | None = None
        self._assignment: Assignment | None = None
        self._part: Part | None = None
        try:
            with world.step("open the store") as step:
                step.result = self._open(store, options)
        except BaseException:
            self._close()
            raise
        self._maps_files, self._rewrites_files, self._hashed = step.results[0]
        if options.delta:
            # Imported here: a sender of whole versions does not need the modules of deltas.
            from dbuffer.publish.deltas import Deltas

            maps_files = self._maps_files
            self._deltas = Deltas(self._buffers, world, self._copier, maps_files=maps_files)

    def _open(self, store: str | os.PathLike[str], options: SenderOptions) -> list[bool]:
        """Open the store. Rank 0 opens it for writing, and returns how all ranks write.

        The result is: whether files are mapped, whether they are rewritten, whether versions have
        checksums. Other ranks return [].
        """
        if self._world.rank:
            self._buffers = DoubleBuffer(store, allow_shared_store=options.allow_shared_store)
            return []
        self._writer_on_0 = writer = BufferWriter(
            store,
            durable=options.durable,
            reader_timeout_s=options.reader_timeout_s,
            allow_shared_store=options.allow_shared_store,
            run_name=options.run,
            keep=options.keep,
        )
        self._buffers, medium, hosts = writer.store, writer.medium, self._world.hosts
        if len(hosts) > 1 and not medium.reaches_other_hosts:
            raise StoreAccessError(
                f"the ranks run on {', '.join(hosts)}, and {writer.root} is on "
                f"{medium.filesystem}, which other hosts do not see: use a network mount"
            )
        hashed = medium.reaches_other_hosts if options.checksum == "auto" else options.checksum
        return [medium.maps_files, writer.rewrites_files, hashed]

    @property
    def store(self) -> Path:
        """Directory of the store."""
        return self._buffers.root

    @property
    def run(self) -> str:
        """Id of the run (all versions of this sender). Only rank 0 has it."""
        return self._writer.record.token

    @property
    def stats(self) -> dict[str, float]:
        """Counts and bytes of versions and of deltas, and the seconds spent on publishing."""
        return dict(self._stats)

    def wait_applied(
        self, version: int, *, receivers: int | str | Collection[str] = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait until receivers have applied ``version`` or a later version.

        An engine with several ranks is one receiver. It has applied a version when all its ranks
        have applied it. Make this call on every rank of a :class:`ShardedWeightSender`.

        Args:
            version: number of a version that `send` returned.
            receivers: the number of receivers, or the ids of the receivers, to wait for.
            timeout_s: how long to wait. With several ranks, it must be less than ``rank_timeout_s +
                reader_timeout_s``, the time that the other ranks wait for rank 0.

        Raises:
            OptionError: an argument is invalid.
            WaitTimeoutError: too few receivers applied the version in time. The message lists
                each receiver's version.
            ReceiverFailedError: a receiver given by its id cannot apply the version, or has ended.
            StoreNotFoundError, WriterSupersededError: the store was removed, or another sender took
                it over.
            RankFailedError: a rank was lost.
        """
        world = self._world
        with world.losing_interrupted():
            self._check_open()
            with world.step("wait for receivers"):
                if world.rank == 0:
                    if checks.seconds("timeout_s", timeout_s) >= world.timeout_s:
                        limit = f"{world.timeout_s:g} s (rank_timeout_s + reader_timeout_s)"
                        checks.refuse("timeout_s", timeout_s, f"less than {limit}")
                    wait_applied(self._writer, version, receivers, timeout_s)

    def receiver_lags(self) -> dict[str, Lag]:
        """Return how far living receivers lag behind the newest version, keyed by receiver id.

        An engine with several ranks is one receiver. If several receivers share an id, the longest
        lag counts. A receiver that has applied no version is absent.

        Raises:
            StoreAccessError, StoreCorruptError: the store cannot be read.
        """
        return receiver_lags(self._buffers)

    def close(self) -> None:
        """Wait for a publish in progress, then close the store. The last version stays readable."""
        if self._is_inherited:  # a forked child: the thread that holds the lock is in the parent
            self._close()
            return
        with self._lock:
            if self._publishing_thread is not None:
                self._must_close = True  # this thread is publishing: close after the publish
            else:
                self._close()

    def _close(self) -> None:
        self._world.close()
        self._copier.close()
        self._mappings.keep_only()
        if self._writer_on_0 is not None:
            self._writer_on_0.close()
        if self._deltas is not None:
            self._deltas.forget()  # lets go of a mapped file, or of a copy of the model

    def _check_open(self) -> None:
        if self._is_inherited or not self._world.is_open:
            raise ClosedError(self._closed_message.format(store=self.store))

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Wait for other threads' publishes; let only this thread publish in the ``with`` block."""
        self._check_open()
        with self._lock:
            if self._publishing_thread is not None:
                raise StoreBusyError("this thread is already publishing with this sender")
            self._publishing_thread = threading.get_ident()
            try:
                self._check_open()
                yield
            finally:
                self._publishing_thread = None
                if self._must_close:
                    self._close()

    def _count(self, publication: Publication) -> Publication:
        self._stats["versions"] += 1
        self._stats["bytes"] += publication.num_bytes
        self._stats["publish_s"] += publication.duration_s
        if publication.delta_bytes is not None:
            self._stats["deltas"] += 1
            self._stats["delta_bytes"] += publication.delta_bytes
        return publication

    @property
    def _writer(self) -> BufferWriter:
        assert self._writer_on_0 is not None  # noqa: S101
        return self._writer_on_0

    def _part_of(self, source: Source) -> Part | None:
        """Return this rank's part of the weights. Reuse the last part if no spec or alias changed.

        Return None if an iterator yields the weights: their layout is not known yet.
        """
        last, described = self._part, (source.specs, source.aliases)
        if source.stream is not None:
            return None
        is_alike = last is not None and (last.whole.specs, last.whole.aliases) == described
        if source.patch is not None or is_alike:
            return last
        layout = Layout.of(source.specs, source.aliases)
        if self._assignment is not None and not self._maps_files:
            layout = layout_in_parts(layout, self._assignment)
        return Part(layout, self._assignment, self._world.rank)

    def _publish(
        self,
        started: float,
        source: Source,
        number: int,
        metadata: dict[str, Any],
    ) -> Publication:
        """Publish weights, or a patch of the last version. Collective.

        The version gets rank 0's ``number`` and ``metadata``. If this method raises, nothing was
        published, unless the message says that the version is published.
        """
        world, deltas = self._world, self._deltas
        self._part = part = self._part_of(source)
        draft = Draft(
            self._buffers,
            self._mappings,
            self._copier,
            part,
            is_mapped=self._maps_files,
            hashed=self._hashed,
        )
        try:
            if deltas is not None and part is not None:
                deltas.compare(part, source)
            # Unmap files that the claim may remove: a removed file takes space while it is mapped.
            self._mappings.keep_only(part.whole if part and self._rewrites_files else None)
            with world.step("claim a buffer") as claiming:
                if world.rank == 0:
                    writer = self._writer
                    with_file = deltas is None or deltas.plan_file(writer, number)
                    claiming.result = draft.begin(
                        writer, writer.version(number), with_file=with_file
                    )
            draft.join(*claiming.results[0])
            if deltas is not None:
                checksums = deltas.write(draft, source)
            else:
                if source.stream is None:
                    fill(draft, "write", source, world)
                else:
                    draft.write_stream(source)
                checksums = draft.finish_parts(world)
            with world.step("commit the version") as committing:
                if world.rank == 0:
                    if deltas is not None:
                        committing.result = deltas.commit(draft, source, metadata, checksums)
                    else:
                        source.check()
                        draft.commit(metadata, checksums)
            if deltas is not None:
                deltas.keep(draft)
        except BaseException:
            if deltas is not None:
                deltas.forget()
            draft.abandon()
            raise
        delta_bytes = committing.results[0]
        return self._count(Publication.of(draft.id, draft.layout, started, delta_bytes))
