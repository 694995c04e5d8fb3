"""Timings of the running product, in one place: intervals, patience, retention.

A timing is a field of `Timing` if it tunes how soon a store, sender, receiver, mirror, follower or
doctor looks, retries, logs, forgets or gives up, and is read when it is needed, so that tests
replace it here. Defaults and bounds of parameters, time-outs of single requests to other programs,
properties of filesystems and the intervals of one framework's integration stay where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds, by package in the order of imports."""

    # runtime: retries with a log
    retry_min_s: float = 0.5
    """Backoff after the first failure; it doubles with each further one."""
    retry_max_s: float = 30.0
    """Upper bound of the backoff."""
    retry_short_max_s: float = 1.0
    """Upper bound where a retry costs little: once a store or a server is back, it is used soon."""
    log_min_s: float = 60.0
    """Time before a lasting failure is logged again; it doubles with each further message."""
    log_max_s: float = 3600.0
    """Upper bound of that time."""

    # store
    lock_retry_min_s: float = 0.0005
    """First pause between two attempts to lock a file, or to hold a version that a writer is at; it
    doubles with each further one."""
    lock_retry_max_s: float = 0.02
    """Upper bound of that pause."""
    quiet_wait_s: float = 1.0
    """Time that a sender waits for readers before it logs for whom."""
    stale_temporary_s: float = 60.0
    """Age of a temporary file that a killed process left behind."""
    heartbeat_s: float = 15.0
    """Interval at which a receiver on a network mount touches its record."""
    presumed_dead_after_s: float = 120.0
    """A process that cannot be seen from here counts as dead when it has not touched its record for
    so long. Eight heartbeats: other hosts may see a file's time up to a minute late, and a process
    that compiles or swaps may miss a few."""
    clock_s: float = 60.0
    """Interval at which a server's clock is compared with this host's."""
    settle_s: float = 2.0
    """Longest time for which pointer and manifest may disagree. A writer is between the two for
    microseconds; a disagreement that lasts, while the pointer stands still, is damage."""
    forget_receivers_after_s: float = 7 * 24 * 3600.0
    """Time for which the last record of an id that the user gave is kept after its receiver
    ended."""
    forget_ephemeral_after_s: float = 60.0
    """Time for which other records are kept: of a generated id, and of an id that has a later
    record. A sender that waits for a version counts receivers that applied it and ended."""
    forget_every_s: float = 10.0
    """Minimum time between two searches for such records, as versions are published."""
    keep_superseded_s: float = 2.0
    """Least age of a superseded file of a network mount before it is removed: readers that write no
    record (a read-only mount, `dbuffer verify`) have this long to finish."""
    acknowledgements_min_s: float = 0.001
    """First pause between two looks at receivers' records; it doubles with each further one."""
    acknowledgements_max_s: float = 0.05
    """Upper bound of that pause."""
    last_word_s: float = 1.0
    """Time for the last acknowledgement of a process that has ended to arrive. The process may have
    acknowledged and ended after its record was read, or the network may be late. A mirror relays
    the end together with the last acknowledgement. A problem with the store itself may be over as
    well, until the receiver looks at the store again."""
    inotify_retry_s: float = 60.0
    """Time before inotify is tried again after its limits were used up."""

    # ranks
    ranks_end_within_s: float = 1.0
    """Time for the end of a rank to show that broke its connection."""
    ranks_look_s: float = 0.01
    """Interval at which the others look for that end."""

    # receive
    stop_check_s: float = 0.1
    """Interval at which a receiver's wait looks at its stop event."""

    # mirror
    stand_by_s: float = 0.5
    """Interval at which a mirror that stands by looks whether the one before it has ended."""
    prepared_s: float = 10.0
    """Upper bound for how long another mirror takes to copy the first version of another run."""
    fit_look_s: float = 0.1
    """Interval at which a mirror that starts looks whether the local store is fit to be read; each
    look at a bucket is a request."""
    mirror_look_s: float = 0.01
    """Interval at which calls of a mirror look whether it, or another one, has caught up."""
    relay_s: float = 0.05
    """Interval at which local records are read; only those that have changed go over the
    network."""

    connect_s: float = 10.0
    """Time to connect to an object storage."""
    request_s: float = 120.0
    """Time for one request to it: a part of 32 MiB at 0.3 MB/s."""
    request_retry_s: float = 0.2
    """Pause before a failed request is repeated, at most; it doubles with each further one."""
    bucket_records_s: float = 1.0
    """Least time between two puts of the object with a mirror's records."""
    bucket_heartbeat_s: float = 60.0
    """Interval at which that object is put although no record has changed."""
    bucket_presumed_dead_after_s: float = 240.0
    """Receivers count as dead when their mirror's object has not changed for so long, by the clock
    of the host that looks."""
    bucket_list_s: float = 5.0
    """Interval at which the sender's mirror lists these objects, at most."""
    bucket_expect_s: float = 0.5
    """First such interval after a version was published; it doubles with each further one."""
    bucket_grace_s: float = 3600.0
    """Time for which objects of a version that is not kept are still there: who reads them must be
    done by then, or starts over with a newer version."""

    # integrations.engine
    ready_check_min_s: float = 0.002
    """First pause between two looks at ranks' records until all ranks are ready; it grows with the
    time that was waited already."""
    ready_check_max_s: float = 0.1
    """Upper bound of that pause."""
    rank_gone_s: float = 5.0
    """Time after which a rank whose record is missing has left the store, or whose process has
    ended is lost: a live rank removes its record when it leaves, and a dead one cannot."""
    rank_dying_s: float = 0.5
    """Time for a rank whose connection broke to end."""
    rank_state_s: float = 0.01
    """Interval at which the others look whether it has ended."""
    network_lag_s: float = 5.0
    """Longest time for which a host may see an older version than the newest on a network mount."""
    network_look_s: float = 0.05
    """Interval at which such a host looks for the newest version."""
    follow_again_s: float = 0.5
    """Least wait of a follower between two attempts, also when a newer version follows the failed
    one at once."""
    server_close_s: float = 30.0
    """Time for the switch of a server that is under way to end, when its follower is closed."""
    resume_retry_s: float = 0.2
    """Pause before a follower asks a server again to resume."""
    alive_check_s: float = 1.0
    """Interval at which a follower that waits for vLLM looks whether vLLM's core is alive."""
    api_server_look_s: float = 0.2
    """Interval at which an API server of vLLM looks whether it is its turn to follow."""
    admission_look_s: float = 0.02
    """Interval at which an API server asks the engine for its version while requests wait for
    one."""
    mapping_settle_s: float = 2.0
    """Time for which Atropos' mapping may be unreadable: its server does not write it
    atomically."""

    # tools
    bucket_watch_s: float = 15.0
    """Interval at which `dbuffer status --watch` reads a bucket. A list of up to 1,000 objects is
    priced as 12 gets; so this costs half of what a mirror's poll does, which is two gets a
    second."""

    # tools.doctor
    doctor_event_s: float = 1.0
    """Time for an event of inotify to come."""
    peer_answer_s: float = 15.0
    """Time for the doctor of another host to acknowledge its first version, and for this one to
    read its last word."""
    peer_limit_s: float = 10.0
    """Time that it has to acknowledge any other version."""
    peer_silence_s: float = 120.0
    """Time without a version after which it gives up."""
    peer_poll_s: float = 0.01
    """Interval at which the doctors of two hosts look at the store."""
    peer_look_s: float = 0.1
    """Interval at which a doctor looks for those of other hosts."""


TIMING = Timing()
"""The timings of this process."""


def doubling(first_s: float, most_s: float) -> Iterator[float]:
    """Return pauses without end, each twice as long as the one before, up to ``most_s``."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)
