"""`FollowerState`: what a follower knows of its engine."""

from __future__ import annotations

import enum


class FollowerEvent(enum.Enum):
    """What changes a follower's state."""

    STARTED = "started"
    """The ranks follow the store, and what they have was asked for."""
    LOST = "lost"
    """The engine does not answer, or an attempt ended without telling which weights it has."""
    PAUSED = "paused"
    """The follower is about to pause the engine, and owes it a resume."""
    RESUMED = "resumed"
    """The engine goes on."""


class FollowerState(enum.Enum):
    """What a follower knows of its engine, and whether it owes it a resume.

    ::

        NEW ──started──► FOLLOWING ──────────lost──────────► LOST
                           │   ▲  ◄────────started──────────  │  ▲
                         paused │                           paused │
                           │  resumed                         │ resumed
                           ▼   │                              ▼  │
                          PAUSING ───────────lost──────────► LOST_PAUSING
                                  ◄────────started──────────

    A switch goes down and up again; so does a beginning that needs a pause, from NEW or LOST. Only
    in FOLLOWING and PAUSING is it known which weights the engine has; the version in
    ``Follower.applied`` is the last one known in the other states.
    """

    NEW = "new"
    """Nothing was asked of it yet."""
    FOLLOWING = "following"
    """Its ranks follow the store, and it is known which weights it has."""
    PAUSING = "pausing"
    """As FOLLOWING, and a pause that this follower began is to be ended."""
    LOST = "lost"
    """It may be another one by now, or have weights that nobody knows: all must be asked again."""
    LOST_PAUSING = "lost in a pause"
    """As LOST, and a pause is to be ended."""

    @property
    def is_known(self) -> bool:
        return self in (FollowerState.FOLLOWING, FollowerState.PAUSING)

    @property
    def owes_resume(self) -> bool:
        return self in (FollowerState.PAUSING, FollowerState.LOST_PAUSING)

    def after(self, event: FollowerEvent) -> FollowerState:
        """The next state; the same one where the event changes nothing."""
        return _NEXT.get((self, event), self)


_NEXT = {
    (FollowerState.NEW, FollowerEvent.STARTED): FollowerState.FOLLOWING,
    (FollowerState.LOST, FollowerEvent.STARTED): FollowerState.FOLLOWING,
    (FollowerState.LOST_PAUSING, FollowerEvent.STARTED): FollowerState.PAUSING,
    (FollowerState.NEW, FollowerEvent.PAUSED): FollowerState.LOST_PAUSING,
    (FollowerState.LOST, FollowerEvent.PAUSED): FollowerState.LOST_PAUSING,
    (FollowerState.FOLLOWING, FollowerEvent.LOST): FollowerState.LOST,
    (FollowerState.PAUSING, FollowerEvent.LOST): FollowerState.LOST_PAUSING,
    (FollowerState.FOLLOWING, FollowerEvent.PAUSED): FollowerState.PAUSING,
    (FollowerState.PAUSING, FollowerEvent.RESUMED): FollowerState.FOLLOWING,
    (FollowerState.LOST_PAUSING, FollowerEvent.RESUMED): FollowerState.LOST,
}
