"""What a mount is, what works on it, and what dbuffer does about that."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from dbuffer.errors import DBufferError
from dbuffer.runtime import options
from dbuffer.store import filesystem
from dbuffer.tools.doctor import peer
from dbuffer.tools.doctor.findings import Finding, OnStep, unknown
from dbuffer.tools.doctor.probes import LOOKS, PROBES, WRITING, Site
from dbuffer.tools.doctor.scratch import remove_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found about a place for a store."""

    path: str
    probed_in: str
    """The path, or the nearest directory above it that is there."""
    host: str
    filesystem: str
    source: str
    """A device, or ``server:/export``."""
    options: tuple[str, ...]
    is_network: bool
    findings: tuple[Finding, ...]
    peers: tuple[peer.Meeting, ...]
    """What was measured with other hosts."""

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings with which a guarantee cannot hold; a store needs a place without any."""
        return tuple(finding for finding in self.findings if finding.verdict == "broken")


def examine(
    path: str | os.PathLike[str],
    *,
    timeout_s: float = 0.0,
    allow_shared_store: bool = False,
    progress: OnStep | None = None,
) -> Examination:
    """Probe the place of a store. A store that is there is not touched, and none is made.

    Args:
        path: the store's directory, or the one above it; where there is none yet, probes are
            made in the nearest directory above it that is there.
        timeout_s: how long to wait for another host (`peer.wait_for_host`) to measure with. With 0,
            those that already wait are measured with.
        allow_shared_store: accept a directory that belongs to someone else, or that others can
            write to.
        progress: called with what is probed next.

    Raises:
        OptionError: one of these is not what it may be.
        StoreAccessError: the path is not a directory, or cannot be examined.
    """
    options.seconds("timeout_s", timeout_s)
    site = Site.at(options.directory("path", path), allow_shared_store)
    say = progress or (lambda _: None)
    findings = [probe.try_on(site, say) for probe in (*LOOKS, WRITING)]
    meetings: tuple[peer.Meeting, ...] = ()
    if findings[-1].verdict == "broken":
        untried = ", ".join(probe.title for probe in PROBES)
        findings.append(unknown(f"not tried: {untried}", "nothing can be written").of("the rest"))
    else:
        findings += [probe.try_on(site, say) for probe in PROBES]
        meetings, between = _meet(site, timeout_s, say)
        findings += between
    mount = filesystem.mount_of(site.base)
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


def _meet(
    site: Site, timeout_s: float, progress: OnStep
) -> tuple[tuple[peer.Meeting, ...], list[Finding]]:
    try:
        remove_stale(site.base)
        meetings = peer.measure_with_peers(site, timeout_s=timeout_s, progress=progress)
    except (DBufferError, OSError) as error:
        return (), [unknown(str(error), "run it again on both hosts").of("other hosts")]
    return meetings, peer.judge(site, meetings)
