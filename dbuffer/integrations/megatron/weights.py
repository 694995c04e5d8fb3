"""`MegatronWeights`: a Megatron model's weights as Hugging Face tensors, in parts on each rank.

mbridge exports a model under Hugging Face's names: it gathers, joins and cuts parameters, tensor by
tensor. The first publish traces the export (module `tracing`), to find each rank's parts of the
exported tensors. The parts are views of the rank's parameters, so that a publish gathers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import InvalidWeightsError, UnsupportedError
from dbuffer.integrations.megatron.tracing import Part, Tracer, tensors_of
from dbuffer.runtime.messages import listed
from dbuffer.weights.conversion import Shapes, shapes_of
from dbuffer.weights.lazy_tensor import LazyTensor


class MegatronWeights:
    """Weights of a Megatron model under the names of mbridge's export, published without a gather.

    ``bridge`` is mbridge's bridge of the model. ``models`` is this rank's part of the model, in the
    form that ``bridge.export_weights`` accepts. Pass the weights to `ShardedWeightSender.send` on
    all ranks. The first publish exports the model three times to find each rank's parts: twice with
    32-bit numbers in place of weights, and once with weights, to verify the parts. On a network
    mount, tensors that are cut by columns are gathered.

    Raises:
        InvalidWeightsError: (raised by ``send``) parameters have other names, shapes or dtypes than
            at the first publish.
        UnsupportedError: (raised by ``send``) the bridge computes a tensor instead of copying it
            from parameters, or a rank has several separate parts of a tensor.
    """

    def __init__(self, bridge: Any, models: Sequence[nn.Module]) -> None:
        self._bridge = bridge
        self._models = [_unwrapped(model) for model in models]
        self._parts: dict[str, Part] | None = None
        self._refused: list[str] = []
        self._shapes: Shapes = {}
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
        tensors = tensors_of(self._models)
        # Tracing needs all ranks. If it fails on one rank, `_parts` stays None on all ranks, so
        # that all ranks trace again at the next publish.
        if self._parts is None:
            self._parts = self._trace()
            self._shapes = shapes_of(
                {part.cut.parameter: tensors[part.cut.parameter] for part in self._parts.values()}
            )
        if self._refused:
            raise UnsupportedError(
                f"cannot publish parts of {listed(self._refused)}: mbridge computes the values, or "
                "joins several parts of a rank; publish the export itself, as a weight source"
            )
        if not self._shapes.items() <= shapes_of(tensors).items():
            raise InvalidWeightsError(
                "the model's parameters have other names, shapes or dtypes than when they were "
                "first published: make new MegatronWeights on all ranks"
            )
        for name, part in self._parts.items():
            yield name, part.in_whole(tensors[part.cut.parameter], self._meshes)

    def _trace(self) -> dict[str, Part]:
        mpu = self._bridge.mpu
        groups = {
            tuple(distributed.get_process_group_ranks(group)): group
            for group in (mpu.tp_group, mpu.etp_group)
        }
        tracer = Tracer(self._bridge, self._models, groups)
        parts = tracer.find_parts()
        self._refused = list(tracer.refused)
        for ranks, group in groups.items():
            device = next(self._models[0].parameters()).device
            self._meshes[ranks] = DeviceMesh.from_group(group, device.type)
        return parts


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without wrappers such as ``DistributedDataParallel`` or ``Float16Module``."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
