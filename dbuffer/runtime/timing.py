"""`Timing`: the intervals and time-outs that several modules share, or that tests replace.

A test replaces fields of `TIMING` in its own process and in child processes, so code reads a field
at each use. A time that depends on another field is a property. All other intervals and time-outs
are constants in the modules that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Intervals and time-outs of dbuffer, in seconds."""

    look_s: float = 0.01
    """Interval at which a wait polls memory, a process or a local file that will change soon."""
    stop_check_s: float = 0.1
    """Interval at which a longer wait polls, or checks whether it must stop."""

    retry_min_s: float = 0.5
    """Backoff after the first failure. The backoff doubles with each further failure. A mirror that
    is not elected, and a follower of an engine that has another follower, try again after this
    time."""
    retry_max_s: float = 30.0
    """Upper bound of the backoff."""

    settle_s: float = 2.0
    """Longest time that the version pointer and the manifest of an intact store can disagree. A
    file that another program writes can be incomplete for the same time."""
    keep_superseded_s: float = 2.0
    """Age at which a superseded file on a network mount can be removed. Readers that write no
    record (on a read-only mount, or `dbuffer verify`) must finish within this time."""
    heartbeat_s: float = 15.0
    """Interval at which a receiver on a network mount touches its record."""
    last_word_s: float = 1.0
    """Time to wait for the last acknowledgement of a receiver whose process has ended, and for the
    next attempt of a receiver that reported a problem with the store."""
    forget_receivers_after_s: float = 7 * 24 * 3600.0
    """Age, since its last change, at which the record of an ended receiver is removed. This age
    holds for ids that users chose, if no later record has the id."""
    forget_ephemeral_after_s: float = 60.0
    """Age at which the record of an ended receiver is removed if the receiver's id was generated,
    or if a later record has the id. The record is kept so long for senders that wait: a receiver
    that applied the version and then ended still counts."""
    inotify_retry_s: float = 60.0
    """Time after which inotify is tried again if its limits were reached."""

    request_retry_s: float = 0.2
    """Longest pause before the first repetition of a failed request to an object storage. It
    doubles with each further failure. The actual pause is random, but at least half as long."""
    bucket_records_s: float = 1.0
    """Shortest time between two puts of a mirror's ``receivers/MIRROR.json``, the object with the
    records of the mirror's receivers, into a bucket."""
    bucket_heartbeat_s: float = 60.0
    """Interval at which a mirror puts its ``receivers/MIRROR.json`` if no record has changed."""
    bucket_list_s: float = 1.0
    """Interval at which the mirror that writes a bucket lists the objects in ``receivers/``."""
    bucket_watch_s: float = 15.0
    """Interval at which `dbuffer status --watch` reads a bucket, where listing costs money."""
    bucket_grace_s: float = 3600.0
    """Time after which the objects of a version that is not kept are deleted. A reader that needs
    longer starts again with a newer version."""

    ranks_end_within_s: float = 1.0
    """Longest time from the moment that a dying process's connections close until its end is
    seen."""
    rank_gone_s: float = 5.0
    """Time after which a rank without a record counts as having left the store, and a rank whose
    process has ended counts as lost. A rank that leaves removes its record; a dead rank cannot."""
    alive_check_s: float = 1.0
    """Interval at which a wait for vLLM checks that vLLM's core is alive."""
    peer_answer_s: float = 15.0
    """Time for `dbuffer doctor` on another host to acknowledge a version, and for the doctor on
    this host to read the other doctor's last record."""

    @property
    def presumed_dead_after_s(self) -> float:
        """Age of a record after which a process that this host cannot see counts as dead."""
        # Allow for eight heartbeats: other hosts can see a file's time up to a minute late, and a
        # process that compiles or swaps can miss some heartbeats.
        return 8 * self.heartbeat_s

    @property
    def bucket_presumed_dead_after_s(self) -> float:
        """How long after its last put of records a mirror's receivers count as dead."""
        return 4 * self.bucket_heartbeat_s


TIMING = Timing()


def doubling(first_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses without end. Each is twice as long as the last one, but at most ``most_s``."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)
