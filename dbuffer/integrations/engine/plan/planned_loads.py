"""`PlannedLoads`: loads by copies alone, where it is proven that a reload does no more.

The first switch of a layout goes through the engine's own reload, and is compared with that: every
parameter to the byte, every image with its layer, and all else that can be reached from the model
must be as it was. What passed is copied from then on; a model of which anything else is true stays
with the reload.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence

import torch

from dbuffer.integrations.engine.plan.copy_plan import (
    CopyPlan,
    LoadInto,
    NotPlannableError,
    Switch,
    Tensors,
    told,
)
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.plan.patches import Changed, Patch, Patches
from dbuffer.integrations.engine.plan.reachable import State
from dbuffer.integrations.engine.plan.recording import Recording
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import split_evenly

logger = logging.getLogger(__name__)

_MAX_PROOFS = 3
"""Of a layout. A first reload may change what no later one does: an attribute that it adds."""

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
        load: what the model's loaders make of some tensors; None: they are not asked again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        copier: Copier,
        *,
        partial: bool = False,
        without: Collection[str] = (),
        packing: Packing | None = None,
        load: LoadInto | None = None,
    ) -> None:
        self._model = model
        self._copier = copier
        self._load = load
        self._partial = partial
        self._without = _NOT_READ | frozenset(without)
        self._packing = packing
        self._recording: Recording | None = None
        self._plan: CopyPlan | None = None
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
    ) -> Switch | None:
        """A switch to a version that is being staged, with its images; None: it is reloaded.

        For another thread than the one that loads, while that does not. ``changed_since``: where
        the version differs from that of an identity, as far as anybody knows.
        """
        if recording is None:
            return None
        if recording is not self._recording:
            self._begin(recording)
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
    def apply(self, switch: Switch, identity: str | None = None) -> bool:
        """Do a switch that was prepared; False: it is not known to be enough, nothing was done.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        if switch.plan is not self._plan or not switch.is_enough:
            return False
        holds, self._holds = self._what_it_holds(self._plan), None
        self._plan.note_loaded(None)
        switch.apply(self._copier.copy_tensors, self._patch, holds)
        self._plan.note_loaded(switch)
        self._note_held(self._plan, identity)
        return True

    def _patch(self, patches: Sequence[Patch]) -> None:
        def work(first: int, end: int) -> None:
            for patch in patches[first:end]:
                patch.apply()

        sizes = [patch.positions.numel() for patch in patches]
        self._copier.in_parallel(work, split_evenly(sizes, self._copier.num_threads))

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
        switch: Switch,
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
        self, reload: Callable[[], None], switch: Switch | None, identity: str | None = None
    ) -> None:
        """Switch by a reload, and see whether the switch that was prepared would have done it.

        A failure leaves a mix, to be repaired at once. ``identity``: of the version, for the next
        one to be told what changed since.
        """
        self._holds, plan = None, self._plan
        if plan is not None:
            plan.note_loaded(None)
        if plan is None or switch is None or switch.plan is not plan:
            reload()
            return
        self._reload_and_prove(plan, switch, reload)
        if self._plan is plan:
            self._note_held(plan, identity)

    def _prove_again(self, plan: CopyPlan, tensors: Tensors) -> None:
        """Ask the loader of one parameter again, whichever, what it does with this version."""
        if self._load is None:
            return
        name = random.choice(list(plan.recording.steps))  # noqa: S311 - nothing to keep secret
        try:
            differs = plan.is_filled_otherwise(name, tensors, self._load)
        # Some models' loaders want all tensors, or none.
        except Exception as error:  # noqa: BLE001
            self._load = None
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

    def _begin(self, recording: Recording) -> None:
        self._recording, self._plan = recording, None
        self._num_proofs, self._is_told = 0, False
        try:
            self._plan = CopyPlan(
                self._model, recording, partial=self._partial, packing=self._packing
            )
        except NotPlannableError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._plan = None
        logger.info("switches go through the engine's reload, and not by copies alone: %s", why)

    def _reload_and_prove(self, plan: CopyPlan, switch: Switch, reload: Callable[[], None]) -> None:
        started = time.monotonic()
        had = plan.found_by(switch)
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
            if self._num_proofs >= _MAX_PROOFS:
                self._give_up(told(f"it changes {name or 'the model'} too" for name in changes))
        elif lacking:
            self._give_up(told(f"{name} is not what was published" for name in lacking))
        else:
            plan.note_proven(had)
            self._tell(plan, looking_s)

    def _tell(self, plan: CopyPlan, looking_s: float) -> None:
        if self._is_told:
            return
        self._is_told = True
        logger.info(
            "switches to %.3f GB are copies into %d parameters from now on, and %d layers that are "
            "packed while the engine serves, as the reload was found to do no more (looking took "
            "%.0f ms)",
            plan.num_bytes / 1e9,
            plan.num_parameters,
            plan.num_images,
            1e3 * looking_s,
        )

    def _look(self, plan: CopyPlan, switch: Switch) -> State | None:
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
