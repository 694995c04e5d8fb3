"""`StagedVersion`: a version in a worker's memory, loaded into a model completely or not at all."""

from __future__ import annotations

import copy
import logging
import multiprocessing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from dbuffer.errors import OptionError, WeightsMismatchError
from dbuffer.format.layout import Layout
from dbuffer.integrations.torchrl.extraction import EXTRA_STATE, clean_path, unpacked
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard
from dbuffer.io.tensors import copy_one
from dbuffer.receive.reader import Snapshot
from dbuffer.weights.named_tensors import clean_names, own_tensors
from dbuffer.weights.targets import Match, Matcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """In-memory copy of a version, so that the sender need not wait until forward calls end."""

    version: int
    layout: Layout
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Copy a version. The copy is valid only if closing the snapshot raises no error."""
        return cls(snapshot.version, snapshot.layout, snapshot.copy())

    def load(self, model: Any, guard: ForwardGuard, matcher: Matcher) -> None:
        """Load the version into a model while no forward call of the model runs.

        If the version does not fit the model, this raises a WeightsMismatchError and does not
        change the model. After any other error, the model's forward calls raise an error until a
        version is loaded.
        """
        match, to_install, states = self._plan(model, matcher)
        with guard.loading():
            try:
                for index, target in enumerate(match.targets):
                    copy_one(target, self._tensor(index))
                for alias, index in match.aliases:
                    copy_one(alias, self._tensor(index))
                for name, tensor in to_install.items():
                    _install(model, name, tensor)
                for module, state in states:
                    module.set_extra_state(state)
            except BaseException as error:
                guard.refuse(f"loading version {self.version} failed half-way with {error!r}")
                raise
            guard.accept()

    def _plan(
        self, model: Any, matcher: Matcher
    ) -> tuple[Match, dict[str, torch.Tensor], list[tuple[nn.Module, Any]]]:
        targets = dict(_targets_of(model, self.layout.all_names))
        to_install = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in targets.items()
            if tensor.is_meta and isinstance(model, nn.Module)
        }
        # The matcher refuses a published tensor without a target in the model. Extra state is no
        # tensor of the model, so its published tensor is its own target.
        extra = {name: self.tensors[name] for name in (EXTRA_STATE,) if name in self.tensors}
        match = matcher.match(targets | to_install | extra, self.layout)
        match.require_ties(self._tensor)
        return match, to_install, self._states_of(model)

    def _states_of(self, model: Any) -> list[tuple[nn.Module, Any]]:
        if EXTRA_STATE not in self.tensors:
            return []
        states: dict[str, Any] = unpacked(self.tensors[EXTRA_STATE])
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        modules = {clean_path(path): module for path, module in named}
        if missing := states.keys() - modules.keys():
            raise WeightsMismatchError(
                f"extra state was published for {sorted(missing)}, but the model has no such "
                "modules"
            )
        return [(modules[path], state) for path, state in states.items()]

    def _tensor(self, index: int) -> torch.Tensor:
        return self.tensors[self.layout.specs[index].name]


def own_memory(model: Any, guard: ForwardGuard) -> None:
    """Replace a model's tensors in shared memory by copies in this process's own memory.

    A model that multiprocessing passed to this process shares memory with the trainer's model.
    """
    shared = _shared_tensors(model)
    with guard.loading():
        for tensor in shared:
            tensor.data = tensor.data.clone()
    if shared:
        logger.info("copied %d tensors of the model out of shared memory", len(shared))


def unshared(policy: Any) -> Any:
    """Return a policy to pass to new processes, so that each process has its own tensors.

    Without this, the processes would share the tensors: multiprocessing moves the tensors of a
    policy into shared memory when it pickles the policy.
    """
    if not isinstance(policy, nn.Module):
        return policy
    # Without allow_none=True, get_start_method() would set the start method of the whole program.
    by_default, *_ = multiprocessing.get_all_start_methods()
    if (multiprocessing.get_start_method(allow_none=True) or by_default) != "fork":
        return _CopiedOnArrival(policy)
    # A forked process has its own copy of all memory except shared memory, so copy only a policy
    # with shared tensors.
    return copy.deepcopy(policy) if _shared_tensors(policy) else policy


class _CopiedOnArrival:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.deepcopy, (self._module,)


def is_on_meta(model: Any) -> bool:
    """Whether a model has tensors on the meta device, which have no data."""
    return model is not None and any(t.is_meta for t in _targets_of(model, ()).values())


def _targets_of(model: Any, published: Collection[str]) -> Mapping[str, torch.Tensor]:
    if isinstance(model, nn.Module):
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= model.named_buffers(remove_duplicate=False)
        saved = model.state_dict(keep_vars=True).keys()
        # Clean the model's names together with the extra state's name, to get the sender's names:
        # clean_names removes "module." only if all names begin with it.
        extra = [EXTRA_STATE] if EXTRA_STATE in published else []
        return {
            name: tensors[name]
            for name, cleaned in zip(tensors, clean_names([*tensors, *extra]), strict=False)
            if name in saved or cleaned in published
        }
    if not callable(model):
        raise OptionError(f"weights cannot be loaded into a {type(model).__name__}")
    return {}  # a policy without weights, such as a random one


def _shared_tensors(model: Any) -> list[torch.Tensor]:
    """Return a module's CPU tensors in shared memory (torch counts every GPU tensor as shared)."""
    tensors = own_tensors(model) if isinstance(model, nn.Module) else ()
    return [
        tensor
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    ]


def _install(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    before = getattr(owner, leaf)
    if isinstance(before, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=before.requires_grad)
    setattr(owner, leaf, tensor)
