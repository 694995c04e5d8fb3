"""`ModelLoader`: loads a version into a worker's model, all of it or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from dbuffer.errors import TargetTypeError, WeightsMismatchError
from dbuffer.integrations.torchrl.extraction import EXTRA_STATE, Structure, decode
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.integrations.torchrl.version_info import VersionInfo
from dbuffer.snapshot import Snapshot
from dbuffer.sources import tensordict_tensors, without_wrappers
from dbuffer.targets import Match, Matcher
from dbuffer.tensors import DTYPES


@dataclass(frozen=True, slots=True)
class Plan:
    """What loading one version means, found out before anything is touched."""

    match: Match
    to_install: dict[str, torch.Tensor]
    """Room for the values of tensors that the model has on the meta device."""
    states: list[tuple[nn.Module, Structure]]
    extra_tensors: dict[str, torch.Tensor]


class ModelLoader:
    """Loads snapshots into one worker's model, while none of its forward calls runs."""

    def __init__(self) -> None:
        self.guard = ForwardGuard()
        self._matcher = Matcher()

    def load(self, snapshot: Snapshot, model: Any, quiet: contextlib.ExitStack) -> None:
        """Load it. From here on no forward call begins until ``quiet`` is closed.

        The snapshot may still turn out to have been evicted, when it is left. Then the model holds
        a mix, and the caller loads another one before it closes ``quiet``.

        Raises:
            WeightsMismatchError: it does not fit; the model was not touched.
            Exception: anything else: the model refuses to run until another version is loaded.
        """
        plan = self._plan(snapshot, model)
        self.guard.attach(model)
        quiet.enter_context(self.guard.loading())
        try:
            snapshot.fill(plan.match)
            for name, tensor in plan.to_install.items():
                _install(model, name, tensor)
            for module, structure in plan.states:
                module.set_extra_state(decode(structure, plan.extra_tensors.__getitem__))
        except BaseException as error:
            self.guard.refuse(f"loading version {snapshot.version} ended half-way with {error!r}")
            raise

    def _plan(self, snapshot: Snapshot, model: Any) -> Plan:
        specs = {spec.name: spec for spec in snapshot.specs}
        names = specs.keys() | snapshot.aliases.keys()
        to_install: dict[str, torch.Tensor] = {}
        targets: dict[str, torch.Tensor] = {}
        for name, tensor in _targets_of(model, names).items():
            targets[name] = tensor
            if tensor.is_meta and isinstance(model, nn.Module):
                targets[name] = to_install[name] = torch.empty_like(tensor, device="cpu")
        extra = {
            name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
            for name, spec in specs.items()
            if name.startswith(f"{EXTRA_STATE}.")
        }
        extra |= {
            alias: torch.empty(specs[name].shape, dtype=DTYPES[specs[name].dtype])
            for alias, name in snapshot.aliases.items()
            if alias.startswith(f"{EXTRA_STATE}.")
        }
        match = self._matcher.match(targets | extra, snapshot.layout)
        return Plan(match, to_install, _states_of(snapshot, model), extra)


def has_weights(model: Any) -> bool:
    """Whether a model has anything that weights could be loaded into."""
    return bool(_targets_of(model, ())) if model is not None else False


def is_on_meta(model: Any) -> bool:
    """Whether a model has tensors without values, which it cannot run with."""
    return model is not None and any(t.is_meta for t in _targets_of(model, ()).values())


def _targets_of(model: Any, published: Any) -> Mapping[str, torch.Tensor]:
    """The tensors that weights are to be loaded into; of those never saved, only the published."""
    if isinstance(model, TensorDictBase):
        return tensordict_tensors(model)
    if isinstance(model, nn.Module):
        tensors: dict[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        saved = model.state_dict(keep_vars=True).keys()
        return {name: t for name, t in tensors.items() if name in saved or name in published}
    if not hasattr(model, "__dict__") or not callable(model):
        raise TargetTypeError(f"weights cannot be loaded into a {type(model).__name__}")
    return {}  # a policy without weights, such as a random one


def _states_of(snapshot: Snapshot, model: Any) -> list[tuple[nn.Module, Structure]]:
    """The modules whose extra state was published, and it.

    Raises:
        WeightsMismatchError: the model has no such module.
    """
    structures = VersionInfo.of(snapshot).extra_state
    if not structures:
        return []
    modules: dict[str, nn.Module] = {}
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            modules[without_wrappers(f"{path}.").removesuffix(".")] = module
    if missing := structures.keys() - modules.keys():
        raise WeightsMismatchError(
            f"extra state was published for {sorted(missing)}, and the model has no such modules"
        )
    return [(modules[path], structure) for path, structure in structures.items()]


def _install(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put values where the model has a tensor on the meta device."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    before = getattr(owner, leaf)
    if isinstance(before, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=before.requires_grad)
    setattr(owner, leaf, tensor)
