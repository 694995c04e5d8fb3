"""`CopyPlan` and `PreparedSwitch`: a switch as direct copies.

The plan of a layout binds its trace to the live parameters. Layers that pack their weights have
images. A layer whose loader computes, or from which something is derived, stays with the engine's
reload, of that layer alone where its published tensors are not those of other layers too. Whether
that is all that a reload does, `weight_loader` verifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import xxhash

from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import align
from dbuffer.integrations.engine.plan.images import Image, PackedLayer, Packing, packed_layers
from dbuffer.integrations.engine.plan.load_trace import (
    Copy,
    LoadTrace,
    TracedTensor,
    Unwrapped,
    View,
    form_of,
)
from dbuffer.integrations.engine.plan.patching import (
    Changed,
    Patch,
    apply_patches,
    flat,
    patch_or_copy,
    same_bytes,
)
from dbuffer.integrations.engine.plan.samples import Sample
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.io.changes import cut_work
from dbuffer.io.copier import Copier
from dbuffer.runtime.messages import described, listed
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Copies the second tensors into the first."""

MIN_COPIED = 0.5
"""Least share of all elements that copies must load. Reloading a part walks the whole model, too:
below this, it saves little."""


@dataclass(eq=False)
class CopyPlan:
    """The copies that switch a model to any version of one layout; see :func:`plan_copies`."""

    traced: Mapping[str, TracedTensor]
    """Parameters and buffers that are copied, those of layers with images included."""
    parameters: Tensors
    """Live tensors that are copied into directly, by their names in the trace."""
    addresses: Sequence[int]
    """Addresses at which the copies are to find these."""
    packing: Packing | None
    packed: Mapping[str, PackedLayer]
    """Layers that have images, by name."""
    reloaded: Mapping[str, str]
    """Names of the layers that stay with the reload, and why."""
    reloaded_sources: Collection[str]
    """Published tensors that these layers are loaded from."""
    verified_for: Mapping[str, int] | None = None
    """Digests of the published tensors that the verification could not vary: the plan is good for
    versions that leave these as they are. None: it is not verified."""

    @cached_property
    def written(self) -> Sequence[torch.Tensor]:
        """Live tensors that a switch writes, those of layers with images included."""
        packed = [p for layer, _ in self.packed.values() for p in layer.parameters(recurse=False)]
        return [*self.parameters.values(), *packed]

    @cached_property
    def is_in_main_memory(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.written)

    @cached_property
    def all_layers(self) -> set[str]:
        """Names of the layers that are loaded, in whatever way."""
        return {*map(layer_of, self.parameters), *self.packed, *self.reloaded}

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes that copies of published tensors load."""
        return sum(each.copied_bytes for each in self.traced.values())

    @cached_property
    def staging_bytes(self) -> int:
        """Memory for one more copy of the parameters."""
        return sum(align(parameter.nbytes) for parameter in self.parameters.values())

    def prepare(self, tensors: Tensors, aliases: Mapping[str, str]) -> PreparedSwitch:
        """Bind the copies to a version's tensors, and pack all layers that have images.

        Raises:
            UnsupportedError: a layer cannot take its image over.
            Exception: a layer could not be packed.
        """
        images = []
        for name, (layer, loaded) in self.packed.items():
            filled = {
                own: self.traced[full].filled(tensors, layer.get_parameter(own).device)
                for own, full in loaded.items()
            }
            assert self.packing is not None  # noqa: S101 - or there were no such layers
            images.append(Image(name, layer, self.packing, filled))
        return PreparedSwitch(
            self,
            tensors,
            self.copies_of(tensors),
            aliases,
            {name: digest_of(tensors[name]) for name in self.verified_for or ()},
            images,
        )

    def copies_of(self, tensors: Tensors) -> dict[str, list[Copy]]:
        """Bind the copies into each parameter to a version's tensors."""
        return {
            name: self.traced[name].bind(parameter, tensors)
            for name, parameter in self.parameters.items()
        }

    def changes_to(
        self, tensors: Tensors, changed: Changed, copier: Copier
    ) -> tuple[dict[str, list[Patch]], list[Copy]]:
        """Return patches by parameter, and copies of what is not patched, for all but images.

        ``copier``: its threads gather the values.
        """
        ops = [(name, op) for name in self.parameters for op in self.traced[name].ops]
        changes: list[Patch | Copy | None] = [None] * len(ops)

        @torch.no_grad()
        def work(first: int, end: int) -> None:
            for index, (name, op) in enumerate(ops[first:end], first):
                changes[index] = patch_or_copy(self.parameters[name], op, tensors, changed)

        sizes = [0 if op.part is None else op.part.num_elements for _, op in ops]
        copier.in_parallel(work, cut_work(sizes, copier))
        patches: dict[str, list[Patch]] = {}
        copies: list[Copy] = []
        for (name, _), change in zip(ops, changes, strict=True):
            if isinstance(change, Patch):
                patches.setdefault(name, []).extend(change.pieces())
            elif change is not None:
                copies.append(change)
        return patches, copies


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
    aliases: Mapping[str, str]
    """Stored names of tensors that the model takes under another name."""
    fixed: Mapping[str, int]
    """Digests of the tensors in ``plan.verified_for``."""
    images: Sequence[Image]
    sample: Sample = field(default_factory=dict)
    """Elements by which the model is known to hold this version."""
    base: str | None = None
    """Identity of the version that a model must hold to be patched; None: there are no patches."""
    patches: Sequence[Patch] = ()
    unpatched: Sequence[Copy] = ()
    """Copies of what has changed since the base and is not patched."""

    @property
    def is_enough(self) -> bool:
        """Whether it is verified to do all that a reload does, to parameters where they were."""
        verified_for = self.plan.verified_for
        return (
            verified_for is not None
            and all(self.fixed.get(name) == xxh3 for name, xxh3 in verified_for.items())
            and addresses_of(self.plan.parameters) == self.plan.addresses
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

    @property
    def staging_bytes(self) -> int:
        """Memory that :meth:`copied_into` needs."""
        reloaded_bytes = sum(align(tensor.nbytes) for tensor in self.reloaded.values())
        return self.plan.staging_bytes + reloaded_bytes

    def of(self, tensors: Tensors) -> PreparedSwitch:
        """Bind the copies to other tensors with the same content, by their stored names."""
        offered = {name: tensors[self.aliases.get(name, name)] for name in self.tensors}
        # Unpatched copies read tensors that are released.
        base = None if self.unpatched else self.base
        return replace(self, tensors=offered, copies=self.plan.copies_of(offered), base=base)

    def by(self, plan: CopyPlan) -> PreparedSwitch:
        """Bind a plan that leaves more layers to the reload to the same version."""
        return replace(
            self,
            plan=plan,
            copies=plan.copies_of(self.tensors),
            images=[image for image in self.images if image.name in plan.packed],
            sample={name: self.sample[name] for name in self.sample if name in plan.parameters},
        )

    def copied_into(self, memory: torch.Tensor, copy: CopyTensors) -> PreparedSwitch:
        """Copy all that it needs into flat bytes, with ``copy``, and bind the copies to these.

        First copies of the parameters, then the published tensors that are reloaded.
        """
        parameters = self.plan.parameters
        staged = _laid_out(memory, parameters)
        reloaded = _laid_out(memory[self.plan.staging_bytes :], self.reloaded)
        copies = [(reloaded[name], tensor) for name, tensor in self.reloaded.items()]
        for name, tensor in staged.items():
            copies += self.plan.traced[name].bind(tensor, self.tensors)
        copy([target for target, _ in copies], [source for _, source in copies])
        bound = {name: [(parameters[name].detach(), staged[name])] for name in staged}
        by_address = {address_of(parameters[name]): name for name in staged}
        unpatched = []
        for target, _ in self.unpatched:
            name = by_address[address_of(target)]
            part = View.of(target, parameters[name])
            unpatched.append((target, part.in_(staged[name])))
        return replace(self, tensors=reloaded, copies=bound, unpatched=unpatched)

    def apply(self, copier: Copier, held: str | None) -> None:
        """Switch. A failure leaves a mix, to be repaired at once.

        Args:
            copier: its threads work in main memory; on a device its own queue does.
            held: identity of the version that the model is known to hold.
        """
        copies = self._patch(copier) if self.base is not None and self.base == held else None
        if copies is None:
            copies = [copy for of_parameter in self.copies.values() for copy in of_parameter]
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

    def _patch(self, copier: Copier) -> Sequence[Copy] | None:
        """Patch what can be patched, and return the remaining copies; None: all of them."""
        try:
            apply_patches(self.patches, copier)
        # A device without room, say. Copying everything needs none, and overwrites the patches.
        except Exception as error:  # noqa: BLE001
            log_copied_whole(error)
            return None
        return self.unpatched

    def mismatches(self, copier: Copier) -> dict[str, str]:
        """Return the parameters and images that differ from what a switch gives, and their layers.

        Parameters must have what they are copied, to the byte. ``copier``: its threads compare.
        """
        copies = [(name, copy) for name, each in self.copies.items() for copy in each]
        differing: set[str] = set()

        def work(first: int, end: int) -> None:
            differing.update(name for name, copy in copies[first:end] if not same_bytes(*copy))

        copier.in_parallel(work, cut_work([copy[0].nbytes for _, copy in copies], copier))
        images = {each.name: each.name for each in self.images if not each.matches()}
        return {name: layer_of(name) for name in sorted(differing)} | images

    def patch_matches(self, name: str, patches: Sequence[Patch], copies: Sequence[Copy]) -> bool:
        """Whether patches and copies give a parameter what the whole switch would give it.

        ``patches`` and what is compared are in main memory: a device may have no room.
        """
        parameter = self.plan.parameters[name].detach()
        patched = flat(parameter).to("cpu", copy=True)
        for patch in patches:
            patch._replace(target=patched).apply()
        like = patched.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        copied = {target.data_ptr() for target, _ in copies}
        return all(
            target.data_ptr() in copied or same_bytes(op.to.in_(like), source)
            for op, (target, source) in zip(
                self.plan.traced[name].ops, self.copies[name], strict=True
            )
        )


def plan_copies(
    model: torch.nn.Module,
    trace: LoadTrace,
    check: ShapeCheck,
    *,
    unwrapped: Unwrapped,
    partial: bool,
    packing: Packing | None,
    reloaded: Mapping[str, str],
) -> CopyPlan:
    """Bind a trace to the live parameters of a model.

    Args:
        model: the model, as it serves.
        trace: of its loaders, for such versions.
        check: traces a part of the layout, that of the layers that are reloaded.
        unwrapped: leads from the live model's names to the trace's.
        partial: versions may hold a part of the model.
        packing: of layers that get images; None: no layer does.
        reloaded: layers that stay with the reload whatever the trace says, and why.

    Raises:
        UnsupportedError: too little of the model is only copied.
    """
    live = {
        unwrapped(name): tensor
        for tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }
    packed = packed_layers(model, packing, trace, unwrapped) if packing is not None else {}
    packed = {name: each for name, each in packed.items() if name not in reloaded}
    in_images = {full for _, loaded in packed.values() for full in loaded.values()}
    reloaded = {**_refused_layers(live, trace, without=in_images), **reloaded}
    traced = {n: each for n, each in trace.tensors.items() if layer_of(n) not in reloaded}
    sources = _sources_to_reload(trace, reloaded, check) if reloaded else ()
    if not in_images <= traced.keys():  # of a layer tied to one that is reloaded
        raise UnsupportedError(listed(list(reloaded.values()), "; "))
    parameters = {name: live[name] for name in traced if name not in in_images}
    addresses = addresses_of(parameters)
    plan = CopyPlan(traced, parameters, addresses, packing, packed, reloaded, sources)
    if not partial:
        _require_all_parameters(model, plan, unwrapped)
    return plan


def _refused_layers(live: Tensors, trace: LoadTrace, *, without: Collection[str]) -> dict[str, str]:
    """Return the layers that copies cannot fill, and why."""
    refused = trace.refused
    for name, traced in trace.tensors.items():
        tensor = live.get(name)
        if name in without or name in refused:
            continue
        if tensor is None or form_of(tensor) != traced.form:
            refused[name] = "is stored in another form"
        elif tensor.untyped_storage().nbytes() != tensor.nbytes:
            refused[name] = "shares its memory with others"
    return {layer_of(name): f"{name} {why}" for name, why in refused.items()}


def _sources_to_reload(
    trace: LoadTrace, layers: Mapping[str, str], check: ShapeCheck
) -> Collection[str]:
    """Return the published tensors that layers are loaded from, and no other layers are.

    Raises:
        UnsupportedError: there are no such tensors, or too little is left to be copied.
    """
    why = listed(list(dict.fromkeys(layers.values())), "; ")
    reloaded = {name: each for name, each in trace.tensors.items() if layer_of(name) in layers}
    copied = [each for name, each in trace.tensors.items() if name not in reloaded]
    num_loaded = sum(each.num_loaded for each in trace.tensors.values())
    if sum(each.num_loaded for each in copied) < MIN_COPIED * num_loaded:
        raise UnsupportedError(why)
    sources = trace.offered - {op.source for each in copied for op in each.ops}
    try:
        alone = check.of_part(sources)
    except WeightsMismatchError as error:
        raise UnsupportedError(f"{why}; not to be loaded alone: {error}") from error
    if alone.tensors != reloaded or alone.offered != sources:
        raise UnsupportedError(f"{why}; the tensors of these layers are those of others, too")
    return sources


def _require_all_parameters(model: torch.nn.Module, plan: CopyPlan, unwrapped: Unwrapped) -> None:
    """Refuse a plan that leaves parameters out: a reload would give them something.

    The values of the engine's start, for instance.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]  # some buffers are views
    loaded = {address_of(tensor) for tensor in plan.written} | {
        address_of(tensor) for name, tensor in tensors if layer_of(unwrapped(name)) in plan.reloaded
    }
    left_out = [
        f"{name} was not published"
        for name, parameter in model.named_parameters()
        if parameter.nbytes and address_of(parameter) not in loaded
    ]
    if left_out:
        raise UnsupportedError(listed(left_out, "; "))


def _laid_out(memory: torch.Tensor, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Lay out tensors of the same form in flat bytes, one behind the other."""
    laid_out, start = {}, 0
    for name, tensor in tensors.items():
        elements = memory[start : start + tensor.nbytes].view(tensor.dtype)
        laid_out[name] = elements.as_strided(tensor.shape, tensor.stride())
        start = align(start + tensor.nbytes)
    return laid_out


def addresses_of(tensors: Tensors) -> list[int]:
    """Return where the first element of each tensor is."""
    return [tensor.data_ptr() for tensor in tensors.values()]


def layer_of(parameter: str) -> str:
    """Return the name of the layer that has a parameter of this name."""
    return parameter.rpartition(".")[0]


def log_copied_whole(error: Exception) -> None:
    """Log that what changed could not be patched this time."""
    message = "a version is copied whole, as patching what changed failed: %s"
    log_once(logger, message, described(error))


def digest_of(tensor: torch.Tensor) -> int:
    """Return the XXH3 of a tensor's bytes."""
    flat_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64(flat_bytes.numpy().data).intdigest()


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
