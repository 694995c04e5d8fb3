"""`as_checkpoint`: the tensors of a transformers module's checkpoint, made from the module.

When transformers loads a checkpoint, it fuses experts and renames layers. This module reverses
these changes by calling the same transformers function as ``save_pretrained``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dbuffer.errors import UnsupportedError
from dbuffer.runtime.messages import described
from dbuffer.weights.conversion import Conversion, Shapes, shapes_of
from dbuffer.weights.named_tensors import WRAPPER_PREFIX, without_wrappers

_conversions: weakref.WeakKeyDictionary[nn.Module, Conversion] = weakref.WeakKeyDictionary()
"""Traced conversion of each module, kept because tracing thousands of experts takes long."""


def has_model(module: nn.Module) -> bool:
    """Whether a module is or contains a transformers model."""
    return any(True for _ in _models_in(module))


def as_checkpoint(module: nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors that ``save_pretrained`` would write, in the module's order.

    ``tensors`` are the module's tensors, by names without wrappers' parts. Most returned tensors
    are views of ``tensors``. If a tensor must be computed, it is returned as a lazy tensor.

    Raises:
        UnsupportedError: a tensor must be computed from sharded tensors, or transformers cannot
            convert the module.
    """
    models = {_prefix_in(tensors, path): model for path, model in _models_in(module)}

    def convert(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _saved(models, parts)

    shapes = shapes_of(tensors)
    conversion = _conversions.get(module)
    if conversion is None or conversion.shapes != shapes:
        _conversions[module] = conversion = _trace(module, models, shapes)
    return conversion.apply(convert, tensors) if conversion.changes_anything else tensors


def _trace(module: nn.Module, models: Mapping[str, Any], shapes: Shapes) -> Conversion:
    try:
        return Conversion.trace(lambda parts: _saved(models, parts), shapes)
    # The operations of transformers raise errors of many classes.
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"transformers cannot say how it would save this {type(module).__name__}: "
            f"{described(error)}; publish the module's own names and tensors (as_checkpoint=False)"
        ) from error


def _saved(models: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as transformers saves them. ``models`` has each model by its name prefix."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = {}
    outside = dict(tensors)
    for prefix, model in models.items():
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        names = [name for name in outside if name.startswith(prefix)]
        of_model = {name.removeprefix(prefix): outside.pop(name) for name in names}
        of_model = {name: tensor for name, tensor in of_model.items() if name not in ignored}
        if of_model:
            reverted = revert_weight_conversion(_in_own_class(model), of_model)
            saved |= {f"{prefix}{name}": tensor for name, tensor in reverted.items()}
    return saved | outside


def _models_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each outermost transformers model in a module, with the model's path."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not hasattr(library, "revert_weight_conversion"):  # before version 5
        return
    inside: list[str] = []
    for path, part in module.named_modules():
        if isinstance(part, library.PreTrainedModel) and not path.startswith(tuple(inside)):
            inside.append(f"{path}." if path else "")
            # transformers does not convert a model with adapters when it saves the model.
            if not getattr(part, "_hf_peft_config_loaded", False):
                yield path, part
        if inside == [""]:
            return


def _prefix_in(names: Mapping[str, Any], path: str) -> str:
    """Return the prefix that the names of the tensors of the model at ``path`` have."""
    prefix = without_wrappers(f"{path}.") if path else ""
    while not any(name.startswith(prefix) for name in names):
        if not prefix.startswith(WRAPPER_PREFIX):
            break
        prefix = prefix.removeprefix(WRAPPER_PREFIX)
    return prefix


def _in_own_class(model: Any) -> Any:
    """Return the model, or a twin of it, with its modules' classes from before ``fully_shard``.

    ``fully_shard`` replaces the class of each module, but transformers needs the name and the
    Python module of the original class.
    """
    if not any(_is_replaced(type(module)) for module in model.modules()):
        return model

    def twin_of(module: nn.Module) -> nn.Module:
        original = next(kind for kind in type(module).__mro__ if not _is_replaced(kind))
        twin: nn.Module = object.__new__(original)
        # Compare with None: bool() of a compiled layer calls the layer's len(), which fails.
        children = {
            name: None if child is None else twin_of(child)
            for name, child in module._modules.items()  # noqa: SLF001
        }
        vars(twin).update(vars(module), _modules=children)
        return twin

    return twin_of(model)


def _is_replaced(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.")
