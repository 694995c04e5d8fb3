"""`examine` and `examine_bucket`: say which guarantees hold in a place, and how dbuffer adapts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from dbuffer.errors import DBufferError
from dbuffer.runtime import options
from dbuffer.store import mounts
from dbuffer.tools.doctor import peer
from dbuffer.tools.doctor.probes import (
    PROBES,
    READING,
    WRITING,
    Finding,
    OnStep,
    Site,
    not_tried,
)
from dbuffer.tools.doctor.scratch import remove_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Findings about a place for a store."""

    path: str
    """Directory, or a bucket's URL."""
    probed_in: str
    """The path, or the nearest existing directory above it."""
    host: str
    filesystem: str
    source: str
    """Device, or ``server:/export``; of a bucket, the client's description of it."""
    options: tuple[str, ...]
    is_network: bool
    findings: tuple[Finding, ...]
    """Findings about the place, and about the installed frameworks."""
    peers: tuple[peer.Meeting, ...]
    """Measurements with other hosts."""

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Findings with which a guarantee cannot hold; a store needs a place without any."""
        return tuple(finding for finding in self.findings if finding.verdict == "broken")


def examine(
    path: str | os.PathLike[str],
    *,
    timeout_s: float = 0.0,
    allow_shared_store: bool = False,
    progress: OnStep | None = None,
) -> Examination:
    """Probe the place of a store. A store in it is not touched, and none is made.

    Args:
        path: the store's directory. If it does not exist, the nearest existing directory above it
            is probed.
        timeout_s: how long to wait for another host (`peer.wait_for_host`) to measure with. With 0,
            only hosts that already wait are measured with.
        allow_shared_store: accept a directory that belongs to another user, or that others can
            write to.
        progress: called with the name of the next probe.

    Raises:
        OptionError: an option is invalid.
        StoreAccessError: the path is not a directory, or cannot be examined.
    """
    from dbuffer.tools.doctor.releases import findings as frameworks  # slow, and not for --help

    options.seconds("timeout_s", timeout_s)
    site = Site.at(options.directory("path", path), allow_shared_store)
    say = progress or (lambda _: None)
    findings = [probe.try_on(site, say) for probe in (*READING, WRITING)]
    meetings: tuple[peer.Meeting, ...] = ()
    if findings[-1].verdict == "broken":
        findings.append(not_tried(PROBES, "nothing can be written"))
    else:
        findings += [probe.try_on(site, say) for probe in PROBES]
        meetings, between = _meet(site, timeout_s, say)
        findings += between
    findings += frameworks(say)
    mount = mounts.mount_of(site.base)
    return Examination(
        path=str(site.path),
        probed_in=str(site.base),
        host=socket.gethostname(),
        filesystem=site.medium.filesystem,
        source=mount.source,
        options=mount.options,
        is_network=site.medium.reaches_other_hosts,
        findings=tuple(findings),
        peers=meetings,
    )


def examine_bucket(url: str, *, progress: OnStep | None = None) -> Examination:
    """Probe a bucket, on objects of its own below the prefix, which it removes.

    Args:
        url: the bucket and a prefix in it.
        progress: called with the name of the next probe.

    Raises:
        OptionError: it is no bucket's URL.
        DBufferError: the client for it is not installed.
    """
    from dbuffer.mirror.bucket import Bucket  # and torch, which takes seconds
    from dbuffer.tools.doctor.bucket import findings

    with Bucket(url) as bucket:
        return Examination(
            path=url,
            probed_in=url,
            host=socket.gethostname(),
            filesystem="bucket",
            source=bucket.description,
            options=(),
            is_network=True,
            findings=findings(bucket, progress or (lambda _: None)),
            peers=(),
        )


def _meet(
    site: Site, timeout_s: float, progress: OnStep
) -> tuple[tuple[peer.Meeting, ...], list[Finding]]:
    try:
        remove_stale(site.base)
        meetings = peer.measure_with_peers(site, timeout_s=timeout_s, progress=progress)
    except (DBufferError, OSError) as error:
        return (), [Finding("other hosts", "unknown", str(error), "run it again on both hosts")]
    return meetings, peer.judge(site, meetings)
