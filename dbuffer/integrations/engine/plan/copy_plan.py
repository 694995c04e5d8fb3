"""`CopyPlan` and `PreparedSwitch`: a switch as direct copies.

The plan of a layout binds its trace to the live parameters: layers that pack their weights have
images, and layers that compute something else stay with the engine's reload. Whether that is all
that a reload does, `weight_loader` verifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import xxhash

from dbuffer.format.layout import align
from dbuffer.integrations.engine.plan.images import Image, PackedLayer, Packing, packed_layers
from dbuffer.integrations.engine.plan.load_trace import LoadTrace, TensorMeta, Unwrapped
from dbuffer.integrations.engine.plan.partial_reload import (
    NotPlannableError,
    PartialReload,
    TracePart,
    layer_of,
    split_off_reload,
)
from dbuffer.integrations.engine.plan.patching import (
    Changed,
    Copy,
    Patch,
    Patches,
    as_integers,
    copies_into,
    flat,
    patch_or_copy,
)
from dbuffer.integrations.engine.plan.samples import Sample
from dbuffer.runtime.messages import listed
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Copies the second tensors into the first."""
ApplyPatches = Callable[[Sequence[Patch]], None]

_BLOCK_BYTES = 64 << 20
"""Bytes compared at a time: a device may have little room."""


@dataclass(eq=False)
class CopyPlan:
    """The copies that switch a model to any version of one layout; see :func:`plan_copies`."""

    trace: LoadTrace
    """Copies into each parameter, and into those of the layers that have images."""
    parameters: Tensors
    """Live parameters that are copied into, by the names in the trace."""
    layers: Sequence[PackedLayer]
    """Layers that have images."""
    partial_reload: PartialReload
    verified_for: Mapping[str, int] | None = None
    """Digests of the published tensors that the verification could not vary: the plan is good for
    versions that leave these as they are. None: it is not verified."""
    _addresses: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self._addresses = self._find_addresses()

    def _find_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.parameters.values()]

    @cached_property
    def written(self) -> Sequence[torch.Tensor]:
        """Live tensors that a switch writes, those of layers with images included."""
        packed = [p for each in self.layers for p in each.layer.parameters(recurse=False)]
        return [*self.parameters.values(), *packed]

    @cached_property
    def is_in_main_memory(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.written)

    @cached_property
    def all_layers(self) -> set[str]:
        """Names of the layers that are loaded, in whatever way."""
        copied = {layer_of(name) for name in self.parameters}
        return copied | {each.name for each in self.layers} | self.partial_reload.layers.keys()

    @cached_property
    def loaded_bytes(self) -> int:
        return self.trace.loaded_bytes

    @cached_property
    def twin_bytes(self) -> int:
        """Memory for one more copy of the parameters."""
        return sum(align(parameter.nbytes) for parameter in self.parameters.values())

    def switch_to(self, tensors: Tensors, aliases: Mapping[str, str]) -> PreparedSwitch:
        """Bind the copies to a version's tensors, without images, sample and patches."""
        fixed = {name: digest_of(tensors[name]) for name in self.verified_for or ()}
        return PreparedSwitch(self, tensors, self.copies_of(tensors), fixed, aliases)

    def copies_of(self, tensors: Tensors) -> dict[str, list[Copy]]:
        """Bind the copies into each parameter to a version's tensors."""
        return {
            name: copies_into(parameter, self.trace.ops[name], tensors)
            for name, parameter in self.parameters.items()
        }

    def make_images(self, tensors: Tensors) -> list[Image]:
        """Pack all layers that have images; takes as long and as much memory as packing does.

        Raises:
            NotPlannableError: a layer could not take its image over.
        """
        images = [layer.image(tensors) for layer in self.layers]
        mismatch = next(filter(None, (image.mismatch for image in images)), None)
        if mismatch is not None:
            raise NotPlannableError(mismatch)
        return images

    def patches_to(self, tensors: Tensors, changed: Changed, base: str) -> Patches:
        """Find the patches from the version ``base`` to these tensors, for all but images."""
        patches: dict[str, list[Patch]] = {}
        copies: list[Copy] = []
        for name, parameter in self.parameters.items():
            for op in self.trace.ops[name]:
                if op.source is None or op.source not in changed:
                    continue
                change = patch_or_copy(parameter, op, tensors[op.source], changed[op.source])
                if isinstance(change, Patch):
                    patches.setdefault(name, []).extend(change.pieces())
                elif change is not None:
                    copies.append(change)
        return Patches(base, patches, copies)

    def loads_same(self, name: str, tensors: Tensors, loaded: torch.Tensor) -> bool:
        """Whether a parameter that loaders filled has what the copies put there."""
        return all(same_bytes(*copy) for copy in copies_into(loaded, self.trace.ops[name], tensors))

    def covers(self, switch: PreparedSwitch) -> bool:
        """Whether copies alone do a switch: verified for its version, and parameters unmoved."""
        return (
            self.verified_for is not None
            and all(switch.fixed.get(name) == xxh3 for name, xxh3 in self.verified_for.items())
            and self._find_addresses() == self._addresses
        )


@dataclass(eq=False)
class PreparedSwitch:
    """The copies that switch a model to one version, bound while the engine serves.

    Where versions are mapped they are copied from there, in the pause; where they are staged in
    memory, only this rank's part is staged, in the order and dtype of its parameters.
    """

    plan: CopyPlan
    tensors: Tensors
    """Published tensors; only those to be reloaded, where the copies have memory of their own."""
    copies: Mapping[str, Sequence[Copy]]
    """Copies into each parameter, by its name."""
    fixed: Mapping[str, int]
    """Digests of the tensors in ``plan.verified_for``."""
    aliases: Mapping[str, str]
    """Stored names of tensors that the model takes under another name."""
    images: Sequence[Image] = ()
    sample: Sample = field(default_factory=dict)
    """Elements by which the model is known to hold this version."""
    patches: Patches | None = None
    """Patches with the same result in a model that holds their base."""

    @property
    def is_enough(self) -> bool:
        """Whether it is verified to do all that a reload does."""
        return self.plan.covers(self)

    @cached_property
    def reloaded(self) -> Tensors:
        """Published tensors that are reloaded in addition."""
        sources = self.plan.partial_reload.sources
        names = [name for name in self.tensors if name in sources] if sources else []
        return {name: self.tensors[name] for name in names}

    @property
    def num_bytes(self) -> int:
        """Bytes that it loads."""
        reloaded_bytes = sum(tensor.nbytes for tensor in self.reloaded.values())
        return self.plan.loaded_bytes + reloaded_bytes

    @property
    def staging_bytes(self) -> int:
        """Memory that :meth:`copied_into` needs."""
        reloaded_bytes = sum(align(tensor.nbytes) for tensor in self.reloaded.values())
        return self.plan.twin_bytes + reloaded_bytes

    def of(self, tensors: Tensors) -> PreparedSwitch:
        """Bind the copies to other tensors with the same content, by their stored names."""
        offered = {name: tensors[self.aliases.get(name, name)] for name in self.tensors}
        return self._from(offered, self.plan.copies_of(offered))

    def copied_into(self, memory: torch.Tensor, copy: CopyTensors) -> PreparedSwitch:
        """Copy all that it needs into flat bytes, with ``copy``, and bind the copies to these.

        First twins of the parameters, then the published tensors that are reloaded.
        """
        parameters, reloaded = self.plan.parameters, self.reloaded
        twins = _twins_in(memory, parameters)
        kept = _twins_in(memory[self.plan.twin_bytes :], reloaded)
        filling = [Copy(kept[name], tensor) for name, tensor in reloaded.items()]
        for name, twin in twins.items():
            filling += copies_into(twin, self.plan.trace.ops[name], self.tensors)
        copy([target for target, _ in filling], [source for _, source in filling])
        copies = {name: [Copy(parameters[name].detach(), twin)] for name, twin in twins.items()}
        return self._from(kept, copies)

    def _from(self, tensors: Tensors, copies: Mapping[str, Sequence[Copy]]) -> PreparedSwitch:
        # Copies among the patches read what is released now.
        patches = None if self.patches is None or self.patches.copies else self.patches
        return replace(self, tensors=tensors, copies=copies, patches=patches)

    def apply(self, copy: CopyTensors, patch: ApplyPatches, holds: str | None) -> None:
        """Switch. A failure leaves a mix, to be repaired at once.

        Args:
            copy: copies in main memory; on a device its own queue does.
            patch: applies patches.
            holds: identity of the version that the model is known to hold.
        """
        copies = self._patch(patch, holds)
        if copies is None:
            copies = [pair for of_one in self.copies.values() for pair in of_one]
        # A tied tensor is in the images of two layers.
        packed = {
            target.data_ptr(): (target, source)
            for image in self.images
            for target, source in image.copies()
        }
        targets = [target for target, _ in (*copies, *packed.values())]
        sources = [source for _, source in (*copies, *packed.values())]
        if self.plan.is_in_main_memory:
            copy(targets, sources)
        else:
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            # The next step reads what was copied, and staging may write anew where it came from.
            torch.accelerator.synchronize()
        for image in self.images:
            image.hand_over()

    def _patch(self, patch: ApplyPatches, holds: str | None) -> Sequence[Copy] | None:
        """Patch what can be patched, and return the remaining copies; None: all of them."""
        if self.patches is None or self.patches.base != holds:
            return None
        try:
            patch([each for pieces in self.patches.patches.values() for each in pieces])
        # A device without room, say. Copying everything needs none, and overwrites the patches.
        except Exception as error:  # noqa: BLE001
            log_copied_whole(error)
            return None
        return self.patches.copies

    def mismatches(self) -> list[str]:
        """Return the parameters and layers that differ from what this switch gives them."""
        differing = [
            name
            for name, copies in self.copies.items()
            if not all(same_bytes(*copy) for copy in copies)
        ]
        return sorted(differing) + [image.of.name for image in self.images if not image.matches()]

    def patch_matches(self, name: str, patches: Patches) -> bool:
        """Whether patches give a parameter what the whole switch would give it.

        ``patches`` and what is compared are in main memory: a device may have no room.
        """
        parameter = self.plan.parameters[name].detach()
        patched = flat(parameter).to("cpu", copy=True)
        for patch in patches.patches.get(name, ()):
            patch._replace(target=patched).apply()
        like = patched.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        copied = {target.data_ptr() for target, _ in patches.copies}
        return all(
            copy.target.data_ptr() in copied or same_bytes(op.to.in_(like), copy.source)
            for op, copy in zip(self.plan.trace.ops[name], self.copies[name], strict=True)
        )


def plan_copies(
    model: torch.nn.Module,
    trace: LoadTrace,
    *,
    unwrapped: Unwrapped,
    partial: bool = False,
    packing: Packing | None = None,
    left: Mapping[str, str] | None = None,
    trace_part: TracePart | None = None,
) -> CopyPlan:
    """Bind a trace to the live parameters of a model.

    Args:
        model: the model, as it serves.
        trace: of its loaders, for such versions.
        unwrapped: leads from the live model's names to the trace's.
        partial: versions may hold a part of the model.
        packing: of layers that get images; None: no layer does.
        left: layers that stay with the reload, and why.
        trace_part: traces a part of the layout; None: the engine cannot reload a part.

    Raises:
        NotPlannableError: too little of the model is only copied.
    """
    left = left or {}
    packed = packed_layers(model, packing, trace, unwrapped) if packing is not None else []
    layers = [layer for layer in packed if layer.name not in left]
    in_images = {name for layer in layers for name in layer.loaded.values()}
    live = {
        unwrapped(name): tensor
        for tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }
    mismatches = _mismatches(live, trace, without=in_images)
    copied, partial_reload = split_off_reload(trace, {**mismatches, **left}, trace_part)
    if not in_images <= copied.ops.keys():  # of a layer tied to one that is reloaded
        raise NotPlannableError(listed(list(partial_reload.layers.values()), "; "))
    parameters = {name: live[name] for name in copied.ops if name not in in_images}
    plan = CopyPlan(copied, parameters, layers, partial_reload)
    if not partial:
        _require_all_parameters(model, plan, unwrapped)
    return plan


def _mismatches(live: Tensors, trace: LoadTrace, *, without: Collection[str]) -> dict[str, str]:
    """Return the layers that copies cannot fill, and why."""
    mismatches = dict(trace.refused)
    for name, meta in trace.metas.items():
        tensor = live.get(name)
        if name in without:
            continue
        if tensor is None or TensorMeta.of(tensor) != meta:
            mismatches[name] = "is stored in another form"
        elif tensor.untyped_storage().nbytes() != tensor.nbytes:
            mismatches[name] = "shares its memory with others"
    return {layer_of(name): f"{name} {why}" for name, why in mismatches.items()}


def _require_all_parameters(model: torch.nn.Module, plan: CopyPlan, unwrapped: Unwrapped) -> None:
    """Refuse a plan that leaves parameters out: a reload would give them something.

    The values of the engine's start, for instance.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]  # some buffers are views
    loaded = {address_of(tensor) for tensor in plan.written} | {
        address_of(tensor)
        for name, tensor in tensors
        if layer_of(unwrapped(name)) in plan.partial_reload.layers
    }
    left_out = [
        f"{name} was not published"
        for name, parameter in model.named_parameters()
        if parameter.nbytes and address_of(parameter) not in loaded
    ]
    if left_out:
        raise NotPlannableError(listed(left_out, "; "))


def _twins_in(memory: torch.Tensor, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Lay out tensors of the same form in flat bytes, one behind the other."""
    twins, start = {}, 0
    for name, tensor in tensors.items():
        elements = memory[start : start + tensor.nbytes].view(tensor.dtype)
        twins[name] = elements.as_strided(tensor.shape, tensor.stride())
        start = align(start + tensor.nbytes)
    return twins


def log_copied_whole(error: Exception) -> None:
    """Log that what changed could not be patched this time."""
    message = "a version is copied whole, as patching what changed failed: %s"
    log_once(logger, message, f"{type(error).__name__} {error!s:.100}")


def digest_of(tensor: torch.Tensor) -> int:
    """Return the XXH3 of a tensor's bytes."""
    flat_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64(flat_bytes.numpy().data).intdigest()


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a target has the bytes that a copy of the source into it leaves."""
    target, source = (each.reshape(each.shape or (1,)) for each in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    return all(
        torch.equal(as_integers(mine), as_integers(other.to(device=mine.device, dtype=mine.dtype)))
        for mine, other in blocks
    )
