"""Fixtures: the lab's guests, booted when the first test needs one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.lab.lab import LIMIT_S, VERSIONS, Lab, Scenario, skip_or_fail
from tests.lab.uml import UnavailableError
from tests.support.soak import IN_SOAKS_ALONE, is_soak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        scenario = _scenario_of(item)
        if scenario is not None:
            item.add_marker(pytest.mark.nfs)
            if not scenario.both and _version_of(item) != VERSIONS[-1]:
                for mark in IN_SOAKS_ALONE:
                    item.add_marker(mark)
            # A test waits for those before it in the guest, each of which has its own limit.
            item.add_marker(pytest.mark.timeout(6 * LIMIT_S))


@pytest.fixture(scope="session")
def boot(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Lab]]:
    """Boots the guest of an NFS version, once; both at once, for a machine with two cores."""
    queues: dict[str, list[Scenario]] = {version: [] for version in VERSIONS}
    for item in request.session.items:
        scenario = _scenario_of(item)
        if scenario is not None and not _is_skipped(item):
            queues[_version_of(item)].append(scenario)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def boot_one(version: str) -> Lab:
            guest = Lab(version, queues[version])
            stack.callback(guest.close)
            return guest

        for version, queue in queues.items():
            # In a soak any process takes any test: each boots what its own need.
            if queue and not is_soak():
                boot_one(version)
        yield boot_one


@pytest.fixture(params=VERSIONS, ids=[f"v{version}" for version in VERSIONS])
def lab(request: pytest.FixtureRequest) -> Lab:
    """The guest of one NFS version."""
    try:
        found: Lab = request.getfixturevalue("boot")(request.param)
    except UnavailableError as error:
        skip_or_fail(error)
    return found


def _is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def _version_of(item: pytest.Item) -> str:
    assert isinstance(item, pytest.Function)
    version: str = item.callspec.params["lab"]
    return version


def _scenario_of(item: pytest.Item) -> Scenario | None:
    return getattr(getattr(item, "function", None), "scenario", None)
