"""Findings about the installed frameworks: which releases dbuffer was tested with."""

from __future__ import annotations

from dbuffer.integrations import interfaces
from dbuffer.runtime.messages import listed
from dbuffer.tools.doctor.finding import Finding


def findings() -> list[Finding]:
    """Return a finding for each framework that is installed."""
    versions = {name: interfaces.installed(name) for name in interfaces.frameworks()}
    return [_finding(name, version) for name, version in versions.items() if version is not None]


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
