"""`PreparedSwitch`: the copies that switch a model to one version, prepared while it serves.

If only some elements of a tensor changed, a `Patch` writes just these elements in the pause. Only
weights on a device are patched, because copies from main memory to a device are slow. For weights
in main memory, patches shortened a pause by half at most.

After a switch, `RankModel.attest` compares the parameters with the staged version, byte by byte, in
a background thread. This attestation does not check layers that the engine's reload fills, buffers
that are not published, or a kernel's own memory. If versions come as deltas, `attest` also computes
a digest of the parameters. A switch computes the digest again before it applies patches. If the
digests differ, other code has written to the parameters, and the switch copies all of them. A
switch without patches does not look for such writes.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import xxhash

from dbuffer.engine.plan.copy_plan import CopyPlan, Image, Tensors, layer_of
from dbuffer.engine.plan.load_trace import Copy, CopyOp, View, as_integers, same_bytes
from dbuffer.format.layout import align
from dbuffer.format.lineage import VersionId
from dbuffer.format.ranges import Integers
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import as_bytes, flat_view
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.messages import described
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

Changed = Mapping[str, Integers]
"""Positions of the elements of published tensors that changed since an earlier version: flat and
ascending, by the tensor's name. A tensor without an entry is unchanged."""

MAX_SHARE = 0.05
"""Largest share of a part's elements to patch; above this share, the whole part is copied. On one
CPU, patching 3 % of 50 million bfloat16 took 0.6 of the time of a copy, and patching 10 % took
twice the time of a copy."""


_CHUNK_BYTES = 32 << 20
"""Number of bytes digested at a time. Digesting takes three times this memory. Smaller chunks would
be slow: on an H200, launching six kernels a chunk takes a quarter of the time of reading 32 MiB."""

_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""Odd constants without a pattern: the golden ratio's, and one of SplitMix64 (Steele et al., 2014).
"""


class Patch(NamedTuple):
    """New values for some elements of a parameter."""

    target: torch.Tensor
    """The parameter, viewed as flat integers of its elements' size."""
    positions: torch.Tensor
    values: torch.Tensor

    def apply(self) -> None:
        self.target.scatter_(0, self.positions.long(), self.values)

    def on_device(self) -> Patch:
        is_short = self.target.numel() <= torch.iinfo(torch.int32).max
        positions = self.positions.to(torch.int32 if is_short else torch.int64)
        device = self.target.device
        return self._replace(positions=positions.to(device), values=self.values.to(device))


class Patches(NamedTuple):
    """Patches and copies that switch a model from an earlier version, the base."""

    base: VersionId
    patches: Sequence[Patch]
    copies: Mapping[str, Sequence[Copy]]
    """Copies for changed parts of parameters that are not patched, by the parameter's name."""

    def apply(self, copier: Copier) -> None:

        def work(first: int, end: int) -> None:
            for patch in self.patches[first:end]:
                patch.apply()

        # The targets are views that the copier's threads made in inference mode. torch refuses to
        # write to such views outside of this mode, so use the copier's threads.
        copier.in_parallel(work, [(0, len(self.patches))])


@dataclass(eq=False)
class PreparedSwitch:
    """A switch of a model to one version.

    If the version's file is mapped, the copies read from the mapping. If the version is staged in
    memory, the memory has only this rank's part, in the order and dtypes of the rank's parameters.
    """

    plan: CopyPlan
    version: VersionId
    tensors: Tensors
    """Published tensors. If the version is staged in memory, this has only the tensors of layers
    that are left to the engine's reload."""
    aliases: Mapping[str, str]
    """Names of tensors in the store, keyed by the names under which the model loads them."""
    copies: Mapping[str, Sequence[Copy]]
    images: Sequence[Image]
    digests: Mapping[str, int]
    patches: Patches | None = None

    @property
    def replaces_tensors(self) -> bool:
        """Whether this switch can load the version instead of a reload of all tensors.

        It can if the verification of the plan is valid for the version's values, and no layer or
        parameter of the plan was replaced.
        """
        verified_for = self.plan.verified_for
        return (
            verified_for is not None
            and all(self.digests.get(name) == xxh3 for name, xxh3 in verified_for.items())
            and not self.plan.places.replaced()
        )

    @cached_property
    def reloaded(self) -> Tensors:
        """Published tensors for the layers that are left to the engine's reload, keyed by name."""
        sources = self.plan.reloaded_sources
        return {name: self.tensors[name] for name in self.tensors if name in sources}

    @property
    def num_bytes(self) -> int:
        return self.plan.copied_bytes + sum(tensor.nbytes for tensor in self.reloaded.values())

    # While the engine serves

    def compared(self) -> Iterator[tuple[str, Sequence[Copy]]]:
        yield from self.copies.items()
        yield from ((image.name, image.copies()) for image in self.images)

    def of(self, tensors: Tensors) -> PreparedSwitch:
        """Return an equal switch that reads from ``tensors``, which are keyed by stored names."""
        offered = {name: tensors[self.aliases.get(name, name)] for name in self.tensors}
        patches = self.patches
        if patches is not None and patches.copies:  # the copies in the patches read the old tensors
            patches = None
        return replace(self, tensors=offered, copies=self.plan.copies_of(offered), patches=patches)

    def leave_device(self) -> None:
        """Free the prepared patches (changed elements), which are in the device's memory."""
        self.patches = None

    def staging_bytes(self, device_bytes: int) -> tuple[int, int]:
        """Return the bytes to stage on the device (at most ``device_bytes``) and in main memory."""
        parameters = self.plan.parameters.values()
        sizes = [align(tensor.nbytes) for tensor in (*parameters, *self.reloaded.values())]
        on_device = sum(size for size in _fitting(sizes[: len(parameters)], device_bytes))
        return on_device, sum(sizes) - on_device

    def copied_into(
        self,
        memories: tuple[torch.Tensor, torch.Tensor],
        copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    ) -> PreparedSwitch:
        """Copy the switch's sources into ``memories``; return a switch that reads these copies.

        The first memory, on the device, gets the parameters' new values until it is full. The
        second, main memory, gets the other sources.
        """
        parameters = self.plan.parameters
        sizes = [align(tensor.nbytes) for tensor in parameters.values()]
        names, count = list(parameters), len(_fitting(sizes, memories[0].numel()))
        staged, _ = _laid_out(memories[0], {name: parameters[name] for name in names[:count]})
        further, memory = _laid_out(memories[1], {name: parameters[name] for name in names[count:]})
        staged |= further
        reloaded, _ = _laid_out(memory, self.reloaded)
        copies = [(reloaded[name], tensor) for name, tensor in self.reloaded.items()]
        for name, tensor in staged.items():
            copies += self.plan.traced[name].bind(tensor, self.tensors)
        copy([target for target, _ in copies], [source for _, source in copies])
        patches = self.patches
        if patches is not None:
            unpatched = {
                name: [
                    (target, View.of(target, parameters[name]).in_(staged[name]))
                    for target, _ in copies
                ]
                for name, copies in patches.copies.items()
            }
            patches = patches._replace(copies=unpatched)
        return replace(
            self,
            tensors=reloaded,
            copies={name: [(parameters[name].detach(), staged[name])] for name in staged},
            patches=patches,
        )

    def patches_from(self, base: VersionId, changed: Changed, copier: Copier) -> Patches:
        """Return the patches and copies that switch a model from an earlier version, ``base``."""
        traced = self.plan.traced
        ops = [(name, op) for name in self.copies for op in traced[name].ops]
        parts: list[Patch | Copy | None] = [None] * len(ops)

        @torch.no_grad()
        def work(first: int, end: int) -> None:
            for index, (name, op) in enumerate(ops[first:end], first):
                parameter = self.plan.parameters[name]
                parts[index] = patch_or_copy(parameter, op, self.tensors, changed)

        sizes = [0 if op.part is None else op.part.num_elements for _, op in ops]
        copier.in_parallel(work, copier.cut_work(sizes))
        patches: list[Patch] = []
        copies: dict[str, list[Copy]] = {}
        for (name, _), part in zip(ops, parts, strict=True):
            if isinstance(part, Patch):
                patches.append(part.on_device())
            elif part is not None:
                copies.setdefault(name, []).append(part)
        return Patches(base, patches, copies)

    # In the pause

    def apply(self, copier: Copier, digest: int | None = None) -> None:
        """Write the version into the model. If this fails, the model has a mix of two versions.

        The caller must then repair the model. If patches were prepared, and the parameters have the
        digest ``digest``, write only changes. Otherwise, copy all tensors.
        """
        copies = itertools.chain(*self._patch(copier, digest).values())
        # A tied tensor is in the images of two layers; copy it once.
        packed = {copy[0].data_ptr(): copy for image in self.images for copy in image.copies()}
        pairs = [*copies, *packed.values()]
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        if self.plan.is_in_main_memory:
            copier.copy_tensors(targets, sources)
        else:
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            # Wait: the next step reads the targets, and staging may overwrite the sources.
            torch.accelerator.synchronize()
        for image in self.images:
            image.hand_over()

    def _patch(self, copier: Copier, digest: int | None) -> Mapping[str, Sequence[Copy]]:
        """Apply the patches if the model has their base version; return the copies still to make.

        If no patch was applied, or patching failed, these are copies of all tensors.
        """
        if self.patches is None or digest is None:
            return self.copies
        try:
            if digest_of_all(self.plan.parameters.values()) != digest:
                logger.warning(
                    "something wrote to the weights after they were compared with version %d: the "
                    "switch copies all weights, not only changes",
                    self.patches.base.number,
                )
                return self.copies
            self.patches.apply(copier)
        # Patching fails, for instance, if the device has no memory left. A copy of everything needs
        # no additional memory, and overwrites values that were patched.
        except Exception as error:  # noqa: BLE001
            log_copied_whole(error)
            return self.copies
        return self.patches.copies

    def mismatches(self, copier: Copier) -> dict[str, str]:
        """Return the model's parameters and images that this switch would change.

        The dictionary maps the name of each to the name of its layer.
        """
        copies = [(name, copy) for name, copies in self.copies.items() for copy in copies]
        differing: set[str] = set()

        def work(first: int, end: int) -> None:
            differing.update(name for name, copy in copies[first:end] if not same_bytes(*copy))

        copier.in_parallel(work, copier.cut_work([copy[0].nbytes for _, copy in copies]))
        images = {image.name: image.name for image in self.images if not image.matches()}
        return {name: layer_of(name) for name in sorted(differing)} | images


def patch_or_copy(
    parameter: torch.Tensor, op: CopyOp, tensors: Mapping[str, torch.Tensor], changed: Changed
) -> Patch | Copy | None:
    """Return a patch or a copy that writes the changed elements of one part into a parameter.

    Return None if nothing in the part changed. ``tensors`` must be contiguous.
    """
    if op.source not in changed or op.source is None or op.part is None:
        return None
    source, all_changed = tensors[op.source], torch.from_numpy(changed[op.source])
    if len(all_changed) > MAX_SHARE * source.numel():
        return op.bind(parameter, tensors)
    positions, targets = _positions_in(op.part, op.to, source.numel(), all_changed)
    if not len(positions):
        return None
    if len(positions) > MAX_SHARE * op.part.num_elements:
        return op.bind(parameter, tensors)
    bits = as_integers(source.reshape(-1))  # torch cannot index every dtype
    values = bits.index_select(0, positions).view(source.dtype)
    return Patch(flat(parameter), targets, as_integers(values.to(parameter.dtype)))


def _positions_in(
    part: View, to: View, num_elements: int, changed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part's changed elements as positions in the published tensor and in the parameter.

    ``num_elements``: size of the published tensor.
    """
    # Most parts are contiguous, in the published tensor and in the parameter. For 50,000 changed
    # elements of 50 million, this branch takes less than 1 ms, and the mask below takes 55 ms.
    if part.num_elements == part.end - part.offset and part.stride == to.stride:
        first, end = torch.searchsorted(changed, torch.tensor([part.offset, part.end])).tolist()
        positions = changed[first:end]
        return positions, positions + (to.offset - part.offset)
    is_changed = torch.zeros(num_elements, dtype=torch.bool)
    is_changed[changed] = True
    places = is_changed.as_strided(part.shape, part.stride, part.offset).nonzero()
    return _positions(places, part), _positions(places, to)


def _positions(places: torch.Tensor, view: View) -> torch.Tensor:
    """Return the positions of a view's elements in the flat tensor that it is a view of.

    Each row of ``places`` is the index of an element in the view.
    """
    return (places * torch.tensor(view.stride, dtype=torch.int64)).sum(1) + view.offset


def _fitting(sizes: Sequence[int], num_bytes: int) -> Sequence[int]:
    """Return the longest beginning of ``sizes`` with a sum of at most ``num_bytes``."""
    return sizes[: bisect.bisect_right(list(itertools.accumulate(sizes)), num_bytes)]


def _laid_out(
    memory: torch.Tensor, tensors: Tensors
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make tensors like ``tensors`` in flat memory; return them, and the memory left over."""
    laid_out = {}
    for name, tensor in tensors.items():
        elements = memory[: tensor.nbytes].view(tensor.dtype)
        laid_out[name] = elements.as_strided(tensor.shape, tensor.stride())
        memory = memory[align(tensor.nbytes) :]
    return laid_out, memory


def log_copied_whole(error: Exception) -> None:
    """Log that a version is copied whole, because patching its changes failed."""
    message = "a version is copied whole, as patching its changes failed: %s"
    log_once(logger, message, described(error))


def digest_of(tensor: torch.Tensor) -> int:
    """Return the XXH3 digest of a tensor's bytes."""
    return xxhash.xxh3_64(as_bytes(flat_view(tensor.detach().cpu().contiguous()))).intdigest()


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter as flat integers. The parameter must not share memory with another one."""
    plain = parameter.detach()
    return as_integers(plain.as_strided((plain.numel(),), (1,), plain.storage_offset()))


@torch.no_grad()
def digest_of_all(parameters: Iterable[torch.Tensor]) -> int:
    """Return a digest of the bytes of parameters, and of their order.

    All must be on the same device.

    The digest is a sum of 64-bit words, each multiplied by a different number (multilinear hashing,
    Carter and Wegman, 1979). A change of a single word always changes the digest. A change of
    several words leaves the digest the same only by chance. The digest does not protect against
    bytes chosen on purpose.
    """
    sums: list[torch.Tensor] = []
    numbers = torch.empty(0)
    for views in _chunks(parameters):
        num_bytes = sum(view.numel() for view in views)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64, device=views[0].device)
        torch.cat(views, out=words.view(torch.uint8)[:num_bytes])
        if numbers.numel() < words.numel():
            numbers = _numbers(words.numel(), words.device)
        # Mix each word's halves. Otherwise, changes of the highest bits of two words cancel out.
        mixed = _upper_half(words)
        mixed ^= words
        mixed *= numbers[: words.numel()]
        sums.append(mixed.sum())
    total = 0
    for part in torch.stack(sums).tolist() if sums else ():
        total = (total * _ODD[0] + part) % (1 << 64)
    return total


def _chunks(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield all bytes in order, in lists of views: `_CHUNK_BYTES` a list, or less in the last."""
    views: list[torch.Tensor] = []
    room = _CHUNK_BYTES
    for parameter in parameters:
        unread = flat(parameter).view(torch.uint8)
        while unread.numel():
            views.append(unread[:room])
            unread = unread[room:]
            room -= views[-1].numel()
            if not room:
                yield views
                views, room = [], _CHUNK_BYTES
    if views:
        yield views


def _upper_half(words: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of 64-bit words."""
    # torch's shift repeats the sign bit; the mask removes the repeated bits.
    return (words >> 32).bitwise_and_(0xFFFFFFFF)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudorandom numbers, the factors of words in :func:`digest_of_all`."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    numbers *= _ODD[0]
    numbers ^= _upper_half(numbers)
    numbers *= _ODD[1]
    return numbers.bitwise_or_(1)
