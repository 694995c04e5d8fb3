"""Switches by copies alone: planned where a reload does no more, and never anywhere else.

The models here have loaders and layers as engines have them, and every way that is known to do more
than to copy. Each is switched many times, beside a twin that is only ever reloaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from dbuffer.format.layout import TensorSpec
from dbuffer.integrations.engine.copy_plan import PlannedLoads
from dbuffer.integrations.engine.recording import Recording
from dbuffer.integrations.engine.shape_check import ShapeCheck, WatchedLoads
from dbuffer.io.tensors import DTYPES

SHAPE = (6, 4)
NUM_SWITCHES = 6

Tensors = dict[str, torch.Tensor]
Loader = Callable[[torch.Tensor, torch.Tensor], None]

_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


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
        self.weight.weight_loader = loader  # type: ignore[attr-defined]

    def process(self) -> None:
        """What a layer does when it is loaded."""


class Model(nn.Module):
    """Layers by name; a tensor ``NAME.weight`` goes to the layer of that name."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer, _, part = name.partition(".")
            weight = self.layers[layer].weight
            loader = weight.weight_loader
            if part == "weight":
                loader(weight, tensor)
            else:
                loader(weight, tensor, part)

    def reload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.load_weights(iter(tensors.items()))
        for layer in self.layers.values():
            layer.process()


class Watched(WatchedLoads):  # type: ignore[no-untyped-call]
    def __init__(self, model: Model) -> None:
        # As if all were padded: what a loader takes of a tensor is not checked here.
        super().__init__(model, embedding=nn.Module, default_loader=copy, tp_size=1)

    def require_complete(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """All is well."""


def record(make: Callable[[], Model], tensors: Tensors) -> Recording:
    with torch.device("meta"):
        model = make()
    specs = [TensorSpec(n, _OF_DTYPE[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return ShapeCheck(Watched(model))(specs)


def random(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


class Switched:
    """A model that is switched, as an engine switches its own, and what came of it."""

    def __init__(self, make: Callable[[], Model], tensors: Tensors) -> None:
        self.model, self.twin = make(), make()
        self.recording = record(make, tensors)
        self.loads = PlannedLoads(self.model)
        self.reloads = 0

    def switch(self, tensors: Tensors) -> bool:
        """Whether it was done by copies alone."""
        before = self.reloads

        def reload() -> None:
            self.reloads += 1
            self.model.reload(tensors)

        self.loads.load(tensors, self.recording, reload)
        self.twin.reload(tensors)
        mine, right = self.model.state_dict(), self.twin.state_dict()
        for name in right:
            assert torch.equal(mine[name], right[name]), name
        return self.reloads == before

    def switch_often(self, make_tensors: Callable[[], Tensors]) -> list[bool]:
        return [self.switch(make_tensors()) for _ in range(NUM_SWITCHES)]


# Models that are only copied to.


def fused(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    first = {"q": 0, "k": 2, "v": 4}[part]
    parameter.data.narrow(0, first, 2).copy_(loaded)


def padded(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter[: len(loaded)].data.copy_(loaded)
    parameter[len(loaded) :].data.fill_(0)


def expert(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    parameter.data[int(part)].copy_(loaded)


def sharded(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """The second of two ranks' columns."""
    parameter.data.copy_(loaded.narrow(1, 4, 4))


def transposed(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.t())


def twice(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)
    parameter.data.copy_(loaded)


def make_tied() -> Model:
    model = Model(a=Layer(), b=Layer())
    model.layers["b"].weight = model.layers["a"].weight
    return model


COPIES: dict[str, tuple[Callable[[], Model], Callable[[], Tensors]]] = {
    "plain": (
        lambda: Model(a=Layer(), b=Layer()),
        lambda: {"a.weight": random(), "b.weight": random()},
    ),
    "fused": (
        lambda: Model(a=Layer(fused)),  # type: ignore[arg-type]
        lambda: {f"a.{part}": random((2, 4)) for part in "qkv"},
    ),
    "padded": (lambda: Model(a=Layer(padded)), lambda: {"a.weight": random((5, 4))}),
    "experts": (
        lambda: Model(a=Layer(expert, (3, 6, 4))),  # type: ignore[arg-type]
        lambda: {f"a.{number}": random() for number in range(3)},
    ),
    "a rank's share": (lambda: Model(a=Layer(sharded)), lambda: {"a.weight": random((6, 8))}),
    "transposed view": (lambda: Model(a=Layer(transposed)), lambda: {"a.weight": random((4, 6))}),
    "cast": (
        lambda: Model(a=Layer(dtype=torch.bfloat16)),
        lambda: {"a.weight": random()},
    ),
    "tied": (make_tied, lambda: {"a.weight": random(), "b.weight": random()}),
    "twice the same": (lambda: Model(a=Layer(twice)), lambda: {"a.weight": random()}),
    "a scalar": (lambda: Model(a=Layer(shape=())), lambda: {"a.weight": random(())}),
    "nothing in one": (
        lambda: Model(a=Layer(), b=Layer(shape=(0, 4))),
        lambda: {"a.weight": random(), "b.weight": random((0, 4))},
    ),
}


@pytest.mark.parametrize("case", COPIES)
def test_what_is_only_copied_is_reloaded_once_and_copied_from_then_on(case: str) -> None:
    make, make_tensors = COPIES[case]
    switched = Switched(make, make_tensors())
    assert switched.recording.refused == {}
    is_planned = switched.switch_often(make_tensors)
    assert is_planned == [False, *[True] * (NUM_SWITCHES - 1)]


def test_parameters_stay_where_they_are() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    places = [parameter.data_ptr() for parameter in switched.model.parameters()]
    switched.switch_often(make_tensors)
    assert places == [parameter.data_ptr() for parameter in switched.model.parameters()]


# Loaders that compute.


def scaled(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded * 2)


def transposed_copy(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.t().contiguous())


def concatenated(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(torch.cat([loaded[3:], loaded[:3]]))


def quantised(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.round())


def added(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.zero_()
    parameter.data.add_(loaded)


def through_a_buffer(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    mine = torch.empty_like(parameter)
    mine.copy_(loaded)
    parameter.data.copy_(mine)


def other_bits(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.view(torch.int32).copy_(loaded.view(torch.int32))


def in_part(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[:3].copy_(loaded[:3])


def overlapping(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[:4].copy_(loaded[:4])
    parameter.data[2:].copy_(loaded[2:])


def depending(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)
    parameter.data[0].mul_(3)


COMPUTING = [
    scaled,
    transposed_copy,
    concatenated,
    quantised,
    added,
    through_a_buffer,
    other_bits,
    in_part,
    overlapping,
    depending,
]


@pytest.mark.parametrize("loader", COMPUTING, ids=lambda loader: loader.__name__)
def test_a_loader_that_does_more_than_to_copy_is_never_planned(
    loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dbuffer")
    shape = (4, 6) if loader is transposed_copy else SHAPE

    def make() -> Model:
        return Model(a=Layer(loader), b=Layer())

    def tensors() -> Tensors:
        return {"a.weight": random(shape), "b.weight": random()}

    switched = Switched(make, tensors())
    assert list(switched.recording.refused) == ["layers.a.weight"]
    assert not any(switched.switch_often(tensors))
    [message] = caplog.messages  # once
    assert "layers.a.weight: its " in message


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


def in_an_attribute(layer: Any) -> None:
    layer.twin = layer.weight * 2


def in_place(layer: Any) -> None:
    if not hasattr(layer, "scale"):
        layer.scale = torch.zeros(())
    layer.scale.copy_(layer.weight.sum())


def in_a_buffer(layer: Any) -> None:
    layer.register_buffer("packed", layer.weight.t().contiguous(), persistent=False)


def in_another_layer(layer: Any) -> None:
    layer.others[0].absorbed = layer.weight[0].clone()


def in_a_closure(layer: Any) -> None:
    packed = layer.weight.t().contiguous()
    layer.linear = lambda x: x @ packed


def in_a_default(layer: Any) -> None:
    def linear(x: torch.Tensor, packed: torch.Tensor) -> Any:
        return x @ packed

    linear.__defaults__ = (layer.weight.t().contiguous(),)
    layer.linear = linear


def in_a_partial(layer: Any) -> None:
    layer.linear = functools.partial(torch.matmul, other=layer.weight.t().contiguous())


def in_an_object(layer: Any) -> None:
    layer.kernel = [{"kernel": Kernel(layer.weight)}]


def behind_a_handle(layer: Any) -> None:
    layer.handle = Handle(layer.weight)


def in_an_opaque_thing(layer: Any) -> None:
    layer.handle = ctypes.create_string_buffer(bytes(layer.weight.numpy()))


def inside_an_opaque_thing(layer: Any) -> None:
    if not hasattr(layer, "handle"):
        layer.handle = memoryview(bytearray(4))
    layer.handle[:] = bytes(layer.weight.sum().reshape(1).view(torch.uint8).tolist())


def in_a_cached_function(layer: Any) -> None:
    if not hasattr(layer, "packed"):
        layer.packed = functools.lru_cache(lambda: layer.weight.t().contiguous())
    layer.packed.cache_clear()
    layer.packed()


def in_a_number(layer: Any) -> None:
    layer.largest = float(layer.weight.max())


def on_the_weight(layer: Any) -> None:
    layer.weight.packed = layer.weight.t().contiguous()


def after_loading(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 2


DERIVING = [
    in_an_attribute,
    in_place,
    in_a_buffer,
    in_another_layer,
    in_a_closure,
    in_a_default,
    in_a_partial,
    in_an_object,
    behind_a_handle,
    in_an_opaque_thing,
    inside_an_opaque_thing,
    in_a_cached_function,
    in_a_number,
    on_the_weight,
    after_loading,
]


@pytest.mark.parametrize("derive", DERIVING, ids=lambda derive: derive.__name__)
def test_a_model_that_derives_something_is_never_planned(
    derive: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dbuffer")

    def make() -> Model:
        other = Layer()
        return Model(a=DerivingOnData(derive, other), b=other)

    def tensors() -> Tensors:
        return {"a.weight": random(), "b.weight": random()}

    switched = Switched(make, tensors())
    assert switched.recording.refused == {}
    assert not any(switched.switch_often(tensors))
    [message] = caplog.messages
    assert message.startswith("switches go through the engine's reload")


class DerivingOnData(Deriving):
    """As `Deriving`, which has nothing to derive from on the meta device."""

    def __init__(self, derive: Callable[[Any], None], *others: nn.Module) -> None:
        super().__init__(lambda layer: None if layer.weight.is_meta else derive(layer), *others)


def test_what_a_parameter_that_never_changed_gives_rise_to_is_derived_when_it_does() -> None:
    frozen = random()

    def make() -> Model:
        return Model(a=Layer(), b=DerivingOnData(in_an_attribute))

    switched = Switched(make, {"a.weight": frozen, "b.weight": frozen})
    switched.model.reload({"a.weight": random(), "b.weight": frozen})
    planned = [switched.switch({"a.weight": random(), "b.weight": frozen}) for _ in range(4)]
    # What its attribute is made from has not changed: copies are all that a reload does.
    assert planned[-1]
    for _ in range(4):
        new = random()
        assert not switched.switch({"a.weight": random(), "b.weight": new})
        assert torch.equal(switched.model.layers["b"].twin, new * 2)


def test_another_layout_is_proven_anew() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    assert switched.switch_often(make_tensors)[-1]
    switched.recording = record(make, make_tensors())
    assert switched.switch_often(make_tensors) == [False, *[True] * (NUM_SWITCHES - 1)]


def test_parameters_that_have_moved_are_reloaded() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    assert switched.switch_often(make_tensors)[-1]
    weight = switched.model.layers["a"].weight
    kept, weight.data = weight.data, weight.data.clone()
    assert not switched.switch(make_tensors())
    assert kept is not weight.data


def test_a_parameter_in_another_form_than_its_loader_left_is_never_planned() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    for model in (switched.model, switched.twin):
        model.layers["a"].weight.data = torch.zeros(4, 6).t()
    assert not any(switched.switch_often(make_tensors))


def test_a_version_that_lacks_a_parameter_is_copied_where_a_part_will_do_alone() -> None:
    make, make_tensors = COPIES["plain"]

    def part() -> Tensors:
        return {"a.weight": make_tensors()["a.weight"]}

    switched = Switched(make, part())
    assert not any(switched.switch_often(part))
    switched = Switched(make, part())
    switched.loads = PlannedLoads(switched.model, partial=True)
    assert switched.switch_often(part) == [False, *[True] * (NUM_SWITCHES - 1)]


def test_parameters_that_share_memory_are_never_planned() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    both = torch.zeros(2, *SHAPE)
    for name, memory in zip("ab", both, strict=True):
        switched.model.layers[name].weight.data = memory
    assert not any(switched.switch_often(make_tensors))


def test_a_reload_that_fails_is_raised_and_proves_nothing() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())

    def fail() -> None:
        raise RuntimeError("no reload")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no reload"):
            switched.loads.load(make_tensors(), switched.recording, fail)
    assert switched.switch_often(make_tensors) == [False, *[True] * (NUM_SWITCHES - 1)]


class Unlookable:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError("do not look")


def test_a_model_that_cannot_be_looked_at_is_reloaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dbuffer")
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    switched.model.layers["a"].odd = Unlookable()
    assert not any(switched.switch_often(make_tensors))
    assert "do not look" in caplog.text


def test_nothing_is_planned_without_a_record() -> None:
    make, make_tensors = COPIES["plain"]
    switched = Switched(make, make_tensors())
    switched.recording = None  # type: ignore[assignment]
    assert not any(switched.switch_often(make_tensors))


def test_values_that_are_no_numbers_are_compared_by_their_bytes() -> None:
    make, _ = COPIES["plain"]

    def tensors() -> Tensors:
        strange = torch.tensor([float("nan"), -0.0, float("inf"), 1.0]) * random((1,)).sign()
        return {"a.weight": strange.repeat(6, 1), "b.weight": random()}

    switched = Switched(make, tensors())
    for _ in range(3):
        version = tensors()
        reload = functools.partial(switched.model.reload, version)
        switched.loads.load(version, switched.recording, reload)
        mine = switched.model.layers["a"].weight.view(torch.int32)
        assert torch.equal(mine, version["a.weight"].view(torch.int32))
