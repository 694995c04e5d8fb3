"""Relations of versions, against a model: a tree of runs, in which paths lead to the root."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.format.lineage import MAX_RUNS, Lineage, Relation, Run, VersionId, relation


def run_of(index: int, upon: int | None) -> Run:
    return Run(f"{index:016x}", None, "host", 1, float(index), upon)


class Tree(NamedTuple):
    """Versions that were published, each with the one before it."""

    lineages: list[Lineage]
    parents: dict[VersionId, VersionId | None]

    def path(self, version: VersionId) -> list[VersionId]:
        """A version, the one before it, and so on back to the first."""
        path, each = [], version
        while each is not None:
            path.append(each)
            each = self.parents[each]
        return path


@st.composite
def trees(draw, max_runs: int = 7) -> Tree:
    """Runs that begin upon any version that a store may have been put back to, or upon none."""
    tree = Tree([], {})
    for index in range(draw(st.integers(1, max_runs))):
        before = draw(st.sampled_from([None, *tree.lineages]))
        number = 0 if before is None else before.id.number
        run = run_of(index, None if before is None else number)
        runs = [run, *([] if before is None else before.runs)][:MAX_RUNS]
        parent = None if before is None else before.id
        for step in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)):
            number += step
            version = VersionId(run.id, number)
            tree.parents[version] = parent
            tree.lineages.append(Lineage(version, runs))
            parent = version
    return tree


@given(trees())
def test_relations_are_those_of_paths_in_the_tree(tree):
    for mine in tree.lineages:
        for newest in tree.lineages:
            mine_leads = mine.id in tree.path(newest.id)
            newest_leads = newest.id in tree.path(mine.id)
            assert newest.reaches(mine.id) == mine_leads
            assert (
                relation(mine, newest)
                is {
                    (True, True): Relation.BEHIND,
                    (True, False): Relation.BEHIND,
                    (False, True): Relation.AHEAD,
                    (False, False): Relation.FORKED,
                }[mine_leads, newest_leads]
            )


@given(trees())
def test_a_number_names_the_version_on_the_path(tree):
    for newest in tree.lineages:
        path = {version.number: version for version in tree.path(newest.id)}
        assert newest.at(newest.id.number + 1) is None
        assert newest.at(0) is None
        for number in range(1, newest.id.number + 1):
            version = newest.at(number)
            assert version is not None
            # A number that was skipped names a version that no store holds.
            assert version not in tree.parents or version == path[number]
            assert number not in path or version == path[number]


@given(trees())
def test_an_earlier_version_has_the_runs_that_it_was_published_with(tree):
    lineages = {lineage.id: lineage for lineage in tree.lineages}
    for newest in tree.lineages:
        for version in tree.path(newest.id):
            assert newest.to(version) == lineages[version]


@given(trees())
def test_one_has_a_version_by_having_a_later_one_on_the_path(tree):
    for newest in tree.lineages:
        path = tree.path(newest.id)
        for version in path:
            assert not newest.has_since(version.number, None)
            for mine in tree.parents:
                is_later = mine in path and version in tree.path(mine)
                assert newest.has_since(version.number, mine) == is_later


def chain(num_runs: int) -> Lineage:
    """Return the last version of so many runs of two versions each."""
    runs: list[Run] = []
    for index in range(num_runs):
        runs = [run_of(index, 2 * index or None), *runs][:MAX_RUNS]
    return Lineage(VersionId(runs[0].id, 2 * num_runs), runs)


@pytest.mark.parametrize("num_runs", [1, MAX_RUNS, MAX_RUNS + 1, MAX_RUNS + 9])
def test_a_version_is_reached_from_as_many_runs_as_are_named(num_runs):
    newest = chain(num_runs)
    for index in range(num_runs):
        version = VersionId(f"{index:016x}", 2 * index + 2)
        is_named = num_runs - index <= MAX_RUNS
        assert newest.reaches(version) == is_named
        expected = Relation.BEHIND if is_named else Relation.FORKED
        assert relation(chain(index + 1), newest) is expected
        assert newest.at(version.number) == (version if is_named else None)
