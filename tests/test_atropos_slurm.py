"""Host lists as SLURM writes them, and which nodes run engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import dbuffer
from dbuffer.integrations.atropos.slurm import (
    MAX_HOSTS,
    NODELIST_VARIABLES,
    expand_hostlist,
    inference_nodes,
)


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("node1", "node1"),
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("x1,y[2-3]", "x1 y2 y3"),
        ("[1-2]", "1 2"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("n[1,3,5-6]-ib,gpu[0-1].cluster.example", "n1-ib n3-ib n5-ib n6-ib "
         "gpu0.cluster.example gpu1.cluster.example"),
        ("r[1-2]c[0-1]s[0-1]", "r1c0s0 r1c0s1 r1c1s0 r1c1s1 r2c0s0 r2c0s1 r2c1s0 r2c1s1"),
        ("b2,a1,b2", "b2 a1 b2"),
        ("n[5-5]", "n5"),
        ("a-b_c.d", "a-b_c.d"),
    ],
)  # fmt: skip
def test_lists_are_expanded(hostlist: str, hosts: str) -> None:
    assert expand_hostlist(hostlist) == hosts.split()


@pytest.mark.parametrize(
    "hostlist",
    [
        *("", ",", "a,", ",a", "a,,b", "n[1-2", "n1-2]", "n[[1-2]]", "n[]", "n[,]", "n[1,]"),
        *("n[2-1]", "n[a-b]", "n[1-2-3]", "n[-1]", "n[1-]", "n[x]", "n[1 -2]", "a b", " a", "a\n"),
        *("n[0-999999999999]", "a[1-999]b[1-999]", "n[1-2]]", "n[1;2]"),
    ],
)
def test_what_is_no_list_is_refused(hostlist: str) -> None:
    with pytest.raises(dbuffer.OptionError) as caught:
        expand_hostlist(hostlist)
    assert repr(hostlist)[:60] in str(caught.value)


texts = st.text("abz-_.", max_size=4)
numbers = st.tuples(st.integers(0, 1200), st.integers(0, 12), st.integers(0, 4))
"""A first number, how many follow it, and the width that they are written with."""


def compress(number: tuple[int, int, int]) -> str:
    first, more, width = number
    return f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}"


def written_out(number: tuple[int, int, int]) -> list[str]:
    first, more, width = number
    return [f"{n:0{max(width, len(str(first)))}}" for n in range(first, first + more + 1)]


brackets = st.lists(numbers, min_size=1, max_size=3)
entries = st.tuples(st.lists(st.tuples(texts, brackets), max_size=3), texts).filter(
    lambda entry: entry[0] or entry[1]
)


@given(st.lists(entries, min_size=1, max_size=4))
def test_what_is_compressed_is_expanded_again(
    entries: list[tuple[list[tuple[str, list[tuple[int, int, int]]]], str]],
) -> None:
    compressed, hosts = [], []
    for pieces, end in entries:
        compressed.append(
            "".join(f"{text}[{','.join(map(compress, bracket))}]" for text, bracket in pieces) + end
        )
        choices = [
            [text + number for item in bracket for number in written_out(item)]
            for text, bracket in pieces
        ]
        hosts += ["".join(choice) + end for choice in itertools.product(*choices)]
    assume(len(hosts) <= MAX_HOSTS)
    assert expand_hostlist(",".join(compressed)) == hosts


@given(st.text("ab12-,[]. \n", max_size=20))
def test_anything_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except dbuffer.OptionError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], \n") for host in hosts)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this process be in a job: with these variables, and no others of its nodes."""

    def be_in(**variables: str) -> None:
        for name in NODELIST_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, hostlist in variables.items():
            monkeypatch.setenv(name, hostlist)

    return be_in


def test_the_last_nodes_of_the_job_run_engines(job: Callable[..., None]) -> None:
    job(SLURM_JOB_NODELIST="n[01-05]")
    assert inference_nodes(2) == ["n04", "n05"]
    assert inference_nodes(5) == ["n01", "n02", "n03", "n04", "n05"]
    job(SLURM_NODELIST="a[1-2]")
    assert inference_nodes(1) == ["a2"]


def test_too_few_nodes_are_refused(job: Callable[..., None]) -> None:
    job(SLURM_JOB_NODELIST="n[1-2]")
    with pytest.raises(dbuffer.NotReadyError, match="the job has 2 nodes: n1,n2"):
        inference_nodes(3)


def test_a_process_outside_of_a_job_is_told_so(job: Callable[..., None]) -> None:
    job()
    with pytest.raises(RuntimeError, match="SLURM_JOB_NODELIST is not set"):
        inference_nodes(1)
