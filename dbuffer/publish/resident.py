"""`ResidentModel`: a model whose parameters live in the buffer that is not being read.

A `WeightSender` copies a trainer's weights into the idle buffer. Here they are there already: the
optimizer writes them where they will be published, and a publish writes the manifest and moves the
pointer. Then the model changes sides: the bytes just published are copied into the other buffer,
and training goes on there. That copy comes after the flip, so no reader waits for it, and what has
been published is never written again: half of an optimizer's step is in no version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dbuffer.errors import DBufferError, UnsupportedError
from dbuffer.format.delta import require_compression
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import MappedTensors
from dbuffer.publish.delta_chain import DeltaChain, is_worth_a_delta
from dbuffer.publish.draft import Draft, Drafts, checked_metadata
from dbuffer.publish.publication import Publication
from dbuffer.publish.publisher import Published, Publisher
from dbuffer.publish.shares import WholeShare
from dbuffer.ranks.world import Solo
from dbuffer.runtime import options
from dbuffer.store.medium import medium_of
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer, Source, is_same_memory, own_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Home:
    """The claimed buffer in which the parameters live."""

    draft: Draft
    mapped: MappedTensors
    tensors: list[torch.Tensor]
    """Tensors that the parameters share their memory with, in the layout's order."""
    addresses: list[int]
    """Addresses of the tensors in the mapped file. ``share_memory()``, which torch.multiprocessing
    calls for what it hands to another process, moves a storage elsewhere, under all tensors that
    share it."""


class ResidentModel(Publisher):
    """The one writer of a store, for a model on the CPU: it lives there, and is not copied there.

    Parameters and persistent buffers keep their identity: optimizers, ties, ``requires_grad`` and
    gradients stay as they are, and ``load_state_dict`` writes in place. What was not contiguous is
    so afterwards. For one thread; publish between steps, not between a forward and its backward.

    Two things must not be written to: what was taken from the module before a publish (``.data``,
    ``state_dict()``), which is the published version's; and, in a forked child, the module, whose
    memory is shared as after ``Module.share_memory()``.

    Args:
        module: its parameters are moved into the store at once.
        store: the store's directory, on a local mount, in ``/dev/shm`` best of all; made if it is
            not there.
        durable: flush each version to stable storage before it is published.
        checksum: write a checksum of every tensor, hashed when it is published.
        delta: tell receivers what changed since the version before, where that is little: engines
            then write nothing else. A publish compares both buffers. Needs ``dbuffer[delta]``.
        rename: a mapping of names, or a function from name to name.
        num_threads: threads that copy and hash. Default: the machine's cores, at most 8.
        reader_timeout_s: how long a publish waits, after its flip, for readers that still hold
            the version before, until they are evicted.
        allow_shared_store: accept a directory that belongs to someone else, or that others can
            write to.
        move_torchrl_aside: where the directory holds weights of TorchRL's own double buffer, move
            them into ``before-dbuffer`` below it. Default: refuse such a directory, as one with a
            checkpoint.

    Raises:
        UnsupportedError: the store is on a network mount, or a tensor is not in main memory, is a
            part of something larger or made by ``state_dict()``; a `WeightSender` publishes such a
            model.
        InvalidWeightsError: something in the module cannot be published.
        StoreBusyError: another sender has this store.
        StoreAccessError: the directory cannot be made or written, or is not ours alone.
        OptionError: an option is not what it may be, or the directory holds other weights.
    """

    _closed_message = "this model has left {store}, or was made before a fork; make a new resident"

    def __init__(
        self,
        module: nn.Module,
        store: str | os.PathLike[str],
        *,
        durable: bool = False,
        checksum: bool = False,
        delta: bool = False,
        rename: Rename | None = None,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        move_torchrl_aside: bool = False,
    ) -> None:
        medium = medium_of(options.directory("store", store))
        if not medium.can_rewrite_in_place:
            raise UnsupportedError(
                f"{medium.root} is on a {medium.filesystem} mount, where each version is a new "
                "file: publish with a WeightSender, or into a store in /dev/shm"
            )
        if not isinstance(module, nn.Module):
            options.refuse("module", type(module), "a torch.nn.Module")
        self.module = module
        options.flag("checksum", checksum)
        if options.flag("delta", delta):
            require_compression()
        self._describer = Describer(rename=rename)
        self._home: _Home | None = None
        source = self._describe_movable()
        copier = Copier(num_threads)
        self._writer = BufferWriter(
            store,
            durable=durable,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
            move_torchrl_aside=move_torchrl_aside,
        )
        self._drafts = Drafts(self._writer)
        chain = DeltaChain(self._drafts)
        buffers = self._writer.store
        super().__init__(buffers, Solo(), copier, chain, hashed=checksum, has_deltas=delta)
        try:
            self._move_in(source)
        except BaseException:
            self.close()
            raise

    def publish(
        self, *, version: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Publication:
        """Publish the parameters as they are, then let the model live in the other buffer.

        What something has moved out of the buffer since the last publish (``.half()``, an
        assignment, a new parameter) is copied back in before, with a warning.

        Args:
            version: above all versions before. Default: the last one plus one.
            metadata: anything JSON can hold, a trainer's step for instance.

        Raises:
            UnsupportedError: something was moved where it cannot be mapped, to a GPU for instance.
            InvalidWeightsError: something in the module or the metadata cannot be published.
            VersionError: ``version`` is not above the last one.
            StoreFullError, StoreAccessError: the filesystem refused.
            WriterSupersededError: another sender took the store over.
            ClosedError: the model's store was closed, or this is a forked child.

        After an error the last version stays published, and the model keeps its values, in
        ordinary memory if need be.
        """
        started = time.monotonic()
        with self._publishing():
            published = self._publish_home(version, metadata)
        return self._note(started, published)

    def _publish_home(self, version: int | None, metadata: Mapping[str, Any] | None) -> Published:
        version = self._writer.next_version(version)
        checked = checked_metadata(metadata)
        source = self._describer.describe(self.module)
        if self._home is None or not _is_at(self._home, source):
            source = self._describe_movable()
            if self._home is not None:
                logger.warning(
                    "%s: something was moved out of the store since the last publish (by .half(), "
                    "share_memory() or an assignment?), and is copied back in",
                    self.store,
                )
                self._leave(self._home)
            self._move_in(source)
        home = self._home
        assert home is not None  # noqa: S101 - it has just been found, or made
        delta_bytes = self._flip(home, version, checked)
        self._change_sides(home, source)
        return Published(version, home.draft.layout, delta_bytes)

    def close(self) -> None:
        """Move the parameters to ordinary memory, and give the store up; after a publish."""
        super().close()

    def _close(self) -> None:
        # A forked child has nothing to give up, and must not remove what its parent writes.
        if self._writer.is_open and self._home is not None:
            self._leave(self._home)
        super()._close()

    def _describe_movable(self) -> Source:
        source = self._describer.describe(self.module)
        if source.is_lazy:
            raise UnsupportedError(
                "a rank holds only a part of the module: use ShardedWeightSender"
            )
        places = set()
        own = {tensor.data_ptr() for tensor in own_tensors(self.module)}
        for spec, tensor in zip(source.specs, source.eager, strict=True):
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"tensor {spec.name!r} is on {tensor.device}, and no file is mapped there: "
                    "publish with a WeightSender, which copies it"
                )
            if tensor.numel() and tensor.data_ptr() not in own:
                raise UnsupportedError(
                    f"tensor {spec.name!r} is none of the module's parameters and buffers, but "
                    "made by its state_dict(): publish with a WeightSender, which copies it"
                )
            # Else who writes to the whole, an optimizer with a flat buffer, writes somewhere else.
            is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
            if tensor.numel() and (is_part or tensor.data_ptr() in places):
                raise UnsupportedError(
                    f"tensor {spec.name!r} is a part of something larger, or another view of it, "
                    "from which moving it would cut it off: publish with a WeightSender"
                )
            places.add(tensor.data_ptr())
        return source

    def _move_in(self, source: Source, *, is_published: bool = False) -> None:
        """Claim the idle buffer, copy everything into it, and let the parameters live there.

        ``is_published``: they are as they were published last, so that what changed since the
        version before is enough.
        """
        tensors = source.eager
        version = self._writer.next_version(None)
        footer = self._drafts.footer_of(source.specs, source.aliases)
        with contextlib.ExitStack() as on_error:
            begun = self._drafts.begin(version, footer, hashed=self._hashed)
            draft = on_error.enter_context(begun)
            mapped = draft.mapped
            if not (is_published and self._brought_up_to_date(draft, mapped)):
                self._copier.write(mapped, tensors)
            on_error.pop_all()  # it stays open, for the model to live in
        housed = _separate_tensors(mapped)
        addresses = [tensor.data_ptr() for tensor in housed]
        self._home = home = _Home(draft, mapped, housed, addresses)
        self._point(dict(zip([t.data_ptr() for t in tensors], home.tensors, strict=True)))

    def _brought_up_to_date(self, draft: Draft, mapped: MappedTensors) -> bool:
        """Write into the version before the last what changed since, if that is what is there."""
        share, head = self._share, self._lead().head
        if not isinstance(share, WholeShare) or head is None:
            return False
        if not share.catch_up(mapped, draft, head):
            return False
        return head.checksums is None or self._copier.checksums(mapped) == head.checksums

    def _make_share(self, footer: Footer | None) -> WholeShare:
        chain, copier, hashed = self._lead(), self._copier, self._hashed
        return WholeShare(footer, chain, copier, hashed=hashed, is_kept=self._has_deltas)

    def _flip(self, home: _Home, version: int, metadata: dict[str, Any]) -> int | None:
        chain, footer = self._lead(), home.draft.footer
        checksums = self._copier.checksums(home.mapped) if self._hashed else None
        share, self._share = self._share, None
        diff = None
        if isinstance(share, WholeShare) and share.footer is footer:
            num_changed = share.find_in(home.tensors)
            if is_worth_a_delta(num_changed, footer.layout):
                diff = share.take_diff(checksums)
        # Readers may have it from here on, even if this fails: nothing more is written into it.
        self._home = None
        try:
            chain.adopt(version, is_delta=diff is not None)
            if diff is not None:
                chain.add_delta(home.draft, diff, self._copier)
            delta_bytes = chain.commit(home.draft, metadata, checksums)
        except BaseException:
            self._leave(home)
            raise
        if self._has_deltas:
            changes = None if diff is None else diff.changes
            self._share = self._make_share(footer)
            self._share.adopt(home.mapped, changes)
        return delta_bytes

    def _change_sides(self, home: _Home, source: Source) -> None:
        try:
            self._move_in(source, is_published=True)
        except BaseException as error:
            self._evacuate(home.mapped)
            if not isinstance(error, DBufferError | OSError):
                raise
            # The version is out. Whatever hinders the next one still does when it is published.
            logger.warning(
                "%s: the model stays in ordinary memory until the next publish, which copies it: "
                "%s",
                self.store,
                error,
            )

    def _leave(self, home: _Home) -> None:
        self._home = None
        try:
            self._evacuate(home.mapped)
        finally:
            home.draft.abandon()

    def _evacuate(self, mapped: MappedTensors) -> None:
        places = range(mapped.address, mapped.address + mapped.layout.checksums_offset)
        tensors = [t for t in own_tensors(self.module) if t.data_ptr() in places]
        self._point({tensor.data_ptr(): tensor.detach().clone() for tensor in tensors})
        # A mapping keeps an unlinked file's room.
        self._drafts.mapped.clear()

    def _point(self, places: dict[int, torch.Tensor]) -> None:
        """Let tensors of the module, ties included, live where those at their addresses lie now.

        An empty one has no address, and stays.
        """
        for tensor in own_tensors(self.module):
            if tensor.numel() and tensor.data_ptr() in places:
                tensor.data = places[tensor.data_ptr()]


def _is_at(home: _Home, source: Source) -> bool:
    layout = home.draft.layout
    return (source.specs, source.aliases, source.is_lazy) == (
        layout.specs,
        layout.aliases,
        False,
    ) and all(
        is_same_memory(tensor, place) and place.data_ptr() == address
        for tensor, place, address in zip(source.tensors, home.tensors, home.addresses, strict=True)
        if place.numel()
    )


def _separate_tensors(mapped: MappedTensors) -> list[torch.Tensor]:
    """The tensors of a file, each with a storage of its own.

    Views of one storage would be taken for tied by what saves checkpoints.
    """
    tensors = []
    for view, start in zip(mapped.views, mapped.layout.offsets, strict=True):
        if view.numel():
            data = torch.frombuffer(mapped.raw, dtype=torch.uint8, count=view.nbytes, offset=start)
            view = data.view(view.dtype).view(view.shape)
        tensors.append(view)
    return tensors
