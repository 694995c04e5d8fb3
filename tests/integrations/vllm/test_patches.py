"""vLLM's sparse patches into a store: what each kind of patch comes to. Needs no vLLM.

Which patches fit published tensors: `tests/core/publish/test_deltas.py`. What engines make of them:
`vllm_offline.py`, and over HTTP `test_server.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbuffer import (
    DBufferError,
    InvalidWeightsError,
    OptionError,
    VersionError,
    WeightReceiver,
    WeightSender,
    WeightsMismatchError,
)
from dbuffer.integrations.vllm.sparse_patches import (
    patches_of,
    publish_patches,
    trainer_send_sparse_weights,
)

WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(6.0).bfloat16(),
    "scaled": torch.ones(4).to(torch.float8_e4m3fn),
}


@dataclass
class Patch:
    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: Any


def patch(
    name: str = "a",
    places: Any = (1, 6),
    values: Any = (20.0, 30.0),
    shape: Any = (3, 4),
    *,
    dtype: torch.dtype = torch.float32,
) -> Patch:
    return Patch(
        name, torch.tensor(places, dtype=torch.int32), torch.tensor(values, dtype=dtype), shape
    )


@pytest.fixture
def store(mount: str, tmp_path: Path) -> Path:
    """On a local mount buffers are whole, on a network a version is an anchor and deltas."""
    return tmp_path / "store"


@pytest.fixture
def sender(store: Path) -> Iterator[WeightSender]:
    with WeightSender(store, delta=True) as sender:
        sender.send(WEIGHTS)
        yield sender


def published(sender: WeightSender) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    with WeightReceiver(sender.store) as receiver:
        receiver.load_into(into)
    return into


def changed(name: str, places: Any, values: Any) -> dict[str, torch.Tensor]:
    after = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    new = torch.tensor(values).to(after[name].dtype)
    if len(new):
        after[name].view(-1)[torch.tensor(places)] = new
    return after


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(one[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in other.items()
    )


def spoilt(**fields: Any) -> Patch:
    return replace(patch(), **fields)


def without_shape() -> Any:
    given = SimpleNamespace(**vars(patch()))
    del given.full_shape
    return given


RIGHT: dict[str, tuple[list[Any], dict[str, torch.Tensor]]] = {
    "values": ([patch()], changed("a", [1, 6], [20.0, 30.0])),
    "indices of 64 bits, and a shape as a list": (
        [
            spoilt(indices=torch.tensor([1, 6]), full_shape=[3, 4]),
            patch(places=(7,), values=(1.0,)),
        ],
        changed("a", [1, 6, 7], [20.0, 30.0, 1.0]),
    ),
    "without a shape": ([without_shape()], changed("a", [1, 6], [20.0, 30.0])),
    "no places": ([patch(places=(), values=())], WEIGHTS),
    "a tensor in parts": (
        [patch(places=(1,), values=(20.0,)), patch(places=(6,), values=(30.0,))],
        changed("a", [1, 6], [20.0, 30.0]),
    ),
    "the later has a place": (
        [patch(places=(1, 2), values=(8.0, 9.0)), patch()],
        changed("a", [1, 2, 6], [20.0, 9.0, 30.0]),
    ),
}


@pytest.mark.parametrize("what", RIGHT)
def test_patches_make_a_version(sender, what):
    patches, after = RIGHT[what]
    assert publish_patches(sender, iter(patches)) == 2
    assert same(published(sender), after)


def test_no_patches_are_no_version(sender):
    for nothing in (None, [], (), iter([])):
        assert publish_patches(sender, nothing) is None
    assert publish_patches(sender, [patch()]) == 2


WRONG: dict[str, tuple[Any, type[DBufferError], str]] = {
    "name": (patch("c"), WeightsMismatchError, "'c'"),
    "no shape": (patch(shape=None), InvalidWeightsError, "patch 1 .*not iterable"),
    "nan": (patch(values=(1.0, math.nan)), InvalidWeightsError, "NaN"),
    "lengths": (patch(places=(1,)), InvalidWeightsError, "one value for each index"),
    "not flat": (spoilt(values=torch.ones(1, 2)), InvalidWeightsError, "must be flat"),
    "another thing": (("a", torch.ones(2)), InvalidWeightsError, "patch 1 "),
    "nan of eight bits": (
        patch("scaled", (0,), (math.nan,), (4,), dtype=torch.float8_e4m3fn),
        InvalidWeightsError,
        "NaN",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_patch_is_refused_with_all_others(sender, what):
    wrong, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        publish_patches(sender, [patch("b", (0,), (9.0,), (6,)), wrong])
    assert same(published(sender), WEIGHTS)
    assert publish_patches(sender, [patch()]) == 2
    assert same(published(sender), changed("a", [1, 6], [20.0, 30.0]))


def test_parts_of_a_tensor_agree_about_it(sender):
    for other in (patch(shape=(4, 3)), patch(dtype=torch.bfloat16)):
        with pytest.raises(WeightsMismatchError, match="'a'"):
            patches_of([patch(), other])
    assert publish_patches(sender, [patch()]) == 2


def test_tied_names_are_one_tensor(tmp_path):
    weight = torch.arange(4.0)
    with WeightSender(tmp_path / "store", delta=True) as sender:
        sender.send({"embed": weight, "head": weight})
        one = patch("head", (0,), (9.0,), (4,))
        assert publish_patches(sender, [one]) == 2
        with pytest.raises(InvalidWeightsError, match=r"'embed'|'head'"):
            publish_patches(sender, [one, patch("embed", (1,), (9.0,), (4,))])
        with WeightReceiver(sender.store) as receiver:
            into = {"embed": torch.zeros(4), "head": torch.zeros(4)}
            receiver.load_into(into)
        assert into["embed"].tolist() == into["head"].tolist() == [9.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("delta", [True, False])
def test_patches_go_upon_nothing_that_another_sender_has_published(store, delta):
    with WeightSender(store, delta=delta) as sender:
        sender.send(WEIGHTS)
    with WeightSender(store, delta=True) as sender:
        assert publish_patches(sender, []) is None
        for publish in (
            lambda: publish_patches(sender, [patch()]),
            lambda: trainer_send_sparse_weights(iter([patch()]), {"sender": sender}),
        ):
            with pytest.raises(VersionError):
                publish()
        assert same(published(sender), WEIGHTS)
        sender.send(WEIGHTS)
        assert publish_patches(sender, [patch()]) == 3
        assert same(published(sender), changed("a", [1, 6], [20.0, 30.0]))


def test_as_releases_with_a_sparse_method_call_it(sender):
    assert trainer_send_sparse_weights(iter([patch()]), {"sender": sender}) == 2
    assert same(published(sender), changed("a", [1, 6], [20.0, 30.0]))
    assert trainer_send_sparse_weights(iter(()), {"sender": sender}) is None
    for arguments in (None, {}, {"sender": None}, {"group": 1}):
        with pytest.raises(OptionError, match="'sender'"):
            trainer_send_sparse_weights([patch()], arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("move", [lambda given: given.cuda(), lambda given: given.pin_memory()])
def test_patches_of_another_device(sender, move):
    given = patch()
    moved = replace(given, indices=move(given.indices), values=move(given.values))
    assert publish_patches(sender, [moved]) == 2
    assert same(published(sender), changed("a", [1, 6], [20.0, 30.0]))
