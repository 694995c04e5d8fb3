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

    Ties stay, and one of their names is enough. Buffers that are not among the tensors keep what
    the model has.

    Raises:
        OptionError: (a ``ValueError``) they are not just this model's: names are missing or
            unknown, shapes differ, or tied ones have different values. The model was not touched.
    """
    given = dict(zip(clean_names(tensors), tensors.values(), strict=True))
    own = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    taken: dict[str, torch.Tensor] = {}
    problems = [f"{name} is not one of its tensors" for name in given if name not in own]
    for names in names_of.values():
        before = own[names[0]]
        candidates = [given[name] for name in names if name in given]
        problem = _problem(names, before, candidates)
        if problem is not None:
            problems.append(problem)
        elif candidates:
            taken |= dict.fromkeys(names, _as_part(candidates[0], before))
    if problems:
        raise OptionError(
            f"the attached tensors do not match {type(model).__name__}, {len(problems)} "
            f"difference(s): {listed(problems, '; ')}"
        )
    model.load_state_dict(taken, strict=False, assign=True)


def _problem(names: list[str], before: torch.Tensor, candidates: list[torch.Tensor]) -> str | None:
    if not candidates:
        return f"{names[0]} is missing" if isinstance(before, nn.Parameter) else None
    first, *others = candidates
    if first.shape != before.shape:
        return f"{names[0]} has shape {list(first.shape)}, not {list(before.shape)}"
    if all(is_same_memory(first, other) or torch.equal(first, other) for other in others):
        return None
    return f"{' and '.join(names)} are one tensor of the model, and differ"


def _as_part(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the tensor, as a parameter where the model has one."""
    if not isinstance(before, nn.Parameter) or isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=before.requires_grad)
