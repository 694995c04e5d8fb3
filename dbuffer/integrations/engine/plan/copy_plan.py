"""`CopyPlan` and `PreparedSwitch`: a switch as copies of bytes alone.

Which part of which published tensor goes to which part of which parameter was recorded while the
engine served. Layers that pack their weights have images; those that compute something else stay
with the engine's reload. Whether that is all that a reload of everything does is for
`weight_loader` to prove.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from dbuffer.format.layout import align
from dbuffer.integrations.engine.plan.images import Image, Packing, packed_layers
from dbuffer.integrations.engine.plan.load_trace import CopyOp, LoadTrace, TensorMeta, Unwrapped
from dbuffer.integrations.engine.plan.partial_reload import (
    NotPlannableError,
    TracePart,
    layer_of,
    without_reloaded,
)
from dbuffer.integrations.engine.plan.patching import (
    Changed,
    Copy,
    Patch,
    Patches,
    as_integers,
    elements_of,
    flat,
    joined,
    patch_or_copy,
)
from dbuffer.runtime.messages import listed
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tensors = Mapping[str, torch.Tensor]
CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Copies the second ones into the first."""
ApplyPatches = Callable[[Sequence[Patch]], None]
"""Applies all of them."""
LoadInto = Callable[[str, Tensors], torch.Tensor]
"""Lets a model's loaders load some tensors; what is then in the parameter of this name."""

_SAMPLED = 8192
"""Elements of all parameters by which a model is known to hold what was put there; and so many of
those that were patched. Looking at them takes a few milliseconds of a pause."""

_MIN_SAMPLED, _MAX_SAMPLED = 8, 64
"""Of each parameter."""

_SAMPLED_PARTS = 8
"""Of a parameter that is made of many, experts for instance."""

_BLOCK_BYTES = 64 << 20
"""Bytes compared at a time: a device may have little room."""


class _Write(NamedTuple):
    """A step, and where in the live model it writes."""

    step: CopyOp
    target: torch.Tensor


class CopyPlan:
    """The copies that switch a model to a version of one layout.

    Args:
        model: the model, as it serves.
        trace: what its loaders do with such a version.
        partial: it may hold a part of the model.
        packing: of layers that get images; None: there are none.
        unwrapped: names of the live model, as they are recorded.
        left: layers that are to stay with the reload, and why.
        trace_part: what loaders do with a part of it; None: the engine cannot reload a part.

    Raises:
        NotPlannableError: too little of it is only copied.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trace: LoadTrace,
        *,
        partial: bool,
        packing: Packing | None = None,
        unwrapped: Unwrapped,
        left: Mapping[str, str] | None = None,
        trace_part: TracePart | None = None,
    ) -> None:
        self._packing, left = packing, left or {}
        packed = (
            packed_layers(model, packing, trace.places, unwrapped) if packing is not None else []
        )
        self._layers = [layer for layer in packed if layer.name not in left]
        in_images = {name for layer in self._layers for name in layer.loaded.values()}
        self._unwrapped = unwrapped
        live = _live_tensors(model, trace, unwrapped, without=in_images)
        self.trace, self.partial_reload = without_reloaded(
            trace, {**_mismatches(live, trace, without=in_images), **left}, trace_part
        )
        if not in_images <= self.trace.steps.keys():  # of a layer tied to one that is reloaded
            raise NotPlannableError(listed(list(self.partial_reload.layers.values()), "; "))
        self._tensors = {name: live[name] for name in self.trace.steps if name in live}
        written = list(self._tensors.values())
        for layer in self._layers:
            written += layer.layer.parameters(recurse=False)
        self.addresses = {_address(tensor) for tensor in written}
        """Of the storages that it writes into."""
        self.is_in_main_memory = all(tensor.device.type == "cpu" for tensor in written)
        if not partial:
            self._require_all_parameters(model)
        self._places = self._find_places()
        with torch.no_grad():
            self._writes = {
                name: [
                    _Write(step, step.to.in_(tensor.detach())) for step in self.trace.steps[name]
                ]
                for name, tensor in self._tensors.items()
            }
        images = {layer.name for layer in self._layers}
        self.all_layers = (
            images | self.partial_reload.layers.keys() | set(map(layer_of, self._tensors))
        )
        """Names of the layers that are loaded, in whatever way."""
        self.num_bytes = self.trace.loaded_bytes
        self.num_images = len(self._layers)
        """How many layers have images."""
        self.num_parameters = len(self._tensors)
        """How many parameters it copies into, images not counted."""
        self.twin_bytes = sum(align(tensor.nbytes) for tensor in self._tensors.values())
        """What :meth:`staged_in` needs for the parameters."""
        num_sampled = _SAMPLED // max(1, len(self._tensors))
        self._num_sampled = min(max(num_sampled, _MIN_SAMPLED), _MAX_SAMPLED)
        self._unproven: Mapping[str, int] | None = None

    def _require_all_parameters(self, model: torch.nn.Module) -> None:
        """A reload would give others something: what they had when the engine was started, say."""
        tensors = [*model.named_parameters(), *model.named_buffers()]  # some buffers are views
        loaded = self.addresses | {
            _address(tensor)
            for name, tensor in tensors
            if layer_of(self._unwrapped(name)) in self.partial_reload.layers
        }
        left_out = [
            f"{name} was not published"
            for name, parameter in model.named_parameters()
            if parameter.nbytes and _address(parameter) not in loaded
        ]
        if left_out:
            raise NotPlannableError(listed(left_out, "; "))

    @property
    def is_proven(self) -> bool:
        """Whether a reload was found to do no more."""
        return self._unproven is not None

    def note_proven(self, unchanged: Tensors) -> None:
        """A reload of a version changed all but these of its tensors, and did nothing else.

        What never changed may be the origin of something that would have changed with it. So the
        plan is good for versions that leave these as they are.
        """
        self._unproven = {name: digest_of(tensor) for name, tensor in unchanged.items()}

    def forget_loaded(self) -> None:
        """Nobody knows any more which version the model has."""
        if self._unproven:
            self._unproven = None

    def switch_to(self, tensors: Tensors, images: Sequence[Image]) -> PreparedSwitch:
        """What switches to a version whose tensors these are."""
        reloaded = {name: tensors[name] for name in tensors if name in self.partial_reload.sources}
        unproven = {name: digest_of(tensors[name]) for name in self._unproven or ()}
        return PreparedSwitch(self, self.copies_of(tensors), images, reloaded, unproven)

    def copies_of(self, tensors: Tensors) -> dict[str, list[Copy]]:
        """What is to be copied of a version, by the names of the parameters that get it."""
        return {
            name: [Copy(write.target, _source(write, tensors)) for write in writes]
            for name, writes in self._writes.items()
        }

    def patches_to(self, tensors: Tensors, changed: Changed, base: str) -> Patches:
        """What brings a model from the version ``base`` to these tensors; images are not in it."""
        patches: dict[str, list[Patch]] = {}
        copies: list[Copy] = []
        for name, writes in self._writes.items():
            parameter = self._tensors[name]
            for step, _ in writes:
                if step.source is None or step.part is None or step.source not in changed:
                    continue
                source, positions = tensors[step.source], changed[step.source]
                found = patch_or_copy(parameter, step.to, step.part, source, positions)
                if isinstance(found, Patch):
                    patches.setdefault(name, []).extend(found.pieces())
                elif found is not None:
                    copies.append(found)
        return Patches(base, patches, copies)

    def patch_matches(self, name: str, patches: Patches, switch: PreparedSwitch) -> bool:
        """Whether patches give a parameter just what the whole switch would give it.

        ``patches`` and what is compared are in main memory: a device may have no room.
        """
        parameter = self._tensors[name].detach()
        patched = flat(parameter).to("cpu", copy=True)
        for patch in patches.patches.get(name, ()):
            patch._replace(target=patched).apply()
        like = patched.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        copied = {target.data_ptr() for target, _ in patches.copies}
        return all(
            target.data_ptr() in copied or _same_bytes(write.step.to.in_(like), source)
            for write, (target, source) in zip(self._writes[name], switch.copies[name], strict=True)
        )

    def sample_of(self, switch: PreparedSwitch, random: np.random.Generator) -> dict[str, Patch]:
        """Choose elements of every parameter, others each time.

        By these a model is known to hold what the switch puts there.
        """
        sample = {}
        for name, copies in switch.copies.items():
            filled = [copy for copy in copies if copy.target.numel()]
            chosen = [
                elements_of(copy, self._tensors[name], self._num_sampled // num_parts, random)
                for copy, num_parts in _some(filled, random)
            ]
            if chosen:
                sample[name] = joined(chosen).on_device()
        return sample

    def with_patched(
        self, sample: Mapping[str, Patch], patches: Patches, random: np.random.Generator
    ) -> dict[str, Patch]:
        """Add to a sample some elements that patches write, of every parameter they write to."""
        more = {}
        for name, pieces in patches.patches.items():
            chosen = [
                piece.some(self._num_sampled // num_parts, random).on_device()
                for piece, num_parts in _some(pieces, random)
            ]
            more[name] = joined([sample[name], *chosen])
        return {**sample, **more}

    def make_images(self, tensors: Tensors) -> list[Image]:
        """Images of all layers that have one; takes as long as packing takes, and its memory.

        Raises:
            NotPlannableError: a layer could not take its image over.
        """
        images = []
        for layer in self._layers:
            assert self._packing is not None  # noqa: S101 - or there were no layers
            shadow = layer.shadow(self.trace.places)
            for name, tensor in layer.tensors_of(shadow).items():
                for step in self.trace.steps[name]:
                    write = _Write(step, step.to.in_(tensor))
                    write.target.copy_(_source(write, tensors))
            image = Image(layer, shadow, self._packing)
            if image.mismatch is not None:
                raise NotPlannableError(image.mismatch)
            images.append(image)
        return images

    def is_filled_otherwise(self, name: str, tensors: Tensors, load: LoadInto) -> bool:
        """Whether ``load`` fills a parameter otherwise than the trace has it."""
        steps = self.trace.steps[name]
        sources = {step.source for step in steps}
        loaded = load(name, {n: tensor for n, tensor in tensors.items() if n in sources})
        writes = [_Write(step, step.to.in_(loaded)) for step in steps]
        return not all(_same_bytes(w.target, _source(w, tensors)) for w in writes)

    def is_good_for(self, switch: PreparedSwitch) -> bool:
        """Whether it is proven for what a version changes, and writes where the model reads."""
        if self._find_places() != self._places or len(switch.images) != len(self._layers):
            return False
        return self._unproven is not None and all(
            switch.unproven.get(name) == digest for name, digest in self._unproven.items()
        )

    def lacking(self, switch: PreparedSwitch) -> list[str]:
        """Parameters and layers that have not what this switch would give them."""
        lacks = [
            name
            for name, copies in switch.copies.items()
            if not all(_same_bytes(*copy) for copy in copies)
        ]
        return sorted(lacks) + [image.of.name for image in switch.images if not image.is_there()]

    def staged_in(
        self, memory: torch.Tensor, switch: PreparedSwitch, copy: CopyTensors
    ) -> PreparedSwitch:
        """A switch out of twins of its parameters, one behind the other, in flat bytes.

        They are filled, by ``copy``, with what ``switch`` would fill the parameters with. Behind
        them are the tensors of the layers that are reloaded.
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
        reloaded = {}
        for name, tensor in switch.reloaded.items():
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            reloaded[name] = flat.view(tensor.shape)
            start = align(start + tensor.nbytes)
            filling.append(Copy(reloaded[name], tensor))
        copy([target for target, _ in filling], [source for _, source in filling])
        return PreparedSwitch(self, staged, switch.images, reloaded, switch.unproven)

    def _find_places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]


class PreparedSwitch:
    """The copies that switch a model to one version, found while the engine serves.

    Where versions are mapped they are copied from there, in the pause; where they are staged in
    memory, what this rank needs of them is all that is, in the order and dtype of its parameters.
    """

    def __init__(
        self,
        plan: CopyPlan,
        copies: Mapping[str, Sequence[Copy]],
        images: Sequence[Image],
        reloaded: Tensors,
        unproven: Mapping[str, int],
    ) -> None:
        self.plan = plan
        self.patches: Patches | None = None
        """What does the same to a model that holds the version before."""
        self.sample: Mapping[str, Patch] = {}
        """Elements by which the model is known to hold this version."""
        self.copies = copies
        """By the name of the parameter."""
        self.images = images
        self.reloaded = reloaded
        """Published tensors that are to be reloaded in addition."""
        self.unproven = unproven
        """Digests of the published tensors for which nothing is proven."""

    @property
    def is_enough(self) -> bool:
        """Whether it is known that there is nothing else to do."""
        return self.plan.is_good_for(self)

    @property
    def num_bytes(self) -> int:
        """Of all that it loads."""
        return self.plan.num_bytes + sum(tensor.nbytes for tensor in self.reloaded.values())

    @property
    def staging_bytes(self) -> int:
        """What :meth:`copied_into` needs."""
        reloaded_bytes = sum(align(tensor.nbytes) for tensor in self.reloaded.values())
        return self.plan.twin_bytes + reloaded_bytes

    def of(self, tensors: Tensors) -> PreparedSwitch:
        """The same out of other tensors that hold the same."""
        reloaded = {name: tensors[name] for name in self.reloaded}
        copies = self.plan.copies_of(tensors)
        return self._with_patches(
            PreparedSwitch(self.plan, copies, self.images, reloaded, self.unproven)
        )

    def _with_patches(self, switch: PreparedSwitch) -> PreparedSwitch:
        switch.sample = self.sample
        # Copies out of what is let go of now would be in them.
        if self.patches is not None and not self.patches.copies:
            switch.patches = self.patches
        return switch

    def copied_into(self, memory: torch.Tensor, copy: CopyTensors) -> PreparedSwitch:
        """The same, out of ``memory``, into which it copies all that it needs."""
        return self._with_patches(self.plan.staged_in(memory, self, copy))

    def apply(self, copy: CopyTensors, patch: ApplyPatches, holds: str | None) -> None:
        """Switch. A failure leaves a mix, to be repaired at once.

        ``copy`` copies in main memory; on a device its own queue does. ``holds``: identity of the
        version that the model holds, if it is known to.
        """
        copies = self._patched(patch, holds)
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

    def _patched(self, patch: ApplyPatches, holds: str | None) -> Sequence[Copy] | None:
        """Patch what can be patched; what is left to be copied. None: everything is."""
        if self.patches is None or self.patches.base != holds:
            return None
        try:
            patch([each for pieces in self.patches.patches.values() for each in pieces])
        # A device without room, say. Copying everything needs none, and leaves no trace of it.
        except Exception as error:  # noqa: BLE001
            note_copied_whole(error)
            return None
        return self.patches.copies


def _some(parts: Sequence[T], random: np.random.Generator) -> Iterator[tuple[T, int]]:
    """Choose a few parts of a parameter, each with the number of those that are chosen."""
    chosen = random.permutation(len(parts))[:_SAMPLED_PARTS]
    for index in chosen:
        yield parts[index], len(chosen)


def note_copied_whole(error: Exception) -> None:
    """Log that what changed could not be patched this time."""
    message = "a version is copied whole, as patching what changed failed: %s"
    log_once(logger, message, f"{type(error).__name__} {error!s:.100}")


def digest_of(tensor: torch.Tensor) -> int:
    """Return the XXH3 of a tensor's bytes."""
    flat_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64(flat_bytes.numpy().data).intdigest()


def _live_tensors(
    model: torch.nn.Module, trace: LoadTrace, unwrapped: Unwrapped, *, without: Collection[str]
) -> dict[str, torch.Tensor]:
    """A model's tensors by the names of a trace, as far as it has them."""
    live = {
        unwrapped(name): tensor
        for tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }
    names = [name for name in trace.places if name in live and name not in without]
    return {name: live[name] for name in names}


def _mismatches(
    live: Mapping[str, torch.Tensor], trace: LoadTrace, *, without: Collection[str]
) -> dict[str, str]:
    """Layers that no copies can fill, and why."""
    mismatches = dict(trace.refused)
    for name, place in trace.places.items():
        tensor = live.get(name)
        if name in without:
            continue
        if tensor is None or TensorMeta.of(tensor) != place:
            mismatches[name] = "is stored in another form"
        elif tensor.untyped_storage().nbytes() != tensor.nbytes:
            mismatches[name] = "shares its memory with others"
    return {layer_of(name): f"{name} {why}" for name, why in mismatches.items()}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _source(write: _Write, tensors: Tensors) -> torch.Tensor:
    return write.step.content(tensors, write.target.dtype)


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    target, source = (each.reshape(each.shape or (1,)) for each in (target, source))
    rows = max(1, len(target) * _BLOCK_BYTES // max(1, target.nbytes))
    blocks = zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    for mine, other in blocks:
        found = other.to(device=mine.device, dtype=mine.dtype)
        if not torch.equal(as_integers(mine), as_integers(found)):
            return False
    return True
