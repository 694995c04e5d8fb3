"""`RankModel`: the model of one rank, into which versions are loaded.

A version is checked and prepared in the stager's thread, while the engine serves. It is loaded in
the worker's main thread, between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from dbuffer.engine.contract import EngineRank, ModelState
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.plan.attestation import same_bytes
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.plan.patching import Changed
from dbuffer.engine.plan.prepared_switch import PreparedSwitch
from dbuffer.engine.plan.weight_loader import WeightLoader
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.io.copier import Copier
from dbuffer.receive.snapshot import Snapshot
from dbuffer.receive.stager import Staged
from dbuffer.runtime.messages import described, listed
from dbuffer.runtime.trouble import log_once
from dbuffer.weights.targets import refuse_adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT_TRACES = 4
"""Number of layouts whose traces are kept."""


class Unread(NamedTuple):
    """Tensors of a version that one rank of a pipeline does not read; it travels as JSON."""

    unused: dict[str, str]
    """Tensors that it has no place for, and why."""
    twins: list[str]
    """Tensors that duplicate a tied tensor of the model."""
    differing: dict[str, str]
    """Differences of such tensors from their tied ones, by name."""


NOTHING_UNREAD = Unread({}, [], {})


class UnusedTensors:
    """Refuses tensors that the model has no place for, or warns of them once.

    A tensor that duplicates a tied tensor of the model counts only if the two differ. A rank of a
    pipeline skips the layers of other ranks, so all ranks compare the tensors they skipped.
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
        """Tensors of that layout that no rank reads, and that duplicate a tensor that is read."""
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
        """Refuse a version with tensors that no rank of a pipeline reads, on all ranks alike."""
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
                "versions of %s are served without %s: the engine's model has no place for them",
                self._store,
                listed(new),
            )
        self._warned.update(unused)


def no_places(unused: Sequence[str]) -> str:
    """Return a message: these tensors were published for a model that has no places for them."""
    return (
        f"the engine's model has no place for {listed(unused)}, and would answer "
        "without them: publish only tensors that it has, or start the engine from a checkpoint of "
        "the published model. "
        "With unused_tensors='warn' such tensors are left out"
    )


class RankModel:
    """Checks versions against the model, prepares them for it, and loads them.

    The stager and `RankReceiver` call it; it calls a `WeightLoader`, which knows no store.
    """

    def __init__(self, rank: EngineRank, options: EngineOptions, state: ModelState) -> None:
        self._state = state
        self._rank = rank
        self.reading = threading.Lock()
        """Held while the stager's thread may read the model's weights."""
        self._shape_check = rank.make_check()
        self._traces: list[tuple[Layout, LoadTrace]] = []
        self.unused = UnusedTensors(
            options.store,
            options.unused_tensors,
            is_pipeline=rank.is_pipeline_stage,
            is_first=rank.ranks.rank == 0,
        )
        self._copier = Copier(options.num_threads)
        self._loader = WeightLoader(
            rank.module,
            rank,
            self._copier,
            self._shape_check,
            plans=options.plan,
            patches=options.attests(on_device=rank.on_device) and rank.on_device,
            not_weights=rank.not_weights,
            packing=rank.packing if options.images else None,
        )

    def close(self) -> None:
        self._copier.close()

    # In the stager's thread

    def check(self, snapshot: Snapshot) -> None:
        """Refuse a version that cannot be loaded."""
        refuse_adapter(snapshot.metadata)
        layout = snapshot.layout
        trace = self._shape_check(layout.specs, layout.aliases)
        # A version is loaded as it was recorded, and the one before may be loaded again.
        self._traces = [(layout, trace), *self._traces][:_KEPT_TRACES]
        self.unused.check(trace)

    def prepare(self, snapshot: Snapshot) -> PreparedSwitch | None:
        """Plan the copies that switch to a version, or return None if a reload is needed."""
        trace = self._trace_of(snapshot.layout)
        if trace is None:
            return None
        self.unused.compare(trace, snapshot)
        tensors = dict(self._as_offered(snapshot.tensors, snapshot.layout))

        def changed_since(version: VersionId) -> Changed | None:
            changed = snapshot.changed_since(version)
            if changed is None:
                return None
            aliases = snapshot.layout.aliases.items()
            return changed | {alias: changed[name] for alias, name in aliases if name in changed}

        with self.reading:
            # What else loads may not be done, and have layers on the meta device meanwhile: no plan
            # is made of those, and the reload that follows verifies none.
            if self._state.is_asleep or self._state.must_reload:
                return None
            return self._loader.prepare(
                tensors, trace, snapshot.id, changed_since, snapshot.layout.aliases
            )

    def attest(self, staged: Staged, is_wanted: Callable[[], bool]) -> Sequence[str] | None:
        """Compare the model with a version that was loaded last; see :meth:`WeightLoader.attest`.

        It is given up once ``is_wanted`` returns False.
        """
        switch = self._switch_of(staged)
        if switch is None:
            return None

        @contextlib.contextmanager
        def reading() -> Iterator[bool]:
            with self.reading:
                is_ours = not (self._state.is_asleep or self._state.must_reload)
                yield is_ours and is_wanted()

        try:
            return self._loader.attest(switch, reading)
        # A device without room, say. That the version is not attested is told.
        except Exception as error:  # noqa: BLE001
            message = "the engine's weights could not be compared with the published ones: %s"
            log_once(logger, message, described(error))
            return None

    # In the worker's main thread

    def is_loadable(self, staged: Staged) -> bool:
        """Whether the staged part of a version is enough to load the version now.

        Raises:
            UnsupportedError: a reload is due, and cannot fill all that computes.
        """
        switch = self._switch_of(staged)
        if switch is not None and switch.replaces_tensors:
            return True
        try:
            self._rank.require_reloadable()
        except UnsupportedError:
            self.note_foreign_load()
            raise
        return staged.tensors is not None

    def load(self, staged: Staged) -> None:
        """Load a version. A failure leaves a mix, to be repaired at once."""
        switch = self._switch_of(staged)
        if switch is not None and switch.replaces_tensors:
            self._loader.apply(switch)
            return
        assert staged.tensors is not None  # noqa: S101 - or the switch replaced them
        trace = self._trace_of(staged.layout)
        tensors = dict(self._as_offered(staged.tensors, staged.layout))
        self._loader.reload(tensors, trace, switch)

    def load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self._loader.load_checkpoint()

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of the model fail, until :meth:`serve_again`."""
        self._state.broken = reason
        self._rank.refuse_to_serve(reason)

    def serve_again(self) -> None:
        self._state.broken = None
        self._rank.serve_again()

    def note_foreign_load(self) -> None:
        """Reload all weights with the next version: something else wrote them."""
        self._state.note_foreign_load()
        self._loader.forget()

    def unread(self, staged: Staged) -> Unread:
        """Return what this rank does not read of a version."""
        return self.unused.unread(staged.layout, staged.id, self._trace_of(staged.layout))

    def _switch_of(self, staged: Staged) -> PreparedSwitch | None:
        """Return the copies prepared for a version, or None if only a reload can load it."""
        if self._state.must_reload or not isinstance(staged.prepared, PreparedSwitch):
            return None
        return staged.prepared

    def _trace_of(self, layout: Layout) -> LoadTrace | None:
        traces = (trace for of, trace in self._traces if of is layout or of == layout)
        return next(traces, None)

    def _as_offered(self, stored: Mapping[str, T], layout: Layout) -> Iterator[tuple[str, T]]:
        """Yield a version's contents under the names that the check offered to the model."""
        trace = self._trace_of(layout)
        names = {**{name: name for name in stored}, **layout.aliases}
        for name, stored_as in names.items():
            if name in trace.offered if trace else name == stored_as:
                yield name, stored[stored_as]
