"""`RankModel`: the model of one rank, into which versions are loaded.

A version is checked and prepared in the stager's thread, while the engine serves. It is loaded in
the worker's main thread, between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from dbuffer.engine.contract import EngineRank, ModelState
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.plan.patching import Changed
from dbuffer.engine.plan.prepared_switch import PreparedSwitch
from dbuffer.engine.plan.weight_loader import WeightLoader
from dbuffer.engine.shape_check import Unread, UnusedTensors
from dbuffer.errors import UnsupportedError
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.io.copier import Copier
from dbuffer.receive.snapshot import Snapshot
from dbuffer.receive.stager import Staged
from dbuffer.runtime.messages import described
from dbuffer.runtime.trouble import log_once
from dbuffer.weights.targets import refuse_adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT_TRACES = 4
"""Number of layouts whose traces are kept."""


class RankModel:
    """Checks versions against the model, prepares them for it, and loads them.

    The stager and `RankReceiver` call it; it calls a `WeightLoader`, which knows no store.
    """

    def __init__(self, rank: EngineRank, options: EngineOptions, state: ModelState) -> None:
        self._state = state
        self.serving = state.model = rank.make_model(state.model)
        """The model as it serves."""
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
            self.serving,
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
        if switch is not None and switch.is_enough:
            return True
        try:
            self.serving.require_reloadable()
        except UnsupportedError:
            self.note_foreign_load()
            raise
        return staged.tensors is not None

    def load(self, staged: Staged) -> None:
        """Load a version. A failure leaves a mix, to be repaired at once."""
        switch = self._switch_of(staged)
        if switch is not None and switch.is_enough:
            self._loader.apply(switch)
            return
        assert staged.tensors is not None  # noqa: S101 - or the switch were enough
        trace = self._trace_of(staged.layout)
        tensors = dict(self._as_offered(staged.tensors, staged.layout))
        self._loader.reload(tensors, trace, switch)

    def load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self._loader.load_checkpoint()

    def refuse_to_serve(self, reason: str) -> None:
        """Let every step of the model fail, until :meth:`serve_again`."""
        self._state.broken = reason
        self.serving.refuse_to_serve(reason)

    def serve_again(self) -> None:
        self._state.broken = None
        self.serving.serve_again()

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
