"""`ShapeCheck`: whether a version fits an engine's model, and how the model's loaders load it.

Tensors without data are loaded into a copy of the model (:class:`MetaModel`) while the engine
serves. `UnusedTensors` refuses a version with tensors that no loader has read, or warns of them.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from dbuffer.engine.meta_model import DraftedModel, MetaModel
from dbuffer.engine.plan.load_trace import LoadTrace, same_bytes
from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import Layout, TensorSpec, is_of_draft
from dbuffer.format.lineage import VersionId
from dbuffer.io.tensors import DTYPES
from dbuffer.receive.reader import Snapshot
from dbuffer.runtime.messages import described, listed
from dbuffer.weights.names import NameMap
from dbuffer.weights.targets import advice

logger = logging.getLogger(__name__)

_MAX_UNKNOWN = 500
"""Limit of a search for names that loaders do not know. A loader raises at the first unknown name,
so each name costs another load."""


class ShapeCheck:
    """Checks versions by loading tensors without data into a copy of a model.

    Make the copy on the worker's main thread, because making it changes settings of the whole
    process. A check may run in another thread while the engine serves. ``is_spare`` returns whether
    the engine may leave out a tensor of a given name.
    """

    def __init__(
        self,
        meta: MetaModel,
        is_spare: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._meta = meta
        self._is_spare = is_spare
        self._specs: Sequence[TensorSpec] = ()

    def __call__(
        self, specs: Sequence[TensorSpec], aliases: Mapping[str, str] | None = None
    ) -> LoadTrace:
        """Check that tensors fit the model; return the trace of how its loaders load them.

        ``aliases`` maps other names of tied tensors to their names in the store. If
        tensors under their stored names leave the model incomplete, the check also loads them under
        the other names. If the model has no draft, a version's draft is left out. Raise
        :class:`WeightsMismatchError` if a shape does not fit, or a tensor is missing.
        """
        aliases = dict(aliases or {})
        if isinstance(model := self._meta.model, DraftedModel):
            self._meta.leaves_draft = not model.has_draft([*(s.name for s in specs), *aliases])
        else:
            specs = [spec for spec in specs if not is_of_draft(spec.name)]
            aliases = {alias: name for alias, name in aliases.items() if not is_of_draft(alias)}
        spec_of = {spec.name: spec for spec in specs}
        stored = {alias: name for alias, name in aliases.items() if alias not in spec_of}
        further = [spec_of[name]._replace(name=alias) for alias, name in stored.items()]
        try:
            trace = self._trace(specs)
        except WeightsMismatchError as error:
            if further:
                with contextlib.suppress(WeightsMismatchError):
                    return self._trace([*specs, *further])
            raise WeightsMismatchError(f"{error}{self._advice(specs)}") from error.__cause__
        surplus = [
            str(spec)
            for spec in further
            # If an embedding or a head loads a tensor, its other names need no place in the model.
            if stored[spec.name] not in self._meta.recorder.embedded
            if spec.name not in self._meta.names
        ]
        return replace(trace, unused=(*trace.unused, *surplus))

    def of_part(self, names: Collection[str]) -> LoadTrace:
        """Trace how the model's loaders load only ``names``, some tensors of the last check.

        Raise :class:`WeightsMismatchError` if the loaders cannot load these tensors alone.
        """
        self._load([spec for spec in self._specs if spec.name in names])
        return self._meta.end()

    def _trace(self, specs: Sequence[TensorSpec]) -> LoadTrace:
        """Trace a load of tensors. Leave out tensors whose names the loaders refuse."""
        accepted = specs
        try:
            tensors = self._load(specs)
        except WeightsMismatchError:
            unknown = self._unknown_among(specs)
            if not unknown:
                raise
            accepted = [spec for spec in specs if spec.name not in unknown]
            tensors = self._load(accepted)
        try:
            self._meta.require_complete()
        except WeightsMismatchError as error:
            without_place = [str(spec) for spec in specs if spec.name not in tensors]
            if not without_place:
                raise
            message = f"{error}; the engine's model has no place for {listed(without_place)}"
            raise WeightsMismatchError(message) from None
        self._specs = accepted
        trace, recorder = self._meta.end(), self._meta.recorder
        read, embedded = recorder.read, recorder.embedded
        twins = {(s.dtype, s.shape): s.name for s in accepted if s.name in embedded}
        unused = [s for s in specs if s.name not in read and not self._makes_no_difference(s)]
        twin_of = {s: twins.get((s.dtype, s.shape)) for s in unused if not is_of_draft(s.name)}
        return replace(
            trace,
            unused=tuple(str(s) for s in unused if not twin_of.get(s)),
            twins={s.name: twin for s, twin in twin_of.items() if twin},
        )

    def _advice(self, specs: Sequence[TensorSpec]) -> str:

        def fits(names: NameMap) -> bool:
            changed = [spec._replace(name=names(spec.name)) for spec in specs]
            self._load(changed)
            self._meta.require_complete()
            read = self._meta.recorder.read
            return all(s.name in read or self._makes_no_difference(s) for s in changed)

        return advice([spec.name for spec in specs], self._meta.names, fits)

    def _makes_no_difference(self, spec: TensorSpec) -> bool:
        return _is_computed(spec) or self._is_spare(spec.name)

    def _unknown_among(self, specs: Sequence[TensorSpec]) -> set[str]:
        """Return the names of tensors which loaders refuse before they read the tensor."""
        unknown: set[str] = set()
        self._meta.reset()
        specs = list(specs)
        while specs and len(unknown) < _MAX_UNKNOWN:
            tensors, refused, _ = self._offer(specs)
            # If loaders have read the tensor, they know its name, and refuse it for another reason:
            # `_load` will raise this error.
            if refused is None or refused.name in self._meta.recorder.read:
                break
            unknown.add(refused.name)
            specs = specs[len(tensors) :]
        return unknown

    def _load(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        self._meta.reset()
        tensors, refused, error = self._offer(specs)
        if error is not None:
            reason = str(error) if isinstance(error, WeightsMismatchError) else described(error)
            current = refused or ("the last tensor" if tensors else "no tensor at all")
            message = f"{current} does not fit the engine's model: {reason}"
            raise WeightsMismatchError(message) from error
        return tensors

    def _offer(
        self, specs: Sequence[TensorSpec]
    ) -> tuple[dict[str, torch.Tensor], TensorSpec | None, Exception | None]:
        """Load tensors without data, until the loaders raise or are done.

        Return the tensors that the loaders took, the tensor on which they raised an error, and the
        error.
        """
        tensors: dict[str, torch.Tensor] = {}
        current: TensorSpec | None = None

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for spec in specs:
                tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
                tensors[spec.name], current = tensor, spec
                self._meta.recorder.note_source(spec.name, tensor)
                yield spec.name, tensor
            current = None

        try:
            with self._meta, torch.device("meta"):
                self._meta.model.load_weights(shapes())
        # Loaders refuse tensors by any error: AssertionError, KeyError, ValueError, RuntimeError.
        except Exception as error:  # noqa: BLE001
            # Some loaders take all tensors before they load any, so ask which tensor they load.
            name = self._meta.loading or getattr(self._meta.model, "last_of_draft", None)
            current = next((spec for spec in specs if spec.name == name), current)
            return tensors, current, error
        return tensors, None, None

    def loaded(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Load real (not meta) tensors by the model's loaders; return the parameter ``name``.

        Call this method in the thread that ran the check.
        """
        with self._meta.with_data(name) as real:
            self._meta.model.load_weights(iter(tensors))
        return real


_COMPUTED = re.compile(r".*(inv_freq|\b(cos|sin)_cached|\bposition_ids)")
_MASK = re.compile(r".*\battn\.(masked_)?bias|.*\battention\.(masked_)?bias")


def _is_computed(spec: TensorSpec) -> bool:
    """Whether a tensor is a buffer that models compute from their configuration."""
    if _COMPUTED.fullmatch(spec.name):
        return True
    is_square = len(spec.shape) == 4 and spec.shape[:2] == (1, 1) and len({*spec.shape[2:]}) == 1
    return bool(_MASK.fullmatch(spec.name)) and (is_square or not spec.shape)


_MTP = re.compile(r"(.*\.)?mtp(_\w+)?\..*")
_LAYER = re.compile(r"(.*\.)?layers\.(\d+)\..*")


def is_multi_token_prediction(name: str, config: Any) -> bool:
    """Whether a tensor belongs to a draft's layers, according to the model's configuration."""
    if _MTP.fullmatch(name):
        return True
    num_drafting = getattr(config, "num_nextn_predict_layers", None) or 0
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    layer = _LAYER.fullmatch(name)
    return layer is not None and num_layers <= int(layer[2]) < num_layers + num_drafting


class UnusedTensors:
    """Refuses versions with tensors that the model has no place for, or warns of the tensors once.

    A duplicate of a tied tensor counts as unused only if it differs from the tied tensor. In a
    pipeline, a tensor counts as unused only if all ranks skipped it.
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
        self._redundant: set[str] = set()
        """Duplicates of tied tensors, in the last layout, that no rank reads."""
        self._differing: tuple[VersionId | None, dict[str, str]] = None, {}
        """Version compared last, and descriptions of its tensors that duplicate a tied tensor and
        differ from it."""

    def check(self, trace: LoadTrace) -> None:
        """Refuse a version, or warn, if the model has no place for some of its tensors.

        If the ranks form a pipeline, :meth:`check_pipeline` does this instead.
        """
        if not self._is_pipeline:
            self._refuse_or_warn(trace.unused)

    def compare(self, trace: LoadTrace, snapshot: Snapshot) -> None:
        """Refuse a version with duplicates of tied tensors that differ from the tied tensor.

        If the ranks form a pipeline, only note the differences, which :meth:`unread` returns.
        """
        tensors, aliases = snapshot.tensors, snapshot.layout.aliases
        stored = {name: aliases.get(name, name) for pair in trace.twins.items() for name in pair}
        differing = {
            name: f"{name} (it differs from {twin}, which the engine uses instead)"
            for name, twin in trace.twins.items()
            if stored[name] != stored[twin]
            and not same_bytes(tensors[stored[name]], tensors[stored[twin]])
        }
        if self._is_pipeline:
            self._differing = snapshot.id, differing
        else:
            self._refuse_or_warn([*differing.values()])

    def unread(
        self, layout: Layout, version: VersionId, trace: LoadTrace
    ) -> tuple[dict[str, str | None], dict[str, str]]:
        """Return two dictionaries of the tensors that this rank of a pipeline does not read.

        The first has, by name, the tensors that the rank's model has no place for. The value
        describes the tensor, or is None if the tensor is a duplicate of a tied tensor of the model.
        The second has, by name, descriptions of the duplicates that differ from the tied tensor.
        """
        differing = self._differing[1] if self._differing[0] == version else {}
        if not self._is_pipeline or layout == self._agreed:
            return {}, differing
        unused = {text.partition(" ")[0]: text for text in trace.unused}
        return unused | dict.fromkeys(trace.twins), differing

    def check_pipeline(
        self,
        layout: Layout,
        unused: Sequence[Mapping[str, str | None]],
        differing: Sequence[Mapping[str, str]],
    ) -> None:
        """Refuse, on all ranks of a pipeline, a version with tensors that no rank reads.

        The arguments are the results of :meth:`unread` on all ranks.
        """
        if not self._is_pipeline:
            return
        nowhere: list[str] = []
        if layout != self._agreed:
            unread = set.intersection(*map(set, unused))
            self._redundant = {name for name in unread if None in [of[name] for of in unused]}
            texts = (unused[0][name] for name in sorted(unread - self._redundant))
            nowhere = [text for text in texts if text is not None]
        different = {
            name: text for of in differing for name, text in of.items() if name in self._redundant
        }
        self._refuse_or_warn([*nowhere, *different.values()])
        self._agreed = layout

    def _refuse_or_warn(self, unused: Sequence[str]) -> None:
        if unused and self._treatment == "refuse":
            raise WeightsMismatchError(no_places(unused))
        new = [name for name in unused if name not in self._warned]
        if new and self._is_first:
            logger.warning(
                "versions of %s are served without %s: the engine's model has no place for them",
                self._store,
                listed(new),
            )
        self._warned.update(unused)


def no_places(unused: Sequence[str]) -> str:
    """Return the message about published tensors that the model has no place for."""
    return (
        f"the engine's model has no place for {listed(unused)}, and would answer "
        "without them: publish only tensors that the engine's model has, or start the engine from "
        "a checkpoint of the published model. "
        "With unused_tensors='warn' such tensors are left out"
    )
