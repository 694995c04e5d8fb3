"""Nodes of a SLURM job, by a `scontrol` of this file's own, and names of this host.

SLURM is not installed where the tests run. This `scontrol` knows one host list. Its exit status for
a list that it cannot read is that of scontrol 22.05.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dbuffer
from dbuffer.integrations.atropos import get_inference_urls, get_local_hostname, slurm

SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] || exit 1
if [ "$3" = "n[1-3]" ]; then printf "%s\\n" n1 n2 n3; else echo "Invalid hostlist: $3" >&2; fi
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is `scontrol`; this process is in no job."""
    for name in slurm.NODELIST_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    return program


@pytest.mark.parametrize("variable", slurm.NODELIST_VARIABLES)
def test_places_of_a_job(scontrol, monkeypatch, variable):
    assert get_inference_urls(2) == (None, None, None, None)
    monkeypatch.setenv(variable, "n[1-3]")
    assert get_inference_urls(2) == ("n1:26756", "n1:26757", "n2:26758", ["n2", "n3"])
    here = "localhost:26756", "localhost:26757", "localhost:26758", ["localhost"]
    assert get_inference_urls(0) == here
    assert get_inference_urls(-1) == (None, None, None, None)
    for more in (3, 100):
        found = get_inference_urls(more)
        assert found == ("n1:26756", "n1:26757", "n1:26758", ["n1", "n2", "n3"]), (
            "as a slice has it"
        )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"n\[x\].*scontrol"),
        (SCONTROL, r"Invalid hostlist: n\[x\]"),
        ("#!/bin/sh\necho 'no configuration source' >&2; exit 1", "no configuration source"),
    ],
    ids=["no scontrol", "an invalid list", "a failure"],
)
def test_host_list_that_cannot_be_expanded(scontrol, monkeypatch, script, message):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[x]")
    if script is None:
        monkeypatch.setenv("PATH", str(scontrol.parent.parent))
    else:
        scontrol.write_text(script)
    with pytest.raises(dbuffer.NotReadyError, match=message):
        get_inference_urls(1)


def test_names_of_this_host(tmp_path, monkeypatch):
    name = os.uname().nodename
    assert name in get_local_hostname()
    hosts = tmp_path / "hosts"
    monkeypatch.setattr(slurm, "_HOSTS_FILE", hosts)
    hosts.write_text(
        f"127.0.1.1 {name}\n# 10.0.0.1 {name}\n10.0.0.2 other\n10.0.0.3 x {name} # y\n"
    )
    assert get_local_hostname() == ["10.0.0.3", "x", name]
    hosts.unlink()
    assert get_local_hostname()[-1] == name
