"""`WeightLoader`: loads by copies alone, where it is proven that a reload does no more.

The first switch of a layout goes through the engine's own reload twice: of values that stand in for
the version's, so that all that is derived from any of them changes, and then of the version. From
the one to the other every parameter must become what was planned, to the byte, and every image what
its layer has; all else that can be reached from the model must stay as it was. What passed is
copied from then on. Layers of which anything else is true are reloaded alone, where that is found
to leave the same as a reload of everything; or else the model stays with the reload.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from dbuffer.integrations.engine.plan.copy_plan import (
    CopyPlan,
    PreparedSwitch,
    Tensors,
    note_copied_whole,
)
from dbuffer.integrations.engine.plan.fingerprint import ModelFingerprint
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.plan.load_trace import LoadTrace, unwrapped_by
from dbuffer.integrations.engine.plan.partial_reload import (
    NotPlannableError,
    layer_of,
    layers_at,
)
from dbuffer.integrations.engine.plan.patching import Changed, Patch, are_there
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import split_evenly
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)

Load = Callable[[Tensors], None]
"""Reloads the layers that these published tensors are all of."""

_MAX_PLANS = 3
"""Of a layout: each leaves more layers to the reload."""

_MAX_PROOFS = 3
"""Of a plan; each takes two reloads."""

_STAND_INS = (0.25, 0.75)
"""Range of the values that stand in for weights: there are roots and inverses of all of them."""

_MIN_PAUSE, _MAX_PAUSE = 8, 64
"""Versions that are reloaded before a plan that failed is tried again; more after each failure."""

_NOT_READ = frozenset({"weight_loader", "_weight_loader", "load_weights"})
"""Attributes that load, and that no computation reads."""


class WeightLoader:
    """Loads versions by a plan where there is a proven one, else by the engine's reload.

    Args:
        model: the model, as it serves.
        copier: its threads copy in main memory.
        partial: versions may hold a part of it.
        without: attributes in it that hold caches.
        packing: of layers that get images; None: there are none.
        wrapper: what a layer is called in one that wraps it; None: none is wrapped.
        check: what recorded; its loaders are asked again. None: they are not.
        load_part: reloads a part of the model; None: it cannot be reloaded in part.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        copier: Copier,
        *,
        partial: bool = False,
        without: Collection[str] = (),
        packing: Packing | None = None,
        wrapper: str | None = None,
        check: ShapeCheck | None = None,
        load_part: Load | None = None,
    ) -> None:
        self._model = model
        self._copier = copier
        self._check = check
        self._loads_alone = check is not None
        self._partial = partial
        self._without = _NOT_READ | frozenset(without)
        self._packing = packing
        self._unwrapped = unwrapped_by(wrapper)
        self._trace: LoadTrace | None = None
        self._load_part = load_part
        self._plan: CopyPlan | None = None
        self._left: dict[str, str] = {}
        self._is_due = False
        self._num_plans = 0
        self._num_proofs = 0
        self._pause = _MIN_PAUSE
        self._num_to_pass_over = 0
        self._is_told = False
        self._holds: str | None = None
        self._sample: Mapping[str, Patch] = {}
        self._may_patch = True
        # Of its own: the engine's generators are seeded, and sample tokens.
        self._random = np.random.default_rng()

    @torch.no_grad()
    def prepare(
        self,
        tensors: Tensors,
        trace: LoadTrace | None,
        changed_since: Callable[[str], Changed | None] = lambda _: None,
    ) -> PreparedSwitch | None:
        """A switch to a version that is being staged, with its images; None: it is reloaded.

        For another thread than the one that loads, while that does not. ``changed_since``: where
        the version differs from that of an identity, as far as anybody knows.
        """
        if trace is None:
            return None
        if trace is not self._trace:
            self._trace, self._left, self._num_plans = trace, {}, 0
            self._is_due, self._num_to_pass_over = True, 0
        elif self._num_to_pass_over:
            self._num_to_pass_over -= 1
            self._is_due = not self._num_to_pass_over
        if self._is_due:
            self._make_plan(trace)
        if self._plan is not None and self._plan.is_proven:
            self._prove_again(self._plan, tensors)
        if self._plan is None:
            return None
        try:
            switch = self._plan.switch_to(tensors, self._plan.make_images(tensors))
        except NotPlannableError as error:
            self._give_up(str(error))
            return None
        # Anything may go wrong when a layer packs, and it does so in the reload as well.
        except Exception as error:  # noqa: BLE001
            self._set_aside(f"a layer could not be packed: {_described(error)}")
            return None
        try:
            switch.sample = self._plan.sample_of(switch, self._random)
            self._add_patches(self._plan, tensors, switch, changed_since)
        # Memory that is short for a moment, say. The whole is there.
        except Exception as error:  # noqa: BLE001
            note_copied_whole(error)
        return switch

    @torch.no_grad()
    def apply(self, switch: PreparedSwitch, identity: str | None = None) -> bool:
        """Do a switch that was prepared; False: it is not known to be enough, nothing was done.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        if not self.is_enough(switch):
            return False
        holds = None if switch.patches is None else self._what_it_holds()
        self._holds = None
        try:
            switch.apply(self._copier.copy_tensors, self._patch, holds)
            self._reload_part(switch)
        except BaseException:
            # What repairs it must not fail by the same: a reload does, and the next is a proof.
            self._plan, self._is_due = None, True
            raise
        self._note_held(switch, identity)
        return True

    def is_enough(self, switch: PreparedSwitch | None) -> bool:
        """Whether a switch that was prepared is known to be all that there is to do."""
        return switch is not None and switch.plan is self._plan and switch.is_enough

    def _reload_part(self, switch: PreparedSwitch) -> None:
        if switch.reloaded:
            assert self._load_part is not None  # noqa: S101 - or all would be copied
            self._load_part(switch.reloaded)

    def _patch(self, patches: Sequence[Patch]) -> None:
        def work(first: int, end: int) -> None:
            for patch in patches[first:end]:
                patch.apply()

        sizes = [patch.positions.numel() for patch in patches]
        self._copier.in_parallel(work, split_evenly(sizes, self._copier.num_threads))

    def forget_base(self) -> None:
        """Treat the model's weights as unknown: the next version is not patched upon them."""
        self._holds = None
        if self._plan is not None:
            self._plan.forget_loaded()

    def _note_held(self, switch: PreparedSwitch, identity: str | None) -> None:
        self._holds, self._sample = identity, switch.sample

    def _what_it_holds(self) -> str | None:
        """Identity of the version in the model; None if that is not known to be there still.

        An engine that was asleep may have lost all of it, or somebody loaded another one.
        """
        if self._holds is None or not self._sample:
            return None
        return self._holds if are_there(self._sample.values()) else None

    def _add_patches(
        self,
        plan: CopyPlan,
        tensors: Tensors,
        switch: PreparedSwitch,
        changed_since: Callable[[str], Changed | None],
    ) -> None:
        """Give a switch patches, where the model holds a version from which those are known."""
        base = self._what_it_holds() if plan.is_proven and self._may_patch else None
        changed = None if base is None else changed_since(base)
        if base is None or changed is None:
            return
        patches = plan.patches_to(tensors, changed, base)
        name = self._random.choice(list(switch.copies))
        if not plan.patch_matches(name, patches, switch):
            self._may_patch = False
            logger.warning(
                "%s changed in other places than its delta says: versions are copied whole from "
                "now on",
                name,
            )
            return
        switch.patches = patches.on_device()
        if patches.patches or patches.copies:
            switch.sample = plan.with_patched(switch.sample, patches, self._random)
        else:  # what was patched last tells more
            switch.sample = self._sample

    @torch.no_grad()
    def reload(
        self,
        reload: Load,
        tensors: Tensors,
        switch: PreparedSwitch | None,
        identity: str | None = None,
    ) -> None:
        """Switch by a reload, and see whether the switch that was prepared would have done it.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        self._holds, plan = None, self._plan
        if plan is None or switch is None or switch.plan is not plan:
            if plan is not None:
                plan.forget_loaded()
            reload(tensors)
            return
        self._num_proofs += 1
        if self._num_proofs > _MAX_PROOFS:
            self._set_aside("what it copies has integers that change, or parameters move")
            reload(tensors)
            return
        self._reload_and_prove(plan, switch, reload, tensors)
        if plan.is_proven and self._plan is plan:
            self._note_held(switch, identity)

    def _prove_again(self, plan: CopyPlan, tensors: Tensors) -> None:
        """Ask the loader of one parameter again, whichever, what it does with this version."""
        if self._check is None or not self._loads_alone:
            return
        name = self._random.choice(list(plan.trace.steps))
        try:
            differs = plan.is_filled_otherwise(name, tensors, self._check.loaded)
        # Some models' loaders want all tensors, or none.
        except Exception as error:  # noqa: BLE001
            self._loads_alone = False
            logger.info(
                "the plan is not proven again: loaders refuse what %s is made of, alone: %s %.300s",
                name,
                type(error).__name__,
                error,
            )
            return
        if differs:
            self._plan = None
            logger.warning(
                "the loader of %s does something else than when it was recorded, so switches go "
                "through the engine's reload from now on",
                name,
            )

    def _make_plan(self, trace: LoadTrace) -> None:
        self._plan, self._is_due = None, False
        self._num_proofs, self._is_told = 0, False
        check = None if self._load_part is None else self._check
        try:
            self._plan = CopyPlan(
                self._model,
                trace,
                partial=self._partial,
                packing=self._packing,
                unwrapped=self._unwrapped,
                left=self._left,
                trace_part=None if check is None else check.of_part,
            )
        except NotPlannableError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._plan = None
        logger.info("switches go through the engine's reload, and not by copies alone: %s", why)

    def _set_aside(self, why: str) -> None:
        """Give a plan up for some versions: memory may have been short for a moment."""
        self._plan, self._num_to_pass_over = None, self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        logger.warning(
            "switches go through the engine's reload for %d versions, and not by copies alone: %s",
            self._num_to_pass_over,
            why,
        )

    def _reload_and_prove(
        self, plan: CopyPlan, switch: PreparedSwitch, reload: Load, tensors: Tensors
    ) -> None:
        started = time.monotonic()
        stand_ins = {
            name: _stand_in(tensor, self._random, is_copied=name not in plan.partial_reload.sources)
            for name, tensor in tensors.items()
        }
        before = None
        # What a reload of everything changes after one of a part was not in that.
        if self._can_reload(
            lambda: reload(stand_ins), "values that stand in for a version cannot be loaded"
        ) and self._can_reload_part(switch):
            before = self._look(plan, switch)
        looking_s = time.monotonic() - started
        reload(tensors)
        if before is None:
            return
        started = time.monotonic()
        after = self._look(plan, switch)
        if after is None:
            return
        changes = before.changes_to(after)
        lacking = plan.lacking(switch)
        looking_s += time.monotonic() - started
        if changes or lacking:
            self._leave_more(plan, changes, lacking)
        elif self._spares_the_rest(plan, switch, lambda: reload(tensors)):
            plan.note_proven({n: t for n, t in tensors.items() if _is_mostly(t, stand_ins[n])})
            self._tell(plan, looking_s)

    def _spares_the_rest(
        self, plan: CopyPlan, switch: PreparedSwitch, reload: Callable[[], None]
    ) -> bool:
        """Whether reloading the part leaves what is copied as it is; else all is reloaded again."""
        if not switch.reloaded:
            return True
        if self._can_reload_part(switch):
            lacking = plan.lacking(switch)
            if not lacking:
                return True
            self._give_up(f"reloading a part changes {listed(lacking)} too")
        reload()
        return False

    def _can_reload_part(self, switch: PreparedSwitch) -> bool:
        """Reload the part that is not copied."""
        return self._can_reload(lambda: self._reload_part(switch), "a part cannot be reloaded")

    def _can_reload(self, reload: Callable[[], None], otherwise: str) -> bool:
        try:
            reload()
        # Whatever it is: the whole is reloaded now.
        except Exception as error:  # noqa: BLE001
            self._set_aside(f"{otherwise}: {_described(error)}")
            return False
        return True

    def _leave_more(self, plan: CopyPlan, changes: Sequence[str], lacking: Sequence[str]) -> None:
        """Leave layers to the reload that it does more with than the plan; all, if that fails."""
        left: dict[str, str] = {}
        for place in changes:
            for layer in layers_at(place, plan.all_layers, self._unwrapped):
                left.setdefault(layer, f"it changes {place or 'the model'} too")
        for name in lacking:
            layer = name if name in plan.all_layers else layer_of(name)
            left.setdefault(layer, f"{name} is not what was published")
        self._num_plans += 1
        if self._num_plans >= _MAX_PLANS or left.keys() <= plan.partial_reload.layers.keys():
            self._give_up(listed(sorted(set(left.values())), "; "))
        else:
            self._left = {**left, **plan.partial_reload.layers}
            self._plan, self._is_due = None, True

    def _tell(self, plan: CopyPlan, looking_s: float) -> None:
        if self._is_told:
            return
        self._is_told = True
        logger.info(
            "switches to %.3f GB are copies into %d parameters from now on, %d layers that are "
            "packed while the engine serves, and a reload of %d others, as the reload of all was "
            "found to do no more (looking took %.0f ms)",
            plan.num_bytes / 1e9,
            plan.num_parameters,
            plan.num_images,
            len(plan.partial_reload.layers),
            1e3 * looking_s,
        )
        for layer, why in plan.partial_reload.layers.items():
            logger.info("%s stays with the engine's reload: %s", layer, why)

    def _look(self, plan: CopyPlan, switch: PreparedSwitch) -> ModelFingerprint | None:
        replaced = {change for image in switch.images for change in image.changes}
        try:
            return ModelFingerprint(
                self._model,
                without=self._without,
                undigested=plan.addresses,
                replaced=replaced,
            )
        # Anything may be in a model, and a switch must not fail because one cannot look at it.
        except Exception as error:  # noqa: BLE001
            self._set_aside(f"the model cannot be looked at: {_described(error)}")
            return None


def _stand_in(
    tensor: torch.Tensor, random: np.random.Generator, *, is_copied: bool
) -> torch.Tensor:
    """Return a tensor of the same form, without memory, whose elements are all another number.

    Integers may be indices or codes, so one of their own stands in for them. What is derived from
    their order would not show, so nothing stands in where that could be left behind by a copy.
    """
    if not tensor.numel():
        return tensor
    first, last = tensor[(0,) * tensor.dim()], tensor[(-1,) * tensor.dim()]
    if not tensor.is_floating_point() or tensor.dtype is torch.float4_e2m1fn_x2:
        return tensor if is_copied else last.expand(tensor.shape)
    value = torch.tensor(random.uniform(*_STAND_INS)).to(tensor.dtype)
    if first.float() == value.float():
        value = (2 * value.float()).to(tensor.dtype)
    return value.expand(tensor.shape)


def _is_mostly(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    """Whether most elements are those of what stood in for it."""
    if stand_in is tensor:
        return True
    if tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2:
        return False
    if tensor.itemsize == 1:
        tensor, stand_in = tensor.view(torch.uint8), stand_in.view(torch.uint8)
    return 2 * int((tensor == stand_in).sum()) > tensor.numel()


def _described(error: Exception) -> str:
    return f"{type(error).__name__} {error!s:.300}"
