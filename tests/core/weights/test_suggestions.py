"""A refusal of names says which prefix would mend them, and says it right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer

NAMES = ("embed.weight", "layers.0.weight", "layers.1.weight")


def weights(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 2), float(number)) for number, name in enumerate(names)}


def refusal(store: Path, published: Any, target: Any, **options: Any) -> str:
    with dbuffer.WeightSender(store) as sender, dbuffer.WeightReceiver(store) as receiver:
        sender.send(published)
        with pytest.raises(dbuffer.WeightsMismatchError) as caught:
            receiver.load_into(target, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("actor.", "", ".prefix('actor.', '')"),
        ("", "model.", ".prefix('', 'model.')"),
        ("policy.net.", "model.", ".prefix('policy.net.', 'model.')"),
    ],
)
def test_the_rule_that_is_named_mends_the_names(tmp_path, before, after, rule):
    published = weights(*(before + name for name in NAMES))
    target = {after + name: torch.zeros(3, 2) for name in NAMES}
    message = refusal(tmp_path / "store", published, target)
    [advice] = re.findall(r"with rename=(.*), the weights fit", message)
    assert advice == f"dbuffer.NameMap(){rule}"
    rename = eval(advice, {"dbuffer": dbuffer})
    with (
        dbuffer.WeightSender(tmp_path / "renamed", rename=rename) as sender,
        dbuffer.WeightReceiver(tmp_path / "renamed") as receiver,
    ):
        sender.send(published)
        receiver.load_into(target)
    assert [float(tensor[0, 0]) for tensor in target.values()] == [0.0, 1.0, 2.0]


def test_a_part_of_the_weights_is_enough_where_a_part_is_loaded(tmp_path):
    target = weights(*NAMES)
    message = refusal(tmp_path / "store", weights("actor.layers.1.weight"), target, partial=True)
    assert "with rename=dbuffer.NameMap().prefix('actor.', ''), the weights fit" in message
    message = refusal(tmp_path / "whole", weights("actor.layers.1.weight"), target)
    assert "rename" not in message


@pytest.mark.parametrize(
    "published",
    [
        weights("actor.embed.weight", "layers.0.weight", "layers.1.weight", "more"),
        weights("a.embed.weight", "b.layers.0.weight", "c.layers.1.weight"),
        {name: tensor[:2] for name, tensor in weights(*(f"actor.{n}" for n in NAMES)).items()},
        {name: tensor[:2] for name, tensor in weights(*NAMES).items()},
    ],
    ids=["one more", "three prefixes", "shapes and names", "shapes"],
)
def test_no_rule_is_named_that_does_not_mend_all(tmp_path, published):
    message = refusal(tmp_path / "store", published, weights(*NAMES))
    assert "rename" not in message


def test_fused_experts_are_named(tmp_path):
    fused = {"layers.0.experts.gate_up_proj": torch.zeros(2, 4, 3)}
    alone = {f"layers.0.experts.{number}.up_proj.weight": torch.zeros(2, 3) for number in range(2)}
    message = refusal(tmp_path / "one", fused, alone)
    assert message.endswith(
        "send the module itself, with as_checkpoint=True, instead of its state_dict()"
    )
