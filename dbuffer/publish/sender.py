"""`WeightSender`: publishes a trainer's weights, one version after another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch

from dbuffer.errors import ClosedError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.io.copier import Copier
from dbuffer.io.transfer import OnBytes
from dbuffer.publish.draft import Drafts, checked_metadata
from dbuffer.runtime import options
from dbuffer.runtime.turns import Turns
from dbuffer.store.writer import BufferWriter
from dbuffer.weights import sources
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer, Weights

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a `send` has published."""

    version: int
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    duration_s: float
    """From the call of `send` to its return, waiting for slow readers included."""

    @classmethod
    def of(cls, version: int, layout: Layout, started: float) -> Self:
        return cls(
            version=version,
            num_tensors=len(layout.specs),
            num_bytes=layout.num_bytes,
            duration_s=time.monotonic() - started,
        )


class LocalSender(Turns):
    """A store's one writer, for weights that one process holds."""

    _closed = "this sender of {store} is closed, or was made before a fork; make a new one"

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        durable: bool,
        num_threads: int | None,
        reader_timeout_s: float,
        allow_shared_store: bool,
    ) -> None:
        super().__init__()
        self._copier = Copier(num_threads)
        self._writer = BufferWriter(
            store,
            durable=durable,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
        )
        self._drafts = Drafts(self._writer)

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
            AcknowledgementTimeoutError: they have not, in time; the message says who has.
            ReceiverFailedError: one of those named cannot apply it, or its process has ended.
        """
        self._check_open()
        self._writer.wait_applied(version, receivers, timeout_s)

    def _check_open(self) -> None:
        if not self._writer.is_open:
            raise ClosedError(self._closed.format(store=self.store))

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
        dtype: publish floating-point tensors in this dtype, cast while copying.
        rename: a :class:`NameMap`, a mapping of names, or a function from name to name.
        num_threads: threads that copy. Default: the machine's cores, at most 8.
        reader_timeout_s: how long to wait for readers that still hold the buffer to be written,
            before they are evicted. On network mounts nobody waits; there it is how long an old
            version is kept for readers that say they still read it.
        allow_shared_store: accept a directory that belongs to someone else, or that others can
            write to.

    Raises:
        WriterActiveError: another sender has this store.
        StoreInsecureError: the directory is not ours alone.
        StoreAccessError: the directory cannot be made or written.
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        durable: bool = False,
        checksum: bool | Literal["auto"] = "auto",
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
    ) -> None:
        options.choice("checksum", checksum, (True, False, "auto"))
        self._describer = Describer(dtype=dtype, rename=rename)
        super().__init__(
            store,
            durable=durable,
            num_threads=num_threads,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
        )
        self._checksum = self._writer.medium.has_checksums if checksum == "auto" else checksum

    def send(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Publication:
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

        Raises:
            InvalidWeightsError: something in the weights or the metadata cannot be published.
            VersionError: ``version`` is not above the last one.
            StoreFullError, StoreAccessError: the filesystem refused. The last version stays.
            WriterSupersededError: another sender took the store over.
            ClosedError: the sender was closed, or this is a forked child.
        """
        started = time.monotonic()
        with self._publishing():
            version, layout = self._send(weights, version, metadata, progress)
        return Publication.of(version, layout, started)

    def _send(
        self,
        weights: Weights,
        version: int | None,
        metadata: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> tuple[int, Layout]:
        version = self._writer.next_version(version)
        checked = checked_metadata(metadata)
        if sources.is_stream(weights):
            stream = self._describer.stream(weights)
            return version, self._send_stream(stream, version, checked, progress)
        source = self._describer.describe(weights)
        footer = self._drafts.footer_of(source.specs, source.aliases)
        with self._drafts.begin(version, footer, hashed=self._checksum) as draft:
            if source.is_lazy:
                # One at a time: what was gathered or read is dropped before the next.
                tensors = map(sources.fetch, source.tensors)
                count = counter(progress, footer.layout.num_bytes)
                draft.fill_one_by_one(tensors, self._copier, count)
            else:
                draft.fill(cast("list[torch.Tensor]", source.tensors), self._copier)
            draft.commit(checked)
        return version, footer.layout

    def _send_stream(
        self,
        stream: Iterator[tuple[TensorSpec, torch.Tensor]],
        version: int,
        metadata: dict[str, Any],
        progress: Progress | None,
    ) -> Layout:
        """Append tensors to a new file as they come; the layout is known when all have."""
        count = counter(progress, 0)
        with self._drafts.begin(version, None, hashed=self._checksum) as draft:
            for spec, tensor in stream:
                draft.append(spec, tensor)
                if count is not None:
                    count(spec.num_bytes)
            draft.commit(metadata)
        return draft.layout


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
