"""A copy of a model without data: how it is built, and how its tensors are exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dbuffer.errors import UnsupportedError
from dbuffer.integrations.engine.plan.load_trace import Unwrapped, tables_of


def built_without_data(make: Callable[[], Any], what: str, keep: Collection[str] = ()) -> Any:
    """Build a model on the meta device.

    Some constructors read what they compute (slopes of ALiBi, a threshold): where that fails, all
    that is made of plain numbers has data. ``keep``: names of buffers that must have theirs.

    Raises:
        UnsupportedError: the constructor fails all the same.
    """
    try:
        with torch.device("meta"):
            return make()
    # Whatever a model's constructor may raise; if that is not for want of data, it is again.
    except Exception:  # noqa: BLE001
        try:
            with torch.device("meta"), _NumbersWithData():
                model = make()
        except Exception as error:
            raise UnsupportedError(
                f"a {what} cannot be built without data, so nothing could be checked before it is "
                f"loaded: {type(error).__name__} {error!s:.300}"
            ) from error
    for module in model.modules():
        for name, buffer in tables_of(module)[1].items():
            is_loaded = name not in module._non_persistent_buffers_set  # noqa: SLF001
            if buffer is not None and is_loaded and name not in keep and not buffer.is_meta:
                put_in_place(model, buffer, twin(buffer, "meta"))
    return model


class _NumbersWithData(TorchFunctionMode):
    """Makes tensors of plain numbers in main memory, whatever the default device is."""

    _MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.arange, torch.linspace)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._MAKERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def tie_as_serving(model: torch.nn.Module, serving: torch.nn.Module, unwrapped: Unwrapped) -> None:
    """Let parameters be one in a copy that are one in the model that serves.

    An engine may tie a head to the embedding once it has loaded both, and found them equal.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    firsts: dict[tuple[int, int], str] = {}
    for served, tensor in serving.named_parameters(remove_duplicate=False):
        name = unwrapped(served)
        if name not in own or not tensor.nbytes:
            continue
        first = firsts.setdefault((tensor.data_ptr(), tensor.nbytes), name)
        if own[name] is not own[first] and own[name].shape == own[first].shape:
            put_in_place(model, own[name], own[first])


@contextlib.contextmanager
def with_data(model: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Let a parameter or buffer of a copy without data have some meanwhile."""
    path, _, own = name.rpartition(".")
    tables = tables_of(model.get_submodule(path))
    without = next(table[own] for table in tables if own in table)
    made = twin(without, "cpu")
    made.data.zero_()
    put_in_place(model, without, made)
    try:
        yield made.data
    finally:
        put_in_place(model, made, without)


def leave_data_out(model: torch.nn.Module) -> None:
    """Parameters that were made on another device than all else go to the meta device, too.

    No buffers: engines keep rotary embeddings for all their models, so the copy has those of the
    model that serves.
    """
    for parameter in list(model.parameters()):
        if not parameter.is_meta:
            put_in_place(model, parameter, twin(parameter, "meta"))


def twin(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same kind, shape and attributes on another device."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    made = torch.Tensor._make_subclass(type(tensor), data, False)  # noqa: SLF001
    made.__dict__.update(tensor.__dict__)
    return made


def put_in_place(model: torch.nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Let all layers that have a parameter or buffer have another; a tied one is in several."""
    for layer in model.modules():
        for table in tables_of(layer):
            for key, tensor in table.items():
                if tensor is old:
                    table[key] = new
