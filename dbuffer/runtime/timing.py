"""Timings of the running product that races or tests depend on: intervals, patience, retention.

A field of `Timing` is a base number that several modules share, or that a test replaces in its
process and its children. It is read when it is needed. A number that follows from another one is a
property. Any other interval or time-out is a constant beside its user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds."""

    look_s: float = 0.01
    """Interval at which a wait looks at memory, a socket or a local file that changes soon."""
    stop_check_s: float = 0.1
    """Interval at which a wait looks at its stop event, or at a place where a look costs more."""

    retry_min_s: float = 0.5
    """Backoff after the first failure; it doubles with each further one. Also the interval at which
    a mirror or follower that has to wait for its turn tries again."""
    retry_max_s: float = 30.0
    """Upper bound of the backoff."""

    settle_s: float = 2.0
    """Longest time that pointer and manifest may disagree. A writer is between the two for
    microseconds; a disagreement that lasts while the pointer does not change is damage. Also the
    longest time that another program's file may be half written."""
    keep_superseded_s: float = 2.0
    """Least age of a superseded file of a network mount before it is removed: readers that write no
    record (a read-only mount, `dbuffer verify`) have this long to finish."""
    heartbeat_s: float = 15.0
    """Interval at which a receiver on a network mount touches its record."""
    last_word_s: float = 1.0
    """Time for the last acknowledgement of a process that has ended to arrive. The process may have
    acknowledged and ended after its record was read, or the network may be late. A mirror relays
    the end together with the last acknowledgement. A problem with the store itself may be over as
    well, until the receiver looks at the store again."""
    forget_receivers_after_s: float = 7 * 24 * 3600.0
    """Time before the last record of an id that the user gave is removed, once its receiver has
    ended, from the record's last change on. On a local mount a killed receiver's may be old."""
    forget_ephemeral_after_s: float = 60.0
    """Time before other records are removed: of a generated id, and of an id that has a later
    record. A sender that waits for a version counts receivers that applied it and ended."""
    inotify_retry_s: float = 60.0
    """Time before inotify is tried again after its limits were used up."""

    request_retry_s: float = 0.2
    """Pause before a failed request to an object storage is repeated, at most; it doubles with each
    further one."""
    bucket_records_s: float = 1.0
    """Least time between two puts of the object with a mirror's records."""
    bucket_heartbeat_s: float = 60.0
    """Interval at which that object is put although no record has changed."""
    bucket_list_s: float = 1.0
    """Interval at which the sender's mirror lists these objects."""
    bucket_watch_s: float = 15.0
    """Interval at which `dbuffer status --watch` reads a bucket. A list of up to 1,000 objects is
    priced as 12 gets; so the cost is a half of a mirror's poll, which is two gets a second."""
    bucket_grace_s: float = 3600.0
    """Time before objects of a version that is not kept are deleted. A reader that takes longer
    starts over with a newer version."""

    ranks_end_within_s: float = 1.0
    """Time for the end of a rank to show that broke its connection."""
    rank_gone_s: float = 5.0
    """Time after which a rank whose record is missing has left the store, or whose process has
    ended is lost: a live rank removes its record when it leaves, and a dead one cannot."""
    alive_check_s: float = 1.0
    """Interval at which a wait for vLLM looks whether vLLM's core is alive."""
    peer_answer_s: float = 15.0
    """Time for the doctor of another host to acknowledge a version, and for this one to read its
    last word."""

    @property
    def presumed_dead_after_s(self) -> float:
        """Age at which the record of a process that cannot be seen from here counts as dead.

        Other hosts may see a file's time up to a minute late, and a process that compiles or swaps
        may miss a few heartbeats.
        """
        return 8 * self.heartbeat_s

    @property
    def bucket_presumed_dead_after_s(self) -> float:
        """Time without a change of a mirror's object after which its receivers count as dead."""
        return 4 * self.bucket_heartbeat_s


TIMING = Timing()
"""The timings of this process."""


def doubling(first_s: float, most_s: float) -> Iterator[float]:
    """Return pauses without end, each twice as long as the one before, up to ``most_s``."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)
