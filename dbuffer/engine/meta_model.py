"""`MetaModel`: a copy of an engine's model without data, whose loaders are watched.

A version is loaded into the copy while the engine serves. The copy counts the elements that loaders
write into each parameter: engines fuse parameters (q, k and v become one), so names would not show
that a part is missing. The copy also records which published tensors the loaders read, because
loaders skip unknown names.

A `DraftedModel` is a model and the draft model of its speculative decoding, as one model. Each step
of a switch treats the two as one model. So a version's draft is loaded together with the model that
it drafts for (the target), or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer.engine.plan.load_trace import LoadRecorder, LoadTrace, tables_of, unwrapped
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import DRAFT_PREFIX, is_of_draft
from dbuffer.runtime.messages import described, listed

Loader = Callable[..., Any]


class MetaModel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A model on the meta device that counts the elements which loaders write into its tensors.

    Args:
        model: copy of an engine's model, made on the meta device.
        embedding: class of embeddings and heads. Engines add rows to these layers (padding), which
            checkpoints lack. So such a layer counts as complete as soon as any element is written.
            Its loader checks the number of rows.
        default_loader: loader for tensors without a ``weight_loader``.
        tp_size: number of ranks among which a tensor may be split. For a single tensor, a subclass
            can give another number (:meth:`num_shares`).
        serving: the model that serves, or None. The copy gets the serving model's ties between
            parameters. A version is refused if its load registers a parameter that the serving
            model lacks.
    """

    def __init__(
        self,
        model: Any,
        *,
        embedding: type[torch.nn.Module],
        default_loader: Loader,
        tp_size: int,
        serving: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if serving is not None:
            _tie_as_serving(model, serving)
        # Leave buffers on their devices: the copy can share some of them, such as rotary
        # embeddings, with the model that serves.
        for parameter in list(model.parameters()):
            if not parameter.is_meta:
                _put_in_place(model, parameter, _empty_like(parameter, "meta"))
        self.model = model
        self._tp_size = tp_size
        self._thread: int | None = None
        self._of_thread = threading.local()
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.recorder = LoadRecorder(self._tensors)
        self.names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        """All names of the copy's parameters. A tied parameter has several."""
        self._loaded: dict[int, int] = {}
        self._padded = {
            id(parameter): module
            for module in model.modules()
            if isinstance(module, embedding)
            for parameter in module.parameters(recurse=False)
        }
        for tensor in (*model.parameters(), *model.buffers()):
            self._wrap_loader(tensor, getattr(tensor, "weight_loader", default_loader))
        self.loading: str | None = None
        """Name of the published tensor that a loader is loading, or has refused."""
        self.leaves_draft = False
        """Whether a load is complete even if it lacks the draft of a :class:`DraftedModel`."""
        self._served_late: dict[str, torch.Size] = {}
        self._late: dict[str, tuple[torch.nn.Module, str]] = {}
        self._watch_late_parameters(serving)

    def reset(self) -> None:
        for module, name in self._late.values():
            tables_of(module)[0][name] = None
        self._late.clear()
        self._loaded.clear()
        self._thread = threading.get_ident()
        self.loading = None
        self.recorder = LoadRecorder(self._tensors)

    def require_complete(self) -> None:
        self.require_late_parameters()
        for name, parameter in self.model.named_parameters():
            if self.is_needed(name):
                self.require_whole(name, parameter, parameter.numel())

    def note_loaded(self, tensor: Any, count: int, *, is_part: bool) -> None:
        """Let a subclass note that a loader has written ``count`` elements of a tensor.

        ``is_part``: whether the loader was called for a part of the tensor, such as q of q, k, v.
        """

    def num_shares(self, tensor: Any) -> int:  # noqa: ARG002
        return self._tp_size

    def count_of(self, tensor: Any) -> int:
        return self._loaded.get(id(tensor), 0)

    def end(self) -> LoadTrace:
        return self.recorder.end(
            (tensor, self.count_of(tensor))
            for tensor in (*self.model.parameters(), *self.model.buffers())
        )

    @contextlib.contextmanager
    def with_data(self, name: str) -> Iterator[torch.Tensor]:
        """Give a parameter or buffer memory, filled with zeros, during the ``with`` block."""
        path, _, attribute = name.rpartition(".")
        tables = tables_of(dict(self.model.named_modules(remove_duplicate=False))[path])
        without = next(table[attribute] for table in tables if attribute in table)
        made = _empty_like(without, "cpu")
        made.data.zero_()
        _put_in_place(self.model, without, made)
        try:
            yield made.data
        finally:
            _put_in_place(self.model, made, without)

    def require_whole(self, name: str, tensor: Any, num_elements: int) -> None:
        """Refuse a tensor if loaders wrote fewer than ``num_elements`` of its elements.

        The error is a :class:`WeightsMismatchError`.
        """
        loaded = self.count_of(tensor)
        if loaded < (1 if id(tensor) in self._padded else num_elements):
            raise WeightsMismatchError(
                f"only {loaded} of {num_elements} elements of {name} were published"
            )

    def require_late_parameters(self) -> None:
        """Refuse a version if its load made other parameters than the serving model's load made."""
        for path, (module, name) in self._late.items():
            served = self._served_late.get(path)
            shape = tables_of(module)[0][name].shape
            if served is None:
                raise WeightsMismatchError(
                    f"{path} was published, but the engine's checkpoint did not have it: publish "
                    "without it, or start the engine from a checkpoint that has it"
                )
            if shape != served:
                raise WeightsMismatchError(
                    f"{path} was published with shape {list(shape)}; the engine's has shape "
                    f"{list(served)}"
                )
        missing = {*filter(self.is_needed, self._served_late)} - self._late.keys()
        if missing:
            raise WeightsMismatchError(
                f"{listed(sorted(missing))} of the engine's model was not published"
            )

    def is_needed(self, name: str) -> bool:
        """Whether a version must have the model's parameter or layer of this name."""
        return not (self.leaves_draft and is_of_draft(f"{name}."))

    def _watch_late_parameters(self, serving: torch.nn.Module | None) -> None:
        """Watch for parameters, such as some biases, that loaders register during a load."""
        served = dict(serving.named_parameters()) if serving is not None else {}
        shapes = {unwrapped(name): tensor.shape for name, tensor in served.items()}
        for prefix, module in self.model.named_modules():
            lacking = [name for name, tensor in tables_of(module)[0].items() if tensor is None]
            paths = {f"{prefix}.{name}".lstrip("."): name for name in lacking}
            # The serving model can have parameters that this copy lacks. Some loaders register a
            # bias while they load, so expect biases. The engine computes other such parameters.
            late = [path for path, name in paths.items() if name == "bias" and path in shapes]
            self._served_late |= {path: shapes[path] for path in late}
            if paths:
                register = functools.partial(self._register, prefix, module)
                module.register_parameter = register

    def _register(self, prefix: str, module: torch.nn.Module, name: str, parameter: Any) -> None:
        """Register a parameter that a loader makes, and count the parameter as loaded."""
        is_late = tables_of(module)[0].get(name) is None and parameter is not None
        torch.nn.Module.register_parameter(module, name, parameter)
        if not is_late or self._thread is None:
            return
        path = f"{prefix}.{name}".lstrip(".")
        self._late[path] = module, name
        self._loaded[id(parameter)] = parameter.numel()
        self.recorder.note_read(parameter)
        self.recorder.note_registered(path, parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Making a view does not count as a read. A model that keeps only a view of a published
        # tensor would later compute with another version's bytes. So the tensor counts as unused.
        if not func.is_view:
            for value in tree_leaves(args):
                if isinstance(value, torch.Tensor):
                    self.recorder.note_read(value)
        if func is torch.ops.aten.copy_.default:
            self._of_thread.num_copied = self._num_copied + args[0].numel()
        self.recorder.note(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.recorder.note_result(args, kwargs or {}, result)
        return result

    @property
    def _num_copied(self) -> int:
        return getattr(self._of_thread, "num_copied", 0)

    def _wrap_loader(self, tensor: Any, loader: Loader) -> None:
        signature = inspect.signature(loader)

        def watched(*args: Any, **kwargs: Any) -> Any:
            # All loaders take the parameter and the loaded tensor first, some as keywords.
            param, loaded, *which_part = signature.bind(*args, **kwargs).arguments.values()
            if not param.is_meta:  # in `with_data`, where nothing is counted
                return loader(*args, **kwargs)
            self.loading = self.recorder.note_read(loaded, is_embedded=id(param) in self._padded)
            # Floating-point types may differ, such as a trainer's float32 and an engine's bfloat16.
            # An integer may be the code of a quantized number, so it must not be converted.
            if loaded.is_floating_point() != param.is_floating_point():
                raise WeightsMismatchError(f"{loaded.dtype} does not convert to {param.dtype}")
            self._require_rows(param, loaded)
            before = self._num_copied
            # Some models load in other threads, where this mode must be entered again.
            is_here = threading.get_ident() == self._thread
            with contextlib.nullcontext() if is_here else self:
                result = loader(*args, **kwargs)
            self._count(param, loaded, self._num_copied - before, is_part=bool(which_part))
            self.loading = None
            return result

        set_loader(tensor, watched)

    def _count(self, parameter: Any, loaded: torch.Tensor, count: int, *, is_part: bool) -> None:
        """Count the elements that a loader wrote; refuse a tensor if it wrote too few of them."""
        # A rank loads all of a tensor, its share, or nothing (another rank's expert). If it loads
        # less than its share, the shapes do not fit.
        if (
            id(parameter) not in self._padded
            and 0 < count * self.num_shares(parameter) < loaded.numel()
        ):
            raise WeightsMismatchError(f"only {count} of {loaded.numel()} elements fit")
        self.note_loaded(parameter, count, is_part=is_part)
        self._loaded[id(parameter)] = self.count_of(parameter) + count

    def _require_rows(self, parameter: Any, loaded: torch.Tensor) -> None:
        """Refuse a vocabulary of another size, and name both sizes.

        Loaders' errors name no sizes.
        """
        num_rows = getattr(self._padded.get(id(parameter)), "org_vocab_size", None)
        if num_rows is None or not loaded.ndim or loaded.shape[0] == num_rows:
            return
        named = self.model.named_parameters()
        name = next((name for name, tensor in named if tensor is parameter), "its embedding")
        raise WeightsMismatchError(
            f"{name} has {num_rows} rows in the engine (its vocabulary), but {len(loaded)} rows "
            f"were published: publish {num_rows} rows, without a trainer's padding, or start the "
            "engine from a checkpoint with this vocabulary"
        )


def set_loader(tensor: Any, loader: Loader) -> tuple[str, Loader | None]:
    """Set a tensor's loader; return the attribute that holds it, and its earlier value if any."""
    # Some quantized parameters have a property ``weight_loader`` without a setter.
    declared = getattr(type(tensor), "weight_loader", None)
    is_fixed = isinstance(declared, property) and declared.fset is None
    attribute = "_weight_loader" if is_fixed else "weight_loader"
    before = getattr(tensor, attribute, None)
    setattr(tensor, attribute, loader)
    return attribute, before


def built_without_data(make: Callable[[], Any], kind: str, keep: Collection[str] = ()) -> Any:
    """Build a model on the meta device, where only the buffers named in ``keep`` have data.

    Some constructors compute a tensor and then read its values (slopes of ALiBi, a threshold). On
    the meta device this fails, so the model is built again, with data in the tensors that the
    constructor makes from Python's numbers. If this fails too, raise :class:`UnsupportedError`.
    """
    try:
        with torch.device("meta"):
            return make()
    # After any error, try again with data. If missing data was not the cause, the second attempt
    # raises the error again.
    except Exception:  # noqa: BLE001
        try:
            with torch.device("meta"), _NumbersWithData():
                model = make()
        except Exception as error:
            raise UnsupportedError(
                f"a {kind} cannot be built on the meta device, without memory for weights, so "
                f"versions cannot be checked before they are loaded: {described(error)}"
            ) from error
    for module in model.modules():
        for name, buffer in tables_of(module)[1].items():
            is_loaded = name not in module._non_persistent_buffers_set  # noqa: SLF001
            if buffer is not None and is_loaded and name not in keep and not buffer.is_meta:
                _put_in_place(model, buffer, _empty_like(buffer, "meta"))
    return model


class _NumbersWithData(TorchFunctionMode):
    """Makes `torch.tensor`, `torch.arange` and others return tensors with data, on the CPU."""

    _MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.arange, torch.linspace)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._MAKERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _tie_as_serving(model: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Tie the parameters of a copy that are tied in the model that serves.

    An engine may tie a head to the embedding after it has loaded equal values into both. The copy
    has no values, so it cannot show such a tie.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    firsts: dict[tuple[int, int], str] = {}
    for served, tensor in serving.named_parameters(remove_duplicate=False):
        name = unwrapped(served)
        if name not in parameters:
            continue
        place = (tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else (id(tensor), 0)
        first = parameters[firsts.setdefault(place, name)]
        if parameters[name] is not first and parameters[name].shape == first.shape:
            _put_in_place(model, parameters[name], first)


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor on another device with the same class, shape, dtype and attributes."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    made = torch.Tensor._make_subclass(type(tensor), data, False)  # noqa: SLF001
    made.__dict__.update(tensor.__dict__)
    return made


def _put_in_place(model: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a parameter or buffer in every layer that has it; a tied one is in several layers."""
    for layer in model.modules():
        for table in tables_of(layer):
            for key, tensor in table.items():
                if tensor is old:
                    table[key] = new


class DraftedModel(torch.nn.Module):
    """A model that serves (the target), and the draft model that proposes its tokens.

    As in a published version, tensors of the target have their own names, and names of the draft's
    tensors begin with ``__draft__.``. Layers that the draft shares with the target have the
    target's names, and a version's draft must not contain them.

    Args:
        target: the model that serves.
        draft: the model that proposes tokens.
        is_in_target: whether a tensor of the target's checkpoint is loaded into the draft, too.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        is_in_target: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        # The target is registered under an empty name, so that its tensors keep their names.
        self._modules |= {"": target, DRAFT_PREFIX[:-1]: draft}
        self._is_in_target = is_in_target
        self.last_of_draft: str | None = None
        """Name of the tensor that the draft's loaders are loading or failed to load, or None."""

    @property
    def target(self) -> Any:
        return self._modules[""]

    @property
    def draft(self) -> Any:
        return self._modules[DRAFT_PREFIX[:-1]]

    def has_draft(self, names: Iterable[str]) -> bool:
        """Whether a version with tensors of these names contains weights for the draft."""
        return any(is_of_draft(name) or self._is_in_target(name) for name in names)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the target model, and then the draft, if the weights include a draft."""
        self.last_of_draft = None
        of_draft: list[tuple[str, torch.Tensor]] = []
        self.target.load_weights(self._of_target(weights, of_draft))
        if of_draft:
            of_target = set(map(id, self.target.parameters()))
            shared = [tensor for tensor in self.draft.parameters() if id(tensor) in of_target]
            with _ignoring_loads(shared):
                self.draft.load_weights(self._noted(of_draft))
        self.last_of_draft = None

    def _of_target(
        self, weights: Iterable[tuple[str, torch.Tensor]], of_draft: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self.has_draft([name]):
                of_draft.append((name, tensor))
            if not is_of_draft(name):
                yield name, tensor

    def _noted(
        self, of_draft: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for self.last_of_draft, tensor in of_draft:
            yield self.last_of_draft.removeprefix(DRAFT_PREFIX), tensor


class DraftAlone(torch.nn.Module):
    """A draft model with a store of its own, without layers that it shares with its target."""

    def __init__(self, draft: Any, target: torch.nn.Module) -> None:
        super().__init__()
        self._modules |= {"": draft}  # registered under an empty name, so tensors keep their names
        of_target = set(map(id, target.modules()))
        self._shared = {name: m for name, m in draft.named_modules() if id(m) in of_target}

    def without_shared(self, copy: torch.nn.Module) -> torch.nn.Module:
        """Return ``copy``, a copy of the draft, without the layers that the target shares."""
        for name in self._shared:
            parent, _, child = name.rpartition(".")
            with contextlib.suppress(AttributeError):  # it was removed with the layer around it
                copy.get_submodule(parent)._modules.pop(child, None)  # noqa: SLF001
        return copy

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        shared = set(map(id, self._shared.values()))
        return (
            item for item in super().named_modules(*args, **kwargs) if id(item[1]) not in shared
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        shared = [tensor for module in self._shared.values() for tensor in module.parameters()]
        with _ignoring_loads(dict.fromkeys(shared)):
            self._modules[""].load_weights(weights)  # type: ignore[operator,union-attr]


@contextlib.contextmanager
def _ignoring_loads(parameters: Iterable[Any]) -> Iterator[None]:
    """Make loaders skip the given parameters in the ``with`` block."""
    loaders = [(parameter, *set_loader(parameter, _load_nothing)) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, attribute, loader in loaders:
            if loader is None:
                delattr(parameter, attribute)
            else:
                setattr(parameter, attribute, loader)


def _load_nothing(*_: Any, **__: Any) -> None: ...
