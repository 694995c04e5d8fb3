"""`ShapeCheck`: whether weights fit an engine's model, and how it loads them, without data.

Shapes are loaded into a copy of the model (:class:`MetaModel`) while the engine serves. Tensors
that no loader has read are in the trace; `rank_model` judges them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dbuffer.engine.meta_model import MetaModel
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.io.tensors import DTYPES
from dbuffer.runtime.messages import described, listed
from dbuffer.weights.comparison import advice
from dbuffer.weights.names import NameMap

_MAX_UNKNOWN = 500
"""Unknown names that are found; loading starts over after each."""


class ShapeCheck:
    """Loads shapes into a copy of a model, without touching the model that serves.

    Building the copy changes settings of the whole process, so that happens on the worker's main
    thread. The check itself does not, and may run while the engine serves.

    Args:
        meta: the copy.
        is_spare: whether the engine leaves out a tensor of this name, as it should.
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
        """Refuse tensors that do not fit the model, and trace how its loaders load the others.

        ``aliases``: further names of some of these tensors, offered to the model too where it lacks
        something without them.

        Raises:
            WeightsMismatchError: a shape is not the model's, or a tensor is missing.
        """
        spec_of = {spec.name: spec for spec in specs}
        more = {alias: name for alias, name in (aliases or {}).items() if alias not in spec_of}
        others = [spec_of[name]._replace(name=alias) for alias, name in more.items()]
        try:
            trace = self._trace(specs)
        except WeightsMismatchError as error:
            if others:
                with contextlib.suppress(WeightsMismatchError):
                    return self._trace([*specs, *others])
            raise WeightsMismatchError(f"{error}{self._advice(specs)}") from error.__cause__
        surplus = [
            str(spec)
            for spec in others
            # Others are names of a tied tensor that the model took under another one.
            if more[spec.name] not in trace.embedded
            if spec.name not in self._meta.names
        ]
        return replace(trace, unused=(*trace.unused, *surplus))

    def of_part(self, names: Collection[str]) -> LoadTrace:
        """Trace how the model's loaders load some of the tensors of the last check alone.

        Raises:
            WeightsMismatchError: they do not take them alone.
        """
        self._load([spec for spec in self._specs if spec.name in names])
        return self._meta.end()

    def _trace(self, specs: Sequence[TensorSpec]) -> LoadTrace:
        """Trace a load of these tensors, without those whose names the loaders refuse."""
        known = specs
        try:
            tensors = self._load(known)
        except WeightsMismatchError:
            unknown = self._unknown_among(specs)
            if not unknown:
                raise
            known = [spec for spec in specs if spec.name not in unknown]
            tensors = self._load(known)
        try:
            self._meta.require_complete()
        except WeightsMismatchError as error:
            unknown_too = [str(spec) for spec in specs if spec.name not in tensors]
            if not unknown_too:
                raise
            what = f"{error}; the engine's model has no place for {listed(unknown_too)}"
            raise WeightsMismatchError(what) from None
        self._specs = known
        embedded = frozenset(n for n, t in tensors.items() if self._meta.is_embedded(t))
        read = {name for name, tensor in tensors.items() if self._meta.is_read(tensor)}
        twins = {(s.dtype, s.shape): s.name for s in known if s.name in embedded}
        unused = [s for s in specs if s.name not in read and not self._makes_no_difference(s)]
        return replace(
            self._meta.end(),
            unused=tuple(str(s) for s in unused if (s.dtype, s.shape) not in twins),
            twins={s.name: twins[s.dtype, s.shape] for s in unused if (s.dtype, s.shape) in twins},
            embedded=embedded,
        )

    def _advice(self, specs: Sequence[TensorSpec]) -> str:
        """Return the end of a message about tensors that the loaders refuse."""

        def fits(names: NameMap) -> bool:
            changed = [spec._replace(name=names(spec.name)) for spec in specs]
            tensors = self._load(changed)
            self._meta.require_complete()
            return all(
                self._meta.is_read(tensors[spec.name]) or self._makes_no_difference(spec)
                for spec in changed
            )

        return advice([spec.name for spec in specs], self._meta.names, fits)

    def _makes_no_difference(self, spec: TensorSpec) -> bool:
        return _is_computed(spec) or self._is_spare(spec.name)

    def _unknown_among(self, specs: Sequence[TensorSpec]) -> set[str]:
        """Return tensors that loaders refuse without reading them, as they do unknown names."""
        unknown: set[str] = set()
        self._meta.reset()
        rest = list(specs)
        while rest and len(unknown) < _MAX_UNKNOWN:
            tensors, refused, _ = self._offer(rest)
            # If the error was about something else, `_load` says so.
            if refused is None or self._meta.is_read(tensors[refused.name]):
                break
            unknown.add(refused.name)
            rest = rest[len(tensors) :]
        return unknown

    def _load(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """Let the loaders load tensors without data, and return those by their names."""
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
        """Load these until the loaders raise.

        Returns:
            The tensors that they asked for, the last one of these if they did not ask for more,
            and their error.
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
        # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
        except Exception as error:  # noqa: BLE001
            return tensors, current, error
        return tensors, None, None

    def loaded(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Load some tensors with data, and return how they fill the parameter of this name.

        For the same thread as the check. Errors of the loaders are raised.
        """
        with self._meta.with_data(name) as real:
            self._meta.model.load_weights(iter(tensors))
        return real


_COMPUTED = re.compile(r".*(inv_freq|\b(cos|sin)_cached|\bposition_ids)")
_MASK = re.compile(r".*\battn\.(masked_)?bias|.*\battention\.(masked_)?bias")


def _is_computed(spec: TensorSpec) -> bool:
    """Whether it is a buffer that every model computes from its configuration."""
    if _COMPUTED.fullmatch(spec.name):
        return True
    is_square = len(spec.shape) == 4 and spec.shape[:2] == (1, 1) and len({*spec.shape[2:]}) == 1
    return bool(_MASK.fullmatch(spec.name)) and (is_square or not spec.shape)


_MTP = re.compile(r"(.*\.)?mtp(_\w+)?\..*")
_LAYER = re.compile(r"(.*\.)?layers\.(\d+)\..*")


def is_multi_token_prediction(name: str, config: Any) -> bool:
    """Whether a tensor is of layers that only a draft has, by a model's configuration."""
    if _MTP.fullmatch(name):
        return True
    num_drafting = getattr(config, "num_nextn_predict_layers", None) or 0
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    layer = _LAYER.fullmatch(name)
    return layer is not None and num_layers <= int(layer[2]) < num_layers + num_drafting
