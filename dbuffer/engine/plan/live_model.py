"""Whether other code replaced a part of a live model: a module, or a parameter or its memory.

Copies reach a tensor only in its place (`Places`). An engine's reload looks up parameters by name,
and can fill a parameter only if its form is as at the engine's start (`forms_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dbuffer.engine.plan.load_trace import form_of, unwrapped, wrapped_layer
from dbuffer.errors import UnsupportedError
from dbuffer.runtime.messages import listed

_TABLES = ("_modules", "_parameters", "_buffers")


class Places:
    """Modules of a model, and memory addresses of some of its tensors, when this was made."""

    def __init__(self, model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        included = {*map(id, tensors)}
        self._places = {
            (module, table, key): (unwrapped(f"{path}.{key}".lstrip(".")), _place_of(thing))
            for path, module in model.named_modules()
            for table in _TABLES
            for key, thing in module.__dict__[table].items()
            if id(thing) in included or isinstance(thing, torch.nn.Module)
        }

    def replaced(self) -> list[str]:
        """Return names of modules and tensors replaced, moved or reshaped after this was made."""
        # A module without a wrapper is its own place. An engine that is paused waits for this loop.
        return [
            name
            for (module, table, key), (name, place) in self._places.items()
            if (thing := module.__dict__[table].get(key)) is not place and _place_of(thing) != place
        ]


def _place_of(thing: Any) -> object:
    """Return a module without its wrappers, or a tensor's address and form.

    A new tensor object with the same memory is no change: some layers make one at each load. A new
    form is a change: ``param.data = param.data.t()`` changes strides at the same address.
    """
    if isinstance(thing, torch.Tensor):
        return thing.data_ptr(), form_of(thing)
    return wrapped_layer(thing) if isinstance(thing, torch.nn.Module) else None


def forms_of(
    model: torch.nn.Module, form: Callable[[torch.Tensor], object] = form_of
) -> dict[str, tuple[object, str]]:
    """Return each parameter's form, and the name of the first parameter in the same memory.

    ``form`` describes a tensor; default: shape, strides and dtype. If two parameters share memory,
    a load into one of them changes both parameters.
    """
    first: dict[tuple[torch.device, int], str] = {}
    return {
        name: (form(p), first.setdefault((p.device, p.data_ptr()), name) if p.numel() else name)
        for name, p in model.named_parameters()
    }


def require_same(before: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Raise :class:`UnsupportedError` if a layer or parameter has another form than before."""
    if replaced := [name for name, form in before.items() if present.get(name) != form]:
        raise UnsupportedError(
            f"something replaced {listed(replaced)} since following began, and the engine cannot "
            "load into the replacements: restart the engine"
        )
