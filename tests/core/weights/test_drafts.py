"""`send(weights, draft=draft)`: a draft beside its target, in one version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dbuffer import InvalidWeightsError, WeightReceiver, WeightSender, WeightsMismatchError


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)


class Draft(nn.Module):
    """Has its target's embedding, and a layer of its own."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embedding = target.embedding
        self.fc = nn.Linear(8, 4)


@pytest.fixture(params=["local", "network", "verified", "delta"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "network":
        monkeypatch.setenv("DBUFFER_MOUNT", "network")
    return str(request.param)


@pytest.fixture
def sender(store: Path, form: str) -> Iterator[WeightSender]:
    with WeightSender(store, checksum=True, delta=form == "delta") as sender:
        yield sender


def loaded(store: Path, form: str, target: nn.Module, **options: Any) -> nn.Module:
    with WeightReceiver(store, verify=form == "verified" or "auto") as receiver:
        assert receiver.load_into(target, **options)
    return target


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_each_part_loads_by_itself(store, form, sender):
    target = Target()
    draft = Draft(target)
    for step in range(3):
        if step:
            target.head.weight.data[0] += step
            draft.fc.weight.data[1] -= step
        sender.send(target, draft=draft)
        assert_same(loaded(store, form, Target()), target)
        assert_same(loaded(store, form, Draft(Target()), draft=True), draft)
    pairs: dict[str, torch.Tensor] = {}
    with WeightReceiver(store) as receiver:
        receiver.load_into(pairs.update, draft=True)
    assert pairs.keys() == {"embedding.weight", "fc.weight", "fc.bias"}
    with WeightReceiver(store) as receiver, receiver.open() as snapshot:
        # What both have is there once.
        assert "embedding.weight" in snapshot.tensors
        assert [n for n in snapshot.tensors if n.startswith("__draft__.")] == [
            "__draft__.fc.weight",
            "__draft__.fc.bias",
        ]
        assert snapshot.aliases == {"__draft__.embedding.weight": "embedding.weight"}


def test_a_version_need_not_have_a_draft(store, form, sender):
    target = Target()
    sender.send(target, draft=Draft(Target()))
    sender.send(target)
    assert_same(loaded(store, form, Target()), target)
    with WeightReceiver(store) as receiver, pytest.raises(WeightsMismatchError, match="no draft"):
        receiver.load_into(Draft(Target()), draft=True)


def test_only_the_target_is_renamed_and_all_is_cast(store):
    target, draft = {"a": torch.ones(2)}, {"module.a": torch.ones(3), "module.b": torch.ones(1)}
    with WeightSender(store, rename=lambda name: f"model.{name}", dtype=torch.bfloat16) as sender:
        sender.send(target, draft=draft)
    with WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert [str(spec) for spec in snapshot.specs] == [
            "model.a bfloat16[2]",
            "__draft__.a bfloat16[3]",
            "__draft__.b bfloat16[1]",
        ]


ONES = {"a": torch.ones(2)}
RESERVED = {"__draft__.a": torch.ones(2)}


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ((RESERVED, None), "reserved for the tensors of a draft"),
        ((ONES, RESERVED), "reserved for the tensors of a draft"),
        ((iter(ONES.items()), ONES), "neither can be an iterator"),
        ((ONES, iter(ONES.items())), "neither can be an iterator"),
        ((ONES, {}), "no tensor"),
    ],
)
def test_what_cannot_be_a_target_with_a_draft_is_refused(store, weights, problem):
    target, draft = weights
    with WeightSender(store) as sender:
        sender.send({"a": torch.zeros(2)})
        with pytest.raises(InvalidWeightsError, match=problem):
            sender.send(target, draft=draft)
    values = {"a": torch.ones(2)}
    with WeightReceiver(store) as receiver:
        assert receiver.load_into(values) == 1


def test_each_part_is_saved_as_its_own_checkpoint(store, tmp_path):
    from safetensors.torch import load_file

    target = Target()
    draft = Draft(target)
    with WeightSender(store) as sender, WeightReceiver(store) as receiver:
        sender.send(target, draft=draft)
        receiver.save_pretrained(tmp_path / "target")
        receiver.save_pretrained(tmp_path / "draft", draft=True)
    for path, module in (("target", target), ("draft", draft)):
        saved = load_file(tmp_path / path / "model.safetensors")
        assert saved.keys() == module.state_dict().keys()
        assert torch.equal(saved["embedding.weight"], target.embedding.weight)
