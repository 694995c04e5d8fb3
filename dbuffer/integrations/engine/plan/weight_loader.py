"""`WeightLoader`: loads versions by direct copies, once these are verified to do all a reload does.

The first switch of a layout goes through the engine's own reload, and is compared with what its
copies would have done (`verification`). Verified copies are used from then on. A layer with which a
reload does more is reloaded alone, where that leaves the same as a reload of everything; otherwise
the whole model stays with the reload.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dbuffer.integrations.engine.plan.copy_plan import (
    CopyPlan,
    PreparedSwitch,
    Tensors,
    address_of,
    digest_of,
    log_copied_whole,
    plan_copies,
)
from dbuffer.integrations.engine.plan.fingerprint import ModelFingerprint
from dbuffer.integrations.engine.plan.images import Packing
from dbuffer.integrations.engine.plan.load_trace import LoadTrace, unwrapped_by
from dbuffer.integrations.engine.plan.partial_reload import NotPlannableError
from dbuffer.integrations.engine.plan.patching import Changed, Patch
from dbuffer.integrations.engine.plan.samples import Sample, draw_sample, is_held, with_patched
from dbuffer.integrations.engine.plan.verification import (
    Mismatch,
    has_varied,
    mismatch_of,
    stand_ins_for,
)
from dbuffer.integrations.engine.shape_check import ShapeCheck
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import split_evenly
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)

_MAX_VERIFICATIONS = 4
"""Verifications of a layout before it is set aside; each takes two reloads."""

_MIN_SKIPPED, _MAX_SKIPPED = 8, 64
"""Versions that are reloaded before a layout that was set aside is planned again; twice as many
after each failure."""

_NEVER = float("inf")

_NOT_READ = frozenset({"weight_loader", "_weight_loader", "load_weights"})
"""Attributes that load, and that no computation reads."""


class Reloadable(Protocol):
    """A model that an engine can load again."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Reload these tensors; ``partial``: layers that get nothing keep all that they have."""


class _Held(NamedTuple):
    """The version that the model holds."""

    identity: str | None
    sample: Sample

    @property
    def base(self) -> str | None:
        """Identity to patch upon; None: the model no longer holds it, or that is not known."""
        return self.identity if self.sample and is_held(self.sample) else None


_UNKNOWN = _Held(None, {})


class WeightLoader:
    """Loads versions into a model: by copies where those are verified, else by a reload.

    :meth:`prepare` runs in another thread than the rest, and never while that loads.

    Args:
        model: the model, as it serves.
        reloadable: reloads it.
        copier: its threads copy in main memory.
        check: traces parts of a layout, and asks loaders again. None: neither is done.
        plans: copy at all; False: every version is reloaded.
        partial: versions may hold a part of the model.
        reloads_parts: whether layers can be reloaded alone.
        caches: attributes in it that serving changes.
        packing: of layers that get images; None: no layer does.
        wrapper: name of a layer in the one that wraps it; None: no layer is wrapped.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reloadable: Reloadable,
        copier: Copier,
        check: ShapeCheck | None = None,
        *,
        plans: bool = True,
        partial: bool = False,
        reloads_parts: bool = True,
        caches: Collection[str] = (),
        packing: Packing | None = None,
        wrapper: str | None = None,
    ) -> None:
        self._model = model
        self._reloadable = reloadable
        self._copier = copier
        self._check = check
        self._plans = plans
        self._partial = partial
        self._reloads_parts = reloads_parts
        self._without = _NOT_READ | frozenset(caches)
        self._packing = packing
        self._unwrapped = unwrapped_by(wrapper)
        self._trace: LoadTrace | None = None
        self._plan: CopyPlan | None = None
        """Plan of the trace; None: versions are reloaded."""
        self._logged: CopyPlan | None = None
        self._left: dict[str, str] = {}
        """Layers that stay with the reload, and why."""
        self._num_skipped: float = 0
        """Versions to reload before the trace is planned."""
        self._num_verifications = 0
        self._next_skipped = _MIN_SKIPPED
        self._held = _UNKNOWN
        self._may_patch = True
        self._asks_again = check is not None
        # The engine's generators are seeded, and sample tokens.
        self._random = np.random.default_rng()

    @torch.no_grad()
    def prepare(
        self,
        tensors: Tensors,
        trace: LoadTrace,
        changed_since: Callable[[str], Changed | None] = lambda _: None,
        aliases: Mapping[str, str] | None = None,
    ) -> PreparedSwitch | None:
        """Prepare a switch to a version that is being staged; None: it is reloaded.

        Args:
            tensors: the version's, by the names that the model takes.
            trace: of its layout.
            changed_since: returns where it differs from the version of an identity, if known.
            aliases: stored names of tensors that the model takes under another name.
        """
        plan = self._plan_of(trace)
        if plan is None:
            return None
        if plan.verified_for is not None and not self._loads_as_traced(plan, tensors):
            return None
        switch = plan.switch_to(tensors, aliases or {})
        try:
            switch.images = plan.make_images(tensors)
        except NotPlannableError as error:
            self._give_up(str(error))
            return None
        # Anything may go wrong when a layer packs, and it does so in the reload as well.
        except Exception as error:  # noqa: BLE001
            self._set_aside("a layer could not be packed", error)
            return None
        try:
            switch.sample = draw_sample(switch.copies, plan.parameters, self._random)
            self._add_patches(switch, changed_since)
        # Memory that is short for a moment, say. The copies are there.
        except Exception as error:  # noqa: BLE001
            log_copied_whole(error)
        return switch

    def _plan_of(self, trace: LoadTrace) -> CopyPlan | None:
        """Return the plan of a trace, made now if that is due."""
        if not self._plans:
            return None
        if trace is not self._trace:
            self._drop_plan()
            self._trace, self._left, self._num_verifications = trace, {}, 0
            self._num_skipped = 0
        elif self._plan is None and self._num_skipped:
            self._num_skipped -= 1
        if self._plan is None and not self._num_skipped:
            check = self._check if self._reloads_parts else None
            try:
                self._plan = plan_copies(
                    self._model,
                    trace,
                    unwrapped=self._unwrapped,
                    partial=self._partial,
                    packing=self._packing,
                    left=self._left,
                    trace_part=None if check is None else check.of_part,
                )
            except NotPlannableError as error:
                self._give_up(str(error))
        return self._plan

    def _loads_as_traced(self, plan: CopyPlan, tensors: Tensors) -> bool:
        """Ask the loader of one parameter again, a random one, what it does with this version."""
        if self._check is None or not self._asks_again:
            return True
        name = self._random.choice(list(plan.trace.ops))
        sources = {op.source for op in plan.trace.ops[name]}
        try:
            loaded = self._check.loaded(name, {n: t for n, t in tensors.items() if n in sources})
        # Some models' loaders want all tensors, or none.
        except Exception as error:  # noqa: BLE001
            self._asks_again = False
            logger.info(
                "the plan is not verified again: loaders refuse what %s is made of, alone: %s",
                name,
                _described(error),
            )
            return True
        if plan.loads_same(name, tensors, loaded):
            return True
        self._give_up(
            f"the loader of {name} does something else than when it was traced", logging.WARNING
        )
        return False

    def _add_patches(
        self, switch: PreparedSwitch, changed_since: Callable[[str], Changed | None]
    ) -> None:
        """Give a switch patches, where it is known what changed since the version that is held."""
        if switch.plan.verified_for is None or not self._may_patch:
            return
        base = self._held.base
        changed = None if base is None else changed_since(base)
        if base is None or changed is None:
            return
        patches = switch.plan.patches_to(switch.tensors, changed, base)
        name = self._random.choice(list(switch.copies))
        if not switch.patch_matches(name, patches):
            self._may_patch = False
            logger.warning(
                "%s changed in other places than its delta says: versions are copied whole from "
                "now on",
                name,
            )
            return
        switch.patches = patches.on_device()
        if patches.patches or patches.copies:
            switch.sample = with_patched(switch.sample, patches, self._random)
        else:  # elements that were patched last tell more
            switch.sample = self._held.sample

    @torch.no_grad()
    def apply(self, switch: PreparedSwitch, identity: str | None = None) -> None:
        """Do a switch that is enough. A failure leaves a mix, to be repaired at once.

        ``identity`` is the version's, to be asked for what changed since.
        """
        base = None if switch.patches is None else self._held.base
        self._held = _UNKNOWN
        try:
            switch.apply(self._copier.copy_tensors, self._patch, base)
            self._reload_part(switch)
        except BaseException:
            # The repair must not fail for the same reason: a reload, and a new verification.
            self._drop_plan()
            raise
        self._held = _Held(identity, switch.sample)

    def _patch(self, patches: Sequence[Patch]) -> None:
        def work(first: int, end: int) -> None:
            for patch in patches[first:end]:
                patch.apply()

        sizes = [patch.positions.numel() for patch in patches]
        self._copier.in_parallel(work, split_evenly(sizes, self._copier.num_threads))

    def _reload_part(self, switch: PreparedSwitch) -> None:
        if reloaded := switch.reloaded:
            self._reloadable.load(reloaded.items(), partial=True)

    def _reload(self, tensors: Tensors) -> None:
        self._reloadable.load(tensors.items(), partial=self._partial)

    def forget(self) -> None:
        """Treat the model's weights as unknown: the next version is not patched upon them."""
        self._held = _UNKNOWN
        # A value derived from one of these may have become another one.
        if self._plan is not None and self._plan.verified_for:
            self._plan.verified_for = None

    @torch.no_grad()
    def reload(
        self, tensors: Tensors, switch: PreparedSwitch | None, identity: str | None = None
    ) -> None:
        """Load by a reload, and verify the switch that was prepared for the version, if any.

        A failure leaves a mix, to be repaired at once. ``identity``: as in :meth:`apply`.
        """
        self._held = _UNKNOWN
        if switch is None or switch.plan is not self._plan:
            self.forget()
            self._reload(tensors)
            return
        self._num_verifications += 1
        if self._num_verifications > _MAX_VERIFICATIONS:
            self._set_aside(
                f"they were verified {_MAX_VERIFICATIONS} times, as integers change, parameters "
                "move, or layers change more than they load"
            )
            self._reload(tensors)
            return
        mismatch = self.verify(tensors, switch)
        if mismatch is not None:
            self._leave(mismatch, switch.plan)
        elif switch.plan.verified_for is not None:
            self._held = _Held(identity, switch.sample)

    def verify(self, tensors: Tensors, switch: PreparedSwitch) -> Mismatch | None:
        """Reload a version, and compare the model with what the switch would have made of it.

        The plan is verified if there is no mismatch, and nothing failed.
        """
        plan, started = switch.plan, time.monotonic()
        plan.verified_for = None
        stand_ins = stand_ins_for(tensors, plan, self._random)
        before = after = None
        with self._setting_aside("values that stand in for a version cannot be loaded"):
            self._reload(stand_ins)
            # If a whole reload changes something after one of a part, that must show.
            with self._setting_aside("a part cannot be reloaded"):
                self._reload_part(switch)
                before = self._fingerprint(switch)
        self._reload(tensors)
        if before is not None:
            after = self._fingerprint(switch)
        if before is None or after is None:
            return None
        mismatch = mismatch_of(switch, before, after, self._unwrapped)
        verified_s = time.monotonic() - started
        if mismatch is not None or not self._part_spares_the_rest(switch, tensors):
            return mismatch
        plan.verified_for = {
            name: digest_of(tensor)
            for name, tensor in tensors.items()
            if not has_varied(tensor, stand_ins[name])
        }
        if self._logged is not plan:
            self._logged = plan
            _log_verified(plan, verified_s)
        return None

    def _part_spares_the_rest(self, switch: PreparedSwitch, tensors: Tensors) -> bool:
        """Whether reloading the part leaves what is copied as it is; else all is reloaded again."""
        if not switch.reloaded:
            return True
        with self._setting_aside("a part cannot be reloaded"):
            self._reload_part(switch)
            mismatches = switch.mismatches()
            if not mismatches:
                return True
            self._give_up(f"reloading a part changes {listed(mismatches)} too")
        self._reload(tensors)
        return False

    def _fingerprint(self, switch: PreparedSwitch) -> ModelFingerprint | None:
        # Anything may be in a model, and a switch must not fail because it cannot be looked at.
        with self._setting_aside("the model cannot be looked at"):
            return ModelFingerprint(
                self._model,
                without=self._without,
                undigested={address_of(tensor) for tensor in switch.plan.written},
                replaced={change for image in switch.images for change in image.changes},
            )
        return None

    def _leave(self, mismatch: Mismatch, plan: CopyPlan) -> None:
        """Leave layers to the reload that it does more with than the plan."""
        if mismatch.layers.keys() <= plan.partial_reload.layers.keys():
            self._give_up(listed(sorted({*mismatch.layers.values()}), "; "))
        else:
            self._drop_plan()
            self._left = {**mismatch.layers, **plan.partial_reload.layers}

    def _drop_plan(self) -> None:
        """Plan the trace again with the next version; switches of this plan are not enough."""
        if self._plan is not None:
            self._plan.verified_for = None
        self._plan = None

    def _give_up(self, why: str, level: int = logging.INFO) -> None:
        """Reload all versions of this layout."""
        self._drop_plan()
        self._num_skipped = _NEVER
        message = "switches go through the engine's reload, and not by copies alone: %s"
        logger.log(level, message, why)

    def _set_aside(self, why: str, error: Exception | None = None) -> None:
        """Reload some versions, and plan again then: memory may have been short for a moment."""
        self._drop_plan()
        self._num_verifications, self._num_skipped = 0, self._next_skipped
        self._next_skipped = min(2 * self._next_skipped, _MAX_SKIPPED)
        logger.warning(
            "switches go through the engine's reload for %d versions, and not by copies alone: %s",
            self._num_skipped,
            why if error is None else f"{why}: {_described(error)}",
        )

    @contextlib.contextmanager
    def _setting_aside(self, what: str) -> Iterator[None]:
        """Set the plan aside if the block fails, however it does: the whole is reloaded now."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._set_aside(what, error)


def _log_verified(plan: CopyPlan, verified_s: float) -> None:
    layers = plan.partial_reload.layers
    logger.info(
        "switches to %.3f GB are copies into %d parameters from now on, %d layers that are packed "
        "while the engine serves, and a reload of %d others, as the reload of all was found to do "
        "no more (verifying took %.0f ms)",
        plan.loaded_bytes / 1e9,
        len(plan.parameters),
        len(plan.layers),
        len(layers),
        1e3 * verified_s,
    )
    for layer, why in layers.items():
        logger.info("%s stays with the engine's reload: %s", layer, why)


def _described(error: Exception) -> str:
    return f"{type(error).__name__} {error!s:.300}"
