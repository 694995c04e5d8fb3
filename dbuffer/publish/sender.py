"""`WeightSender`: publishes a trainer's weights, one version after another."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch.utils.hooks import RemovableHandle

from dbuffer.errors import ClosedError, InvalidWeightsError, VersionError
from dbuffer.format.delta import require_compression
from dbuffer.format.layout import TensorSpec
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import file_under
from dbuffer.io.transfer import OnBytes
from dbuffer.publish.delta_publisher import DeltaPublisher, Published, Wanted
from dbuffer.publish.draft import Drafts, checked_metadata
from dbuffer.publish.patches import SparsePatch
from dbuffer.publish.publication import PendingPublication, Publication, StreamsOf, Unchanged
from dbuffer.publish.publisher import Publisher
from dbuffer.runtime import options
from dbuffer.store.writer import BufferWriter
from dbuffer.weights import sources
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer, Source, Weights

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class LocalSender(Publisher):
    """A store's one writer, for weights that one process holds."""

    _closed_message = "this sender of {store} is closed, or was made before a fork; make a new one"

    def __init__(self, copier: Copier, writer: BufferWriter) -> None:
        super().__init__()
        self._copier = copier
        self._writer = writer
        self._drafts = Drafts(writer)

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._writer.root

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
            OptionError: one of these is not what it may be.
            WaitTimeoutError: they have not, in time; the message says who has.
            ReceiverFailedError: one of those named cannot apply it, or its process has ended.
            StoreNotFoundError, WriterSupersededError: the store was removed, or another sender has
                it.
        """
        self._check_open()
        self._writer.wait_applied(version, receivers, timeout_s)

    def _check_open(self) -> None:
        if not self._writer.is_open:
            raise ClosedError(self._closed_message.format(store=self.store))

    def _close(self) -> None:
        self._copier.close()
        self._drafts.close()


class WeightSender(LocalSender):
    """The one writer of a store.

    Args:
        store: the store's directory; made (mode 0700) if it is not there.
        durable: flush each version to stable storage before it is published, so that it
            outlives a power cut. Always so on network mounts, where other hosts see nothing else.
        checksum: write a checksum of every tensor. ``"auto"``: on network mounts only.
        delta: publish what changed since the version before, where that is worth it; needs
            ``dbuffer[delta]``, and weights that lie in memory whole. On a network mount, memory
            for one more copy of them.
        dtype: publish floating-point tensors in this dtype, cast while copying.
        rename: a :class:`NameMap`, a mapping of names, or a function from name to name.
        num_threads: threads that copy. Default: the machine's cores, at most 8.
        reader_timeout_s: how long to wait for readers that still hold the buffer to be written,
            before they are evicted. On network mounts nobody waits; there it is how long an old
            version is kept for readers that say they still read it.
        allow_shared_store: accept a directory that belongs to someone else, or that others can
            write to.
        move_torchrl_aside: where the directory holds weights of TorchRL's own double buffer, move
            them into ``before-dbuffer`` below it. Default: refuse such a directory, as one with a
            checkpoint.

    Raises:
        StoreBusyError: another sender has this store.
        StoreAccessError: the directory is not ours alone.
        OptionError: the directory holds weights of another kind.
        StoreAccessError: the directory cannot be made or written.
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        durable: bool = False,
        checksum: bool | Literal["auto"] = "auto",
        delta: bool = False,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        move_torchrl_aside: bool = False,
    ) -> None:
        options.choice("checksum", checksum, (True, False, "auto"))
        if options.flag("delta", delta):
            require_compression()
        self._describer = Describer(dtype=dtype, rename=rename)
        copier = Copier(num_threads)
        writer = BufferWriter(
            store,
            durable=durable,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
            move_torchrl_aside=move_torchrl_aside,
        )
        super().__init__(copier, writer)
        self._pending: list[PendingPublication] = []
        """Publications that nobody waited for, until their outcome is known."""
        self._is_behind = False
        """Whether a send has failed: patches of what it would have published fit nothing."""
        self._checksum = self._writer.medium.has_checksums if checksum == "auto" else checksum
        self._deltas: DeltaPublisher | None = None
        if delta:
            self._deltas = DeltaPublisher(self._drafts, self._copier, hashed=self._checksum)

    @overload
    def send(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: Literal[True] = True,
    ) -> Publication: ...

    @overload
    def send(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: Literal[False],
    ) -> PendingPublication: ...

    def send(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> Publication | PendingPublication:
        """Publish weights. When it returns, every receiver can see them.

        Args:
            weights: a module (its parameters and persistent buffers), a state dict, a
                TensorDict, ``(name, tensor)`` pairs, or the path of a HuggingFace checkpoint.
                An iterator is consumed tensor by tensor, for weights that do not fit into
                memory at once; all else is faster.
            version: above all versions before. Default: the last one plus one.
            metadata: anything JSON can hold, a trainer's step for instance.
            progress: called with the bytes copied so far and in all (0: not known), for sources
                that come tensor by tensor.
            wait: False: return at once, and publish from a thread meanwhile. The trainer may go on
                with forward and backward, and must not change the weights before ``wait()`` of
                what was returned; see also :meth:`guard`. Not for iterators, lazy tensors and
                checkpoints. A version before that is not published yet is waited for.

        Raises:
            InvalidWeightsError: something in the weights or the metadata cannot be published.
            VersionError: ``version`` is not above the last one.
            StoreFullError, StoreAccessError: the filesystem refused. The last version stays.
            WriterSupersededError: another sender took the store over.
            OptionError: ``wait`` is not what it may be.
            ClosedError: the sender was closed, or this is a forked child.
            DBufferError: what went wrong with a version that was not waited for.
        """
        started = time.monotonic()
        self._is_behind = True
        options.flag("wait", wait)
        self._settle()
        with self._publishing():
            if wait:
                version, published = self._send(weights, version, metadata, progress)
                return self._note_sent(started, version, published)
            if sources.is_stream(weights):
                options.refuse("wait", wait, "True with an iterator, which only its owner may run")
            self._writer.next_version(version)
            checked = checked_metadata(metadata)
            source = self._describer.describe(weights)
            if source.is_lazy:
                options.refuse("wait", wait, "True with lazy tensors, which only their owner makes")
        tensors = cast("list[torch.Tensor]", source.tensors)
        unchanged = Unchanged([spec.name for spec in source.specs], tensors)
        streams = StreamsOf(tensors)

        def publish() -> Publication:
            with self._publishing(), streams.followed():
                at = self._writer.next_version(version)
                published = self._send_source(source, at, checked, progress, unchanged.require)
            return self._note_sent(started, at, published)

        pending = PendingPublication()
        try:
            # First of all: if this is interrupted later, it may go on, and is waited for.
            self._pending.append(pending)
            pending.begin(publish)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def send_patches(
        self,
        patches: Iterable[SparsePatch],
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Publish the newest version once more, with other values in some places.

        It costs what the patches change, not the model. Patches that change nothing make a version
        all the same; bits are taken as they are, also those of a NaN.

        The newest version is the one that this sender has published last. Before its first, it is
        the one that the sender before it has left, as for a `send`; send all weights first where
        that may be another run's.

        Args:
            patches: one a tensor at most.
            version: as for `send`.
            metadata: as for `send`.

        Raises:
            OptionError: this sender was made without ``delta=True``.
            WeightsMismatchError: a patch names a tensor or a place that there is not, or has
                another shape, or a dtype that is not cast.
            InvalidWeightsError: a patch names a place twice, has more indices than values, or is no
                `SparsePatch` of plain tensors.
            VersionError: nothing was published before that patches could follow, or the last
                `send`, or publish of patches, failed: send all weights. Patches that were refused
                spoil nothing.
            StoreFullError, StoreAccessError, WriterSupersededError, ClosedError: as for `send`.
        """
        started = time.monotonic()
        self._settle()
        with self._publishing():
            if self._deltas is None:
                options.refuse("delta", False, "True, for a sender of patches")
            if self._is_behind:
                raise VersionError(
                    f"the weights that were sent last to {self.store} were not published, so there "
                    "is nothing that patches of them could follow: send all weights once"
                )
            at = self._writer.next_version(version)
            wanted = Wanted(at, checked_metadata(metadata))
            published = self._deltas.publish_patches(patches, wanted)
        return self._note(started, at, *published)

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let each step of an optimizer wait for what ``send(wait=False)`` is publishing.

        What went wrong with it is raised by the step, which is not taken then.

        Returns:
            What takes the guard off again, by ``remove()``.
        """
        return optimizer.register_step_pre_hook(lambda *_: self._settle())

    def _note_sent(self, started: float, version: int, published: Published) -> Publication:
        self._is_behind = False
        return self._note(started, version, *published)

    def _settle(self) -> None:
        """Wait for what was sent and not waited for, and raise what nobody has been told of.

        Not in a forked child, where nobody publishes it; nor on top of this thread's own publish,
        for which it may be waiting.
        """
        if self._pid != os.getpid() or self._publishing_thread == threading.get_ident():
            return
        settled = list(self._pending)
        for pending in settled:
            pending.finish()
        errors = [error for each in settled if (error := each.untold_error()) is not None]
        for pending in settled:
            with contextlib.suppress(ValueError):  # another thread has done so
                self._pending.remove(pending)
        for error in errors[1:]:
            logger.error("another version that was sent was not published, either: %s", error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Give the store up, after what is being published. The last version stays published.

        Raises:
            DBufferError: what went wrong with a version that was not waited for.
        """
        try:
            self._settle()
        finally:
            super().close()

    def _send(
        self,
        weights: Weights,
        version: int | None,
        metadata: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> tuple[int, Published]:
        version = self._writer.next_version(version)
        checked = checked_metadata(metadata)
        if sources.is_stream(weights):
            if self._deltas is not None:
                raise InvalidWeightsError(
                    "a sender with delta=True compares weights that lie in memory whole, and an "
                    "iterator gives them one by one: make a dictionary of them"
                )
            stream = self._describer.stream(weights)
            return version, self._send_stream(stream, version, checked, progress)
        source = self._describer.describe(weights)
        return version, self._send_source(source, version, checked, progress)

    def _send_source(
        self,
        source: Source,
        version: int,
        metadata: dict[str, Any],
        progress: Progress | None,
        check: Callable[[], None] = lambda: None,
    ) -> Published:
        self._refuse_idle_buffer(source)
        footer = self._drafts.footer_of(source.specs, source.aliases)
        if self._deltas is not None:
            fetched = list(map(sources.fetch, source.tensors))
            return self._deltas.publish(footer, fetched, Wanted(version, metadata, check))
        with self._drafts.begin(version, footer, hashed=self._checksum) as draft:
            if source.is_lazy:
                # One at a time: what was gathered or read is dropped before the next.
                tensors = map(sources.fetch, source.tensors)
                count = counter(progress, footer.layout.num_bytes)
                draft.fill_one_by_one(tensors, self._copier, count)
            else:
                draft.fill(cast("list[torch.Tensor]", source.tensors), self._copier)
            check()
            draft.commit(metadata)
        return Published(footer.layout, None)

    def _refuse_idle_buffer(self, source: Source) -> None:
        """Refuse a snapshot's tensors that this version would overwrite while it reads them."""
        tensors = [] if source.is_lazy else cast("list[torch.Tensor]", source.tensors)
        files = [file_under(tensor) for tensor in tensors]
        if not any(files):
            return
        idle = self._writer.idle_file()
        for spec, file in zip(source.specs, files, strict=True):
            if file is not None and file == idle:
                raise InvalidWeightsError(
                    f"{spec.name} lies in the buffer of {self.store} that the next version is "
                    "written to: it is a tensor of a snapshot of the version before the newest. "
                    "To roll back to that, send snapshot.copy() after its with block"
                )

    def _send_stream(
        self,
        stream: Iterator[tuple[TensorSpec, torch.Tensor]],
        version: int,
        metadata: dict[str, Any],
        progress: Progress | None,
    ) -> Published:
        """Append tensors to a new file as they come; the layout is known when all have."""
        count = counter(progress, 0)
        with self._drafts.begin(version, None, hashed=self._checksum) as draft:
            for spec, tensor in stream:
                draft.append(spec, tensor)
                if count is not None:
                    count(spec.num_bytes)
            draft.commit(metadata)
        return Published(draft.layout, None)


def counter(progress: Progress | None, total: int) -> OnBytes | None:
    """Adds up what several threads copy, and tells ``progress``; None if nobody is to be told."""
    if progress is None:
        return None
    done = 0
    lock = threading.Lock()

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress(done, total)

    return count
