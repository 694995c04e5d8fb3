"""`CopyPlan` and `Switch`: a switch as copies of bytes alone.

Which part of which published tensor goes to which part of which parameter was recorded while the
engine served. Layers that pack their weights have images. Whether that is all that a reload does is
for `planned_loads` to prove.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from dbuffer.format.layout import align
from dbuffer.integrations.engine.plan.images import Image, Packing, packed_layers
from dbuffer.integrations.engine.plan.patches import (
    Changed,
    Copy,
    Patch,
    Patches,
    as_integers,
    flat,
    patch_or_copy,
)
from dbuffer.integrations.engine.plan.recording import Place, Recording, Step

Tensors = Mapping[str, torch.Tensor]
CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Copies the second ones into the first."""
ApplyPatches = Callable[[Sequence[Patch]], None]
"""Applies all of them."""
LoadInto = Callable[[str, Tensors], torch.Tensor]
"""Lets a model's loaders load some tensors; what is then in the parameter of this name."""

_MAX_TOLD = 3

_SAMPLED = 64
"""Parameters, and elements of each, by which a model is known to hold what was put there."""


class NotPlannableError(Exception):
    """Why a layout's switches stay with the reload."""


class _Write(NamedTuple):
    """A step, and where in the live model it writes."""

    step: Step
    target: torch.Tensor


class CopyPlan:
    """The copies that switch a model to a version of one layout.

    Args:
        model: the model, as it serves.
        recording: what its loaders do with such a version.
        partial: it may hold a part of the model.
        packing: of layers that get images; None: there are none.

    Raises:
        NotPlannableError: they do something else than to copy, or the live model is not as they
            left it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        recording: Recording,
        *,
        partial: bool,
        packing: Packing | None = None,
    ) -> None:
        self.recording = recording
        self._packing = packing
        if recording.refused:
            raise NotPlannableError(told(f"{n}: {why}" for n, why in recording.refused.items()))
        self._layers = packed_layers(model, packing, recording.places) if packing else []
        packed = {name for layer in self._layers for name in layer.loaded.values()}
        self._tensors = _live_tensors(model, recording, without=packed)
        written = list(self._tensors.values())
        for layer in self._layers:
            written += layer.layer.parameters(recurse=False)
        self.addresses = {_address(tensor) for tensor in written}
        """Of the storages that it writes into."""
        self.is_in_main_memory = all(tensor.device.type == "cpu" for tensor in written)
        if not partial:
            # A reload would give it something: what it had when the engine was started, say.
            left_out = [
                name
                for name, parameter in model.named_parameters()
                if parameter.nbytes and _address(parameter) not in self.addresses
            ]
            if left_out:
                raise NotPlannableError(told(f"{n} was not published" for n in left_out))
        shared = [n for n, t in self._tensors.items() if t.untyped_storage().nbytes() != t.nbytes]
        if shared:
            raise NotPlannableError(told(f"{n} shares its memory with others" for n in shared))
        self._places = self._find_places()
        with torch.no_grad():
            self._writes = {
                name: [_Write(step, step.to.in_(tensor.detach())) for step in recording.steps[name]]
                for name, tensor in self._tensors.items()
            }
        self.num_bytes = recording.loaded_bytes
        self.num_images = len(self._layers)
        """How many layers have images."""
        self.num_parameters = len(self._tensors)
        """How many parameters it copies into, images not counted."""
        self.twin_bytes = sum(align(tensor.nbytes) for tensor in self._tensors.values())
        """What :meth:`staged_in` needs."""
        self._all_names = {*self._writes, *(layer.name for layer in self._layers)}
        self._unproven = self._all_names
        self._loaded_xxh3: dict[str, int] = {}
        """Of what each layer that has an image was loaded with, as far as that is known."""

    @property
    def is_proven(self) -> bool:
        """Whether a reload was found to do no more, for what it changed."""
        return self._unproven != self._all_names

    def note_loaded(self, switch: Switch | None) -> None:
        """The model has what this switch brings; None: nobody knows which version it has."""
        self._loaded_xxh3 = {} if switch is None else switch.loaded_xxh3

    def switch_to(self, tensors: Tensors, images: Sequence[Image] = ()) -> Switch:
        """The copies that switch to a version whose tensors these are."""
        copies = {
            name: [Copy(write.target, _source(write, tensors)) for write in writes]
            for name, writes in self._writes.items()
        }
        return Switch(self, copies, images)

    def patches_to(self, tensors: Tensors, changed: Changed, base: str) -> Patches:
        """What brings a model from the version ``base`` to these tensors; images are not in it."""
        patches: list[Patch] = []
        copies: list[Copy] = []
        for name, writes in self._writes.items():
            parameter = self._tensors[name]
            for step, _ in writes:
                if step.source is None or step.part is None or step.source not in changed:
                    continue
                source, positions = tensors[step.source], changed[step.source]
                found = patch_or_copy(parameter, step.to, step.part, source, positions)
                if isinstance(found, Patch):
                    patches += found.pieces()
                elif found is not None:
                    copies.append(found)
        return Patches(base, patches, copies)

    def is_patched_right(self, name: str, patches: Patches, switch: Switch) -> bool:
        """Whether patches give a parameter just what the whole switch would give it."""
        place = flat(self._tensors[name])
        patched = place.clone()
        for patch in patches.patches:
            if patch.target.data_ptr() == place.data_ptr():
                patch._replace(target=patched).apply()
        parameter = self._tensors[name].detach()
        like = patched.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        copied = {target.data_ptr() for target, _ in patches.copies}
        return all(
            target.data_ptr() in copied or _same_bytes(write.step.to.in_(like), source)
            for write, (target, source) in zip(self._writes[name], switch.copies[name], strict=True)
        )

    def sample(self) -> list[torch.Tensor]:
        """A few bytes of some parameters: whether something has written all of them anew."""
        tensors = list(self._tensors.values())
        some = tensors[:: max(1, len(tensors) // _SAMPLED)]
        return [flat(t)[:: max(1, t.numel() // _SAMPLED)].clone() for t in some]

    def make_images(self, tensors: Tensors) -> list[Image]:
        """Images of all layers that have one; takes as long as packing takes, and its memory.

        Raises:
            NotPlannableError: a layer could not take its image over.
        """
        images = []
        for layer in self._layers:
            assert self._packing is not None  # noqa: S101 - or there were no layers
            shadow = layer.shadow(self.recording.places)
            for name, tensor in layer.tensors_of(shadow).items():
                for step in self.recording.steps[name]:
                    write = _Write(step, step.to.in_(tensor))
                    write.target.copy_(_source(write, tensors))
            image = Image(layer, shadow, self._packing)
            if image.misfit is not None:
                raise NotPlannableError(image.misfit)
            images.append(image)
        return images

    def is_filled_otherwise(self, name: str, tensors: Tensors, load: LoadInto) -> bool:
        """Whether ``load`` fills a parameter otherwise than the recording has it."""
        steps = self.recording.steps[name]
        sources = {step.source for step in steps}
        loaded = load(name, {n: tensor for n, tensor in tensors.items() if n in sources})
        writes = [_Write(step, step.to.in_(loaded)) for step in steps]
        return not all(_same_bytes(w.target, _source(w, tensors)) for w in writes)

    def is_good_for(self, switch: Switch) -> bool:
        """Whether it is proven for what a version changes.

        What never changed yet may be the origin of something that would have changed with it.
        """
        if self._find_places() != self._places or len(switch.images) != len(self._layers):
            return False
        return switch.finds(self._unproven, self._loaded_xxh3) == self._unproven

    def found_by(self, switch: Switch) -> set[str]:
        """All that this switch would not change, for all that can be told."""
        layers = {image.of.name for image in switch.images if image.is_there()}
        return layers | switch.finds(self._writes, {})

    def note_proven(self, unchanged: Collection[str]) -> None:
        """A reload changed all but these parameters and layers, and did nothing else."""
        self._unproven = self._unproven & set(unchanged)

    def lacking(self, switch: Switch) -> list[str]:
        """Parameters and layers that have not what this switch would give them."""
        has = switch.finds(self._writes, {})
        layers = [image.of.name for image in switch.images if not image.is_there()]
        return sorted(self._writes.keys() - has) + layers

    def staged_in(self, memory: torch.Tensor, switch: Switch, copy: CopyTensors) -> Switch:
        """A switch out of twins of its parameters, one behind the other, in flat bytes.

        They are filled, by ``copy``, with what ``switch`` would fill the parameters with.
        """
        staged: dict[str, list[Copy]] = {}
        filling: list[Copy] = []
        start = 0
        for name, tensor in self._tensors.items():
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            twin = flat.as_strided(tensor.shape, tensor.stride())
            start = align(start + tensor.nbytes)
            filling += [
                Copy(write.step.to.in_(twin), source)
                for write, (_, source) in zip(self._writes[name], switch.copies[name], strict=True)
            ]
            staged[name] = [Copy(tensor.detach(), twin)]
        copy([target for target, _ in filling], [source for _, source in filling])
        return Switch(self, staged, switch.images)

    def _find_places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]


class Switch:
    """The copies that switch a model to one version, found while the engine serves.

    Where versions are mapped they are copied from there, in the pause; where they are staged in
    memory, what this rank needs of them is all that is, in the order and dtype of its parameters.
    """

    def __init__(
        self,
        plan: CopyPlan,
        copies: Mapping[str, Sequence[Copy]],
        images: Sequence[Image],
    ) -> None:
        self.plan = plan
        self.patches: Patches | None = None
        """What does the same to a model that holds the version before."""
        self.copies = copies
        """By the name of the parameter."""
        self.images = images

    @property
    def is_enough(self) -> bool:
        """Whether it is known that there is nothing else to do."""
        return self.plan.is_proven and self.plan.is_good_for(self)

    @property
    def num_bytes(self) -> int:
        """Of all that it loads."""
        return self.plan.num_bytes

    @property
    def staging_bytes(self) -> int:
        """What :meth:`copied_into` needs."""
        return self.plan.twin_bytes

    @property
    def loaded_xxh3(self) -> dict[str, int]:
        """What the layers that have images are loaded with."""
        return {image.of.name: image.loaded_xxh3 for image in self.images}

    def of(self, tensors: Tensors) -> Switch:
        """The same out of other tensors that hold the same."""
        return self._with_patches(self.plan.switch_to(tensors, self.images))

    def _with_patches(self, switch: Switch) -> Switch:
        # Copies out of what is let go of now would be in them.
        if self.patches is not None and not self.patches.copies:
            switch.patches = self.patches
        return switch

    def copied_into(self, memory: torch.Tensor, copy: CopyTensors) -> Switch:
        """The same, out of ``memory``, into which it copies all that it needs."""
        return self._with_patches(self.plan.staged_in(memory, self, copy))

    def finds(self, names: Collection[str], loaded_xxh3: Mapping[str, int]) -> set[str]:
        """Which of these parameters and layers have already what it would give them.

        ``loaded_xxh3``: what the layers were loaded with before.
        """
        mine = self.loaded_xxh3
        found = {name for name in names if name in mine and loaded_xxh3.get(name) == mine[name]}
        return found | {
            name
            for name in names
            if name in self.copies and all(_same_bytes(*copy) for copy in self.copies[name])
        }

    def apply(self, copy: CopyTensors, patch: ApplyPatches, holds: str | None) -> None:
        """Switch. A failure leaves a mix, to be repaired at once.

        ``copy`` copies in main memory; on a device its own queue does. ``holds``: identity of the
        version that the model holds, if it is known to.
        """
        copies: Sequence[Copy] = [pair for of_one in self.copies.values() for pair in of_one]
        if self.patches is not None and self.patches.base == holds:
            patch(self.patches.patches)
            copies = self.patches.copies
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


def _live_tensors(
    model: torch.nn.Module, recording: Recording, *, without: Collection[str]
) -> dict[str, torch.Tensor]:
    """A model's tensors by the names of a recording, which must have found their like."""
    live: dict[str, torch.Tensor] = {}
    live |= dict(model.named_parameters(remove_duplicate=False))
    live |= dict(model.named_buffers(remove_duplicate=False))
    places = {name: place for name, place in recording.places.items() if name not in without}
    strange = [
        name for name, place in places.items() if name not in live or Place.of(live[name]) != place
    ]
    if strange:
        raise NotPlannableError(told(f"{n} is stored in another form" for n in strange))
    return {name: live[name] for name in places}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _source(write: _Write, tensors: Tensors) -> torch.Tensor:
    step = write.step
    if step.source is None or step.part is None:
        return torch.tensor(step.value, dtype=write.target.dtype).expand(write.target.shape)
    return step.part.in_(tensors[step.source])


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    found = source.to(device=target.device, dtype=target.dtype)
    return torch.equal(as_integers(target), as_integers(found))


def told(reasons: Iterable[str]) -> str:
    """The first few of many reasons."""
    told = list(reasons)
    more = f", and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else ""
    return "; ".join(told[:_MAX_TOLD]) + more
