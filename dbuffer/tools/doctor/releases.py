"""Findings about the installed frameworks: which releases dbuffer was tested with."""

from __future__ import annotations

from dbuffer.integrations import interfaces
from dbuffer.runtime.messages import listed
from dbuffer.tools.doctor.probes import Finding, OnStep


def findings(progress: OnStep) -> list[Finding]:
    """Return a finding for each framework that is installed."""
    found = []
    for name in interfaces.frameworks():
        if (version := interfaces.installed(name)) is not None:
            progress(name)
            found.append(_finding(name, version))
    return found


def _finding(framework: str, version: str) -> Finding:
    first, last = interfaces.Record.of(framework).tested
    result = f"{version}; {first} to {last} on record"
    if moved := interfaces.moved_names(framework):
        consequence = f"dbuffer refuses it: {listed(moved)} moved"
        return Finding(framework, "unknown", result, consequence)
    if interfaces.is_newer(framework):
        consequence = "newer than all on record; what dbuffer uses of it is unchanged"
        return Finding(framework, "good", result, consequence)
    if interfaces.release_of(version) < interfaces.release_of(first):
        return Finding(framework, "unknown", result, "older than all on record")
    return Finding(framework, "good", result, "")
