"""Which tensors an engine's model has places for, by its own loaders. No engine but ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from dbuffer.engine.meta_model import DraftedModel, MetaModel, built_without_data
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.shape_check import ShapeCheck, is_multi_token_prediction
from dbuffer.errors import UnsupportedError, WeightsMismatchError
from dbuffer.format.layout import TensorSpec

ROWS, WIDTH = 10, 4
EMBEDDING, HEAD, LAYER, BIAS = "embed.weight", "head.weight", "layer.weight", "head.bias"
SPECS = [TensorSpec(name, "float32", (ROWS, WIDTH)) for name in (EMBEDDING, HEAD)]
SPECS.append(TensorSpec(LAYER, "float32", (WIDTH, WIDTH)))
UNTIED, TIED = SPECS, [SPECS[0], SPECS[2]]
ONE = TensorSpec("bias", "float32", (WIDTH,))


class Rows(nn.Module):
    """An embedding or a head, padded as engines pad them."""

    org_vocab_size = ROWS

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * ROWS, WIDTH))
        self.register_parameter("bias", None)


class Model(nn.Module):
    """Passes over biases that it does not know, refuses other names, and registers one itself."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = Rows(), Rows()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_tied = is_tied
        if is_tied:
            self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name == BIAS:
                self.head.bias = nn.Parameter(tensor.to(self.head.weight.device))
            elif name in own:
                own[name].weight_loader(own[name], tensor)
            elif not (name.endswith((".bias", "inv_freq")) or (self.is_tied and name == HEAD)):
                raise KeyError(name)


def rows(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[: len(loaded)].copy_(loaded)
    parameter.data[len(loaded) :].fill_(0)


def check_of(serving: Model, **options: Any) -> ShapeCheck:
    copy = built_without_data(lambda: Model(is_tied=serving.is_tied), "Model")
    watched = MetaModel(copy, embedding=Rows, default_loader=rows, tp_size=1, serving=serving)
    return ShapeCheck(watched, **options)


def unused(trace: LoadTrace) -> list[str]:
    return [tensor.partition(" ")[0] for tensor in trace.unused]


@pytest.mark.parametrize(
    "names",
    [
        ["layer.bias"],  # passed over
        ["head.scale"],  # refused
        ["other.0.weight", "layer.bias", "other.1.weight", "other.1.bias"],
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_tensors_without_a_place_are_named(names, *, is_first):
    surplus = [ONE._replace(name=name) for name in names]
    trace = check_of(Model())([*surplus, *UNTIED] if is_first else [*UNTIED, *surplus])
    assert sorted(unused(trace)) == sorted(names)
    assert set(trace.tensors) == {EMBEDDING, HEAD, LAYER}
    assert {spec.name for spec in UNTIED} <= trace.offered


@pytest.mark.parametrize(
    ("spec", "is_known"),
    [
        (TensorSpec("layer.rotary_emb.inv_freq", "float32", (2,)), True),
        (TensorSpec("layer.position_ids", "int64", (1, 8)), True),
        (TensorSpec("layer.attn.bias", "bool", (1, 1, 8, 8)), True),  # a mask
        (TensorSpec("layer.attn.bias", "float32", (8,)), False),
        (TensorSpec("mtp.layers.0.weight", "float32", (8,)), True),
        (TensorSpec("model.layers.2.weight", "float32", (8,)), True),
        (TensorSpec("model.layers.3.weight", "float32", (8,)), False),
    ],
)
def test_computed_buffers_and_drafts_need_no_place(spec, *, is_known):
    class Config:
        num_hidden_layers, num_nextn_predict_layers = 2, 1

    check = check_of(Model(), is_spare=lambda name: is_multi_token_prediction(name, Config()))
    assert unused(check([*UNTIED, spec])) == ([] if is_known else [spec.name])


def test_a_refusal_says_which_rule_would_mend_the_names():
    check = check_of(Model())
    advice = re.escape("with rename=dbuffer.NameMap().prefix('actor.', ''), the")
    with pytest.raises(WeightsMismatchError, match=advice):
        check([spec._replace(name=f"actor.{spec.name}") for spec in UNTIED])
    assert not check(UNTIED).unused


def test_aliases_are_offered_where_a_name_is_missing():
    trace = check_of(Model())(TIED, {HEAD: EMBEDDING})
    assert set(trace.tensors) == {EMBEDDING, HEAD, LAYER}
    assert trace.offered == {EMBEDDING, HEAD, LAYER}
    assert not trace.unused
    # A tied model skips the head, under whichever name the store has both.
    stored = [SPECS[1], SPECS[2]]
    trace = check_of(Model(is_tied=True))(stored, {EMBEDDING: HEAD})
    assert set(trace.tensors) == {EMBEDDING, LAYER}
    assert not trace.unused
    # One that the model has not is named.
    aliases = {HEAD: EMBEDDING, "other.weight": LAYER}
    for is_tied in (True, False):
        assert unused(check_of(Model(is_tied=is_tied))(TIED, aliases)) == ["other.weight"]


class Threaded(Model):
    """Loads in threads of its own, as some models of engines do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(super(Threaded, self).load_weights, [pair]) for pair in weights]
        for load in loads:
            load.result()


def test_loads_in_threads_are_counted_and_traced():
    check, threaded = check_of(Model()), check_of(Model())
    threaded._meta.model.__class__ = Threaded
    assert threaded(UNTIED) == check(UNTIED)
    with pytest.raises(WeightsMismatchError, match=r"0 of 16 .*layer.weight"):
        threaded(UNTIED[:2])


def test_a_head_that_the_model_ties_is_redundant_if_it_is_equal():
    for tied in (Model(is_tied=True), Model()):
        tied.head.weight = tied.embed.weight  # as engines tie what they found equal
        trace = check_of(tied)(UNTIED)
        assert not trace.unused
        assert trace.twins == {HEAD: EMBEDDING}


def test_parameters_that_a_loader_registers():
    bias = TensorSpec(BIAS, "float32", (ROWS,))
    serving = Model()
    with pytest.raises(WeightsMismatchError):
        check_of(serving)([*UNTIED, bias])
    serving.head.bias = nn.Parameter(torch.empty(ROWS))
    check = check_of(serving)
    for _ in range(2):
        trace = check([*UNTIED, bias])
        assert "registered by its loader" in trace.refused[BIAS]
        assert not trace.unused
        with pytest.raises(WeightsMismatchError, match=r"head.bias "):
            check(UNTIED)
    with pytest.raises(WeightsMismatchError, match=r"head.bias .*\[3\]"):
        check([*UNTIED, bias._replace(shape=(3,))])


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([SPECS[0]._replace(shape=(12, WIDTH)), *SPECS[1:]], r"\[12, 4\] .*10 .*12"),
        ([*SPECS[:2], SPECS[2]._replace(name="lay_er.weight")], r"layer.weight .*lay_er"),
        ([*SPECS[:2], SPECS[2]._replace(dtype="int64")], r"torch.int64 .*torch.float"),
    ],
    ids=["another vocabulary", "a name that is missing and one that is unknown", "integers"],
)
def test_a_refusal_says_what_does_not_fit(specs, told):
    with pytest.raises(WeightsMismatchError, match=told):
        check_of(Model())(specs)


class Slopes(nn.Module):
    """Reads what it computes, as ALiBi's slopes and thresholds of activations are."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        base = torch.tensor(2 ** -(2 ** -(math.log2(8) - 3)), dtype=torch.float32)
        slopes = torch.pow(base, torch.arange(1, 9, dtype=torch.int32))
        self.read = read(torch.cat([slopes, slopes])[4:12])
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("cache", torch.tensor([0.5]), persistent=False)


def test_models_that_read_numbers_are_built_without_data():
    made = built_without_data(lambda: Slopes(torch.Tensor.tolist), "Slopes")
    assert made.read == Slopes(torch.Tensor.tolist).read
    assert made.weight.is_meta
    assert made.scale.is_meta
    assert not made.cache.is_meta


def test_models_that_read_weights_are_refused_by_name():
    def read(_: torch.Tensor) -> float:
        return torch.empty(1).item()

    with pytest.raises(UnsupportedError, match="Slopes"):
        built_without_data(lambda: Slopes(read), "Slopes")


def test_an_engine_without_a_draft_leaves_drafts_out():
    draft = [ONE._replace(name=f"__draft__.{name}") for name in (LAYER, "fc.weight")]
    trace = check_of(Model())([*UNTIED, *draft], {"__draft__.embed.weight": EMBEDDING})
    assert not trace.unused
    assert trace.offered == {spec.name for spec in UNTIED}


class Head(nn.Module):
    """A draft with a layer of its own, and with its target's embedding."""

    def __init__(self, target: Model) -> None:
        super().__init__()
        self.embed = target.embed
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in list(weights):  # all of them, before it loads one
            own[name].weight_loader(own[name], tensor)


def drafted(model: Model) -> DraftedModel:
    return DraftedModel(model, Head(model))


def drafted_check() -> ShapeCheck:
    copy = built_without_data(lambda: drafted(Model()), "Model")
    serving = drafted(Model())
    return ShapeCheck(
        MetaModel(copy, embedding=Rows, default_loader=rows, tp_size=1, serving=serving)
    )


FC = TensorSpec("__draft__.fc.weight", "float32", (WIDTH, 2 * WIDTH))
SHARED = SPECS[0]._replace(name=f"__draft__.{EMBEDDING}")


def test_a_draft_is_checked_with_its_target():
    check = drafted_check()
    assert set(check([*UNTIED, FC]).tensors) == {EMBEDDING, HEAD, LAYER, FC.name}
    assert set(check(UNTIED).tensors) == {EMBEDDING, HEAD, LAYER}  # a version without it leaves it
    tied = check([*UNTIED, FC], {SHARED.name: EMBEDDING})
    assert not tied.unused
    [op] = check([*UNTIED, FC, SHARED]).tensors[EMBEDDING].ops[:1]
    assert op.source == EMBEDDING  # and not the draft's tensor for this shared layer
    for surplus in (SHARED, FC._replace(name="__draft__.none")):
        assert unused(check([*UNTIED, FC, surplus])) == [surplus.name]


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ([FC._replace(shape=(WIDTH, WIDTH)), SHARED], r"__draft__.fc.weight float32\[4, 4\] does"),
        ([SHARED], "only 0 of 32 elements of __draft__.fc.weight were published"),
    ],
)
def test_a_draft_that_does_not_fit_is_named(draft, problem):
    with pytest.raises(WeightsMismatchError, match=problem):
        drafted_check()([*UNTIED, *draft])
