"""Whether weights fit a model, told while it serves: loaded without data into a copy without data.

The copy's own loaders do that (:class:`ShapeCheck`), and what they write is counted
(:class:`WatchedLoads`): engines fuse parameters (q, k and v are one), so a set of loaded names
cannot tell that one of the parts is missing. Loaders also pass over what they do not know, so
tensors that no loader has read are reported.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.model_copy import leave_data_out, with_data
from dbuffer.integrations.engine.plan.load_trace import (
    LoadRecorder,
    LoadTrace,
    Unwrapped,
    storage_of,
    tables_of,
    unwrapped_by,
)
from dbuffer.io.tensors import DTYPES
from dbuffer.runtime.messages import listed
from dbuffer.weights.names import NameMap, renamed

Loader = Callable[..., Any]

_ALL = ""
"""No tensor's name: in the place of one more, once loaders have asked for all."""


_MAX_UNKNOWN = 500
"""Of how many unknown names each is found out: loading is begun anew after each."""


class WatchedLoads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a model's loaders write into each of its tensors.

    Args:
        model: the copy, made on the meta device. Layers that name a device of their own are
            moved there.
        embedding: the class of embeddings and heads, which are padded to a round number of rows;
            no checkpoint has the last ones, and the loaders check the rows they get.
        default_loader: of tensors without a ``weight_loader``.
        tp_size: over how many ranks a tensor may be spread, of which nothing else is known.
        serving: the model that serves, whose loaders may have registered parameters that the copy
            does not have yet. None: they have not.
        wrapper: the name of a layer of ``serving`` in the one that wraps it; None: none is wrapped.
    """

    def __init__(
        self,
        model: Any,
        *,
        embedding: type[torch.nn.Module],
        default_loader: Loader,
        tp_size: int,
        serving: torch.nn.Module | None = None,
        wrapper: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        leave_data_out(model)
        self.model = model
        self._tp_size = tp_size
        self._thread: int | None = None
        self.recorder = LoadRecorder(dict(model.named_parameters()) | dict(model.named_buffers()))
        self.names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        """All names of its parameters, those of tied ones included."""
        self._name_of = {id(tensor): name for name, tensor in model.named_parameters()}
        self._loaded: dict[int, int] = {}
        self._read: set[int] = set()
        self._embedded: set[int] = set()
        self._padded = {
            id(parameter): module
            for module in model.modules()
            if isinstance(module, embedding)
            for parameter in module.parameters(recurse=False)
        }
        for tensor in (*model.parameters(), *model.buffers()):
            self._wrap_loader(tensor, getattr(tensor, "weight_loader", default_loader))
        self._served_late: dict[str, torch.Size] = {}
        self._late: dict[str, tuple[torch.nn.Module, str]] = {}
        self._watch_late_parameters(serving, unwrapped_by(wrapper))

    def reset(self) -> None:
        for module, name in self._late.values():
            tables_of(module)[0][name] = None
        self._late.clear()
        self._loaded.clear()
        self._read.clear()
        self._embedded.clear()
        self._thread = threading.get_ident()
        self.recorder.begin()

    def require_complete(self) -> None:
        """Raise :class:`WeightsMismatchError` if something is missing."""
        raise NotImplementedError

    def note_read(self, tensor: torch.Tensor) -> None:
        """A loader is about to read this."""
        # What loaders make themselves is gone soon, and another tensor where it was.
        if self.recorder.is_source(tensor):
            self._read.add(storage_of(tensor))

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Whether a loader has read this, or a view of it."""
        return storage_of(tensor) in self._read

    def is_embedded(self, tensor: torch.Tensor) -> bool:
        """Whether this has gone into an embedding or a head."""
        return storage_of(tensor) in self._embedded

    def note_loaded(self, tensor: Any, count: int, *, is_part: bool) -> None:
        """A loader has written so many elements of this; of a part of it, or of it as a whole."""

    def num_shares(self, tensor: Any) -> int:  # noqa: ARG002
        """Over how many ranks a tensor may be spread."""
        return self._tp_size

    def count_of(self, tensor: Any) -> int:
        return self._loaded.get(id(tensor), 0)

    def end(self) -> LoadTrace:
        """What was done since :meth:`reset`."""
        return self.recorder.end(
            (tensor, self.count_of(tensor))
            for tensor in (*self.model.parameters(), *self.model.buffers())
        )

    def require_whole(self, name: str, tensor: Any, num_elements: int) -> None:
        """Raise :class:`WeightsMismatchError` if fewer elements of this were written."""
        loaded = self.count_of(tensor)
        if loaded < (1 if id(tensor) in self._padded else num_elements):
            raise WeightsMismatchError(
                f"only {loaded} of {num_elements} elements of {name} were published"
            )

    def require_late_parameters(self, *, partial: bool = False) -> None:
        """Refuse other parameters than loaders registered when the engine was started."""
        for path, (module, name) in self._late.items():
            served = self._served_late.get(path)
            shape = tables_of(module)[0][name].shape
            if served is None:
                raise WeightsMismatchError(
                    f"{path} was published, and the engine was started from a checkpoint without: "
                    "leave it out, or start the engine from a checkpoint that has it"
                )
            if shape != served:
                raise WeightsMismatchError(
                    f"{path} was published as {list(shape)}; the engine has {list(served)}"
                )
        if not partial and (missing := self._served_late.keys() - self._late.keys()):
            raise WeightsMismatchError(
                f"{listed(sorted(missing))} of the engine's model was not published"
            )

    def _watch_late_parameters(self, serving: torch.nn.Module | None, unwrapped: Unwrapped) -> None:
        """Find out which parameters the model's loaders register themselves: some biases."""
        served = dict(serving.named_parameters()) if serving is not None else {}
        shapes = {unwrapped(name): tensor.shape for name, tensor in served.items()}
        for prefix, module in self.model.named_modules():
            lacking = [name for name, tensor in tables_of(module)[0].items() if tensor is None]
            paths = {f"{prefix}.{name}".lstrip("."): name for name in lacking}
            # Engines make others of what they have loaded.
            late = [path for path, name in paths.items() if name == "bias" and path in shapes]
            self._served_late |= {path: shapes[path] for path in late}
            if paths:
                register = functools.partial(self._register, prefix, module)
                module.register_parameter = register

    def _register(self, prefix: str, module: torch.nn.Module, name: str, parameter: Any) -> None:
        """Register a parameter of the copy, and treat it as loaded: its loader is not wrapped."""
        is_late = tables_of(module)[0].get(name) is None and parameter is not None
        torch.nn.Module.register_parameter(module, name, parameter)
        if not is_late or self._thread is None:
            return
        path = f"{prefix}.{name}".lstrip(".")
        self._late[path] = module, name
        self._loaded[id(parameter)] = parameter.numel()
        self.note_read(parameter)
        self.recorder.note_registered(path, parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor):
                self.note_read(value)
        self.recorder.note(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.recorder.note_result(args, kwargs or {}, result)
        return result

    def _wrap_loader(self, tensor: Any, loader: Loader) -> None:
        signature = inspect.signature(loader)

        def watched(*args: Any, **kwargs: Any) -> Any:
            # All take the parameter and what is loaded first, some by name.
            param, loaded, *which_part = signature.bind(*args, **kwargs).arguments.values()
            if not param.is_meta:  # with data, what was counted without is done once more
                return loader(*args, **kwargs)
            self.note_read(loaded)
            # A trainer's float32 into an engine's bfloat16 is the usual case; bits are not numbers.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            # Some models load in threads of their own, which have modes of their own too.
            is_here = threading.get_ident() == self._thread
            copied = _CopiedElements(None if is_here else self.recorder)
            self._require_rows(param, loaded)
            with copied:
                result = loader(*args, **kwargs)
            # Each rank takes its share, or all of it, or nothing (another rank's expert).
            is_padded = id(param) in self._padded
            if not is_padded and 0 < copied.count * self.num_shares(param) < loaded.numel():
                raise WeightsMismatchError(f"only {copied.count} of {loaded.numel()} elements fit")
            if is_padded and self.recorder.is_source(loaded):
                self._embedded.add(storage_of(loaded))
            self.note_loaded(param, copied.count, is_part=bool(which_part))
            self._loaded[id(param)] = self.count_of(param) + copied.count
            return result

        # Parameters of some quantisations have a property of that name, without a setter.
        found = getattr(type(tensor), "weight_loader", None)
        is_fixed = isinstance(found, property) and found.fset is None
        setattr(tensor, "_weight_loader" if is_fixed else "weight_loader", watched)

    def _require_rows(self, parameter: Any, loaded: torch.Tensor) -> None:
        """Refuse a vocabulary of another size, of which loaders say no more than that it is bad."""
        num_rows = getattr(self._padded.get(id(parameter)), "org_vocab_size", None)
        if num_rows is None or not loaded.ndim or loaded.shape[0] == num_rows:
            return
        name = self._name_of.get(id(parameter), "its embedding")
        raise WeightsMismatchError(
            f"{name} of the engine has the {num_rows} rows of its vocabulary, not {len(loaded)}: "
            f"publish {num_rows} rows, without those that a trainer pads it with, or start the "
            "engine from a checkpoint with this vocabulary"
        )


class _CopiedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are copied while it is on, in this thread; tells the recorder."""

    def __init__(self, recorder: LoadRecorder | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        if self._recorder is not None:
            self._recorder.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class ShapeCheck:
    """Loads shapes into a copy of a model; the model that serves is not touched.

    Building the copy sets things for the whole process, so that is done on the worker's main
    thread. The check itself does not, and may run while the engine serves.

    Args:
        watched: the copy.
        names: from published names to the model's.
        is_spare: whether the engine leaves out a tensor of this (model's) name, as it should.
    """

    def __init__(
        self,
        watched: WatchedLoads,
        names: NameMap | None = None,
        is_spare: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._watched = watched
        self._names = names
        self._is_spare = is_spare
        self._specs: Sequence[TensorSpec] = ()

    def __call__(
        self, specs: Sequence[TensorSpec], aliases: Mapping[str, str] | None = None
    ) -> LoadTrace:
        """Refuse tensors that do not fit the model; what its loaders do with those that do.

        ``aliases``: further names of some of these tensors. They are offered to the model too where
        it lacks something without them.

        Raises:
            WeightsMismatchError: a shape is not the model's, or a tensor is missing.
        """
        spec_of = {spec.name: spec for spec in specs}
        more = {alias: name for alias, name in (aliases or {}).items() if alias not in spec_of}
        others = [spec_of[name]._replace(name=alias) for alias, name in more.items()]
        try:
            trace = self._trace(specs)
        except WeightsMismatchError:
            with_others = self._trace_or_none([*specs, *others]) if others else None
            if with_others is None:
                raise
            return with_others
        surplus = [
            str(spec)
            for spec in others
            # Others are names of a tied tensor that the model took under another one.
            if more[spec.name] not in trace.embedded
            if renamed(spec.name, self._names) not in self._watched.names
        ]
        return replace(trace, unused=(*trace.unused, *surplus))

    def of_part(self, names: Collection[str]) -> LoadTrace:
        """What the model's loaders do with some of the tensors of the last check alone.

        Raises:
            WeightsMismatchError: they do not take them alone.
        """
        self._load([spec for spec in self._specs if spec.name in names])
        return self._watched.end()

    def _trace_or_none(self, specs: Sequence[TensorSpec]) -> LoadTrace | None:
        try:
            return self._trace(specs)
        except WeightsMismatchError:
            return None

    def _trace(self, specs: Sequence[TensorSpec]) -> LoadTrace:
        """Return what loaders do with these tensors, but for those whose names they refuse."""
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
            self._watched.require_complete()
        except WeightsMismatchError as error:
            unknown_too = [str(spec) for spec in specs if spec.name not in tensors]
            if not unknown_too:
                raise
            what = f"{error}; the engine's model has no place for {listed(unknown_too)}"
            raise WeightsMismatchError(what) from None
        self._specs = known
        embedded = frozenset(n for n, t in tensors.items() if self._watched.is_embedded(t))
        read = {name for name, tensor in tensors.items() if self._watched.is_read(tensor)}
        twins = {(s.dtype, s.shape): s.name for s in known if s.name in embedded}
        unused = [s for s in specs if s.name not in read and not self._makes_no_difference(s)]
        return replace(
            self._watched.end(),
            unused=tuple(str(s) for s in unused if (s.dtype, s.shape) not in twins),
            twins={s.name: twins[s.dtype, s.shape] for s in unused if (s.dtype, s.shape) in twins},
            embedded=embedded,
        )

    def _makes_no_difference(self, spec: TensorSpec) -> bool:
        name = renamed(spec.name, self._names)
        return _is_computed(spec._replace(name=name)) or self._is_spare(name)

    def _unknown_among(self, specs: Sequence[TensorSpec]) -> set[str]:
        """Return tensors that loaders refuse without a look at them, as they do unknown names."""
        unknown: set[str] = set()
        self._watched.reset()
        rest = list(specs)
        while rest and len(unknown) < _MAX_UNKNOWN:
            tensors: dict[str, torch.Tensor] = {}
            try:
                self._offer(rest, tensors)
            # If it was about something else, `_load` says so.
            except Exception:  # noqa: BLE001
                if not tensors or _ALL in tensors:
                    break
                refused = rest[len(tensors) - 1].name
                if self._watched.is_read(tensors[refused]):
                    break
                unknown.add(refused)
                rest = rest[len(tensors) :]
            else:
                break
        return unknown

    def _load(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """Let the loaders load tensors without data, and return those by their names."""
        self._watched.reset()
        tensors: dict[str, torch.Tensor] = {}
        try:
            self._offer(specs, tensors)
        # A model's loaders refuse in their own ways: assert, KeyError, ValueError, RuntimeError.
        except Exception as error:
            is_ours = isinstance(error, WeightsMismatchError)
            # Some list every parameter that there is.
            reason = str(error) if is_ours else f"{type(error).__name__} {error!s:.300}".strip()
            current: object = "the last tensor" if _ALL in tensors else "no tensor at all"
            if tensors and _ALL not in tensors:
                current = specs[len(tensors) - 1]
            message = f"{current} does not fit the engine's model: {reason}"
            raise WeightsMismatchError(message) from error
        return tensors

    def _offer(self, specs: Sequence[TensorSpec], tensors: dict[str, torch.Tensor]) -> None:
        """Load these; each is in ``tensors`` from when a loader asks for it."""

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in specs:
                tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
                tensors[spec.name] = tensor
                self._watched.recorder.note_source(spec.name, tensor)
                yield renamed(spec.name, self._names), tensor
            tensors[_ALL] = torch.empty(0, device="meta")

        with self._watched, torch.device("meta"):
            self._watched.model.load_weights(shapes())

    def loaded(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the model's loaders make of some tensors with data, in the parameter of this name.

        For the same thread as the check. What the loaders raise is raised.
        """
        model = self._watched.model
        with with_data(model, name) as real:
            model.load_weights((renamed(n, self._names), tensor) for n, tensor in tensors.items())
        return real


def no_places(unused: Sequence[str]) -> str:
    """Say that these tensors were published for a model that has no places for them."""
    return (
        f"the engine's model has no place for {listed(unused)}, and would answer as a model "
        "without: publish what it has, or start the engine from a checkpoint of what is published. "
        "With unused_tensors='warn' such tensors are left out"
    )


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
