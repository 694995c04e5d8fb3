"""Fixtures: the lab's guest, booted when the first test needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from tests.lab.lab import LIMIT_S, VERSIONS, Lab, Result, Scenario, skip_or_fail
from tests.lab.uml import UnavailableError
from tests.support.soak import IN_SOAKS_ALONE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        scenario = _scenario_of(item)
        if scenario is not None:
            item.add_marker(pytest.mark.nfs)
            if not scenario.both and _version_of(item) != VERSIONS[-1]:
                item.add_marker(IN_SOAKS_ALONE)
            # A test waits for those before it in the guest, each of which has its own limit.
            item.add_marker(pytest.mark.timeout(6 * LIMIT_S))


@pytest.fixture(scope="session")
def guest(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The guest, which runs the scenarios of all tests of this session that are not skipped."""
    queue = [
        (scenario, _version_of(item))
        for item in request.session.items
        if (scenario := _scenario_of(item)) is not None and not _is_skipped(item)
    ]
    booted = Lab(queue)
    yield booted
    booted.close()


@pytest.fixture(params=VERSIONS, ids=[f"v{version}" for version in VERSIONS])
def result_of(request: pytest.FixtureRequest) -> Callable[[Scenario], Result]:
    """Waits for the result of a scenario over one NFS version."""
    try:
        booted: Lab = request.getfixturevalue("guest")
    except UnavailableError as error:
        skip_or_fail(error)
    return functools.partial(booted.result_of, request.param)


def _is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def _version_of(item: pytest.Item) -> str:
    assert isinstance(item, pytest.Function)
    version: str = item.callspec.params["result_of"]
    return version


def _scenario_of(item: pytest.Item) -> Scenario | None:
    return getattr(getattr(item, "function", None), "scenario", None)
