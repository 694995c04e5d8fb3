"""`PreparedSwitch`: the copies that switch a model to one version, bound while it serves."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import xxhash

from dbuffer.engine.plan.attestation import digest_of_all, same_bytes
from dbuffer.engine.plan.copy_plan import CopyPlan, Tensors, layer_of
from dbuffer.engine.plan.images import Image
from dbuffer.engine.plan.load_trace import Copy, View
from dbuffer.engine.plan.patching import Changed, Patch, Patches, patch_or_copy
from dbuffer.format.layout import align
from dbuffer.format.lineage import VersionId
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import as_bytes, flat_view
from dbuffer.runtime.lazy import cached_property
from dbuffer.runtime.messages import described
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Copies the second tensors into the first."""


@dataclass(eq=False)
class PreparedSwitch:
    """A switch of a model to one version.

    Where versions are mapped they are copied from there, in the pause; where they are staged in
    memory, only this rank's part is staged, in the order and dtype of its parameters.
    """

    plan: CopyPlan
    version: VersionId
    tensors: Tensors
    """Published tensors; only those to be reloaded, where the copies have memory of their own."""
    aliases: Mapping[str, str]
    """Stored names of tensors that the model takes under another name."""
    copies: Mapping[str, Sequence[Copy]]
    """Copies into each parameter, by its name."""
    images: Sequence[Image]
    digests: Mapping[str, int]
    """Digests of the tensors in ``plan.verified_for``."""
    patches: Patches | None = None
    """Changes since a version that the model may hold, or None if they are not known."""

    @classmethod
    def of_plan(
        cls,
        plan: CopyPlan,
        version: VersionId,
        tensors: Tensors,
        aliases: Mapping[str, str],
        images: Sequence[Image],
    ) -> Self:
        """Bind the copies of a plan to a version's tensors; ``images`` are of these, too."""
        return cls(
            plan,
            version,
            tensors,
            aliases,
            copies=plan.copies_of(tensors),
            images=[image for image in images if image.name in plan.packed],
            digests={name: digest_of(tensors[name]) for name in plan.verified_for or ()},
        )

    @property
    def replaces_tensors(self) -> bool:
        """Whether it is verified to do all that a reload does, to the model's present tensors."""
        verified_for = self.plan.verified_for
        return (
            verified_for is not None
            and all(self.digests.get(name) == xxh3 for name, xxh3 in verified_for.items())
            and self.plan.replaced() is None
        )

    @cached_property
    def reloaded(self) -> Tensors:
        """Published tensors that are reloaded in addition."""
        sources = self.plan.reloaded_sources
        return {name: self.tensors[name] for name in self.tensors if name in sources}

    @property
    def num_bytes(self) -> int:
        """Bytes that it loads."""
        return self.plan.copied_bytes + sum(tensor.nbytes for tensor in self.reloaded.values())

    # While the engine serves

    def of(self, tensors: Tensors) -> PreparedSwitch:
        """Bind the copies to other tensors with the same content, by their stored names."""
        offered = {name: tensors[self.aliases.get(name, name)] for name in self.tensors}
        patches = self.patches
        if patches is not None and patches.copies:  # these read tensors that are released
            patches = None
        return replace(self, tensors=offered, copies=self.plan.copies_of(offered), patches=patches)

    def leave_device(self) -> None:
        """Let go of the patches, which lie on the parameters' device."""
        self.patches = None

    def with_plan(self, plan: CopyPlan) -> PreparedSwitch:
        """Bind a plan that leaves more layers to the reload to the same version."""
        return replace(
            self,
            plan=plan,
            copies=plan.copies_of(self.tensors),
            images=[image for image in self.images if image.name in plan.packed],
        )

    def staging_bytes(self, device_bytes: int) -> tuple[int, int]:
        """Sizes of the memories that :meth:`copied_into` needs: a device's, and main memory.

        ``device_bytes``: largest size of the first.
        """
        parameters = self.plan.parameters.values()
        sizes = [align(tensor.nbytes) for tensor in (*parameters, *self.reloaded.values())]
        on_device = sum(size for size in _fitting(sizes[: len(parameters)], device_bytes))
        return on_device, sum(sizes) - on_device

    def copied_into(
        self, memories: tuple[torch.Tensor, torch.Tensor], copy: CopyTensors
    ) -> PreparedSwitch:
        """Copy all that it needs into flat bytes, with ``copy``, and bind the copies to these.

        The first memory gets copies of parameters for as long as they fit; the second gets the
        rest, and the published tensors that are reloaded.
        """
        parameters = self.plan.parameters
        sizes = [align(tensor.nbytes) for tensor in parameters.values()]
        names, count = list(parameters), len(_fitting(sizes, memories[0].numel()))
        staged, _ = _laid_out(memories[0], {name: parameters[name] for name in names[:count]})
        others, rest = _laid_out(memories[1], {name: parameters[name] for name in names[count:]})
        staged |= others
        reloaded, _ = _laid_out(rest, self.reloaded)
        copies = [(reloaded[name], tensor) for name, tensor in self.reloaded.items()]
        for name, tensor in staged.items():
            copies += self.plan.traced[name].bind(tensor, self.tensors)
        copy([target for target, _ in copies], [source for _, source in copies])
        patches = self.patches
        if patches is not None:
            unpatched = {
                name: [
                    (target, View.of(target, parameters[name]).in_(staged[name]))
                    for target, _ in each
                ]
                for name, each in patches.copies.items()
            }
            patches = patches._replace(copies=unpatched)
        return replace(
            self,
            tensors=reloaded,
            copies={name: [(parameters[name].detach(), staged[name])] for name in staged},
            patches=patches,
        )

    def patches_from(self, base: VersionId, changed: Changed, copier: Copier) -> Patches:
        """Return what is left of the copies where a model holds another version.

        ``changed``: where this version may differ from ``base``.
        """
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
        """Switch. A failure leaves a mix, to be repaired at once.

        Args:
            copier: its threads work in main memory; on a device its own queue does.
            digest: of parameters that the patches change. Default: everything is copied.
        """
        copies = [copy for each in self._patch(copier, digest).values() for copy in each]
        # A tied tensor is in the images of two layers.
        packed = {copy[0].data_ptr(): copy for image in self.images for copy in image.copies()}
        targets = [target for target, _ in (*copies, *packed.values())]
        sources = [source for _, source in (*copies, *packed.values())]
        if self.plan.is_in_main_memory:
            copier.copy_tensors(targets, sources)
        else:
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            # The next step reads what was copied, and staging may write anew where it came from.
            torch.accelerator.synchronize()
        for image in self.images:
            image.hand_over()

    def _patch(self, copier: Copier, digest: int | None) -> Mapping[str, Sequence[Copy]]:
        """Patch what can be patched, and return the copies that are left."""
        if self.patches is None or digest is None:
            return self.copies
        try:
            if digest_of_all(self.plan.parameters.values()) != digest:
                logger.warning(
                    "something wrote to the weights since they were seen to be version %d: all of "
                    "them are copied",
                    self.patches.base.number,
                )
                return self.copies
            self.patches.apply(copier)
        # A device without room, say. Copying everything needs none, and overwrites the patches.
        except Exception as error:  # noqa: BLE001
            log_copied_whole(error)
            return self.copies
        return self.patches.copies

    def mismatches(self, copier: Copier) -> dict[str, str]:
        """Return the parameters and images that differ from what a switch gives, and their layers.

        Parameters must have what they are copied, to the byte. ``copier``: its threads compare.
        """
        copies = [(name, copy) for name, each in self.copies.items() for copy in each]
        differing: set[str] = set()

        def work(first: int, end: int) -> None:
            differing.update(name for name, copy in copies[first:end] if not same_bytes(*copy))

        copier.in_parallel(work, copier.cut_work([copy[0].nbytes for _, copy in copies]))
        images = {each.name: each.name for each in self.images if not each.matches()}
        return {name: layer_of(name) for name in sorted(differing)} | images


def _fitting(sizes: Sequence[int], num_bytes: int) -> Sequence[int]:
    """Return the sizes, from the first on, whose sum is so many bytes at most."""
    return sizes[: bisect.bisect_right(list(itertools.accumulate(sizes)), num_bytes)]


def _laid_out(
    memory: torch.Tensor, tensors: Tensors
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Lay out tensors of the same form in flat bytes, one behind the other.

    Returns:
        The tensors in there, and the bytes behind them.
    """
    laid_out = {}
    for name, tensor in tensors.items():
        elements = memory[: tensor.nbytes].view(tensor.dtype)
        laid_out[name] = elements.as_strided(tensor.shape, tensor.stride())
        memory = memory[align(tensor.nbytes) :]
    return laid_out, memory


def log_copied_whole(error: Exception) -> None:
    """Log that what changed could not be patched this time."""
    message = "a version is copied whole, as patching what changed failed: %s"
    log_once(logger, message, described(error))


def digest_of(tensor: torch.Tensor) -> int:
    """Return the XXH3 of a tensor's bytes."""
    return xxhash.xxh3_64(as_bytes(flat_view(tensor.detach().cpu().contiguous()))).intdigest()
