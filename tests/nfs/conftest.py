"""Fixtures: the lab's guests, booted when the first test needs one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from lab import LIMIT_S, VERSIONS, Lab, Scenario, skip_or_fail
from uml import UnavailableError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _scenario_of(item) is not None:
            item.add_marker(pytest.mark.nfs)
            # A test waits for those before it in the guest, each of which has its own limit.
            item.add_marker(pytest.mark.timeout(6 * LIMIT_S))


@pytest.fixture(scope="session")
def labs(request: pytest.FixtureRequest) -> Iterator[dict[str, Lab]]:
    """A running guest for each NFS version; both at once, for a machine with two cores."""
    queues: dict[str, list[Scenario]] = {version: [] for version in VERSIONS}
    for item in request.session.items:
        scenario = _scenario_of(item)
        if scenario is not None and isinstance(item, pytest.Function):
            queues[item.callspec.params["lab"]].append(scenario)
    with contextlib.ExitStack() as stack:
        guests = {}
        for version, queue in queues.items():
            if queue:
                guests[version] = Lab(version, queue)
                stack.callback(guests[version].close)
        yield guests


@pytest.fixture(params=VERSIONS, ids=[f"v{version}" for version in VERSIONS])
def lab(request: pytest.FixtureRequest) -> Lab:
    """The guest of one NFS version."""
    try:
        labs: dict[str, Lab] = request.getfixturevalue("labs")
    except UnavailableError as error:
        skip_or_fail(error)
    return labs[request.param]


def _scenario_of(item: pytest.Item) -> Scenario | None:
    return getattr(getattr(item, "function", None), "scenario", None)
