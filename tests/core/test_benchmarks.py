"""Options of the benchmarks."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as benchmarks


@pytest.mark.parametrize(
    "given",
    [["--dir", "/one", "/two"], ["--dir", "/one", "--dir", "/two"]],
    ids=["at once", "each"],
)
def test_directories_are_in_the_order_given(given: list[str]) -> None:
    assert [str(each) for each in benchmarks._parse(["objects", *given]).dir] == ["/one", "/two"]


def test_without_directories_stores_are_in_memory() -> None:
    assert str(benchmarks._parse(["objects"]).dir[0]) == "/dev/shm"
