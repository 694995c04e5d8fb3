"""`MegatronWeights`: a Megatron model as HuggingFace's tensors, each rank's part of them.

mbridge exports a model under HuggingFace's names: it gathers, joins and cuts parameters, tensor by
tensor. The first publish traces that (`tracing`). After it, each rank gives its parts (`parts`) as
views of its own parameters, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import InvalidWeightsError, UnsupportedError
from dbuffer.integrations.megatron.parts import Part
from dbuffer.integrations.megatron.tracing import Tracer, tensors_of
from dbuffer.runtime.messages import listed
from dbuffer.weights.conversion import Shapes, shapes_of
from dbuffer.weights.lazy_tensor import LazyTensor


class MegatronWeights:
    """Weights of a Megatron model under the names of mbridge's export, published without a gather.

    Give it to `ShardedWeightSender.send` on all ranks. The first time, the ranks export three
    times: twice to trace the export, with four bytes per element, and once to compare their parts
    with the weights. On a network mount, tensors that are cut by columns are gathered.

    Args:
        bridge: mbridge's bridge of the model.
        models: this rank's part of the model, as ``bridge.export_weights`` takes it.

    Raises:
        InvalidWeightsError: while it is sent: parameters have other names, shapes or dtypes than
            the first time.
        RankFailedError: while it is sent: a rank failed while the export was traced.
        UnsupportedError: while it is sent: the bridge computes a tensor, or a rank has several
            boxes of it.
    """

    def __init__(self, bridge: Any, models: Sequence[nn.Module]) -> None:
        self._bridge = bridge
        self._models = [_unwrapped(model) for model in models]
        self._parts: dict[str, Part] | None = None
        """Parts by exported name; None before the first publish."""
        self._refused: list[str] = []
        """Exported tensors that cannot be published."""
        self._shapes: Shapes = {}
        """Parameters that have parts, at the first publish."""
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
        tensors = tensors_of(self._models)
        # It is collective: done on all ranks, even if in vain, or, after an error, on none.
        if self._parts is None:
            self._parts = self._trace()
            self._shapes = shapes_of(
                {part.cut.parameter: tensors[part.cut.parameter] for part in self._parts.values()}
            )
        if self._refused:
            raise UnsupportedError(
                f"mbridge does not make {listed(self._refused)} of one box per rank, copied out "
                "of a parameter: publish the export itself, as a weight source"
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
    """Return a model without wrappers, as ``DistributedDataParallel`` and ``Float16Module``."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
