"""`UnusedTensors`: tensors of a version that the engine's model does not read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.integrations.engine.plan.load_trace import LoadTrace
from dbuffer.integrations.engine.plan.patching import same_bytes
from dbuffer.integrations.engine.shape_check import no_places
from dbuffer.receive.snapshot import Snapshot
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)


class Unread(NamedTuple):
    """Tensors of a version that one rank of a pipeline does not read; it travels as JSON."""

    unused: dict[str, str]
    """Tensors that it has no place for, and why."""
    twins: list[str]
    """Tensors that it has another one for, to which they are tied."""
    differing: dict[str, str]
    """Tensors that differ from the ones to which they are tied, and how."""


NOTHING_UNREAD = Unread({}, [], {})


class UnusedTensors:
    """Refuses tensors that the model has no place for, or warns of them once.

    A tensor that is not read because the model has another one in its place, to which it is tied,
    counts only where the two differ. One rank of a pipeline passes over the layers of the others:
    there only all ranks together can tell, when each has said what it does not read.
    """

    def __init__(
        self, store: str, treatment: Literal["refuse", "warn"], *, is_pipeline: bool, is_first: bool
    ) -> None:
        self._store = store
        self._treatment = treatment
        self._is_pipeline = is_pipeline
        self._is_first = is_first
        self._warned: set[str] = set()
        self._agreed: Layout | None = None
        """Last layout that the ranks of a pipeline agreed on."""
        self._redundant: set[str] = set()
        """Tensors of that layout that no rank reads, and that are tied to one that is read."""
        self._differing: tuple[VersionId | None, dict[str, str]] = None, {}
        """Identity of the version compared last, and its tensors that differ from their twins."""

    def check(self, trace: LoadTrace) -> None:
        """Refuse a layout, as far as this rank alone can tell."""
        if not self._is_pipeline:
            self._refuse_or_warn(trace.unused)

    def compare(self, trace: LoadTrace, snapshot: Snapshot) -> None:
        """Refuse a version whose tied tensors differ, as far as this rank alone can tell."""
        tensors, aliases = snapshot.tensors, snapshot.layout.aliases
        stored = {name: aliases.get(name, name) for pair in trace.twins.items() for name in pair}
        differing = {
            name: f"{name} (it differs from {twin}, which the engine has in its place)"
            for name, twin in trace.twins.items()
            if stored[name] != stored[twin]
            and not same_bytes(tensors[stored[name]], tensors[stored[twin]])
        }
        if self._is_pipeline:
            self._differing = snapshot.id, differing
        else:
            self._refuse_or_warn([*differing.values()])

    def unread(self, layout: Layout, version: VersionId, trace: LoadTrace | None) -> Unread:
        """Return what this rank of a pipeline does not read, for the other ranks."""
        if not self._is_pipeline:
            return NOTHING_UNREAD
        differing = self._differing[1] if self._differing[0] == version else {}
        if layout == self._agreed or trace is None:
            return Unread({}, [], differing)
        unused = {text.partition(" ")[0]: text for text in trace.unused}
        return Unread(unused, [*trace.twins], differing)

    def check_pipeline(self, layout: Layout, of_ranks: Sequence[Unread]) -> None:
        """Refuse a version by what all ranks of a pipeline do not read; on all ranks alike."""
        if not self._is_pipeline:
            return
        nowhere: list[str] = []
        if layout != self._agreed:
            unread = set.intersection(*({*each.unused, *each.twins} for each in of_ranks))
            self._redundant = unread & {name for each in of_ranks for name in each.twins}
            nowhere = [of_ranks[0].unused[name] for name in sorted(unread - self._redundant)]
        differing = {
            name: why
            for each in of_ranks
            for name, why in each.differing.items()
            if name in self._redundant
        }
        self._refuse_or_warn([*nowhere, *differing.values()])
        self._agreed = layout

    def _refuse_or_warn(self, unused: Sequence[str]) -> None:
        if unused and self._treatment == "refuse":
            raise WeightsMismatchError(no_places(unused))
        new = [each for each in unused if each not in self._warned]
        if new and self._is_first:
            logger.warning(
                "versions of %s are served without %s, for which the engine's model has no place",
                self._store,
                listed(new),
            )
        self._warned.update(unused)
