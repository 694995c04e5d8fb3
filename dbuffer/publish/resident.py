"""`ResidentModel`: a model whose parameters live in the buffer that is not being read.

A `WeightSender` copies a trainer's weights into the idle buffer. Here they are there already: the
optimizer writes them where they will be published, and a publish writes the manifest and flips the
version pointer. Then the model changes sides: the bytes just published are copied into the other
buffer, and training goes on there. That copy comes after the flip, so no reader waits for it, and
published bytes are never written again: no version has half of an optimizer's step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dbuffer.errors import DBufferError, UnsupportedError
from dbuffer.format.delta import require_compression
from dbuffer.format.layout import ALIGNMENT_BYTES, Layout
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.tensors import MappedTensors
from dbuffer.publish.delta_chain import DeltaChain
from dbuffer.publish.draft import Draft, checked_metadata
from dbuffer.publish.publication import Publication
from dbuffer.publish.publisher import Base, Publisher, PublishRequest
from dbuffer.publish.shares import ResidentShare, WholeShare
from dbuffer.ranks.world import World
from dbuffer.runtime import options
from dbuffer.store.medium import medium_of
from dbuffer.store.writer import BufferWriter
from dbuffer.weights.checkpoint import LazyTensor
from dbuffer.weights.names import Rename
from dbuffer.weights.sources import Describer, Source, is_same_memory, own_tensors

logger = logging.getLogger(__name__)


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
            then write nothing else. A publish compares both buffers. Needs the extra ``delta``.
        rename: a mapping of names, or a function from name to name.
        as_checkpoint: publish a transformers module as ``save_pretrained`` would save it. False:
            publish its own names and tensors, with experts fused as transformers fuses them.
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
        as_checkpoint: bool = True,
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
        self._describer = Describer(rename=rename, as_checkpoint=as_checkpoint)
        self._home: MappedTensors | None = None
        """File in which the parameters live; None: they are in ordinary memory."""
        source = self._describe_movable()
        copier = Copier(num_threads)
        self._writer = BufferWriter(
            store,
            durable=durable,
            reader_timeout_s=reader_timeout_s,
            allow_shared_store=allow_shared_store,
            move_torchrl_aside=move_torchrl_aside,
        )
        chain = DeltaChain(self._writer, hashed=checksum)
        buffers = self._writer.store
        super().__init__(buffers, World(), copier, chain, hashed=checksum, has_deltas=delta)
        self._base = None  # an earlier sender's version is not read: the first is published in full
        try:
            self._move_in(source)
        except BaseException:
            self.close()
            raise

    def publish(
        self, *, version: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Publication:
        """Publish the parameters as they are, then let the model live in the other buffer.

        A tensor that was moved out of the buffer since the last publish (``.half()``, an
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
            version = self._writer.next_version(version)
            checked = checked_metadata(metadata)
            source = self._describer.describe(self.module)
            if self._home is None or not _is_at(self._home, source):
                source = self._describe_movable()
                if self._home is not None:
                    logger.warning(
                        "%s: something was moved out of the store since the last publish (by "
                        ".half(), share_memory() or an assignment?), and is copied back in",
                        self.store,
                    )
                    self._abandon()
                self._move_in(source)
            footer = self._footer_of(source)
            request = PublishRequest(started, source, footer, version, checked)
            home = self._home
            try:
                publication = self._publish(request)
                self._change_sides(source)
            except BaseException:
                # An interrupt may come when readers have the version, and the model lives in it.
                if self._home is home:
                    self._abandon()
                raise
        duration_s = time.monotonic() - started  # readers of the other buffer included
        return self._count(replace(publication, duration_s=duration_s))

    def close(self) -> None:
        """Move the parameters to ordinary memory, and give the store up; after a publish."""
        super().close()

    def _close(self) -> None:
        # A forked child has nothing to abandon, and must not remove what its parent writes.
        if self._writer.is_open:
            self._abandon()
        super()._close()

    def _describe_movable(self) -> Source:
        source = self._describer.describe(self.module)
        for spec, lazy in zip(source.specs, source.tensors, strict=True):
            if not isinstance(lazy, LazyTensor):
                continue
            if lazy.sharded is not None:
                raise UnsupportedError(
                    "a rank holds only a part of the module: use ShardedWeightSender"
                )
            raise UnsupportedError(
                f"transformers computes {spec.name!r} when it saves the module, so it is none of "
                "the module's tensors: publish with a WeightSender, or the module's own tensors "
                "(as_checkpoint=False)"
            )
        _require_wholes(source, own_tensors(self.module))
        return source

    def _move_in(self, source: Source, *, is_published: bool = False) -> None:
        """Claim the idle buffer, copy everything into it, and let the parameters live there.

        ``is_published``: they are as they were published last, so that the changes since the
        version before are enough.
        """
        tensors, chain = source.eager, self._lead()
        draft = chain.open(self._writer.next_version(None), self._footer_of(source))
        try:
            mapped = draft.mapped
            if not (is_published and self._is_caught_up(draft)):
                self._copier.write(mapped, tensors)
        except BaseException:
            chain.abandon()
            raise
        self._home = mapped
        offset_of = dict(
            zip([tensor.data_ptr() for tensor in tensors], mapped.layout.offsets, strict=True)
        )
        own = [tensor for tensor in own_tensors(self.module) if tensor.data_ptr() in offset_of]
        self._point(
            {
                tensor.data_ptr(): _tensor_at(mapped, offset_of[tensor.data_ptr()], tensor)
                for tensor in own
                if tensor.numel()
            }
        )

    def _is_caught_up(self, draft: Draft) -> bool:
        """Write the last changes into the draft's file, if it holds the version before the last."""
        base, head = self._base, self._lead().last
        if not isinstance(base, Base) or not isinstance(base.share, WholeShare):
            return False
        if not base.share.catch_up(draft, head):
            return False
        return head.checksums is None or self._copier.checksums(draft.mapped) == head.checksums

    def _make_share(self, footer: Footer | None) -> ResidentShare:
        return ResidentShare(footer, self._lead(), self._copier, is_kept=self._has_deltas)

    def _change_sides(self, source: Source) -> None:
        """Let the model live in the other buffer, or in ordinary memory if that cannot be."""
        published = self._home
        assert published is not None  # noqa: S101 - it was published from there
        try:
            self._move_in(source, is_published=True)
        except BaseException as error:
            if self._home is published:
                self._home = None
            self._evacuate(published)
            if not isinstance(error, DBufferError | OSError):
                raise
            # The version is out. Whatever hinders the next one still does when it is published.
            logger.warning(
                "%s: the model stays in ordinary memory until the next publish, which copies it: "
                "%s",
                self.store,
                str(error),
            )

    def _abandon(self) -> None:
        """Move the parameters to ordinary memory, and abandon the version that was begun.

        Readers may have one that failed in its commit: nothing more is written into its file.
        """
        home, self._home = self._home, None
        try:
            if home is not None:
                self._evacuate(home)
        finally:
            super()._abandon()

    def _evacuate(self, mapped: MappedTensors) -> None:
        places = range(mapped.address, mapped.address + mapped.layout.checksums_offset)
        tensors = [t for t in own_tensors(self.module) if t.data_ptr() in places]
        self._point({tensor.data_ptr(): tensor.detach().clone() for tensor in tensors})
        # A mapping keeps an unlinked file's room.
        self._lead().mappings.clear()

    def _point(self, places: dict[int, torch.Tensor]) -> None:
        """Let tensors of the module, ties included, live where those at their addresses lie now.

        An empty one has no address, and stays.
        """
        for tensor in own_tensors(self.module):
            if tensor.numel() and tensor.data_ptr() in places:
                tensor.data = places[tensor.data_ptr()]


def _is_at(home: MappedTensors, source: Source) -> bool:
    """Whether a source's tensors lie in this file, each at its place."""
    layout = home.layout
    if source.is_lazy or (source.specs, source.aliases) != (layout.specs, layout.aliases):
        return False
    pairs = zip(source.eager, home.views, strict=True)
    return all(is_same_memory(tensor, view) for tensor, view in pairs if view.numel())


def _require_wholes(source: Source, own: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that are not the module's own, in main memory, and whole."""
    wholes: dict[int, torch.Tensor] = {}
    places: set[int] = set()
    seen_otherwise: set[int] = set()
    """Storages of which the module has several views, that are published or not."""
    for one in own:
        if one.device.type == "cpu":
            address = one.untyped_storage().data_ptr()
            if not is_same_memory(wholes.setdefault(address, one), one):
                seen_otherwise.add(address)
    parts: dict[int, list[int]] = {}
    for index, (spec, tensor) in enumerate(zip(source.specs, source.eager, strict=True)):
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"tensor {spec.name!r} is on {tensor.device}, and no file is mapped there: "
                "publish with a WeightSender, which copies it"
            )
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        if (whole := wholes.get(storage.data_ptr())) is None:
            raise UnsupportedError(
                f"tensor {spec.name!r} is none of the module's parameters and buffers, but "
                "made by its state_dict(): publish with a WeightSender, which copies it"
            )
        # Else who writes to the whole, an optimizer with a flat buffer, writes somewhere else.
        if (
            storage.nbytes() != whole.nbytes
            or tensor.data_ptr() in places
            or storage.data_ptr() in seen_otherwise
        ):
            raise UnsupportedError(
                f"tensor {spec.name!r} is a part of something larger, or another view of it, "
                "from which moving it would cut it off: publish with a WeightSender"
            )
        places.add(tensor.data_ptr())
        if tensor.nbytes != whole.nbytes:
            parts.setdefault(storage.data_ptr(), []).append(index)
    for address, indices in parts.items():
        _check_parts(source, indices, wholes[address])


def _check_parts(source: Source, indices: list[int], whole: torch.Tensor) -> None:
    """Refuse a tensor that cannot live in the file because its published parts lie otherwise."""
    specs = [source.specs[index] for index in indices]
    tensors = [source.eager[index] for index in indices]
    starts = [tensor.data_ptr() - whole.data_ptr() for tensor in tensors]
    if (
        list(Layout.of(specs).offsets) != starts
        or sum(tensor.nbytes for tensor in tensors) != whole.nbytes
        or not all(tensor.is_contiguous() for tensor in tensors)
        or indices != list(range(indices[0], indices[-1] + 1))
    ):
        raise UnsupportedError(
            f"{specs[0].name!r} and {len(specs) - 1} more are parts of one tensor of the module, "
            "but do not lie in it as in a store, one after another and each at a multiple of "
            f"{ALIGNMENT_BYTES} bytes: publish with a WeightSender, or the module's own tensors "
            "(as_checkpoint=False)"
        )


def _tensor_at(mapped: MappedTensors, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a file, with a storage of its own.

    Programs that save checkpoints take views of one storage for tied tensors. And
    ``share_memory()`` moves a storage, under all tensors that share it.
    """
    data = torch.frombuffer(mapped.raw, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return data.view(like.dtype).view(like.shape)
