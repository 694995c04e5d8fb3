"""Model with fused parameters, as in an engine, and a receiver that switches it by a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.models import DTYPE, Shapes, Weights
from dbuffer.engine.contract import EngineRank, ModelState
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.meta_model import MetaModel
from dbuffer.engine.plan.prepared_switch import PreparedSwitch
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_model import RankModel
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.stager import Staged, Stager
from dbuffer.runtime.closing import Closing

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Fused parameter of a published tensor, and the tensor's position among the parameter's parts."""

_TIMEOUT_S = 120.0


class FusedModel(nn.Module):
    """Model with one parameter for q, k and v, and one for gate and up.

    Args:
        shapes: shapes of the published tensors.
        device: device of the parameters.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        parts: dict[str, dict[int, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            fused, index = _place_of(name)
            parts.setdefault(fused, {})[index] = shape
        self._rows: dict[str, list[int]] = {}
        for fused, found in parts.items():
            rows = [found[index][0] for index in sorted(found)]
            self._rows[fused] = rows
            shape = (sum(rows), *found[0][1:])
            data = torch.zeros(shape, dtype=DTYPE, device=device)
            self.register_parameter(fused, nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into its part of a parameter."""
        for name, tensor in weights:
            fused, index = _place_of(name)
            rows = self._rows[fused]
            part = self.get_parameter(fused).data.narrow(0, sum(rows[:index]), rows[index])
            part.copy_(tensor)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:  # noqa: ARG002
        """Load weights as an engine's reload does. This model derives nothing from its weights."""
        self.load_weights(tensors)


def _place_of(name: str) -> tuple[str, int]:
    for part, (fused, index) in _FUSED.items():
        if part in name:
            return name.replace(part, fused).replace(".", "-"), index
    return name.replace(".", "-"), 0


class _Watched(MetaModel):  # type: ignore[no-untyped-call]
    def require_complete(self) -> None:
        """Do nothing: all tensors of the model are published."""


class _Rank(EngineRank):
    """Engine rank with a :class:`FusedModel`, which counts as on a GPU even in main memory."""

    on_device = True

    def __init__(self, model: FusedModel, check: ShapeCheck, device: torch.device) -> None:
        self.ranks = RankChannel(SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None))
        self.module, self.device = model, device
        self._check = check
        self.load = model.load  # type: ignore[method-assign]

    def make_check(self) -> ShapeCheck:
        return self._check


class Switched(NamedTuple):
    """Times and size of a switch."""

    staging_s: float
    commit_s: float
    staged_bytes: int
    is_patched: bool
    """Whether the switch wrote only the elements that a delta changed."""


class PlannedReceiver(Closing):
    """Follows a store for a :class:`FusedModel`, as an engine's rank does."""

    def __init__(
        self,
        store: Path,
        shapes: Shapes,
        device: torch.device,
        *,
        stages_on_device: bool = False,
    ) -> None:
        self._make_model = partial(FusedModel, shapes, device)
        self.model = self._make_model()
        watched = _Watched(
            FusedModel(shapes, torch.device("meta")),
            embedding=nn.Module,
            default_loader=lambda parameter, loaded: parameter.data.copy_(loaded),
            tp_size=1,
        )
        serving = _Rank(self.model, ShapeCheck(watched), device)
        options = EngineOptions(store=str(store), attest=True)
        self._loads = RankModel(serving, options, ModelState())
        receiver = WeightReceiver(store, receiver_id="engine.rank-0")
        self._stager = Stager(
            receiver,
            check=self._loads.check,
            prepare=self._loads.prepare,
            copy=True,
            device=device if stages_on_device else None,
            pin_memory=device.type == "cuda",
            attest=self._attest,
        )
        self._stager.use_device()
        self._attest_s = 0.0

    def close(self) -> None:
        """Stop following."""
        self._stager.close()
        self._loads.close()

    def switch(self, at_least: int | None = None) -> Switched:
        """Switch to the newest staged version. Wait until it is at least ``at_least``."""
        staged = self._stager.take(at_least=at_least, timeout_s=_TIMEOUT_S)
        start_s = time.perf_counter()
        self._loads.load(staged)
        commit_s = time.perf_counter() - start_s
        self._stager.compared = None
        self._stager.release(applied=staged.id)
        switch = staged.prepared
        is_patched = isinstance(switch, PreparedSwitch) and switch.patches is not None
        return Switched(staged.duration_s, commit_s, staged.num_bytes, is_patched)

    def is_ready(self, version: int) -> bool:
        """Whether a version is staged."""
        return self._stager.reserve(version)

    def attest_s(self) -> float:
        """Wait until the last switch is attested; return the seconds that comparing took.

        Raises:
            RuntimeError: the model's weights differ from the staged version.
        """
        while self._stager.compared is None:
            time.sleep(0.001)
        if differing := self._stager.differing:
            raise RuntimeError(f"parameters differ from the staged version: {differing}")
        return self._attest_s

    def _attest(self, staged: Staged, is_wanted: Callable[[], bool]) -> Sequence[str] | None:
        started = time.perf_counter()
        differing = self._loads.attest(staged, is_wanted)
        self._attest_s = time.perf_counter() - started
        return differing

    def require_right(self, weights: Weights) -> None:
        """Raise a RuntimeError if the model differs from a model that loaded ``weights`` itself."""
        right = self._make_model()
        right.load_weights(weights.items())
        for name, parameter in right.named_parameters():
            if not torch.equal(parameter, self.model.get_parameter(name)):
                raise RuntimeError(f"the plan wrote wrong values into {name}")
