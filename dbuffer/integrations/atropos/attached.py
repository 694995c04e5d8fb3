"""`take_over`: a model whose parameters are tensors that the trainer has already."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dbuffer.errors import OptionError
from dbuffer.runtime.messages import listed
from dbuffer.weights.names import clean_names
from dbuffer.weights.sources import is_same_memory


def take_over(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a model's parameters be these tensors: they are not copied, and keep their dtypes.

    One name of tied tensors is enough. Other buffers keep the model's values.

    Raises:
        OptionError: (a ``ValueError``) they are not just this model's: names are missing or
            unknown, shapes differ, or tied ones have different values. The model was not touched.
    """
    parts = model.state_dict(keep_vars=True)
    new: dict[int, torch.Tensor] = {}
    problems = []
    for name, tensor in zip(clean_names(tensors), tensors.values(), strict=True):
        if name not in parts:
            problems.append(f"{name} is not one of its tensors")
            continue
        part = parts[name]
        if isinstance(part, nn.Parameter) and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor.detach(), requires_grad=part.requires_grad)
        tied = new.setdefault(id(part), tensor)
        if tensor.shape != part.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(part.shape)}")
        elif not (is_same_memory(tied, tensor) or torch.equal(tied, tensor)):
            problems.append(f"{name} is tied to another tensor of the model, and differs from it")
    taken = {name: new[id(part)] for name, part in parts.items() if id(part) in new}
    for name, part in parts.items():
        if isinstance(part, nn.Parameter) and name not in taken:
            problems.append(f"{name} is missing")
    if problems:
        raise OptionError(
            f"the attached tensors do not match {type(model).__name__}, {len(problems)} "
            f"difference(s): {listed(problems, '; ')}"
        )
    model.load_state_dict(taken, strict=False, assign=True)
