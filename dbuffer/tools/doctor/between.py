"""What was measured with another host, judged."""

from __future__ import annotations

from collections.abc import Sequence

from dbuffer.store.filesystem import MOUNT_VARIABLE
from dbuffer.tools.doctor.findings import (
    POLLING,
    Finding,
    Outcome,
    adapted,
    broken,
    duration,
    good,
    unknown,
)
from dbuffer.tools.doctor.peer import Delay, Meeting
from dbuffer.tools.doctor.probes import Site


def judge(site: Site, meetings: Sequence[Meeting]) -> list[Finding]:
    """What was measured with other hosts, as findings."""
    if not meetings:
        return [_nobody(site).of("other hosts")]
    return [finding for meeting in meetings for finding in _judge(site, meeting)]


def _nobody(site: Site) -> Outcome:
    if site.medium.reaches_other_hosts:
        return unknown(
            "not measured: no peer waits here",
            f"to measure, run 'dbuffer doctor {site.path} --peer' on another host, then this again",
        )
    return good("no peer waits here", "a store on a local mount is for the processes of this host")


def _judge(site: Site, meeting: Meeting) -> list[Finding]:
    host = meeting.host
    return [
        _mounts(site, meeting).of(f"{host}: mount", 1),
        _delay(meeting.directory_first).of(f"{host}: sees a change", 5),
        _by_name(meeting.by_name).of(f"{host}: opening by name only"),
        _files(meeting.directory_first).of(f"{host}: new files", 1),
        _locks(meeting.locks_exclude).of(f"{host}: locks"),
    ]


def _mounts(site: Site, meeting: Meeting) -> Outcome:
    found = f"{meeting.filesystem} there, {site.medium.filesystem} here"
    if site.medium.reaches_other_hosts and meeting.is_network:
        return good(found, "both use it as a network mount")
    if not site.medium.reaches_other_hosts and not meeting.is_network and meeting.is_same_kernel:
        return good(f"{found}, on one machine", "both use it as a local one")
    where = "there" if site.medium.reaches_other_hosts else "here"
    return broken(
        found,
        f"used as a local mount {where}: what is published {where} is rewritten in place, "
        f"and refused on the other host; set {MOUNT_VARIABLE}=network {where}",
    )


def _delay(delay: Delay) -> Outcome:
    found = _describe(delay)
    if delay.num_unseen:
        return broken(found, "workers there would not see new versions")
    if delay.max_ms > 1e3:
        return adapted(found, f"versions arrive that late; {POLLING}")
    return good(found, f"the directory is opened before the pointer; {POLLING}")


def _by_name(delay: Delay) -> Outcome:
    if delay.num_unseen or delay.num_errors:
        return adapted(_describe(delay), "not relied on: the directory is opened first")
    return good(_describe(delay), "not relied on")


def _files(delay: Delay) -> Outcome:
    num_whole = delay.num_files - delay.num_wrong_files
    found = f"{num_whole} of {delay.num_files} whole when the pointer to them was seen"
    if num_whole == 0:
        return broken(found, "what is published here cannot be read there")
    if delay.num_wrong_files:
        return adapted(found, "detected by sizes and checksums; readers read again")
    return good(found, "sizes and checksums are checked anyway")


def _locks(exclude: bool | None) -> Outcome:
    if exclude:
        return good("exclude processes of the other host", "a second sender there is refused")
    found = "do not reach the other host" if exclude is False else "not supported"
    return adapted(found, "a second sender there is detected by its epoch, not prevented")


def _describe(delay: Delay) -> str:
    median, most = duration(delay.median_ms), duration(delay.max_ms)
    found = f"{median} (median), {most} (max) of {delay.num_rounds}"
    if delay.num_unseen:
        found += f"; {delay.num_unseen} not seen within {duration(delay.limit_ms)}"
    if delay.num_errors:
        found += f"; {delay.num_errors} looks found nothing, or a stale handle"
    return found
