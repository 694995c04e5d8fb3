"""`RankModel`: the model of one rank, into which versions are loaded.

A version is checked and prepared in a background thread, the stager's, while the engine serves. The
version is loaded in the worker's main thread, between two steps of the engine.

The engine's reload loads the first version of a layout (names, dtypes and shapes of tensors), and
the result is compared with the planned copies. If the two are equal, later versions are copied. If
a reload does more to a layer than copy, the next plan has an image of the layer (its processed
weights, made beforehand), or reloads just this layer. Without a plan that passed the comparison,
every version is reloaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dbuffer.engine.contract import EngineRank, ModelState
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.meta_model import DraftedModel
from dbuffer.engine.plan.copy_plan import (
    CopyPlan,
    Image,
    NotAloneError,
    Tensors,
    packed_layers,
    plan_copies,
)
from dbuffer.engine.plan.load_trace import same_bytes
from dbuffer.engine.plan.prepared_switch import (
    PreparedSwitch,
    digest_of,
    digest_of_all,
    log_copied_whole,
)
from dbuffer.engine.plan.verification import UnverifiableError, Verifier
from dbuffer.engine.planning import MAX_VERIFICATIONS, Planning, PlanState
from dbuffer.engine.shape_check import UnusedTensors
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import DRAFT_PREFIX, Layout
from dbuffer.format.lineage import VersionId
from dbuffer.io.copier import Copier
from dbuffer.io.devices import fork_streams
from dbuffer.receive.reader import Snapshot
from dbuffer.receive.stager import Staged
from dbuffer.runtime.messages import described, listed
from dbuffer.runtime.trouble import log_once
from dbuffer.weights.targets import refuse_adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT_LAYOUTS = 4
"""Number of layouts whose traces (records of how loaders load them) and plans are kept. An earlier
version may have to be loaded again."""


class RankModel:
    """Checks versions against the model, prepares switches to them, and loads them.

    If a version's layout has no plan of copies, preparing the version makes a plan, and loading the
    version verifies it. A mismatch, a failure or a replaced layer drops the plan. If plans keep
    failing, the engine's reload loads the next few versions of the layout, or all later ones.
    """

    def __init__(self, rank: EngineRank, options: EngineOptions, state: ModelState) -> None:
        self._rank = rank
        self._check = rank.make_check()  # make_check() can replace the module
        self._model = rank.module
        self._state = state
        self.reading = threading.Lock()
        """Lock that the stager's thread holds while it reads the model's weights."""
        self._plannings: list[Planning] = []
        """Plannings of the last layouts, the newest first."""
        self.unused = UnusedTensors(
            options.store,
            options.unused_tensors,
            is_pipeline=rank.is_pipeline_stage,
            is_first=rank.ranks.rank == 0,
        )
        self._store, self._draft_store = options.store, options.draft_store
        self._copier = Copier(options.num_threads)
        self._plans = options.plan
        self._may_patch = rank.on_device and options.attests(on_device=True)
        self._packing = rank.packing if options.images else None
        # Do not use the engine's random generators: drawing would change the tokens it samples.
        self._random = np.random.default_rng()
        self._verifier = Verifier(
            rank.module,
            partial(self._load, partial=False),
            self._reload_part,
            self._copier,
            rank.not_weights,
            self._random,
        )
        self._rewritten: Collection[str] = ()
        """Published tensors that loaders write into. Loaders get copies of these."""
        self._loaded: VersionId | None = None
        """Version that the model has, or None if a reload or other code wrote the weights since."""
        self._digest: int | None = None
        """Digest of the weights, taken when they equaled the version `_loaded`, or None."""
        self._tried_draft = False
        """Whether the version of the last attempt to load, even a failed one, has a draft."""
        self._comes_as_deltas = False
        self._rechecks_loaders = True

    def close(self) -> None:
        self._copier.close()

    def _has_draft(self, layout: Layout) -> bool:
        """Whether both a version and the model have a draft."""
        return isinstance(self._model, DraftedModel) and self._model.has_draft(layout.all_names)

    # In the stager's thread

    def check(self, snapshot: Snapshot) -> None:
        refuse_adapter(snapshot.metadata)
        layout = snapshot.layout
        if self._draft_store is not None and (of_draft := layout.draft) is not None:
            raise WeightsMismatchError(
                f"{DRAFT_PREFIX}{of_draft.specs[0].name} belongs to a draft, and this engine's "
                f"draft follows {self._draft_store}: publish without draft=, or follow without "
                "draft_store"
            )
        trace = self._check(layout.specs, layout.aliases)
        if isinstance(self._model, DraftedModel):
            if not self._has_draft(layout) and self._draft_store is None:
                message = "a version of %s has no draft, so the engine's draft keeps its weights"
                log_once(logger, message, self._store)
        elif layout.draft is not None:
            message = "the drafts in %s are left out: this engine has no draft that can follow"
            log_once(logger, message, self._store)
        equal = (p for p in self._plannings if p.layout == layout and p.trace == trace)
        planning = next(equal, None) or Planning(layout, trace)
        plannings = [planning, *(p for p in self._plannings if p is not planning)]
        for forgotten in plannings[_KEPT_LAYOUTS:]:
            forgotten.drop()
        self._plannings = plannings[:_KEPT_LAYOUTS]
        self.unused.check(trace)

    @torch.no_grad()
    def prepare(self, snapshot: Snapshot) -> PreparedSwitch | None:
        """Return a switch to a checked version, or None if there is no plan to use now."""
        layout = snapshot.layout
        planning = self._planning_of(layout)
        self.unused.compare(planning.trace, snapshot)
        tensors = self._as_offered(snapshot.tensors, layout)
        with self.reading:
            # If another program is loading weights, layers may be on the meta device. Make no plan
            # for such layers: the next version is reloaded, and no plan is verified.
            if self._state.is_asleep or self._state.must_reload:
                return None
            switch = self._bind(planning, tensors, snapshot)
            if switch is not None and switch.plan.verified_for is not None:
                try:
                    self._add_patches(switch, snapshot)
                # Making patches fails, for instance, if memory is short. The version is then copied
                # without patches.
                except Exception as error:  # noqa: BLE001
                    log_copied_whole(error)
            return switch

    def _bind(
        self, planning: Planning, tensors: Tensors, snapshot: Snapshot
    ) -> PreparedSwitch | None:
        if not self._plans:
            return None
        for earlier in self._plannings:
            # Versions with and without a draft may alternate.
            if earlier.plan is not None and not earlier.is_alike(planning.trace):
                earlier.drop()
        planning.drop_if_replaced()
        planning.begin_version()
        if planning.state is PlanState.MISSING:
            self._make_plan(planning)
        if (plan := planning.plan) is None:
            return None
        if plan.verified_for is not None and (name := self._changed_loader(plan, tensors)):
            changed = f"the loader of {name} does something else than when it was traced"
            planning.give_up(changed, logging.WARNING)
            return None
        images = self._images_of(planning, plan, tensors)
        if (plan := planning.plan) is None:
            return None
        return PreparedSwitch(
            plan,
            snapshot.id,
            tensors,
            snapshot.layout.aliases,
            copies=plan.copies_of(tensors),
            images=[image for image in images if image.name in plan.packed],
            digests={name: digest_of(tensors[name]) for name in plan.verified_for or ()},
        )

    def _make_plan(self, planning: Planning) -> None:
        try:
            plan = plan_copies(
                self._model,
                planning.trace,
                self._check,
                packing=self._packing,
                derived=planning.derived,
                reloaded=planning.reloaded,
            )
        except UnsupportedError as error:
            planning.give_up(str(error))
        else:
            planning.enter(PlanState.UNVERIFIED, plan)

    def _images_of(self, planning: Planning, plan: CopyPlan, tensors: Tensors) -> list[Image]:
        """Make the images (processed weights) of a plan's layers.

        If processing a layer fails, make a new plan that leaves this layer to the engine's reload.
        If processing needs other ranks, or memory is short, drop the plan, and return no image.
        """
        images: list[Image] = []
        failed: dict[str, str] = {}
        with fork_streams(plan.written)():
            for packed in plan.packed.values():
                try:
                    images.append(Image(packed, plan.traced, tensors))
                except NotAloneError as error:
                    planning.give_up(str(error))
                    return []
                except (MemoryError, torch.OutOfMemoryError) as error:
                    planning.pause(f"no memory for an image of {packed.name}: {described(error)}")
                    return []
                # Quantization may raise any error, even for a layer that a reload can load.
                except Exception as error:  # noqa: BLE001
                    failed[packed.name] = f"no image of it can be made: {described(error)}"
        if failed:
            planning.drop()
            planning.reloaded = {**failed, **plan.reloaded}
            self._make_plan(planning)
        return images

    def _changed_loader(self, plan: CopyPlan, tensors: Tensors) -> str | None:
        """Load one random parameter through its loader, to compare the result with planned copies.

        Return the parameter's name if the two differ. Return None if they are equal, or if loaders
        cannot load this parameter alone.
        """
        if not self._rechecks_loaders or not plan.traced:
            return None
        name = str(self._random.choice(list(plan.traced)))
        sources = {op.source for op in plan.traced[name].ops}
        try:
            part = [(n, t) for n, t in tensors.items() if n in sources]
            loaded = self._check.loaded(name, self._for_loaders(part))
        # Some models' loaders cannot load a few tensors without the others.
        except Exception as error:  # noqa: BLE001
            self._rechecks_loaders = False
            logger.info(
                "later versions are not checked for changed loaders, because the model's loaders "
                "cannot load the tensors of %s alone: %s",
                name,
                described(error),
            )
            return None
        copies = plan.traced[name].bind(loaded, tensors)
        return None if all(same_bytes(*copy) for copy in copies) else name

    def _add_patches(self, switch: PreparedSwitch, snapshot: Snapshot) -> None:
        """Let a switch write only changed elements (patches) instead of whole tensors.

        Do so only if the model was compared with the version that was loaded last and equals it,
        and if deltas lead from that version to the snapshot's.
        """
        if not self._may_patch or self._loaded is None:
            return
        changed = snapshot.changed_since(self._loaded)
        self._comes_as_deltas |= changed is not None
        if changed is not None and self._digest is not None:
            aliases = snapshot.layout.aliases.items()
            changed |= {alias: changed[name] for alias, name in aliases if name in changed}
            switch.patches = switch.patches_from(self._loaded, changed, self._copier)

    def attest(self, staged: Staged, is_wanted: Callable[[], bool]) -> Sequence[str] | None:
        """Compare the model with ``staged``, the version that was loaded last.

        Return the names of parameters and layers that differ or were replaced. Return None if the
        comparison did not finish: the version's direct copies are not verified, the engine sleeps,
        the version in the model is unknown, an error occurred, or ``is_wanted`` returned False.
        Layers that are left to the engine's reload are not compared.
        """
        switch = self._switch_of(staged)
        try:
            if switch is None:
                return None
            return self._differing(self._planning_of(staged.layout), switch, is_wanted)
        # The comparison fails, for instance, if the device is out of memory. The record then names
        # no attestation.
        except Exception as error:  # noqa: BLE001
            message = "the engine's weights could not be compared with the published ones: %s"
            log_once(logger, message, described(error))
            return None

    @torch.no_grad()
    def _differing(
        self, planning: Planning, switch: PreparedSwitch, is_wanted: Callable[[], bool]
    ) -> Sequence[str] | None:
        plan = switch.plan
        differing: list[str] = []

        def may_read() -> bool:
            is_ours = not (self._state.is_asleep or self._state.must_reload)
            is_last = plan is planning.plan and self._loaded == switch.version
            return is_ours and is_last and is_wanted()

        with fork_streams(plan.written)():
            # First take the digest. If something writes after that, before a parameter is compared,
            # the comparison finds it. If it writes later, the digest before patches differs.
            digest = None
            with self.reading:
                if self._comes_as_deltas and may_read():
                    digest = digest_of_all(plan.parameters.values())
            for name, copies in switch.compared():
                with self.reading:
                    if not may_read():
                        return None
                    if not all(same_bytes(*copy) for copy in copies):
                        differing.append(name)
            with self.reading:
                if not may_read():
                    return None
                differing += plan.places.replaced()
                if not differing:
                    self._digest = digest
        return differing

    # In the worker's main thread

    def is_loadable(self, staged: Staged) -> bool:
        """Whether the staged part of a version suffices to load the version now.

        If not, the caller must stage all of the version's tensors.

        Raise :class:`UnsupportedError` if a reload is needed and the engine's reload cannot fill
        every tensor in use.
        """
        switch = self._switch_of(staged)
        if switch is not None and switch.replaces_tensors:
            return True
        try:
            self._rank.require_reloadable()
        except UnsupportedError:
            self.note_foreign_load()
            raise
        return staged.tensors is not None

    def load(self, staged: Staged) -> None:
        self._tried_draft = self._has_draft(staged.layout)
        switch = self._switch_of(staged)
        planning = self._planning_of(staged.layout)
        if switch is not None and switch.replaces_tensors:
            self._apply(planning, switch)
            return
        assert staged.tensors is not None  # noqa: S101 - or the switch replaced them
        tensors = self._as_offered(staged.tensors, staged.layout)
        self._reload_and_verify(planning, tensors, switch)

    def load_again(self, staged: Staged) -> None:
        """Load a version after a failed load, even if the load failed only on another rank.

        If the failed version had a draft and this version has none, load the draft that the engine
        was started with.
        """
        may_have_mix = self._tried_draft
        self.load(staged)
        if may_have_mix and not self._tried_draft:
            self._load(self._rank.read_draft_checkpoint(), partial=True)

    @torch.no_grad()
    def _apply(self, planning: Planning, switch: PreparedSwitch) -> None:
        is_base = switch.patches is not None and switch.patches.base == self._loaded
        digest = self._digest if is_base else None
        self._loaded = self._digest = None
        try:
            switch.apply(self._copier, digest)
            increment_version(switch.plan.written)
            self._reload_part(switch)
        except BaseException:
            # The caller repairs the model by a reload. Drop the plan, because its copies may have
            # caused the failure. The next plan must be verified again.
            switch.plan.verified_for = None
            planning.drop()
            raise
        self._loaded = switch.version
        planning.note_copied()

    @torch.no_grad()
    def _reload_and_verify(
        self, planning: Planning, tensors: Tensors, switch: PreparedSwitch | None
    ) -> None:
        """Load a version by a reload.

        If a switch was prepared for the version, verify the switch.
        """
        self._forget()
        self._rewritten = planning.trace.rewritten
        if switch is None or switch.plan is not planning.plan:
            self._load(tensors.items(), partial=False)
            return
        if planning.num_verifications == MAX_VERIFICATIONS:
            planning.pause(
                f"copies were verified {MAX_VERIFICATIONS} times, and each time this was soon "
                "invalid: integers change, parameters move, or reloads do more than copy"
            )
            self._load(tensors.items(), partial=False)
            return
        plan, started = switch.plan, time.monotonic()
        planning.begin_verification()
        try:
            mismatch = self._verifier.verify(switch, tensors)
        except UnverifiableError as error:
            planning.pause(str(error))
            return
        if not mismatch:
            planning.enter(PlanState.VERIFIED)
            self._loaded = switch.version
            _log_verified(plan, time.monotonic() - started)
        elif mismatch.keys() <= plan.reloaded.keys():
            planning.give_up(listed(sorted({*mismatch.values()}), "; "))
        else:
            self._plan_more(planning, mismatch, plan)

    def _plan_more(self, planning: Planning, mismatch: Mapping[str, str], plan: CopyPlan) -> None:
        """Let the next plan make images of mismatched layers. If it cannot, it reloads them."""
        planning.drop()
        if self._packing is not None:
            derived = planning.derived | mismatch.keys()
            packed = packed_layers(self._model, self._packing, planning.trace, derived)
            if not packed.keys() - plan.reloaded.keys() <= plan.packed.keys():
                planning.derived = derived
                return
        planning.reloaded = {**mismatch, **plan.reloaded}

    def load_checkpoint(self) -> None:
        self._forget()
        self._load(self._rank.read_checkpoint(), partial=False)

    def refuse_to_serve(self, reason: str) -> None:
        self._state.broken = reason
        self._rank.refuse_to_serve(reason)

    def serve_again(self) -> None:
        self._state.broken = None
        self._rank.serve_again()

    def note_foreign_load(self) -> None:
        self._state.note_foreign_load()
        self._forget()

    def _forget(self) -> None:
        """Treat the weights as unknown, so that the next version is not patched onto them."""
        self._loaded = self._digest = None
        for planning in self._plannings:
            planning.drop_if_replaced()
            planning.verify_again()

    def _reload_part(self, switch: PreparedSwitch) -> None:
        if reloaded := switch.reloaded:
            self._load(reloaded.items(), partial=True)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        self._rank.load(self._for_loaders(tensors), partial=partial)
        # Wait for the copies: the engine's next step reads them, and staging may overwrite their
        # sources.
        if self._rank.device.type != "cpu":
            torch.accelerator.synchronize(self._rank.device)
        # Some output heads keep a float32 copy of their weight, and renew the copy when torch's
        # version counter of the weight goes up. vLLM's reload, which writes to `param.data`, and
        # direct copies leave the counter unchanged.
        increment_version(self._model.parameters())

    def _for_loaders(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors for loaders. If loaders write into a tensor, yield a copy of the tensor."""
        # Later loads and copies use these tensors again, so they must stay as published.
        for name, tensor in tensors:
            yield name, tensor.clone() if name in self._rewritten else tensor

    # Parts of a staged version

    def unread(self, staged: Staged) -> tuple[dict[str, str | None], dict[str, str]]:
        return self.unused.unread(staged.layout, staged.id, self._planning_of(staged.layout).trace)

    def _switch_of(self, staged: Staged) -> PreparedSwitch | None:
        if self._state.must_reload or not isinstance(staged.prepared, PreparedSwitch):
            return None
        return staged.prepared

    def _planning_of(self, layout: Layout) -> Planning:
        return next(p for p in self._plannings if p.layout is layout or p.layout == layout)

    def _as_offered(self, stored: Mapping[str, T], layout: Layout) -> dict[str, T]:
        """Return a version's tensors to load, keyed by the names that passed the shape check."""
        offered = self._planning_of(layout).trace.offered
        names = {**{name: name for name in stored}, **layout.aliases}
        return {name: stored[stored_as] for name, stored_as in names.items() if name in offered}


def _log_verified(plan: CopyPlan, verified_s: float) -> None:
    logger.info(
        "fast path: from now on a switch copies into %d parameters (%.3f GB), takes %d layers that "
        "were packed or quantized beforehand, and reloads %d layers (verified in %.0f ms)",
        len(plan.parameters),
        plan.copied_bytes / 1e9,
        len(plan.packed),
        len(plan.reloaded),
        1e3 * verified_s,
    )
    for layer, reason in plan.reloaded.items():
        logger.info("%s is left to the engine's reload: %s", layer, reason)
