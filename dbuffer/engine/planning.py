"""`Planning`: the plan of copies for versions of one layout, and its state.

`PlanState` and `TRANSITIONS` describe the states.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from dbuffer.engine.plan.copy_plan import CopyPlan
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.format.layout import Layout, is_of_draft
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)

MAX_VERIFICATIONS = 4
"""Number of verifications of a layout's plans after which planning pauses. Versions that were
loaded by copies can reset the count. With a verification, an engine's pause lasts two reloads, not
one."""

_NUM_SKIPPED = 16
"""Number of versions to reload before planning is resumed after a pause. A verified plan that loads
as many versions by copies was worth its verification, so verifications are then counted anew."""


class PlanState(enum.Enum):
    """State of a layout's plan. In all states but `VERIFIED`, switches use the engine's reload."""

    MISSING = enum.auto()
    """A plan is made with the next version."""
    UNVERIFIED = enum.auto()
    """The next switch reloads the version, to verify that the plan's copies give the same."""
    VERIFIED = enum.auto()
    """The copies gave the same result as a reload, so switches copy tensors directly."""
    PAUSED = enum.auto()
    """Planning failed for a reason that may pass. It starts again after some versions."""
    GIVEN_UP = enum.auto()
    """Copies cannot replace the reload of this layout."""


_UNPLANNED = (PlanState.MISSING, PlanState.PAUSED, PlanState.GIVEN_UP)

TRANSITIONS = {
    PlanState.MISSING: (PlanState.UNVERIFIED, PlanState.PAUSED, PlanState.GIVEN_UP),
    PlanState.UNVERIFIED: (PlanState.VERIFIED, *_UNPLANNED),
    PlanState.VERIFIED: (PlanState.UNVERIFIED, *_UNPLANNED),
    PlanState.PAUSED: (PlanState.MISSING,),
    PlanState.GIVEN_UP: (),
}


@dataclass(eq=False)
class Planning:
    """Trace and plan of one layout, and results of earlier plans.

    The stager's thread makes plans. The worker's main thread verifies them, and drops them if other
    code replaced a part of the model.
    """

    layout: Layout
    trace: LoadTrace
    plan: CopyPlan | None = None
    """Plan of copies, or None if there is no plan now."""
    derived: set[str] = field(default_factory=set)
    """Layers that a reload changes after it has copied tensors into them."""
    reloaded: Mapping[str, str] = field(default_factory=dict)
    """Reasons why layers are left to the engine's reload, by layer."""
    num_verifications: int = 0
    """Number of verifications since the count began anew: see `_NUM_SKIPPED`."""
    _num_copied: int = 0
    """Number of versions copied since the last verification."""
    _num_skipped: int = 0
    """Number of versions still to reload before a pause of planning ends."""
    state: PlanState = PlanState.MISSING
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def enter(self, state: PlanState, plan: CopyPlan | None = None) -> None:
        """Enter a state.

        In `MISSING`, `PAUSED` and `GIVEN_UP` there is no plan. With `UNVERIFIED`, pass a new plan,
        or none to keep the present one. A switch that was prepared with a dropped or unverified
        plan is not applied.
        """
        with self._lock:
            assert state in TRANSITIONS[self.state], (self.state, state)  # noqa: S101
            if self.plan is not None and state is not PlanState.VERIFIED:
                self.plan.verified_for = None
            self.plan = None if state in _UNPLANNED else plan or self.plan
            self.state = state

    def drop(self) -> None:
        """Drop the plan, if any; the next version makes a new plan."""
        with self._lock:
            if self.plan is not None:
                self.enter(PlanState.MISSING)

    def drop_if_replaced(self) -> None:
        """Drop the plan if other code has replaced or moved a module or tensor that it uses."""
        plan = self.plan
        if plan is not None and (names := plan.places.replaced()):
            logger.warning(
                "%s was replaced, or has moved in memory, since switches were planned: the next "
                "switch is a reload, and switches are planned again",
                listed(names),
            )
            self.derived, self.reloaded = set(), {}
            self.drop()

    def verify_again(self) -> None:
        """Verify the plan again, unless its verification is valid for all values of tensors.

        It is not if the plan's ``verified_for`` has tensors: the verification tried only one value
        of each.
        """
        with self._lock:
            if self.plan is not None and self.plan.verified_for:
                self.enter(PlanState.UNVERIFIED)

    def give_up(self, reason: str, level: int = logging.INFO) -> None:
        self.enter(PlanState.GIVEN_UP)
        logger.log(level, "no fast path: switches go through the engine's reload: %s", reason)

    def pause(self, reason: str) -> None:
        """Reload the next few versions without a plan, for instance because memory is short now."""
        self.num_verifications, self._num_skipped = 0, _NUM_SKIPPED
        self.enter(PlanState.PAUSED)
        logger.warning(
            "no fast path for the next %d versions: switches go through the engine's reload: %s",
            _NUM_SKIPPED,
            reason,
        )

    def begin_verification(self) -> None:
        self.num_verifications += 1
        self._num_copied = 0
        if self.state is PlanState.VERIFIED:  # but for other values of integer tensors
            self.enter(PlanState.UNVERIFIED)

    def note_copied(self) -> None:
        """Note a switch by copies."""
        self._num_copied += 1
        if self._num_copied == _NUM_SKIPPED:
            self.num_verifications = 0

    def begin_version(self) -> None:
        """Count a version, before it is prepared. After enough versions, planning is resumed."""
        if self.state is PlanState.PAUSED:
            self._num_skipped -= 1
            if not self._num_skipped:
                self.enter(PlanState.MISSING)

    def is_alike(self, trace: LoadTrace) -> bool:
        """Whether the target model (all but a draft) is loaded in the same way in ``trace``.

        ``trace`` is of another layout. If it differs, a version of that layout may change memory
        that this layout's copies do not write.
        """
        if trace is self.trace:
            return True
        ours, theirs = (
            {name: traced for name, traced in of.tensors.items() if not is_of_draft(name)}
            for of in (self.trace, trace)
        )
        return ours == theirs
