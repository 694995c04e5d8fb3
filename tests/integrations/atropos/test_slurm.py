"""Which nodes of a SLURM job run engines, by a `scontrol` of the tests' own."""

from __future__ import annotations

import pytest

import dbuffer
from dbuffer.integrations.atropos import get_inference_urls
from tests.support.slurm_job import be_in_job, write_scontrol


def test_the_older_variable_is_read_too(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path, "a[1-2]", ("a1", "a2"), variable="SLURM_NODELIST")
    assert get_inference_urls(1)[3] == ["a2"]


def test_host_list_without_scontrol(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dbuffer.NotReadyError, match=r"n\[1-3\].*scontrol"):
        get_inference_urls(1)


def test_host_list_that_scontrol_refuses(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[x]")
    with pytest.raises(dbuffer.NotReadyError, match=r"Invalid hostlist: n\[x\]"):
        get_inference_urls(1)


def test_scontrol_that_fails(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    write_scontrol(monkeypatch, tmp_path, "echo 'no configuration source' >&2; exit 1")
    with pytest.raises(dbuffer.NotReadyError, match="no configuration source"):
        get_inference_urls(1)
