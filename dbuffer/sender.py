"""`WeightSender`: publishes a trainer's weights, one version after another."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch

from dbuffer import filesystem, sources, spans
from dbuffer.acknowledgements import wait_applied
from dbuffer.errors import (
    ClosedError,
    InvalidWeightsError,
    OptionError,
)
from dbuffer.layout import BLOCK_BYTES, Layout, TensorSpec, align, digest
from dbuffer.names import Rename
from dbuffer.output import Footer, KeptMappings, checked_metadata
from dbuffer.sources import Describer, Source, Weights
from dbuffer.tensors import (
    DTYPES,
    Copier,
    as_bytes,
    can_cast_to,
    copy_one,
    join_digests,
)
from dbuffer.writer import BufferWriter, Claim

logger = logging.getLogger(__name__)

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


class WeightSender:
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
        if dtype is not None and not can_cast_to(dtype):
            raise OptionError(f"weights cannot be cast to {dtype}: dtype is a floating-point one")
        if checksum not in (True, False, "auto"):
            raise OptionError(f"checksum is {checksum!r}, and may be True, False or 'auto'")
        self._opened_at = time.time()
        self._send_lock = threading.Lock()
        self._copier = Copier(num_threads)
        self._writer = BufferWriter(
            store,
            durable=durable,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
        )
        self._checksum = self._writer.mount.is_network if checksum == "auto" else checksum
        self._describer = Describer(dtype=dtype, rename=rename)
        self._mapped = KeptMappings()
        self._footer: Footer | None = None

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self._writer.root

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
        with self._send_lock:
            version, layout = self._send(weights, version, metadata, progress)
        return Publication(
            version=version,
            num_tensors=len(layout.specs),
            num_bytes=layout.num_bytes,
            duration_s=time.monotonic() - started,
        )

    def wait_applied(
        self, version: int, *, receivers: int | Collection[str] = 1, timeout_s: float = 60.0
    ) -> None:
        """Wait until receivers have applied ``version`` or a later one.

        An engine of many ranks is one receiver, and has applied it when all ranks have.

        Args:
            version: as `send` returned it.
            receivers: how many of them, whichever; or the ids of those to wait for.
            timeout_s: for how long.

        Raises:
            AcknowledgementTimeoutError: they have not, in time; the message says who has.
            ReceiverFailedError: one of those named cannot apply it, or its process has ended.
        """
        self._check_open()
        wait_applied(
            self._writer.store, version, receivers, timeout_s=timeout_s, since=self._opened_at
        )

    def close(self) -> None:
        """Give the store up. The last version stays published."""
        self._mapped.clear()
        self._copier.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._writer.is_open:
            raise ClosedError(
                f"this sender of {self.store} is closed, or was made before a fork; make a new one"
            )

    def _send(
        self,
        weights: Weights,
        version: int | None,
        metadata: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> tuple[int, Layout]:
        self._check_open()
        version = self._writer.next_version(version)
        checked = checked_metadata(metadata)
        if sources.is_stream(weights):
            stream = self._describer.stream(weights)
            layout = self._send_stream(stream, version, checked, progress)
        else:
            source = self._describer.describe(weights)
            layout = self._send_source(source, version, checked, progress)
        return version, layout

    def _send_source(
        self, source: Source, version: int, metadata: dict[str, Any], progress: Progress | None
    ) -> Layout:
        footer = self._footer_of(source)
        self._mapped.drop_other_layouts(footer.layout)
        claim = self._claim(version, footer.layout_xxh3, footer.file_bytes)
        try:
            if claim.is_new:
                footer.write(claim)
            write = self._write if self._writer.mount.is_network else self._copy
            checksums = write(claim, footer, source, progress)
            self._commit(claim, footer, checksums, metadata)
        except BaseException:
            self._writer.abandon(claim)
            # A mapping keeps an unlinked file's room, which the next version needs.
            self._mapped.clear()
            raise
        return footer.layout

    def _claim(self, version: int, layout_xxh3: str | None, file_bytes: int) -> Claim:
        try:
            return self._writer.claim(version, layout_xxh3=layout_xxh3, file_bytes=file_bytes)
        except BaseException:
            self._mapped.clear()
            raise

    def _footer_of(self, source: Source) -> Footer:
        """The footer of a source's file; that of the last publish, where nothing changed."""
        self._footer = Footer.like(self._footer, source.specs, source.aliases)
        return self._footer

    def _copy(
        self, claim: Claim, footer: Footer, source: Source, progress: Progress | None
    ) -> list[int] | None:
        """Copy everything into the file, which is mapped; the checksums, if they are wanted."""
        mapped = self._mapped.of(claim.path, claim.file, footer)
        if not source.is_lazy:
            tensors = cast("list[torch.Tensor]", source.tensors)
            if self._checksum:
                return self._copier.write_hashed(mapped, tensors)
            self._copier.write(mapped, tensors)
            return None
        done, total = 0, mapped.layout.num_bytes
        for view, tensor in zip(mapped.views, source.tensors, strict=True):
            # One at a time: what was gathered or read is dropped before the next.
            copy_one(view, sources.fetch(tensor))
            done += view.nbytes
            if progress is not None:
                progress(done, total)
        return self._copier.checksums(mapped) if self._checksum else None

    def _write(
        self, claim: Claim, footer: Footer, source: Source, progress: Progress | None
    ) -> list[int] | None:
        """Write everything into the file, which is not mapped; the checksums, if wanted."""
        layout = footer.layout
        if not source.is_lazy:
            tensors = cast("list[torch.Tensor]", source.tensors)
            file = claim.file.number
            checksums = spans.write_tensors(
                file, claim.path, layout, tensors, self._copier, hashed=self._checksum
            )
            return checksums if self._checksum else None
        checksums = []
        for spec, offset, tensor in zip(layout.specs, layout.offsets, source.tensors, strict=True):
            checksums += self._append(claim, offset, _bytes_of(sources.fetch(tensor), spec))
            if progress is not None:
                progress(offset + spec.num_bytes, layout.checksums_offset)
        return checksums if self._checksum else None

    def _append(self, claim: Claim, offset: int, data: memoryview) -> list[int]:
        """Write one tensor; its checksum, if wanted."""
        with filesystem.os_errors("write a tensor", claim.path):
            filesystem.write_at(claim.file.number, offset, data)
        return [_checksum(data)] if self._checksum else []

    def _commit(
        self,
        claim: Claim,
        footer: Footer,
        checksums: list[int] | None,
        metadata: dict[str, Any],
    ) -> None:
        self._writer.commit(claim, footer.seal(claim, checksums, metadata))

    def _send_stream(
        self,
        stream: Iterator[tuple[TensorSpec, torch.Tensor]],
        version: int,
        metadata: dict[str, Any],
        progress: Progress | None,
    ) -> Layout:
        """Append tensors to a new file as they come; the layout is known when all have."""
        self._mapped.clear()
        claim = self._claim(version, None, 0)
        try:
            specs: list[TensorSpec] = []
            checksums: list[int] = []
            end = 0
            for spec, tensor in stream:
                checksums += self._append(claim, end, _bytes_of(tensor, spec))
                specs.append(spec)
                end = align(end + spec.num_bytes)
                if progress is not None:
                    progress(end, 0)
            if not specs:
                raise InvalidWeightsError("there is no tensor in the weights to publish")
            footer = Footer.of(Layout.of(specs))
            footer.write(claim)
            self._commit(claim, footer, checksums if self._checksum else None, metadata)
        except BaseException:
            self._writer.abandon(claim)
            raise
        return footer.layout


def _bytes_of(tensor: torch.Tensor, spec: TensorSpec) -> memoryview:
    """The tensor's bytes in main memory, cast; a view of the tensor itself where it can be."""
    dtype = DTYPES[spec.dtype]
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return as_bytes(flat.view(torch.uint8))


def _checksum(data: memoryview) -> int:
    """The same number as `Copier.checksums` gives for these bytes."""
    starts = range(0, max(data.nbytes, 1), BLOCK_BYTES)
    digests = [int(digest(data[at : at + BLOCK_BYTES]), 16) for at in starts]
    return digests[0] if len(digests) == 1 else join_digests(digests)
