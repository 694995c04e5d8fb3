"""A SLURM job without SLURM: a `scontrol` on the PATH that knows one host list.

SLURM is not installed where the tests run. What this one prints, and its exit status for a list
that it cannot read, are those of scontrol 22.05.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from dbuffer.integrations.atropos.slurm import NODELIST_VARIABLES


def be_in_job(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    hostlist: str = "n[1-3]",
    hosts: tuple[str, ...] = ("n1", "n2", "n3"),
    *,
    variable: str = NODELIST_VARIABLES[0],
) -> None:
    """Let this process, and its children, be in a job of these hosts."""
    be_in_no_job(monkeypatch)
    monkeypatch.setenv(variable, hostlist)
    write_scontrol(
        monkeypatch,
        directory,
        f'[ "$1 $2" = "show hostnames" ] || exit 1\n'
        f'if [ "$3" = {shlex.quote(hostlist)} ]; then printf "%s\\n" {shlex.join(hosts)}\n'
        f'else echo "Invalid hostlist: $3" >&2; fi\n',
    )


def be_in_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NODELIST_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def write_scontrol(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Put a shell script on the PATH under that name."""
    program = directory / "slurm-bin" / "scontrol"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
