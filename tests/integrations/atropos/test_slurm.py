"""Which nodes of a SLURM job run engines, by a `scontrol` of the tests' own."""

from __future__ import annotations

import pytest

import dbuffer
from dbuffer.integrations.atropos.slurm import inference_nodes, job_nodes
from tests.support.slurm_job import be_in_job, write_scontrol

FIVE = tuple(f"n0{number}" for number in range(1, 6))


def test_the_last_nodes_of_the_job_run_engines(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path, "n[01-05]", FIVE)
    assert job_nodes() == list(FIVE)
    assert inference_nodes(2) == ["n04", "n05"]
    assert inference_nodes(5) == list(FIVE)


def test_the_older_variable_is_read_too(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path, "a[1-2]", ("a1", "a2"), variable="SLURM_NODELIST")
    assert inference_nodes(1) == ["a2"]


def test_too_few_nodes_are_refused(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path, "n[1-2]", ("n1", "n2"))
    with pytest.raises(dbuffer.NotReadyError, match="n1,n2"):
        inference_nodes(3)


def test_host_list_without_scontrol(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dbuffer.NotReadyError, match=r"n\[1-3\].*scontrol"):
        inference_nodes(1)


def test_host_list_that_scontrol_refuses(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[x]")
    with pytest.raises(dbuffer.NotReadyError, match=r"Invalid hostlist: n\[x\]"):
        inference_nodes(1)


def test_scontrol_that_fails(tmp_path, monkeypatch):
    be_in_job(monkeypatch, tmp_path)
    write_scontrol(monkeypatch, tmp_path, "echo 'no configuration source' >&2; exit 1")
    with pytest.raises(dbuffer.NotReadyError, match="no configuration source"):
        inference_nodes(1)
