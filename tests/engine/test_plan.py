"""Switches by copies alone: planned where a reload does no more, and never anywhere else.

The models here have loaders and layers as engines have them, and every way that is known to do more
than to copy. Each is switched many times, beside a twin that is only ever reloaded.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy as copy_layer
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from dbuffer.engine.contract import WEIGHTS, ModelState
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.meta_model import MetaModel
from dbuffer.engine.plan import prepared_switch
from dbuffer.engine.plan.copy_plan import NotAloneError, Packing
from dbuffer.engine.plan.load_trace import CopyOp, LoadTrace, View, unwrapped
from dbuffer.engine.plan.prepared_switch import Changed, PreparedSwitch, digest_of_all
from dbuffer.engine.planning import Planning, PlanState
from dbuffer.engine.rank_model import RankModel
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import WeightsMismatchError
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.io.copier import Copier
from dbuffer.io.tensors import DTYPES
from dbuffer.receive.stager import Staged

SHAPE = (6, 4)
NUM_SWITCHES = 6
PLANNED = [False, *[True] * (NUM_SWITCHES - 1)]
"""Switches by copies alone, where the first one verifies the plan."""
PLANNED_AGAIN = [False, *PLANNED[:-1]]
"""Switches by copies alone, where the second one verifies a plan that reloads more layers."""
PATCHED = [False, *PLANNED[:-1]]
"""Switches by patches, where the first delta is copied whole."""

COPIER = Copier(1)

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]
Loader = Callable[[torch.Tensor, torch.Tensor], None]

_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """dbuffer's log from level INFO on."""
    caplog.set_level(logging.INFO, "dbuffer")
    return caplog


def plan_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    names = {RankModel.__module__, Planning.__module__}
    return [each.getMessage() for each in caplog.records if each.name in names]


@pytest.fixture(autouse=True)
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a few elements be patched, too."""
    monkeypatch.setattr(prepared_switch, "MAX_SHARE", 1.0)


def copy(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)


class Layer(nn.Module):
    """One weight, and how it is loaded."""

    def __init__(
        self,
        loader: Loader = copy,
        shape: tuple[int, ...] = SHAPE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = loader

    def begin(self) -> None:
        """Called before it is loaded."""

    def process(self) -> None:
        """Called when it is loaded."""

    def compute(self) -> torch.Tensor:
        return self.weight.sum()

    def forward(self) -> torch.Tensor:
        return self.compute()


class OnItsDevice(Layer):
    """Names the device of its weight, as some norms do, wherever the model is made."""

    def __init__(self) -> None:
        with torch.device("cpu"):
            super().__init__()


class Model(nn.Module):
    """Layers by name; a tensor ``NAME.weight`` goes to the layer of that name."""

    derived: torch.Tensor | None = None
    """Derived tensor, which a model computes with besides its parameters."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            layer, _, part = name.partition(".")
            weight = self.layers[layer].weight
            loader = getattr(weight, "weight_loader", copy)
            loader(weight, tensor, *[part] * (part != "weight"))

    def reload(self, tensors: Tensors) -> None:
        self._reload(list(self.layers.values()), tensors)

    def reload_part(self, tensors: Tensors) -> None:
        """Reload some layers, of which all tensors came, and leave the others alone."""
        names = dict.fromkeys(name.partition(".")[0] for name in tensors)
        self._reload([self.layers[name] for name in names], tensors)

    def _reload(self, layers: list[Layer], tensors: Tensors) -> None:
        for layer in layers:
            layer.begin()
        self.load_weights(iter(tensors.items()))
        for layer in layers:
            layer.process()

    def computed(self) -> list[list[float]]:
        derived = [] if self.derived is None else [self.derived]
        values = [*(layer.compute() for layer in self.layers.values()), *derived]
        return [each.tolist() for each in values]


class Watched(MetaModel):
    def __init__(self, model: Model) -> None:
        # As if all were padded: what a loader takes of a tensor is not checked here.
        super().__init__(model, embedding=nn.Module, default_loader=copy, tp_size=1)

    def require_complete(self) -> None:
        """All is well."""


class OfWhole(ShapeCheck):
    """Check of an engine that loads no part alone."""

    def of_part(self, names: Collection[str]) -> LoadTrace:
        raise WeightsMismatchError("no part is loaded alone")


def check_of(make: Callable[[], Model], *, in_parts: bool = False) -> ShapeCheck:
    with torch.device("meta"):
        return (ShapeCheck if in_parts else OfWhole)(Watched(make()))


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec(n, _OF_DTYPE[t.dtype], tuple(t.shape)) for n, t in tensors.items()]


def random(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def codes() -> torch.Tensor:
    """Integers, as a quantized checkpoint has them."""
    return torch.randint(-(2**31), 2**31, SHAPE).to(torch.int32)


def strange() -> torch.Tensor:
    """Values that are no numbers, or equal without being the same."""
    values = torch.tensor([float("nan"), -0.0, float("inf"), 1.0]) * random((1,)).sign()
    return values.repeat(6, 1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def copied(tensors: Tensors) -> Tensors:
    """For whoever may write into them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


OPTIONS = EngineOptions(store="store", num_threads=1, attest=True)


class Version(NamedTuple):
    """Attributes of a snapshot that a rank reads."""

    id: VersionId
    tensors: Tensors
    layout: Layout
    changed_since: Callable[[VersionId], Changed | None]
    metadata: dict[str, Any]


class Switched:
    """A model that is switched, as an engine switches its own, and what came of it."""

    device = torch.device("cpu")
    on_device = True
    """So that it is patched."""
    is_pipeline_stage = False
    ranks = SimpleNamespace(rank=0)
    not_weights = ()

    def __init__(
        self,
        make: Callable[[], Model],
        tensors: Tensors,
        *,
        staged: bool = False,
        packing: Packing | None = None,
        in_parts: bool = False,
    ) -> None:
        self.model, self.twin = make(), make()
        self.module, self.packing = self.model, packing
        self.check = check_of(make, in_parts=in_parts)
        self.loads = RankModel(self, OPTIONS, ModelState())
        self.layout = Layout.of(specs_of(tensors))
        self.in_parts = in_parts
        self.reloads = 0
        self.parts: list[set[str]] = []
        """What was reloaded in part."""
        self.staged = staged
        """In memory of its own, and not where the version has it."""
        self.changes: Callable[[Tensors, Tensors], Changed] | None = None
        """Tells what differs between two versions; None: nobody does."""
        self.versions: list[Tensors] = []
        self.patched: list[bool] = []
        self.switched: PreparedSwitch | None = None
        """The last switch."""
        self.trace_layout()

    def switch(self, tensors: Tensors) -> bool:
        """Whether it was done by copies alone."""
        before = self.reloads
        self.twin.reload(copied(tensors))
        self.versions.append(copied(tensors))
        switch = self.prepare(tensors)
        if switch is not None and switch.replaces_tensors and self.staged:
            whole = sum(switch.staging_bytes(0))
            sizes = switch.staging_bytes(int(torch.randint(0, whole + 1, ())))
            assert sum(sizes) == whole
            device, memory = (torch.full((size,), 255, dtype=torch.uint8) for size in sizes)
            switch = switch.copied_into((device, memory), COPIER.copy_tensors)
            for tensor in tensors.values():  # it needs them no longer
                tensor.fill_(-1)
        self.patched.append(switch is not None and switch.patches is not None)
        self.commit(switch, tensors)
        assert not self.attest(switch)
        self.switched = switch
        mine = {unwrapped(name): tensor for name, tensor in self.model.state_dict().items()}
        right = self.twin.state_dict()
        for name in right:
            assert torch.equal(as_bytes(mine[name]), as_bytes(right[name])), name
        assert str(self.model.computed()) == str(self.twin.computed())  # of which some are NaN
        return self.reloads == before

    def make_check(self) -> ShapeCheck:
        return self.check

    def require_reloadable(self) -> None:
        """Its loaders find each parameter by its name."""

    @property
    def trace(self) -> LoadTrace:
        return self.loads._planning_of(self.layout).trace

    def trace_layout(self) -> None:
        """Trace the layout, as with its first version."""
        self.loads.check(self.version({}))

    def version(self, tensors: Tensors, number: int | None = None) -> Version:
        """Return a version of these tensors. Default: the newest."""
        number = len(self.versions) - 1 if number is None else number
        id_ = VersionId("0" * 16, number)
        return Version(id_, tensors, self.layout, self.changed_since, {})

    def prepare(self, tensors: Tensors, number: int | None = None) -> PreparedSwitch | None:
        """Prepare a version. Default: the newest."""
        return self.loads.prepare(self.version(tensors, number))

    def commit(self, switch: PreparedSwitch | None, tensors: Tensors | None = None) -> None:
        """Load a version, by its switch if that is enough."""
        self.loads.load(self.staged_version(switch, tensors))

    def staged_version(
        self, switch: PreparedSwitch | None, tensors: Tensors | None = None
    ) -> Staged:
        return Staged(
            lineage=Lineage(VersionId("0" * 16, 1), []),
            metadata={},
            layout=self.layout,
            tensors=tensors,
            prepared=switch,
            num_bytes=0,
            duration_s=0.0,
        )

    def attest(
        self, switch: PreparedSwitch | None, is_wanted: Callable[[], bool] = lambda: True
    ) -> Sequence[str] | None:
        """Return what differs from the last switch, or None if that cannot be told."""
        return self.loads.attest(self.staged_version(switch), is_wanted)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Reload the model, as its loader asks for it."""
        if partial and self.in_parts:
            part = dict(tensors)
            self.parts.append(set(part))
            self.model.reload_part(part)
        else:
            self.reloads += 1
            self.model.reload(dict(tensors))

    def prepare_next(self) -> tuple[Tensors, PreparedSwitch]:
        """Prepare a version of which little changed, under the one that is served."""
        newest, served = changed_a_little(self.versions[-1]), copied(self.model.state_dict())
        self.versions.append(newest)
        switch = self.prepare(newest)
        assert all(torch.equal(served[n], now) for n, now in self.model.state_dict().items())
        return newest, switch

    def changed_since(self, version: VersionId) -> Changed | None:
        if self.changes is None:
            return None
        return self.changes(self.versions[version.number], self.versions[-1])

    def switch_often(self, make_tensors: Callable[[], Tensors]) -> list[bool]:
        return [self.switch(make_tensors()) for _ in range(NUM_SWITCHES)]


# Models that are only copied to.


def fused(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    parameter.data.narrow(0, 2 * "qkv".index(part), 2).copy_(loaded)


def fused_columns(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """As a loader fills a fused layer whose matrix is stored transposed."""
    parameter.data.narrow(1, 2 * "kv".index(part), 2).copy_(loaded)


def padded(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter[: len(loaded)].data.copy_(loaded)
    parameter[len(loaded) :].data.fill_(0)


def expert(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    parameter.data[int(part)].copy_(loaded)


def sharded(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """Load the second of two ranks' columns."""
    parameter.data.copy_(loaded.narrow(1, 4, 4))


def transposed(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.t())


def twice(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    copy(parameter, loaded)
    copy(parameter, loaded)


def vector(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.view(-1))


def zeroed(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """As vLLM loads biases of gpt-oss's experts, on all ranks but the first."""
    parameter.data[:3].copy_(loaded[:3])
    loaded.zero_()
    parameter.data[3:].copy_(loaded[3:])


def two_layers() -> Model:
    return Model(a=Layer(), b=Layer())


def two_tensors() -> Tensors:
    return {"a.weight": random(), "b.weight": random()}


def make_tied() -> Model:
    model = two_layers()
    model.layers["b"].weight = model.layers["a"].weight
    return model


KINDS: dict[str, tuple[Callable[[], Layer], Callable[[], Tensors]]] = {
    "plain": (Layer, lambda: {"weight": random()}),
    "fused": (lambda: Layer(fused), lambda: {part: random((2, 4)) for part in "qkv"}),
    "fused columns": (
        lambda: Layer(fused_columns),
        lambda: {part: random((6, 2)) for part in "kv"},
    ),
    "codes": (lambda: Layer(dtype=torch.int32), lambda: {"weight": codes()}),
    "padded": (lambda: Layer(padded), lambda: {"weight": random((5, 4))}),
    "experts": (
        lambda: Layer(expert, (12, 6, 4)),
        lambda: {str(number): random() for number in range(12)},
    ),
    "share": (lambda: Layer(sharded), lambda: {"weight": random((6, 8))}),
    "transposed": (lambda: Layer(transposed), lambda: {"weight": random((4, 6))}),
    "cast": (lambda: Layer(dtype=torch.bfloat16), lambda: {"weight": random()}),
    "vector": (lambda: Layer(vector, (4,)), lambda: {"weight": random((1, 4))}),
    "scalar": (lambda: Layer(shape=()), lambda: {"weight": random(())}),
}
"""Layers that are only copied to, and the tensors of each."""

MORE_KINDS: dict[str, tuple[Callable[[], Layer], Callable[[], Tensors]]] = {
    "twice": (lambda: Layer(twice), lambda: {"weight": random()}),
    "zeroed": (lambda: Layer(zeroed), lambda: {"weight": random()}),
    "nowhere": (lambda: Layer(shape=(0, 4)), lambda: {"weight": random((0, 4))}),
    "device": (OnItsDevice, lambda: {"weight": random()}),
    "strange": (Layer, lambda: {"weight": strange()}),
}


def beside_plain(
    make_layer: Callable[[], Layer], make_parts: Callable[[], Tensors]
) -> tuple[Callable[[], Model], Callable[[], Tensors]]:
    def make_tensors() -> Tensors:
        parts = {f"a.{part}": tensor for part, tensor in make_parts().items()}
        return parts | {"b.weight": random()}

    return lambda: Model(a=make_layer(), b=Layer()), make_tensors


COPIES = {name: beside_plain(*kind) for name, kind in (KINDS | MORE_KINDS).items()}
COPIES["tied"] = make_tied, two_tensors

mapped_and_staged = pytest.mark.parametrize("staged", [False, True], ids=["mapped", "staged"])


@mapped_and_staged
@pytest.mark.parametrize("case", COPIES)
def test_what_is_only_copied_is_reloaded_once_and_copied_from_then_on(case, staged):
    make, make_tensors = COPIES[case]
    switched = Switched(make, make_tensors(), staged=staged)
    places = [parameter.data_ptr() for parameter in switched.model.parameters()]
    assert switched.trace.refused == {}
    assert switched.switch_often(make_tensors) == PLANNED
    assert switched.reloads == 2  # of what stands in for the version, and of the version
    assert places == [parameter.data_ptr() for parameter in switched.model.parameters()]
    # The loaders do with data what they were traced doing.
    newest = switched.versions[-1]
    for name in switched.trace.tensors:
        loaded = switched.check.loaded(name, copied(newest).items())
        assert torch.equal(as_bytes(loaded), as_bytes(switched.twin.get_parameter(name)))
    assert all(parameter.is_meta for parameter in switched.check._meta.model.parameters())


# Loaders that compute.


def scaled(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded * 2)


def through_a_buffer(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    mine = torch.empty_like(parameter)
    mine.copy_(loaded)
    parameter.data.copy_(mine)


def overlapping(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[:4].copy_(loaded[:4])
    parameter.data[2:].copy_(loaded[2:])


def depending(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)
    parameter.data[0].mul_(3)


def shifted_in_place(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """As SGLang loads the norms of Gemma."""
    loaded += 1.0
    parameter.data.copy_(loaded)


def shifted_twice(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[:3].copy_(loaded[:3])
    loaded[0].fill_(7)
    loaded.copy_(loaded * 2)
    parameter.data[3:].copy_(loaded[3:])


COMPUTING: dict[str, Loader] = {
    "scaled": scaled,
    "shifted in place": shifted_in_place,
    "shifted twice": shifted_twice,
    "transposed": lambda parameter, loaded: parameter.data.copy_(
        loaded.t().contiguous().view(SHAPE)
    ),
    "added": lambda parameter, loaded: parameter.data.zero_().add_(loaded),
    "through a buffer": through_a_buffer,
    "other bits": lambda parameter, loaded: parameter.data.view(torch.int32).copy_(
        loaded.view(torch.int32)
    ),
    "in part": lambda parameter, loaded: parameter.data[:3].copy_(loaded[:3]),
    "overlapping": overlapping,
    "depending": depending,
}


# Layers that keep what they derive somewhere else.


class Handle:
    """Of a kernel in another library: what is behind it, nobody sees."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = [float(weight.sum())]
        self.handler = ctypes.c_uint64(7)


class Kernel:
    __slots__ = ("packed",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = weight.t().contiguous()


class Deriving(Layer):
    """Loads by copying, and then derives something from its weight."""

    def __init__(self, derive: Callable[[Any], None], *others: nn.Module) -> None:
        super().__init__()
        self.derive = derive
        self.others = others
        derive(self)

    def process(self) -> None:
        self.derive(self)


def in_place(layer: Any) -> None:
    if not hasattr(layer, "scale"):
        layer.scale = torch.zeros(())
    layer.scale.copy_(layer.weight.sum())


def in_another_layer(layer: Any) -> None:
    layer.others[0].absorbed = layer.weight[0].clone()


def in_a_closure(layer: Any) -> None:
    packed = turned(layer)
    layer.linear = lambda x: x @ packed


def inside_an_opaque_thing(layer: Any) -> None:
    if not hasattr(layer, "handle"):
        layer.handle = memoryview(bytearray(4))
    layer.handle[:] = bytes(layer.weight.sum().reshape(1).view(torch.uint8).tolist())


def in_a_cached_function(layer: Any) -> None:
    if not hasattr(layer, "packed"):
        layer.packed = functools.lru_cache(lambda: turned(layer))
    layer.packed.cache_clear()
    layer.packed()


def turned(layer: Any) -> torch.Tensor:
    return layer.weight.t().contiguous()


def setting(name: str, derived: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, derived(layer))


def in_a_default(layer: Any) -> Any:
    def linear(x: torch.Tensor, packed: torch.Tensor = turned(layer)) -> Any:  # noqa: B008
        return x @ packed

    return linear


in_an_attribute = setting("twin", lambda layer: layer.weight * 2)

REPEATED = {
    "in an attribute": in_an_attribute,
    "in place": in_place,
    "in a buffer": lambda layer: layer.register_buffer("packed", turned(layer), persistent=False),
    "in a closure": in_a_closure,
    "in a default": setting("linear", in_a_default),
    "in a partial": setting("linear", lambda own: functools.partial(torch.mm, mat2=turned(own))),
    "in a number": setting("largest", lambda layer: float(layer.weight.max())),
    "on the weight": lambda layer: setattr(layer.weight, "packed", turned(layer)),
    "after loading": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
}
"""Two reloads with the same weights leave these alike; of the rest nothing can be told."""

DERIVING = REPEATED | {
    "in another layer": in_another_layer,
    "in an object": setting("kernel", lambda layer: [{"kernel": Kernel(layer.weight)}]),
    "behind a handle": setting("handle", lambda layer: Handle(layer.weight)),
    "in an opaque thing": setting(
        "handle", lambda layer: ctypes.create_string_buffer(bytes(layer.weight.numpy()))
    ),
    "inside an opaque thing": inside_an_opaque_thing,
    "in a cached function": in_a_cached_function,
}


class DerivingOnData(Deriving):
    """As `Deriving`, which has nothing to derive from on the meta device."""

    def __init__(self, derive: Callable[[Any], None], *others: nn.Module) -> None:
        super().__init__(lambda layer: None if layer.weight.is_meta else derive(layer), *others)


class KeepingOne(Model):
    """Keeps a published tensor beside its parameters."""

    def load_weights(self, weights: Pairs) -> None:
        tensors = dict(weights)
        self.derived = tensors.pop("bias").clone()
        super().load_weights(iter(tensors.items()))


def test_a_published_tensor_that_goes_into_no_parameter_is_not_left_behind():
    def tensors(bias: float) -> Tensors:
        return two_tensors() | {"bias": torch.full((2,), bias)}

    switched = Switched(lambda: KeepingOne(a=Layer(), b=Layer()), tensors(0.0))
    for bias in (0.0, 0.0, 0.0, 1.0):  # `switch` compares it with a reload's
        switched.switch(tensors(bias))


class Coded(Model):
    """Derives something from codes that is alike for many of them."""

    def reload(self, tensors: Tensors) -> None:
        super().reload(tensors)
        self.derived = self.layers["b"].weight.argsort(dim=1)


def test_what_is_derived_from_integers_is_derived_when_they_change():
    def tensors(codes: torch.Tensor) -> Tensors:
        return {"a.weight": random(), "b.weight": codes}

    alike = torch.ones(SHAPE, dtype=torch.int32)
    switched = Switched(lambda: Coded(a=Layer(), b=Layer(dtype=torch.int32)), tensors(alike))
    assert [switched.switch(tensors(alike)) for _ in range(3)] == [False, True, True]
    in_order = torch.arange(24, dtype=torch.int32).view(SHAPE)
    switched.model.reload(tensors(in_order))  # as something else loads a checkpoint
    switched.loads._forget()
    assert not switched.switch(tensors(alike))
    assert not switched.switch(tensors(in_order))
    assert not switched.switch(tensors(in_order.flip(1)))
    assert not any(switched.switch(tensors(in_order + number)) for number in range(4))
    assert switched.reloads == 11  # two for each of three proofs (the last fails), and five


def test_verifications_with_many_copies_between_them_never_pause_planning(log):
    def tensors() -> Tensors:
        return {"a.weight": random(), "b.weight": torch.ones(SHAPE, dtype=torch.int32)}

    switched = Switched(lambda: Coded(a=Layer(), b=Layer(dtype=torch.int32)), tensors())
    for _ in range(6):
        switched.loads._forget()  # as after each sleep
        assert [switched.switch(tensors()) for _ in range(18)] == [False, *[True] * 17]
    assert switched.reloads == 12
    assert not any("no fast path" in message for message in log.messages)


# Layers that pack their weights, and have images.


class PackedKernel:
    """Of another library: what it has packed, only its computing tells."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = weight.t().contiguous().numpy().tobytes()
        self.handle = ctypes.c_uint64(7)

    def compute(self) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(self._packed), dtype=torch.float32)
        return packed * torch.arange(len(packed))


class PackingLayer(Layer):
    """Loads by copying, and then packs its weight, as an engine does at each reload."""

    factor = 1.0
    """Which its shadow has differently, in a packing that is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.unpacked = self.weight
        if not self.weight.is_meta:
            self.pack()

    def begin(self) -> None:
        self.places = {
            name: self._parameters.pop(name) for name in ("weight", "scale") if hasattr(self, name)
        }
        self.weight = nn.Parameter(torch.zeros(SHAPE), requires_grad=False)
        self.weight.weight_loader = copy

    def process(self) -> None:
        self.pack()
        self.keep_places()

    def pack(self) -> None:
        raise NotImplementedError

    def keep_places(self) -> None:
        """A reload leaves parameters where they were."""
        for name, place in self.places.items():
            place.data.copy_(self._parameters[name])
            self._parameters[name] = place
        del self.places


class IntoAKernel(PackingLayer):
    def pack(self) -> None:
        self.kernel = PackedKernel(self.weight * self.factor)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def compute(self) -> torch.Tensor:
        return self.kernel.compute()


class IntoItself(PackingLayer):
    def pack(self) -> None:
        packed = self.weight.t().contiguous().view(SHAPE) * self.factor
        self.weight = nn.Parameter(packed, requires_grad=False)


class Rounding:
    """Method of a layer's quantization, which keeps something of the layer."""

    largest = 0.0

    def quantize(self, layer: Any) -> None:
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        rounded = (layer.weight / scale).round().to(torch.int8)
        layer.weight = nn.Parameter(rounded, requires_grad=False)
        layer.scale = nn.Parameter(scale * layer.factor, requires_grad=False)
        self.largest = float(scale.max())
        self.kernel = PackedKernel(scale)
        self.compute = self.compute_with_kernel

    def compute_with_kernel(self, layer: Any) -> torch.Tensor:
        values = layer.weight.float() * layer.scale + self.largest
        return torch.cat([values.flatten(), self.kernel.compute()])


class Quantizing(PackingLayer):
    def __init__(self) -> None:
        self.__dict__["method"] = Rounding()
        super().__init__()

    def pack(self) -> None:
        self.method.quantize(self)

    def compute(self) -> torch.Tensor:
        return self.method.compute(self)


class Packer:
    """Packer as an engine has it, which knows its layers; or one with a mistake about them."""

    def __init__(
        self,
        pack: Callable[[Any], None] = lambda layer: layer.pack(),
        computed: Callable[[Any], torch.Tensor | None] = lambda layer: layer.compute(),
        *,
        is_sure: bool = True,
    ) -> None:
        self._pack, self.computed, self._is_sure = pack, computed, is_sure

    def packs(self, layer: nn.Module, *, is_as_loaded: bool) -> bool:
        return isinstance(layer, PackingLayer) and (self._is_sure or not is_as_loaded)

    def pack(self, shadow: Any, layer: Any) -> list[tuple[Any, Any]]:
        copies = []
        if isinstance(layer, Quantizing):
            shadow.method = copy_layer(layer.method)
            copies.append((layer.method, shadow.method))
        self._pack(shadow)
        return copies


def scale(layer: Any) -> None:
    layer.factor = 2.0
    layer.pack()
    del layer.factor


def reshape(layer: Any) -> None:
    layer.pack()
    layer.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


class Once:
    """Does as another one, but for one time."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.has_failed = False

    def __call__(self, *args: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("no room on this device")
        return self.real(*args)


def mixed_tensors() -> Tensors:
    return {"a.weight": random(), "b.weight": random(), "c.weight": random((20, 4))}


def mixed_model(
    make_a: Callable[[], Layer] = lambda: Layer(scaled), kind: type[Model] = Model
) -> Model:
    """A model whose layer ``a`` is special; it computes, say."""
    return kind(a=make_a(), b=Layer(), c=Layer(shape=(20, 4)))


PACKED = {"into a kernel": IntoAKernel, "into itself": IntoItself, "into codes": Quantizing}


@pytest.mark.parametrize("kind", PACKED)
def test_a_switch_that_is_done_twice_leaves_its_version(kind):
    """As one is that other ranks could not do, and which is tried once more."""
    switched = Switched(lambda: mixed_model(PACKED[kind]), mixed_tensors(), packing=Packer())
    switched.switch_often(mixed_tensors)
    newest = mixed_tensors()
    switched.twin.reload(copied(newest))
    switched.versions.append(newest)
    switch = switched.prepare(newest)
    for _ in range(2):
        switched.commit(switch)
        assert str(switched.model.computed()) == str(switched.twin.computed())


@mapped_and_staged
@pytest.mark.parametrize("kind", PACKED)
def test_a_layer_that_packs_is_packed_beside_it_and_handed_over(kind, staged):
    make = functools.partial(mixed_model, PACKED[kind])
    switched = Switched(make, mixed_tensors(), staged=staged, packing=Packer())
    weight = switched.model.layers["a"].weight
    assert switched.switch_often(mixed_tensors) == PLANNED
    assert switched.reloads == 2
    assert switched.model.layers["a"].weight is weight


def test_what_a_layer_had_before_a_switch_is_freed_without_a_collection_of_garbage():
    switched = Switched(lambda: mixed_model(Quantizing), mixed_tensors(), packing=Packer())
    gc.disable()
    try:
        kernels = []
        for _ in range(NUM_SWITCHES):
            switched.switch(mixed_tensors())
            kernels.append(weakref.ref(switched.model.layers["a"].method.kernel))
        is_freed = [kernel() is None for kernel in kernels]
    finally:
        gc.enable()
    assert is_freed[2:] == [True] * (NUM_SWITCHES - 4) + [False] * 2


def test_a_layer_that_does_not_look_processed_gets_an_image_once_a_reload_shows_that_it_is():
    class Unseen(IntoItself):
        def __init__(self) -> None:
            super().__init__()
            del self.unpacked

    packing = Packer(is_sure=False)
    switched = Switched(lambda: mixed_model(Unseen), mixed_tensors(), packing=packing)
    assert switched.switch_often(mixed_tensors) == [False, *PLANNED[:-1]]
    assert switched.reloads == 4


def test_a_layer_that_cannot_be_processed_beside_itself_is_reloaded_alone(log):
    packing = Packer(lambda layer: layer.no_room)
    switched = Switched(
        lambda: mixed_model(IntoItself), mixed_tensors(), packing=packing, in_parts=True
    )
    assert switched.switch_often(mixed_tensors) == PLANNED
    assert switched.parts[-1] == {"a.weight"}
    assert "layers.a is left to the engine's reload: no image of it can be made" in log.text


def test_ranks_that_process_layers_together_reload_all(log):
    """Each as often as the others, or one would wait for a rank that reloads less."""

    def refuse(_: Any) -> None:
        raise NotAloneError("common scales")

    switched = Switched(
        lambda: mixed_model(Quantizing), mixed_tensors(), packing=Packer(refuse), in_parts=True
    )
    assert not any(switched.switch_often(mixed_tensors))
    assert switched.reloads == NUM_SWITCHES
    [message] = log.messages
    assert message == "no fast path: switches go through the engine's reload: common scales"


# Layers that stay with the reload, beside others that are copied to.


@mapped_and_staged
@pytest.mark.parametrize("loader", COMPUTING)
def test_a_layer_whose_loader_computes_is_reloaded_alone(loader, staged, log):
    make = functools.partial(mixed_model, lambda: Layer(COMPUTING[loader]))
    switched = Switched(make, mixed_tensors(), staged=staged, in_parts=True)
    assert list(switched.trace.refused) == ["layers.a.weight"]
    assert switched.switch_often(mixed_tensors) == PLANNED
    assert switched.reloads == 2
    assert switched.parts == [{"a.weight"}] * (NUM_SWITCHES + 1)  # twice where it is proven
    [summary, reason] = log.messages
    assert "copies into 2 parameters" in summary
    assert reason.startswith("layers.a is left to the engine's reload: layers.a.weight ")


@pytest.mark.parametrize("derive", DERIVING)
def test_a_layer_that_derives_something_is_reloaded_alone_or_all_are(derive):
    def make() -> Model:
        other = Layer()
        model = mixed_model(lambda: DerivingOnData(DERIVING[derive], other))
        model.layers["b"] = other
        return model

    switched = Switched(make, mixed_tensors(), in_parts=True)
    assert switched.trace.refused == {}
    planned = switched.switch_often(mixed_tensors)
    if derive in REPEATED:
        assert planned == PLANNED_AGAIN
        assert switched.reloads == 4  # two to see what it derives, and two to verify the others
        assert switched.parts == [{"a.weight"}] * NUM_SWITCHES
    else:
        assert not any(planned)
        assert len(switched.parts) < NUM_SWITCHES


class Absorbing(Model):
    """Derives something in a layer that nothing is loaded into, beside the one it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.a, self.block.b, self.block.attention = Layer(), Layer(), nn.Module()
        self.c = Layer(shape=(20, 4))
        del self.layers  # they have their names from where they are
        self.layers = {"a": self.block.a, "b": self.block.b, "c": self.c}

    def _reload(self, layers: list[Layer], tensors: Tensors) -> None:
        super()._reload(layers, tensors)
        self.block.attention.absorbed = self.block.a.weight * 2

    @property
    def derived(self) -> torch.Tensor:
        return self.block.attention.absorbed


def test_what_is_derived_beside_a_layer_leaves_the_whole_block_to_the_reload():
    switched = Switched(Absorbing, mixed_tensors(), in_parts=True)
    assert switched.switch_often(mixed_tensors) == PLANNED_AGAIN
    assert switched.reloads == 4
    assert switched.parts[-1] == {"a.weight", "b.weight"}


class Spreading(Model):
    """Marks another layer with each reload of all: no plan is ever good."""

    numbers = itertools.count()

    def reload(self, tensors: Tensors) -> None:
        super().reload(tensors)
        number = next(self.numbers)
        list(self.layers.values())[number % len(self.layers)].mark = number


def test_a_pause_has_a_bounded_number_of_reloads(log):
    names = "abcdefghijklmnop"

    def tensors() -> Tensors:
        return {f"{name}.weight": random() for name in names}

    switched = Switched(
        lambda: Spreading(**{name: Layer() for name in names}), tensors(), in_parts=True
    )
    for num_reloads in (2, 4, 6, 8, 9):
        assert not switched.switch(tensors())
        assert switched.reloads == num_reloads
    [message] = log.messages
    assert "for the next 16 versions" in message
    assert "verified 4 times" in message
    assert not any(switched.switch(tensors()) for _ in range(15))
    assert switched.reloads == 24


def test_a_switch_that_fails_is_raised_and_repaired_by_a_reload():
    class Failing(Model):
        fails = False

        def reload_part(self, tensors: Tensors) -> None:
            super().reload_part(tensors)
            if self.fails:
                raise RuntimeError("not today")

    switched = Switched(lambda: mixed_model(kind=Failing), mixed_tensors(), in_parts=True)
    assert switched.switch_often(mixed_tensors)[-1]
    _, late = switched.prepare_next()
    assert late.replaces_tensors
    switched.model.fails = True
    with pytest.raises(RuntimeError, match="not today"):
        switched.switch(mixed_tensors())
    assert not late.replaces_tensors
    switched.model.fails = False
    assert switched.switch_often(mixed_tensors) == PLANNED
    switched.model.fails = True
    with pytest.raises(RuntimeError, match="not today"):
        switched.switch(mixed_tensors())
    assert not any(switched.switch_often(mixed_tensors))


class Sharing(Model):
    """Loads one tensor into two layers, of which one computes."""

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            super().load_weights(iter([(name, tensor)]))
            if name == "b.weight":
                super().load_weights(iter([("a.weight", tensor)]))


class Demanding(Model):
    """Takes all tensors or none."""

    def load_weights(self, weights: Pairs) -> None:
        tensors = dict(weights)
        if len(tensors) < len(self.layers):
            raise ValueError("all of them, please")
        super().load_weights(iter(tensors.items()))


class FailingInPart(Model):
    def reload_part(self, tensors: Tensors) -> None:
        super().reload_part({name: tensor * 3 for name, tensor in tensors.items()})
        raise RuntimeError("no part of it")


class Meddling(Model):
    def reload_part(self, tensors: Tensors) -> None:
        super().reload_part(tensors)
        self.layers["b"].weight.data.mul_(2)


class Unlookable(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.odd = type("Odd", (), {"__dict__": property(lambda _: 1 / 0)})()


NEVER: dict[str, tuple[Callable[[], Model], dict[str, Any], str]] = {
    "computes, and no part is loaded alone": (mixed_model, {}, "layers.a"),
    "derives, and no part is loaded alone": (
        lambda: mixed_model(lambda: DerivingOnData(in_an_attribute)),
        {},
        "no part is loaded alone",
    ),
    "cannot be looked at": (lambda: mixed_model(Unlookable), {}, "ZeroDivisionError"),
    "most of it computes": (
        lambda: Model(a=Layer(), b=Layer(), c=Layer(scaled, shape=(20, 4))),
        {"in_parts": True},
        "layers.c.weight is computed",
    ),
}
NEVER |= {
    f"packs {kind}, {mistake}": (
        functools.partial(mixed_model, PACKED[kind]),
        {"packing": packing},
        "",
    )
    for kind in PACKED
    for mistake, packing in {
        "scaled": Packer(scale),
        "in another form": Packer(reshape),
        "not at all": Packer(lambda layer: layer.no_room),
        "without an image": None,
    }.items()
}
NEVER["packs into a kernel, untold"] = (
    lambda: mixed_model(IntoAKernel),
    {"packing": Packer(computed=lambda _: None)},
    "",
)
NEVER |= {
    kind.__name__: (functools.partial(mixed_model, kind=kind), {"in_parts": True}, why)
    for kind, why in (
        (Sharing, "share published tensors with others"),
        (Demanding, "all of them, please"),
        (FailingInPart, "no part of it"),
        (Meddling, "reloading a part changes layers.b.weight too"),
    )
}


@pytest.mark.parametrize("case", NEVER)
def test_where_copies_are_not_all_that_a_reload_does_all_is_reloaded(case, log):
    make, options, why = NEVER[case]
    switched = Switched(make, mixed_tensors(), **options)
    assert not any(switched.switch_often(mixed_tensors))
    [message] = log.messages  # once
    assert message.startswith("no fast path")
    assert why in message


FROZEN: dict[str, tuple[Callable[[], Model], dict[str, Any], bool]] = {
    "derived": (lambda: mixed_model(lambda: DerivingOnData(in_an_attribute)), {}, False),
    "packed": (lambda: mixed_model(IntoAKernel), {"packing": Packer()}, True),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_comes_of_a_layer_that_never_changed_is_known(case):
    make, options, is_planned = FROZEN[case]
    frozen = random()

    def tensors() -> Tensors:
        return mixed_tensors() | {"a.weight": frozen.clone()}

    switched = Switched(make, tensors(), **options)
    for model in (switched.model, switched.twin):  # as an engine that was started on such weights
        model.reload(tensors())
    planned = [switched.switch(tensors()) for _ in range(4)]
    assert planned == [False, *[is_planned] * 3]
    assert [switched.switch(mixed_tensors()) for _ in range(2)] == [is_planned] * 2


# A plan is proven again.


class Moody:
    """A loader that comes to do something else, which no trace on the meta device shows."""

    scales = False

    def __call__(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        if self.scales and not loaded.is_meta:
            loaded = loaded * 2
        parameter.data.copy_(loaded)


def test_a_loader_that_comes_to_do_something_else_ends_the_plan(caplog):
    moods = [Moody(), Moody()]

    switched = Switched(lambda: Model(a=Layer(moods[0]), b=Layer(moods[1])), two_tensors())
    assert switched.switch_often(two_tensors) == PLANNED
    assert not plan_lines(caplog)
    for mood in moods:
        mood.scales = True
    assert not any(switched.switch_often(two_tensors))
    [warning] = plan_lines(caplog)
    assert "does something else than when it was traced" in warning


def test_loaders_that_want_all_tensors_are_not_asked_again(log):
    switched = Switched(lambda: Demanding(a=Layer(), b=Layer()), two_tensors())
    assert switched.switch_often(two_tensors) == PLANNED
    assert sum("are not checked for changed loaders" in message for message in log.messages) == 1


@mapped_and_staged
def test_a_value_cached_by_its_weight_s_version_counter_is_computed_anew(staged):
    class Caching(Layer):
        cached = -1, None

        def compute(self) -> torch.Tensor:
            if self.cached[0] != self.weight._version:
                self.cached = self.weight._version, self.weight.sum()
            return self.cached[1]

    def written_behind_its_back(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    tensors = {"a.weight": random(), "b.weight": random()}
    kinds = itertools.chain([Caching], itertools.repeat(Layer))  # the twin caches nothing
    switched = Switched(
        lambda: Model(a=next(kinds)(written_behind_its_back), b=Layer()), tensors, staged=staged
    )
    switched.changes = differences
    for _ in range(NUM_SWITCHES):
        tensors = changed_a_little(tensors)
        switched.switch(copied(tensors))  # which compares what both compute
    assert switched.patched == PATCHED


def test_version_counters_change_after_the_last_load_also_if_it_is_of_a_draft():
    tensors = two_tensors()
    switched = Switched(two_layers, tensors)
    weight, load = switched.model.layers["a"].weight, switched.load
    counters: list[int] = []

    def noting(tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        load(tensors, partial=partial)
        counters.append(weight._version)

    switched.load = noting
    switched.read_draft_checkpoint = tensors.items
    switched.loads._tried_draft = True  # with a version that another rank could not load
    switched.loads.load_again(switched.staged_version(None, tensors))
    assert len(counters) == 2
    assert weight._version > counters[-1]


@pytest.mark.parametrize("module", ["sglang.srt.distributed.parallel_state", "vllm.distributed.x"])
def test_messages_of_ranks_are_no_weights(module):
    """SGLang's heads refer to the group of their ranks, whose memory each message changes."""

    class Group:
        def __init__(self) -> None:
            self.memory = 0

    class Head(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.group = Group()

        def process(self) -> None:
            self.group.memory += 1

    Group.__module__ = module
    switched = Switched(lambda: Model(a=Head(), b=Layer()), two_tensors())
    assert switched.switch_often(two_tensors) == PLANNED


def switch_layout(switched: Switched, tensors: Tensors) -> bool:
    switched.layout = Layout.of(specs_of(tensors))
    switched.trace_layout()
    return switched.switch(tensors)


def test_another_layout_is_proven_anew():
    """A version of it may have changed what copies of the first one leave alone."""

    def tensors(num_rows: int = 6) -> Tensors:
        return {"a.weight": random((num_rows, 4)), "b.weight": random()}

    switched = Switched(lambda: Model(a=Layer(padded), b=Layer()), tensors())
    assert switched.switch_often(tensors) == PLANNED
    for _ in range(2):
        for num_rows in (5, 6):
            assert not switch_layout(switched, tensors(num_rows))
            assert switched.switch(tensors(num_rows))
    for num_rows in range(6, 0, -1):
        switch_layout(switched, tensors(num_rows))
    assert len(switched.loads._plannings) == 4
    states = [planning.state for planning in switched.loads._plannings]
    assert states == [PlanState.VERIFIED, *[PlanState.MISSING] * 3]


def test_layouts_that_are_loaded_alike_keep_their_plans():
    """As those with and without a draft."""

    def tensors(dtype: torch.dtype) -> Tensors:
        return {"a.weight": random(), "b.weight": random(dtype=dtype)}

    dtypes = torch.float32, torch.bfloat16
    switched = Switched(two_layers, tensors(dtypes[0]))
    planned = [switch_layout(switched, tensors(dtype)) for dtype in dtypes * 3]
    assert planned == [False, False, True, True, True, True]
    assert switched.reloads == 4


def move_memory(model: Model) -> None:
    weight = model.layers["a"].weight
    weight.data = weight.data.clone()


def replace_parameter(model: Model) -> None:
    model.layers["a"].weight = parameter_like(model.layers["a"].weight)


def replace_layer(model: Model) -> None:
    layer = copy_layer(model.layers["a"])
    layer._parameters = layer._parameters | {"weight": parameter_like(layer.weight)}
    model.layers["a"] = layer


def parameter_like(parameter: Any) -> nn.Parameter:
    like = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    like.__dict__.update(parameter.__dict__)
    return like


class Adapted(nn.Module):
    """Layer in a wrapper, as an engine wraps layers that have a LoRA adapter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)


def assign(model: Model) -> None:
    model.layers["a"].weight = nn.Parameter(model.layers["a"].weight.clone(), requires_grad=False)


def assign_all(model: Model) -> None:
    model.load_state_dict(copied(model.state_dict()), assign=True)


def move_all(model: Model) -> None:
    """As one does by ``LLM.apply_model``."""
    model.apply(lambda module: module._apply(torch.Tensor.clone, recurse=False))


def wrapping(wrap: Callable[[nn.Module], Any]) -> Callable[[Model], None]:
    def replace(model: Model) -> None:
        model.layers["a"] = wrap(model.layers["a"])

    return replace


def compiled(layer: nn.Module) -> Any:
    """The layer in torch.compile's wrapper, once."""
    return layer if hasattr(layer, "_orig_mod") else torch.compile(layer, backend="eager")


REPLACING: dict[str, Callable[[Model], None]] = {
    "memory": move_memory,
    "parameter": replace_parameter,
    "parameter without a loader": assign,
    "state_dict(assign=True)": assign_all,
    "apply_model": move_all,
    "layer": replace_layer,
    "deep copy": wrapping(deepcopy),
    "LoRA wrapper": wrapping(Adapted),
    "torch.compile": wrapping(compiled),
}
"""Functions that replace a part of a model, or its memory, without changing a value."""


@mapped_and_staged
@pytest.mark.parametrize("kind", [Layer, Quantizing])
@pytest.mark.parametrize("is_delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("way", REPLACING)
def test_a_version_reaches_what_has_replaced_a_part_of_the_model(way, is_delta, kind, staged):
    tensors = mixed_tensors()
    make = functools.partial(mixed_model, kind)
    switched = Switched(make, tensors, packing=Packer(), staged=staged)
    switched.changes = differences if is_delta else None

    def switch() -> bool:
        """Switch to a version, and compare with a reload."""
        nonlocal tensors
        tensors = changed_a_little(tensors)
        return switched.switch(copied(tensors))

    def switch_by_force() -> None:
        switched.loads.note_foreign_load()
        assert not switch()
        switched.loads._state.note_loaded(None, "store", {})

    assert [switch() for _ in range(3)] == [False, True, True]
    REPLACING[way](switched.model)
    assert [switch() for _ in range(4)][-2:] == [True, True]
    assert switched.patched[-1] == is_delta
    REPLACING[way](switched.model)
    switch_by_force()
    switch_by_force()
    assert [switch() for _ in range(4)][-2:] == [True, True]
    assert switched.patched[-1] == is_delta


@pytest.mark.parametrize(
    ("kind", "replace"),
    [
        (Layer, move_memory),
        (Layer, replace_parameter),
        (Layer, replace_layer),
        (IntoItself, replace_parameter),
        (IntoAKernel, replace_layer),
    ],
)
def test_a_switch_fills_what_has_replaced_what_was_planned(kind, replace, log):
    make = functools.partial(mixed_model, kind)
    switched = Switched(make, mixed_tensors(), packing=Packer())
    assert switched.switch_often(mixed_tensors) == PLANNED
    newest, switch = switched.prepare_next()
    replace(switched.model)  # in the pause
    switched.commit(switch, newest)
    assert torch.equal(switched.model.layers["c"].weight, newest["c.weight"])
    assert switched.switch_often(mixed_tensors) == PLANNED
    assert sum("was replaced, or has moved" in line for line in plan_lines(log)) == 1


def test_a_weight_whose_strides_were_exchanged_is_reloaded():
    """The object and its address stay the same."""

    def tensors() -> Tensors:
        return {"a.weight": random((20, 20)), "b.weight": random()}

    switched = Switched(lambda: Model(a=Layer(shape=(20, 20)), b=Layer()), tensors())
    assert switched.switch_often(tensors) == PLANNED
    weight = switched.model.layers["a"].weight
    weight.data = weight.data.t()
    newest, switch = switched.prepare_next()
    switched.commit(switch, newest)
    assert torch.equal(weight, newest["a.weight"])


@pytest.mark.parametrize(
    "memory",
    [lambda: [torch.zeros(4, 6).t(), torch.zeros(SHAPE)], lambda: torch.zeros(2, *SHAPE)],
    ids=["in another form than its loader left", "shared"],
)
def test_parameters_that_copies_do_not_fill_are_never_planned(memory):
    switched = Switched(two_layers, two_tensors())
    for model in (switched.model, switched.twin):
        for name, tensor in zip("ab", memory(), strict=True):
            model.layers[name].weight.data = tensor
    assert not any(switched.switch_often(two_tensors))


def test_a_version_that_lacks_a_parameter_is_never_planned():
    def part() -> Tensors:
        return {"a.weight": random()}

    switched = Switched(two_layers, part())
    assert not any(switched.switch_often(part))


def test_a_reload_that_fails_is_raised_and_verifies_nothing():
    class Failing(Model):
        fails_with: torch.Tensor | None = None

        def reload(self, tensors: Tensors) -> None:
            if tensors["a.weight"] is self.fails_with:
                raise RuntimeError("no reload")
            super().reload(tensors)

    switched = Switched(lambda: Failing(a=Layer(), b=Layer()), two_tensors())
    version = two_tensors()
    switched.model.fails_with = version["a.weight"]
    for _ in range(2):
        switch = switched.prepare(version)
        assert not switch.replaces_tensors
        with pytest.raises(RuntimeError, match="no reload"):
            switched.commit(switch, version)
    assert switched.switch_often(two_tensors) == PLANNED


# What changed alone.


def differences(before: Tensors, after: Tensors) -> Changed:
    return {
        name: np.flatnonzero((before[name] != tensor).numpy()) for name, tensor in after.items()
    }


def changed_a_little(tensors: Tensors) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        if tensor.numel():
            places = torch.randperm(tensor.numel())[:2]  # two of them, and not one twice
            tensor.view(-1)[places] = (9 * random((len(places),))).to(tensor.dtype)
    return changed


def patched_often(
    make: Callable[[], Model], tensors: Tensors, *, staged: bool = False, changes: Any = differences
) -> Switched:
    """A model after several switches to versions of which little changed."""
    switched = Switched(make, tensors, staged=staged)
    switched.changes = changes
    for _ in range(NUM_SWITCHES):
        tensors = changed_a_little(tensors)
        switched.switch({name: tensor.clone() for name, tensor in tensors.items()})
    return switched


def one_patched() -> Switched:
    switched = patched_often(lambda: Model(a=Layer()), {"a.weight": random()})
    assert switched.patched[-1]
    return switched


@mapped_and_staged
@pytest.mark.parametrize("case", COPIES)
def test_what_changed_is_patched_where_somebody_tells(case, staged, monkeypatch):
    applied, apply = [], prepared_switch.Patches.apply

    def note_and_apply(*args: Any) -> None:
        applied.append(args)
        apply(*args)

    monkeypatch.setattr(prepared_switch.Patches, "apply", note_and_apply)
    make, make_tensors = COPIES[case]
    switched = patched_often(make, make_tensors(), staged=staged)
    assert switched.patched == PATCHED
    assert len(applied) == sum(PATCHED)


def test_a_patch_reaches_every_rank_s_share_and_no_other():
    """By comparison with a copy, for places in random views of random tensors."""
    for _ in range(200):
        shape = [int(extent) for extent in torch.randint(1, 5, (3,))]
        source = random(tuple(shape))
        axis = int(torch.randint(0, 3, ()))
        start = int(torch.randint(0, shape[axis], ()))
        view = source.narrow(axis, start, shape[axis] - start)
        view = view.permute(*torch.randperm(3).tolist())
        parameter = torch.zeros(view.shape)
        part, to = View.of(view, source), View.of(parameter, parameter)
        places = np.flatnonzero(np.random.default_rng().random(source.numel()) < 0.5)
        patch = prepared_switch.patch_or_copy(
            parameter, CopyOp(to, "a", part), {"a": source}, {"a": places}
        )
        wanted = torch.zeros(source.shape)
        wanted.view(-1)[torch.from_numpy(places)] = source.view(-1)[torch.from_numpy(places)]
        if patch is None:
            assert not part.in_(wanted).any()
            continue
        assert isinstance(patch, prepared_switch.Patch)
        patch.apply()
        assert torch.equal(parameter, part.in_(wanted))


def test_a_patch_reaches_each_place_of_an_element():
    source = random((1, 4))
    view = source.expand(3, 4)
    parameter = torch.zeros(3, 4)
    part, to = View.of(view, source), View.of(parameter, parameter)
    changed = {"a": np.array([2])}
    patch = prepared_switch.patch_or_copy(parameter, CopyOp(to, "a", part), {"a": source}, changed)
    patch.apply()
    wanted = torch.zeros(3, 4)
    wanted[:, 2] = source[0, 2]
    assert torch.equal(parameter, wanted)


def test_a_patch_of_a_part_in_one_piece_costs_as_much_as_its_changes():
    """By a part with more elements than any memory has room for."""
    size = 1 << 50
    source = random((1,)).expand(size)
    parameter = torch.zeros(2 * size, device="meta")
    to, part = View(size, (size,), (1,)), View(0, (size,), (1,))
    changed = {"a": np.array([3, size - 1])}
    patch = prepared_switch.patch_or_copy(parameter, CopyOp(to, "a", part), {"a": source}, changed)
    assert patch.positions.tolist() == [size + 3, 2 * size - 1]
    assert patch.values.view(torch.float32).tolist() == [source[0].item()] * 2


def test_what_is_told_wrongly_is_found_out():
    one = {"a.weight": random()}
    switched = patched_often(lambda: Model(a=Layer()), one)
    switched.changes = lambda before, after: {}
    _, switch = switched.prepare_next()
    assert switch.patches is not None
    switched.commit(switch)
    assert switched.attest(switch) == ["layers.a.weight"]


def test_a_model_whose_weights_are_unknown_is_copied_whole():
    switched = one_patched()
    switched.loads._forget()
    assert switched.switch(changed_a_little(switched.versions[-1]))
    assert not switched.patched[-1]


def test_patches_to_another_version_than_the_model_holds_are_not_used():
    """The version before was loaded again meanwhile, say."""
    switched = one_patched()
    newest, late = switched.prepare_next()
    assert late.patches is not None
    before = switched.prepare(switched.versions[0], 0)
    switched.commit(before)
    switched.commit(late)
    assert torch.equal(switched.model.layers["a"].weight, newest["a.weight"])


def test_an_engine_that_sleeps_keeps_no_patches_on_its_device():
    switched = one_patched()
    newest, switch = switched.prepare_next()
    switch.leave_device()
    assert switch.patches is None
    switched.commit(switch)
    assert torch.equal(switched.model.layers["a"].weight, newest["a.weight"])


@mapped_and_staged
def test_a_tensor_of_which_much_changed_leaves_the_others_alone(staged, monkeypatch):
    monkeypatch.setattr(prepared_switch, "MAX_SHARE", 0.05)
    tensors = two_tensors()
    switched = Switched(two_layers, tensors, staged=staged)
    switched.changes = differences
    switched.switch(tensors)
    for _ in range(2):
        assert switched.switch(switched.versions[-1] | {"b.weight": random()})
    assert switched.patched[-1]
    _, switch = switched.prepare_next()
    assert not switch.patches.patches
    assert list(switch.patches.copies) == ["layers.a.weight", "layers.b.weight"]


# Weights that something else has loaded meanwhile.


def all_kinds() -> Model:
    return Model(**{kind: make_layer() for kind, (make_layer, _) in KINDS.items()})


def tensors_of_all_kinds() -> Tensors:
    return {
        f"{kind}.{part}": tensor
        for kind, (_, make_parts) in KINDS.items()
        for part, tensor in make_parts().items()
    }


@mapped_and_staged
def test_whichever_parameter_something_else_wrote_the_model_is_not_attested(staged):
    switched = Switched(all_kinds, tensors_of_all_kinds(), staged=staged)
    switched.switch_often(tensors_of_all_kinds)
    switch = switched.switched
    for name, parameter in switched.model.named_parameters():
        element = parameter.data.view(-1)[:1].view(torch.uint8)[-1:]
        element ^= 1
        assert switched.attest(switch) == [name]
        element ^= 1
    assert switched.attest(switch) == []


def test_a_replaced_parameter_is_not_attested():
    switched = Switched(two_layers, two_tensors())
    switched.switch_often(two_tensors)
    layer = switched.model.layers["a"]
    layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    assert switched.attest(switched.switched) == ["layers.a.weight"]


def test_weights_that_may_not_be_read_are_not_attested():
    switched = Switched(two_layers, two_tensors())
    switched.switch_often(two_tensors)
    is_wanted = iter([True, False])
    assert switched.attest(switched.switched, lambda: next(is_wanted)) is None
    switched.loads._forget()
    assert switched.attest(switched.switched) is None


@pytest.mark.parametrize(
    ("state", "value", "usual"), [("asleep", {WEIGHTS}, set()), ("must_reload", True, False)]
)
def test_weights_that_sleep_or_are_unknown_are_neither_planned_nor_attested(state, value, usual):
    switched = Switched(two_layers, two_tensors())
    switched.switch_often(two_tensors)
    setattr(switched.loads._state, state, value)
    assert switched.prepare(two_tensors()) is None
    assert switched.attest(switched.switched) is None
    setattr(switched.loads._state, state, usual)
    assert switched.prepare(two_tensors()) is not None
    assert switched.attest(switched.switched) == []


def test_what_was_put_back_after_a_version_was_prepared_is_noticed_in_the_pause(log):
    switched = one_patched()
    newest, switch = switched.prepare_next()
    assert switch.patches is not None
    switched.model.reload(switched.versions[-3])
    switched.commit(switch)
    assert "something wrote to the weights" in log.text
    assert torch.equal(switched.model.layers["a"].weight, newest["a.weight"])


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 24, 64, 200])
def test_a_digest_tells_every_change_of_a_bit_and_of_an_order(num_bytes, monkeypatch):
    monkeypatch.setattr(prepared_switch, "_CHUNK_BYTES", 24)
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    parts = list(content.split([num_bytes // 3, num_bytes - num_bytes // 3]))
    whole = digest_of_all([content.clone()])
    assert digest_of_all(map(torch.Tensor.clone, parts)) == whole
    digests = {whole}
    for place in range(num_bytes):
        for bit in range(8):
            changed = content.clone()
            changed[place] ^= 1 << bit
            digests.add(digest_of_all([changed]))
    assert len(digests) == 1 + 8 * num_bytes
    words = content[: num_bytes // 8 * 8].view(-1, 8)
    for place in range(len(words)):  # all bits of a word
        changed = content.clone()
        changed[8 * place : 8 * place + 8] ^= 255
        digests.add(digest_of_all([changed]))
    for first, second in itertools.combinations(range(len(words)), 2):
        changed = content.clone()
        changed.view(torch.uint8)[: words.numel()].view(-1, 8)[[first, second]] = words[
            [second, first]
        ]
        digests.add(digest_of_all([changed]))
        changed = content.clone()  # the highest bit of two words
        changed[[8 * first + 7, 8 * second + 7]] ^= 128
        digests.add(digest_of_all([changed]))
    pairs = len(words) * (len(words) - 1) // 2
    assert len(digests) == 1 + 8 * num_bytes + len(words) + 2 * pairs


# Failures that pass.


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (prepared_switch, "patch_or_copy"),
        (prepared_switch.Patch, "on_device"),
        (prepared_switch.Patch, "apply"),
    ],
)
def test_a_version_whose_patches_fail_is_copied_whole_and_the_next_is_patched(
    kind, step, monkeypatch
):
    switched = patched_often(two_layers, two_tensors())
    once = Once(getattr(kind, step))
    monkeypatch.setattr(kind, step, lambda *args: once(*args))
    for _ in range(3):
        assert switched.switch(changed_a_little(switched.versions[-1]))
    assert once.has_failed
    assert switched.patched[-2:] == [True, True] or step == "on_device"
    assert switched.patched[-1]


def test_an_image_that_failed_is_made_again_after_some_versions(caplog):
    packing = Packer(Once(lambda layer: layer.pack()))
    switched = Switched(lambda: mixed_model(IntoAKernel), mixed_tensors(), packing=packing)
    planned = [switched.switch(mixed_tensors()) for _ in range(19)]
    assert planned == [*[False] * 17, True, True]
    [warning] = plan_lines(caplog)
    assert "for the next 16 versions" in warning
    assert "no room on this device" in warning
