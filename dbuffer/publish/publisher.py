"""`Publisher`: the path of every version, in `Publisher._publish`.

1. Describe: the sender's `send` makes a `Source`, and checks all that can be checked before
   anything is touched. The layout, and the `Part` of it that this rank writes, are known then; of a
   stream they are known at its end.
2. Compare, on a network mount with deltas: bring the `KeptCopy` of the last version to the next.
3. Claim the idle buffer: `_claim`, `Draft.claimed`, `BufferWriter.claim`.
4. Write: each rank its boxes, from the weights or the copy.
5. Compare, on a local mount with deltas: each version is written whole; then its file is compared
   with the published one.
6. Commit: `_commit`, `DeltaBase.commit`, `Draft.commit`, `BufferWriter.commit`, which replaces the
   pointer: from then on receivers see the version.

A sender alone is a world of one rank. Several ranks do each step together, 3 and 6 on rank 0 for
all.

The trainer may write to its memory at any time. So the delta, the checksums, and the bytes that the
next version is compared with all come from the file, or from the copy.

One thread at a time publishes or closes, and no forked child does. A writer that was closed in the
middle of a publish would write into another file that has its descriptor's number since; a lock
that was held during a fork is never released in the child.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbuffer.errors import (
    ClosedError,
    StoreAccessError,
    StoreBusyError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE, Lag
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.changes import Changes, Patch, apply_patch, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import KeptMappings, MappedTensors
from dbuffer.publish.delta_base import DeltaBase, explain_full, is_worth, max_changed
from dbuffer.publish.draft import (
    Draft,
    Progress,
    counter,
    join_digests_of_parts,
)
from dbuffer.publish.kept_copy import KeptCopy
from dbuffer.publish.part import Part
from dbuffer.publish.publication import Publication
from dbuffer.ranks.world import World
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.store.acknowledgements import receiver_lags
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.hold import hold_newest
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.sources import Source

logger = logging.getLogger(__name__)

UNREADABLE = (*UNDECODABLE, StoreAccessError, StoreNotFoundError)
"""Errors of a version that cannot be read back, or is not what was published."""

_FIRST = "this sender has published no version yet"
_FAILED = "the last publish failed"


@dataclass(frozen=True, slots=True, eq=False)
class PublishRequest:
    """Weights to publish, with their version and metadata."""

    started: float
    """Time of the call, by `time.monotonic`."""
    source: Source
    layout: Layout | None
    """Layout of their file; None for a stream."""
    version: int
    """Number of the version, above the last one; on rank 0."""
    metadata: dict[str, Any]
    """Checked metadata; on rank 0."""
    progress: Progress | None = None
    patch: Patch | None = None
    """In place of a source: new words for the last version."""


class Publisher(Closing, ProcessBound):
    """A store's writer, closed for good when its ``with`` block is left.

    Args:
        store: the store.
        world: the ranks that publish together.
        copier: its threads do the work.
        writer: rank 0's; None on all others.
        maps_files: whether the store is on a local mount, where each version has a file.
        rewrites_files: whether a buffer's file is written again and again.
        hashed: whether versions have checksums.
        has_deltas: whether versions with few changes are published as deltas.
    """

    _closed_message: str
    """Message for calls of a closed one, with ``{store}`` in it."""

    def __init__(
        self,
        store: DoubleBuffer,
        world: World,
        copier: Copier,
        writer: BufferWriter | None,
        *,
        maps_files: bool,
        rewrites_files: bool,
        hashed: bool,
        has_deltas: bool,
    ) -> None:
        super().__init__()
        # Reentrant: a progress callback, or a signal handler during a publish, may call close().
        self._lock = threading.RLock()
        self._publishing_thread: int | None = None
        self._must_close = False
        names = ("versions", "bytes", "deltas", "delta_bytes", "publish_s")
        self._stats = dict.fromkeys(names, 0.0)
        self._buffers = store
        self._world = world
        self._copier = copier
        self._writer_on_0 = writer
        self._mappings = KeptMappings()
        self._maps_files = maps_files
        self._rewrites_files = rewrites_files
        self._hashed = hashed
        self._has_deltas = has_deltas
        self._memory: KeptCopy | MappedTensors | None = None
        """Copy or file of the last version, if the next version may come with a delta from it."""
        self._why_full = _FIRST
        """Reason that there is none, if there is none."""
        self._base: DeltaBase | None = None
        """Base of the next version's delta, on rank 0; None during a publish without a delta."""
        self._part: Part | None = None
        self._draft: Draft | None = None
        self._layout: Layout | None = None

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._buffers.root

    @property
    def run(self) -> str:
        """Id of its run; on rank 0."""
        return self._writer.record.token

    @property
    def stats(self) -> dict[str, float]:
        """Versions and their bytes, deltas and theirs, seconds that publishing took."""
        return dict(self._stats)

    def wait_applied(
        self, version: int, *, receivers: int | str | Collection[str] = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait until receivers have applied ``version`` or a later one.

        An engine of many ranks is one receiver, and has applied it when all ranks have.

        Args:
            version: as `send` or `publish` returned it.
            receivers: how many of them, whichever; or the id of one, or the ids of those to wait
                for.
            timeout_s: for how long.

        Raises:
            OptionError: an argument is invalid.
            WaitTimeoutError: too few did so in time; the message names the version of each.
            ReceiverFailedError: a named receiver cannot apply it, or its process has ended.
            StoreNotFoundError, WriterSupersededError: the store was removed, or another sender has
                it.
        """
        self._check_open()
        self._world.first(
            "wait for receivers",
            lambda: self._writer.wait_applied(version, receivers, timeout_s),
        )

    def receiver_lags(self) -> dict[str, Lag]:
        """Return the lag behind the newest version of each living receiver, by its id.

        An engine of many ranks is one receiver. If several receivers have one id, the longest lag
        counts. A receiver that has applied no version is absent.

        Raises:
            StoreAccessError, StoreCorruptError: the store cannot be read.
        """
        return receiver_lags(self._buffers)

    def close(self) -> None:
        """Give the store up, after the publish under way. The last version stays published."""
        if self._is_inherited:  # the thread that holds the lock is not in this process
            self._close()
            return
        with self._lock:
            if self._publishing_thread is not None:
                self._must_close = True  # in this very thread: when its publish ends
            else:
                self._close()

    def _close(self) -> None:
        """Close it, for good; called once at least."""
        self._world.close()
        self._copier.close()
        self._mappings.clear()
        if self._writer_on_0 is not None:
            self._writer_on_0.close()
        self._memory = self._base = None  # a mapped file, or a copy of the model

    def _check_open(self) -> None:
        """Raise a `ClosedError` where it is closed, or this is a forked child."""
        if self._is_inherited or not self._world.is_open:
            raise ClosedError(self._closed_message.format(store=self.store))

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publish in a ``with`` block, after the publishes of other threads.

        Raises:
            ClosedError: before anything is waited for, and after.
            StoreBusyError: this very thread is in the middle of a publish.
        """
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
        """Add a version to the statistics."""
        self._stats["versions"] += 1
        self._stats["bytes"] += publication.num_bytes
        self._stats["publish_s"] += publication.duration_s
        if publication.delta_bytes is not None:
            self._stats["deltas"] += 1
            self._stats["delta_bytes"] += publication.delta_bytes
        return publication

    def _layout_of(self, source: Source) -> Layout:
        """Return the layout of a source's file: the last one, if the tensors are the same."""
        last = self._layout
        if last is None or (last.specs, last.aliases) != (source.specs, source.aliases):
            self._layout = last = Layout.of(source.specs, source.aliases)
        return last

    @property
    def _writer(self) -> BufferWriter:
        """The store's writer, on rank 0."""
        assert self._writer_on_0 is not None  # noqa: S101
        return self._writer_on_0

    def _make_part(self, layout: Layout) -> Part:
        """Return this rank's part of versions with this layout."""
        return Part(layout)

    def _publish(self, request: PublishRequest) -> Publication:
        """Publish weights, with a delta if there is a base and few words changed. Collective.

        On a local mount each version is written whole, and the delta is a second file. On a network
        mount a version with a delta mostly has no other file.

        Raises:
            DBufferError: nothing was published, on any rank, unless the message says so; and the
                next version is a full one.
        """
        world, copy, changes = self._world, None, None
        before = self._take_memory(request.layout)
        part, has_base = self._part, before is not None
        try:
            # Compare weights with a copy
            if part is not None and self._has_deltas and not self._maps_files:
                copy = before if isinstance(before, KeptCopy) else KeptCopy(part, self._copier)
                changes = self._update(copy, request, is_compared=has_base)

            # Claim. A mapping keeps an unlinked file's room, which the new version may need.
            kept = part.whole if part is not None and self._rewrites_files else None
            self._mappings.keep_only(kept)
            version, file, inode = world.first(
                "claim a buffer", lambda: self._claim(request, changes, has_base=has_base)
            )
            if self._draft is None:
                self._draft = Draft(
                    self._buffers,
                    self._mappings,
                    self._copier,
                    self.store / file,
                    None if inode is None else (inode[0], inode[1]),
                    part,
                    is_mapped=self._maps_files,
                    hashed=self._hashed,
                )
            draft = self._draft

            # Write, and compare files
            if request.patch is not None and isinstance(before, MappedTensors):
                changes, checksums = self._write_patch(draft, before, request.patch)
            else:
                checksums = self._write(draft, copy, request)
                if isinstance(before, MappedTensors):
                    changes = self._compare(before, draft.mapped)

            # Commit
            delta_bytes = world.first(
                "commit the version", lambda: self._commit(draft, request, changes, checksums)
            )
            if self._has_deltas:
                self._memory = draft.mapped if copy is None else copy
            layout = draft.layout
        except BaseException:
            before = copy = self._base = None
            if self._draft is not None:
                self._draft.abandon()
            self._mappings.clear()
            raise
        finally:
            self._draft = None
        return Publication.of(VersionId.parse(version), layout, request.started, delta_bytes)

    def _take_memory(self, layout: Layout | None) -> KeptCopy | MappedTensors | None:
        """Take the last version, if the next may come with a delta from it.

        Until the next version is committed there is none: after an error, the one after the error
        comes without a delta.
        """
        memory, self._memory = self._memory, None
        if memory is not None and (part := self._part) is not None and layout is not None:
            # By content: a rank may have one object for both layouts, and another rank two.
            if part.whole.xxh3 == layout.xxh3:
                return memory
            self._why_full = "the last version has other tensors"
        if self._has_deltas and self._writer_on_0 is not None:
            explain_full(self.store, self._why_full)
        self._why_full = _FAILED
        if layout is None:
            self._part = None
        elif self._part is None or self._part.whole is not layout:
            self._part = self._make_part(layout)
        return None

    def _update(
        self, copy: KeptCopy, request: PublishRequest, *, is_compared: bool
    ) -> Changes | None:
        """Bring a copy to the next version. Collective.

        Returns:
            On rank 0, what that changed; elsewhere, and unless it ``is_compared``, None.
        """
        if request.patch is not None:
            return copy.patch(request.patch)
        if not is_compared:
            self._fill("copy", copy, request)
            return None
        copy.begin_comparing()
        self._fill("compare", copy, request)
        return self._collect(copy.take_changes)

    def _fill(self, what: str, target: KeptCopy | Draft, request: PublishRequest) -> None:
        """Write the elements of all ranks' boxes into a copy, or a draft's file. Collective.

        The boxes that ranks hold are one step, and the gathered tensors another: a rank that fails
        with a box that it holds must not leave others waiting in a gather.

        Args:
            what: the step, as in "rank 1 could not {what} what it holds".
            target: what is written to.
            request: the weights.
        """
        part, source, specs = target.part, request.source, target.part.layout.specs

        def write_held() -> None:
            on_bytes = counter(request.progress, part.layout.num_bytes) if source.is_lazy else None
            for numbers, elements in part.held(source):
                target.write(numbers, elements)
                if on_bytes is not None:
                    on_bytes(sum(specs[number].num_bytes for number in numbers))
            if source.is_lazy and not part.gathered:
                source.finish()

        def write_gathered() -> None:
            problem: Exception | None = None
            for number, whole in part.gather(source):
                if problem is None:
                    try:
                        source.refuse_values([specs[number]], [whole])
                        target.write([number], [whole])
                    except Exception as error:  # noqa: BLE001 - the others wait in the next gather
                        problem = error
            if problem is not None:
                raise problem

        self._world.each(f"{what} what it holds", write_held)
        if part.gathered:
            self._world.each(f"gather and {what}", write_gathered)

    def _claim(
        self, request: PublishRequest, changes: Changes | None, *, has_base: bool
    ) -> list[Any]:
        """Claim the idle buffer on rank 0, for all ranks to write.

        On a network mount, a version with a delta gets a weights file only if its anchor is far, or
        readers cannot have the last version.

        Returns:
            The version's id; path of its file in the store; its device and inode, or None if it
            has no file.
        """
        writer, root = self._writer, self.store
        base, with_file = self._base if has_base else None, True
        if base is not None and changes is not None:
            base = base if is_worth(changes, base.layout, root) else None
        if base is not None:
            checked = base.checked(writer)
            if checked is base and not self._maps_files:
                with_file = base.is_far_from_anchor()
                if with_file:
                    logger.info(
                        "%s: the next version gets a whole file: its anchor is many deltas, or "
                        "bytes, back",
                        root,
                    )
            base = checked
        self._base = base
        self._draft = draft = Draft.claimed(
            writer,
            self._mappings,
            self._copier,
            writer.version(request.version),
            self._part,
            hashed=self._hashed,
            with_file=with_file,
        )
        file = str(draft.path.relative_to(root))
        return [str(draft.id), file, None if draft.inode is None else [*draft.inode]]

    def _write(
        self, draft: Draft, copy: KeptCopy | None, request: PublishRequest
    ) -> list[int] | None:
        """Write all boxes into a draft's file, if it has one; return the checksums. Collective."""
        world, source = self._world, request.source
        if copy is None and source.stream is None:
            self._fill("write", draft, request)
        elif copy is None:
            assert source.stream is not None  # noqa: S101 - see above
            draft.write_stream(source.stream, source.new_names, counter(request.progress, 0))
        elif draft.has_file:
            views = copy.contents.views
            world.each("write what it holds", lambda: draft.write(range(len(views)), views))
        elif self._hashed:
            by_rank = world.each("hash its boxes", copy.digests)
            return join_digests_of_parts(draft.layout, by_rank)
        else:
            return None
        return draft.finish(world)

    def _compare(self, before: MappedTensors, after: MappedTensors) -> Changes | None:
        """Compare a draft's file with the one before it: return what differs on rank 0."""
        world, layout = self._world, after.layout
        return self._collect(
            lambda: find_changes(
                before.data,
                after.data,
                layout,
                self._copier,
                share=(world.rank, world.size),
                max_changed=max_changed(layout),
            )
        )

    def _collect(self, find: Callable[[], Changes]) -> Changes | None:
        """Return the changes of all ranks on rank 0, None elsewhere. Collective."""
        by_rank = self._world.collect("send what changed", find, Changes.encode, Changes.decode)
        return Changes.joined(by_rank) if by_rank else None

    def _write_patch(
        self, draft: Draft, before: MappedTensors, patch: Patch
    ) -> tuple[Changes, list[int] | None]:
        """Bring a draft's file to the last version, and write a patch into it.

        Returns:
            What that changed, and the checksums of all tensors, if versions have any.

        Raises:
            StoreCorruptError: the published buffer was damaged.
        """
        mapped, copier, base = draft.mapped, self._copier, self._base
        assert base is not None  # noqa: S101 - patches follow a version
        if not self._apply_deltas(draft, base):
            copier.write(mapped, before.views)
            if damaged := _damaged(mapped, base, copier):
                raise StoreCorruptError(
                    f"{self.store}: {damaged} was damaged after it was published, so what changed "
                    "since cannot be published upon it; send all weights"
                )
        changes = apply_patch(patch, mapped.data, mapped.layout, copier)
        if base.checksums is None:
            return changes, None
        changed = sorted(changes.tensors)
        new = zip(changed, copier.checksums(mapped, changed), strict=True)
        return changes, list((dict(enumerate(base.checksums)) | dict(new)).values())

    def _apply_deltas(self, draft: Draft, base: DeltaBase) -> bool:
        """Bring the version in a draft's file to the last one by its deltas, if they lead there.

        Return whether the file holds the last version now, undamaged if that has checksums.
        """
        mapped, since = draft.mapped, draft.claim.held_before
        held = hold_newest(self._buffers, newer_than=None)
        if held is None:
            return False
        with held, contextlib.suppress(*UNREADABLE):
            if since is not None and since in held.manifest.chain:
                ChainReader(held, mapped.layout).read(mapped, self._copier, since=since)
                if not _damaged(mapped, base, self._copier):
                    return True
                logger.warning("%s was damaged since it was written: writing it anew", draft.path)
        return False

    def _commit(
        self,
        draft: Draft,
        request: PublishRequest,
        changes: Changes | None,
        checksums: list[int] | None,
    ) -> int | None:
        """Publish on rank 0 the ranks' writes; return the bytes of the delta to it.

        In a store that is flushed, rank 0's flush is enough: pages that other processes of this
        machine have written are pages of the same file.
        """
        base, num_bytes, layout = self._base, None, draft.layout
        if base is not None and changes is not None and is_worth(changes, layout, self.store):
            num_bytes = base.write_delta(self._writer, draft, changes, checksums)
        request.source.check()
        self._base = DeltaBase.commit(draft, request.metadata, checksums, base, num_bytes)
        return num_bytes


def _damaged(mapped: MappedTensors, base: DeltaBase, copier: Copier) -> str | None:
    """Return the name of a tensor that is not as the base has it, or None without checksums."""
    if base.checksums is None:
        return None
    checksums = zip(mapped.layout.specs, base.checksums, copier.checksums(mapped), strict=True)
    return next((spec.name for spec, old, new in checksums if old != new), None)
