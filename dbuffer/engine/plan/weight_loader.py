"""`WeightLoader`: loads versions by direct copies, once these are verified to do all a reload does.

The first switch of a layout goes through the engine's own reload, and is compared with what its
copies would have done (`verification`). Verified copies are used from then on. A layer with which a
reload does more is reloaded alone, where that leaves the same as a reload of everything, which is
verified in the same pause; otherwise the whole model stays with the reload.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dbuffer.engine.contract import EngineRank
from dbuffer.engine.plan.attestation import digest_of_all, same_bytes
from dbuffer.engine.plan.copy_plan import CopyPlan, Tensors, plan_copies
from dbuffer.engine.plan.images import Image, NotAloneError, Packing, packed_layers
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.plan.patching import Changed
from dbuffer.engine.plan.prepared_switch import PreparedSwitch, log_copied_whole
from dbuffer.engine.plan.verification import UnverifiableError, Verifier
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import UnsupportedError
from dbuffer.format.lineage import VersionId
from dbuffer.io.copier import Copier
from dbuffer.io.devices import fork_streams
from dbuffer.runtime.messages import described, listed

logger = logging.getLogger(__name__)

_MAX_VERIFICATIONS = 4
"""Verifications of a layout before it is set aside; each takes two reloads."""

_NUM_SKIPPED = 16
"""Versions that are reloaded before a layout that was set aside is planned again."""

_NEVER = float("inf")


class WeightLoader:
    """Loads versions into a model: by copies where those are verified, else by a reload.

    A layout is *unplanned*, *planned*, *verified*, or *set aside*: reloaded for some versions, or
    for ever. The next version plans it; a reload verifies the plan, or leaves more layers to the
    reload and verifies that; a failure, or a replaced layer, makes it unplanned again.

    :meth:`prepare` runs in the stager's thread, and never while another method does.

    Args:
        model: the model, as it serves; ``rank`` reloads it.
        check: traces parts of a layout, and runs the model's loaders again.
        plans: whether to copy at all.
        patches: whether to patch where little changed; its weights are on a device.
        not_weights: attributes of its layers that serving changes.
        packing: processes layers, so that they get images. Default: none gets one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rank: EngineRank,
        copier: Copier,
        check: ShapeCheck,
        *,
        plans: bool = True,
        patches: bool = False,
        not_weights: Collection[str] = (),
        packing: Packing | None = None,
    ) -> None:
        self._model = model
        self._rank = rank
        self._copier = copier
        self._check = check
        self._plans = plans
        self._may_patch = patches
        self._packing = packing
        # The engine's generators are seeded, and sample tokens.
        self._random = np.random.default_rng()
        self._verifier = Verifier(
            model, self._reload, self._reload_part, copier, not_weights, self._random
        )
        self._trace: LoadTrace | None = None
        """Trace of the current layout."""
        self._rewritten: Collection[str] = ()
        """Published tensors of the last reload that loaders write into: each load gets copies."""
        self._plan: CopyPlan | None = None
        """Plan of this trace, or None if it is unplanned or set aside."""
        self._derived: set[str] = set()
        """Layers of this layout that a reload does more to than copy."""
        self._reloaded: Mapping[str, str] = {}
        """Layers of this layout that stay with the reload, and why."""
        self._num_verifications = 0
        """Verifications of this layout since it was last set aside."""
        self._num_skipped: float = 0
        """Versions to reload before this layout, which was set aside, is planned again."""
        self._held: VersionId | None = None
        """Version that was loaded last, as far as that is known."""
        self._digest: int | None = None
        """Digest of its parameters, as they were seen to be that version's while they served."""
        self._comes_as_deltas = False
        self._rechecks_loaders = True

    @torch.no_grad()
    def prepare(
        self,
        tensors: Tensors,
        trace: LoadTrace,
        version: VersionId,
        changed_since: Callable[[VersionId], Changed | None] = lambda _: None,
        aliases: Mapping[str, str] | None = None,
    ) -> PreparedSwitch | None:
        """Return a switch to a version that is being staged, or None if a reload is needed.

        Args:
            tensors: the version's, by the names that the model takes.
            trace: of its layout.
            version: later versions ask what changed since it.
            changed_since: returns where it differs from an earlier version, if known.
            aliases: stored names of tensors that the model takes under another name.
        """
        plan = self._plan_of(trace)
        if plan is None:
            return None
        if plan.verified_for is not None and (name := self._changed_loader(plan, tensors)):
            changed = f"the loader of {name} does something else than when it was traced"
            self._give_up(changed, logging.WARNING)
            return None
        images = self._images_of(plan, tensors)
        if self._plan is None:
            return None
        switch = PreparedSwitch.of_plan(self._plan, version, tensors, aliases or {}, images)
        try:
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
            self._trace, self._derived, self._reloaded = trace, set(), {}
            self._num_verifications, self._num_skipped = 0, 0
        self._drop_plan_of_replaced()
        if self._plan is None and self._num_skipped:
            self._num_skipped -= 1
        if self._plan is None and not self._num_skipped:
            self._make_plan()
        return self._plan

    def _make_plan(self) -> None:
        """Plan the trace, without the layers that stay with the reload."""
        assert self._trace is not None  # noqa: S101 - it was prepared
        try:
            self._plan = plan_copies(
                self._model,
                self._trace,
                self._check,
                packing=self._packing,
                derived=self._derived,
                reloaded=self._reloaded,
            )
        except UnsupportedError as error:
            self._give_up(str(error))

    def _images_of(self, plan: CopyPlan, tensors: Tensors) -> list[Image]:
        """Return the images of a plan; plan again if a layer cannot be processed beside itself."""
        images: list[Image] = []
        failed: dict[str, str] = {}
        with fork_streams(plan.written)():
            for packed in plan.packed.values():
                try:
                    images.append(Image(packed, plan.traced, tensors))
                except NotAloneError as error:
                    self._give_up(str(error))
                    return []
                except (MemoryError, torch.OutOfMemoryError) as error:
                    self._set_aside(f"there is no image of {packed.name}: {described(error)}")
                    return []
                # Each method fails in its own way, on a layer that a reload would load.
                except Exception as error:  # noqa: BLE001
                    failed[packed.name] = f"no image of it can be made: {described(error)}"
        if failed:
            self._drop_plan()
            self._reloaded = {**failed, **plan.reloaded}
            self._make_plan()
        return images

    def _changed_loader(self, plan: CopyPlan, tensors: Tensors) -> str | None:
        """Load one parameter, a random one, and return its name if that is not as it was traced."""
        if not self._rechecks_loaders or not plan.traced:
            return None
        name = str(self._random.choice(list(plan.traced)))
        sources = {op.source for op in plan.traced[name].ops}
        try:
            given = self._given({n: t for n, t in tensors.items() if n in sources})
            loaded = self._check.loaded(name, given)
        # Some models' loaders want all tensors, or none.
        except Exception as error:  # noqa: BLE001
            self._rechecks_loaders = False
            logger.info(
                "the plan is not verified again: loaders refuse what %s is made of, alone: %s",
                name,
                described(error),
            )
            return None
        copies = plan.traced[name].bind(loaded, tensors)
        return None if all(same_bytes(*copy) for copy in copies) else name

    def _add_patches(
        self, switch: PreparedSwitch, changed_since: Callable[[VersionId], Changed | None]
    ) -> None:
        """Give a switch patches, if the model was seen to hold a version that they lead from."""
        if switch.plan.verified_for is None or not self._may_patch or self._held is None:
            return
        changed = changed_since(self._held)
        self._comes_as_deltas |= changed is not None
        if changed is not None and self._digest is not None:
            switch.patches = switch.patches_from(self._held, changed, self._copier)

    @torch.no_grad()
    def apply(self, switch: PreparedSwitch) -> None:
        """Do a switch that is enough. A failure leaves a mix, to be repaired at once."""
        is_base = switch.patches is not None and switch.patches.base == self._held
        digest = self._digest if is_base else None
        self._held = self._digest = None
        try:
            switch.apply(self._copier, digest)
            increment_version(switch.plan.written)
            self._reload_part(switch)
        except BaseException:
            # The repair must not fail for the same reason: a reload, and a new verification.
            self._drop_plan()
            raise
        self._held = switch.version

    @torch.no_grad()
    def attest(
        self, switch: PreparedSwitch, reading: Callable[[], AbstractContextManager[bool]]
    ) -> list[str] | None:
        """Compare the model with the version of the last switch; runs in the stager's thread.

        Layers that stay with the reload are not compared.

        Args:
            switch: that switch; the memory that it copies from must still exist.
            reading: makes a context that tells whether the model's weights may be read in it.

        Returns:
            Parameters and layers that differ, or were replaced; None if a reload loaded the
            version, and no copies do the same, or if weights may not be read.
        """
        plan, differing = switch.plan, []
        compared = [
            *((name, lambda copies=copies: copies) for name, copies in switch.copies.items()),
            *((image.name, image.copies) for image in switch.images),
        ]

        def digest() -> int | None:
            with reading() as may_read:
                return digest_of_all(plan.parameters.values()) if may_read else None

        with fork_streams(plan.written)(), contextlib.ExitStack() as last:
            # Before and after: something may write while parameters are compared.
            before = digest() if self._comes_as_deltas else None
            for name, copies_of in compared:
                with reading() as may_read:
                    if not may_read or plan is not self._plan or self._held != switch.version:
                        return None
                    if not all(same_bytes(*copy) for copy in copies_of()):
                        differing.append(name)
            after = None if before is None else digest()
            if not last.enter_context(reading()):
                return None
            if (replaced := plan.replaced()) is not None:
                differing.append(replaced)
            if not differing and before is not None and before == after:
                self._digest = before
        return differing

    def _reload_part(self, switch: PreparedSwitch) -> None:
        if reloaded := switch.reloaded:
            self._load(reloaded, partial=True)

    def _reload(self, tensors: Tensors) -> None:
        self._load(tensors, partial=False)

    def _load(self, tensors: Tensors, *, partial: bool) -> None:
        self._rank.load(self._given(tensors), partial=partial)
        # Some heads keep a float32 copy of their weight, which is stale if this counter went up.
        # Neither direct copies nor vLLM's reload, which writes to `param.data`, count it up.
        increment_version(self._model.parameters())

    def _given(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors to give to loaders: of those that they write into, copies."""
        # Tensors are loaded again, and copied from, and must be as they were published.
        for name, tensor in tensors.items():
            yield name, tensor.clone() if name in self._rewritten else tensor

    def load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self.forget()
        self._rank.load_checkpoint()
        increment_version(self._model.parameters())

    def forget(self) -> None:
        """Treat the model's weights as unknown: the next version is not patched upon them."""
        self._held = self._digest = None
        self._drop_plan_of_replaced()
        # A value derived from one of these may have become another one.
        if self._plan is not None and self._plan.verified_for:
            self._plan.verified_for = None

    @torch.no_grad()
    def reload(
        self, tensors: Tensors, trace: LoadTrace | None, switch: PreparedSwitch | None
    ) -> None:
        """Load by a reload, and verify the switch that was prepared for the version, if any.

        A failure leaves a mix, to be repaired at once. ``trace``: as in :meth:`prepare`.
        """
        self.forget()
        # Where it is not known what loaders write into, it may be anything.
        self._rewritten = tensors.keys() if trace is None else trace.rewritten
        if switch is None or switch.plan is not self._plan:
            self._reload(tensors)
            return
        started = time.monotonic()
        for _ in range(self._num_verifications, _MAX_VERIFICATIONS):
            self._num_verifications += 1
            try:
                mismatch = self._verifier.verify(switch, tensors)
            except UnverifiableError as error:
                self._set_aside(str(error))
                break
            if mismatch:
                self._plan_more(mismatch, switch.plan)
            if not mismatch or self._plan is None:
                break
            switch = switch.with_plan(self._plan)
        else:
            self._set_aside(
                f"they were verified {_MAX_VERIFICATIONS} times, as integers change, parameters "
                "move, or layers change more than they load"
            )
            self._reload(tensors)
        if self._plan is not None:
            self._held = switch.version
            _log_verified(self._plan, time.monotonic() - started)

    def _plan_more(self, mismatch: Mapping[str, str], plan: CopyPlan) -> None:
        """Plan again: layers that a reload does more to get images, or stay with the reload."""
        if mismatch.keys() <= plan.reloaded.keys():
            self._give_up(listed(sorted({*mismatch.values()}), "; "))
            return
        self._drop_plan()
        derived = self._derived | mismatch.keys()
        if self._has_more_images(plan, derived):
            self._derived = derived  # the next version is planned with them, while it serves
            return
        self._reloaded = {**mismatch, **plan.reloaded}
        self._make_plan()

    def _has_more_images(self, plan: CopyPlan, derived: Collection[str]) -> bool:
        """Whether a plan has more images if a reload does more to these layers than copy."""
        if self._packing is None or self._trace is None:
            return False
        packed = packed_layers(self._model, self._packing, self._trace, derived)
        return not packed.keys() - plan.reloaded.keys() <= plan.packed.keys()

    def _drop_plan(self) -> None:
        """Plan the trace again with the next version; switches of this plan are not enough."""
        if self._plan is not None:
            self._plan.verified_for = None
        self._plan = None

    def _drop_plan_of_replaced(self) -> None:
        """Plan again, and reload once, if the model has other modules or tensors than planned."""
        if self._plan is not None and (name := self._plan.replaced()):
            logger.warning(
                "%s was replaced, or has moved in memory, since switches were planned: a reload "
                "fills the model that serves, and they are planned again",
                name,
            )
            self._derived, self._reloaded = set(), {}
            self._drop_plan()

    def _give_up(self, why: str, level: int = logging.INFO) -> None:
        """Reload all versions of this layout."""
        self._drop_plan()
        self._num_skipped = _NEVER
        logger.log(level, "no fast path: switches go through the engine's reload: %s", why)

    def _set_aside(self, why: str) -> None:
        """Reload some versions, and plan again then: memory may have been short for a moment."""
        self._drop_plan()
        self._num_verifications, self._num_skipped = 0, _NUM_SKIPPED
        logger.warning(
            "no fast path for %d versions: switches go through the engine's reload: %s",
            _NUM_SKIPPED,
            why,
        )


def _log_verified(plan: CopyPlan, verified_s: float) -> None:
    logger.info(
        "fast path: from now on a switch copies into %d parameters (%.3f GB), uses %d layers "
        "processed beforehand, and reloads %d (verified in %.0f ms)",
        len(plan.parameters),
        plan.copied_bytes / 1e9,
        len(plan.packed),
        len(plan.reloaded),
        1e3 * verified_s,
    )
    for layer, why in plan.reloaded.items():
        logger.info("%s stays with the engine's reload: %s", layer, why)
