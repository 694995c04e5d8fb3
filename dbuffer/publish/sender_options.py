"""`SenderOptions`: the options of senders, and of each class and command that makes a sender."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict

import torch

from dbuffer.errors import OptionError
from dbuffer.io.tensors import can_cast_to
from dbuffer.runtime import options as checks
from dbuffer.store.medium import Medium
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.sources import Describer, Rename


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
    """A :class:`NameMap`, a mapping of names, or a function from name to name."""
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

    def open_writer(self, store: str | os.PathLike[str]) -> BufferWriter:
        return BufferWriter(
            store,
            durable=self.durable,
            reader_timeout_s=self.reader_timeout_s,
            allow_shared_store=self.allow_shared_store,
            run_name=self.run,
            keep=self.keep,
        )

    def make_describer(self, *, sharded: bool = False) -> Describer:
        return Describer(
            dtype=self.dtype,
            rename=self.rename,
            sharded=sharded,
            as_checkpoint=self.as_checkpoint,
            require_finite=self.require_finite,
        )

    def has_checksums(self, medium: Medium) -> bool:
        return medium.reaches_other_hosts if self.checksum == "auto" else self.checksum
