"""`PlannedLoads`: loads by copies alone, where it is proven that a reload does no more.

The first switch of a layout goes through the engine's own reload, and is compared with that: every
parameter to the byte, every image with its layer, and all else that can be reached from the model
must be as it was. What passed is copied from then on. Layers of which anything else is true are
reloaded alone, where that is found to leave the same as a reload of everything; or else the model
stays with the reload.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence

import torch

from dbuffer.integrations.engine.plan.copy_plan import CopyPlan, PlannedSwitch, Tensors
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.plan.patches import Changed, Patch, Patches
from dbuffer.integrations.engine.plan.reachable import State
from dbuffer.integrations.engine.plan.recording import Recording, unwrapped_by
from dbuffer.integrations.engine.plan.reloaded import (
    NotPlannableError,
    layer_of,
    layers_at,
)
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import split_evenly
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)

LoadPart = Callable[[Tensors], None]
"""Reloads the layers that these published tensors are all of."""

_MAX_PROOFS = 3
"""Of a plan. A first reload may change what no later one does: an attribute that it adds."""

_MAX_PLANS = 3
"""Of a layout: each leaves more layers to the reload."""

_NOT_READ = frozenset({"weight_loader", "_weight_loader", "load_weights"})
"""Attributes that load, and that no computation reads."""


class PlannedLoads:
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
        load_part: LoadPart | None = None,
    ) -> None:
        self._model = model
        self._copier = copier
        self._check = check
        self._loads_alone = check is not None
        self._partial = partial
        self._without = _NOT_READ | frozenset(without)
        self._packing = packing
        self._unwrapped = unwrapped_by(wrapper)
        self._recording: Recording | None = None
        self._load_part = load_part
        self._plan: CopyPlan | None = None
        self._left: dict[str, str] = {}
        self._is_due = False
        self._num_plans = 0
        self._num_proofs = 0
        self._is_told = False
        self._holds: str | None = None
        self._sample: list[torch.Tensor] = []
        self._may_patch = True

    @torch.no_grad()
    def prepare(
        self,
        tensors: Tensors,
        recording: Recording | None,
        changed_since: Callable[[str], Changed | None] = lambda _: None,
    ) -> PlannedSwitch | None:
        """A switch to a version that is being staged, with its images; None: it is reloaded.

        For another thread than the one that loads, while that does not. ``changed_since``: where
        the version differs from that of an identity, as far as anybody knows.
        """
        if recording is None:
            return None
        if recording is not self._recording:
            self._recording, self._left, self._num_plans = recording, {}, 0
            self._is_due = True
        if self._is_due:
            self._make_plan(recording)
        if self._plan is not None and self._plan.is_proven:
            self._prove_again(self._plan, tensors)
        if self._plan is None:
            return None
        try:
            switch = self._plan.switch_to(tensors, self._plan.make_images(tensors))
            switch.patches = self._find_patches(self._plan, tensors, switch, changed_since)
            return switch
        except NotPlannableError as error:
            self._give_up(str(error))
        # Anything may go wrong when a layer packs, and it does so in the reload as well.
        except Exception as error:  # noqa: BLE001
            self._give_up(f"a layer could not be packed: {type(error).__name__} {error!s:.300}")
        return None

    @torch.no_grad()
    def apply(self, switch: PlannedSwitch, identity: str | None = None) -> bool:
        """Do a switch that was prepared; False: it is not known to be enough, nothing was done.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        if switch.plan is not self._plan or not switch.is_enough:
            return False
        plan = self._plan
        holds, self._holds = self._what_it_holds(plan), None
        plan.note_loaded(None)
        try:
            switch.apply(self._copier.copy_tensors, self._patch, holds)
            self._reload_part(switch)
        except BaseException:
            # What repairs it must not fail by the same: a reload does, and the next is a proof.
            self._plan, self._is_due = None, True
            raise
        plan.note_loaded(switch)
        self._note_held(plan, identity)
        return True

    def _reload_part(self, switch: PlannedSwitch) -> None:
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
            self._plan.note_loaded(None)

    def _note_held(self, plan: CopyPlan, identity: str | None) -> None:
        self._holds, self._sample = identity, plan.sample()

    def _what_it_holds(self, plan: CopyPlan) -> str | None:
        """Identity of the version in the model; None if that is not known to be there still.

        An engine that was asleep may have lost all of it.
        """
        if self._holds is None or not self._sample:
            return None
        is_there = all(map(torch.equal, plan.sample(), self._sample))
        return self._holds if is_there else None

    def _find_patches(
        self,
        plan: CopyPlan,
        tensors: Tensors,
        switch: PlannedSwitch,
        changed_since: Callable[[str], Changed | None],
    ) -> Patches | None:
        """What is to be patched, where the model holds a version from which that is known."""
        base = self._what_it_holds(plan)
        if base is None or not plan.is_proven or not self._may_patch:
            return None
        changed = changed_since(base)
        if changed is None:
            return None
        patches = plan.patches_to(tensors, changed, base)
        name = random.choice(list(switch.copies))  # noqa: S311 - nothing to keep secret
        if not plan.is_patched_right(name, patches, switch):
            self._may_patch = False
            logger.warning(
                "%s changed in other places than its delta says: versions are copied whole from "
                "now on",
                name,
            )
            return None
        return patches

    @torch.no_grad()
    def reload(
        self, reload: Callable[[], None], switch: PlannedSwitch | None, identity: str | None = None
    ) -> None:
        """Switch by a reload, and see whether the switch that was prepared would have done it.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        self._holds, plan = None, self._plan
        if plan is None or switch is None or switch.plan is not plan:
            if plan is not None:
                plan.note_loaded(None)
            reload()
            return
        self._reload_and_prove(plan, switch, reload)
        if self._plan is plan:
            self._note_held(plan, identity)

    def _prove_again(self, plan: CopyPlan, tensors: Tensors) -> None:
        """Ask the loader of one parameter again, whichever, what it does with this version."""
        if self._check is None or not self._loads_alone:
            return
        name = random.choice(list(plan.recording.steps))  # noqa: S311 - nothing to keep secret
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

    def _make_plan(self, recording: Recording) -> None:
        self._plan, self._is_due = None, False
        self._num_plans += 1
        self._num_proofs, self._is_told = 0, False
        check = None if self._load_part is None else self._check
        try:
            self._plan = CopyPlan(
                self._model,
                recording,
                partial=self._partial,
                packing=self._packing,
                unwrapped=self._unwrapped,
                left=self._left,
                record_part=None if check is None else check.of_part,
            )
        except NotPlannableError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._plan = None
        logger.info("switches go through the engine's reload, and not by copies alone: %s", why)

    def _reload_and_prove(
        self, plan: CopyPlan, switch: PlannedSwitch, reload: Callable[[], None]
    ) -> None:
        started = time.monotonic()
        had = plan.found_by(switch)
        plan.note_loaded(None)
        if not self._can_reload_part(switch):
            reload()
            return
        before = self._look(plan, switch)
        looking_s = time.monotonic() - started
        reload()
        started = time.monotonic()
        after = self._look(plan, switch)
        if before is None or after is None:
            return
        changes = before.changes_to(after)
        lacking = plan.lacking(switch)
        plan.note_loaded(switch)
        looking_s += time.monotonic() - started
        self._num_proofs += 1
        if changes:
            # What was reloaded twice was changed by no first reload.
            if self._num_proofs >= _MAX_PROOFS or self._are_in_reloaded(plan, changes):
                self._leave_more(plan, changes, lacking)
        elif lacking:
            self._leave_more(plan, (), lacking)
        elif self._spares_the_rest(plan, switch, reload):
            plan.note_proven(had)
            self._tell(plan, looking_s)

    def _spares_the_rest(
        self, plan: CopyPlan, switch: PlannedSwitch, reload: Callable[[], None]
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

    def _can_reload_part(self, switch: PlannedSwitch) -> bool:
        """Reload the part that is not copied; what a whole reload then changes was not in it."""
        try:
            self._reload_part(switch)
        # Whatever it is: the whole is reloaded now.
        except Exception as error:  # noqa: BLE001
            self._give_up(f"a part cannot be reloaded: {type(error).__name__} {error!s:.300}")
        return self._plan is switch.plan

    def _are_in_reloaded(self, plan: CopyPlan, places: Sequence[str]) -> bool:
        found = (layers_at(place, plan.all_layers, self._unwrapped) for place in places)
        return all(plan.reloaded.layers.keys() >= set(layers) for layers in found)

    def _leave_more(self, plan: CopyPlan, changes: Sequence[str], lacking: Sequence[str]) -> None:
        """Leave layers to the reload that it does more with than the plan; all, if that fails."""
        left: dict[str, str] = {}
        for place in changes:
            for layer in layers_at(place, plan.all_layers, self._unwrapped):
                left.setdefault(layer, f"it changes {place or 'the model'} too")
        for name in lacking:
            layer = name if name in plan.all_layers else layer_of(name)
            left.setdefault(layer, f"{name} is not what was published")
        if self._num_plans >= _MAX_PLANS or left.keys() <= plan.reloaded.layers.keys():
            self._give_up(listed(sorted(set(left.values())), "; "))
        else:
            self._left = {**left, **plan.reloaded.layers}
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
            len(plan.reloaded.layers),
            1e3 * looking_s,
        )
        for layer, why in plan.reloaded.layers.items():
            logger.info("%s stays with the engine's reload: %s", layer, why)

    def _look(self, plan: CopyPlan, switch: PlannedSwitch) -> State | None:
        replaced = {change for image in switch.images for change in image.changes}
        try:
            return State(
                self._model,
                without=self._without,
                undigested=plan.addresses,
                replaced=replaced,
            )
        # Anything may be in a model, and a switch must not fail because one cannot look at it.
        except Exception as error:  # noqa: BLE001
            self._give_up(f"the model cannot be looked at: {type(error).__name__} {error!s:.300}")
            return None
