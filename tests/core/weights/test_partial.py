"""`load_into(target, partial=True)`: parts of a target, and never parts of two versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from dbuffer import WeightReceiver, WeightSender, WeightsMismatchError
from tests.support.patterns import Tied


@pytest.fixture(params=["local", "network", "verified"])
def receiver(
    request: pytest.FixtureRequest, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightReceiver]:
    if request.param == "network":
        monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with WeightReceiver(store, verify=request.param == "verified" or "auto") as receiver:
        yield receiver


@pytest.fixture
def sender(store: Path, receiver: WeightReceiver) -> Iterator[WeightSender]:
    with WeightSender(store, checksum=True) as sender:
        yield sender


def filled(value: float, names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((5,), value) for name in names}


def values(target: Mapping[str, torch.Tensor]) -> dict[str, float]:
    assert all((tensor == tensor[0]).all() for tensor in target.values())
    return {name: tensor[0].item() for name, tensor in target.items()}


def test_what_is_missing_stays_if_a_part_is_asked_for(sender, receiver):
    target = filled(0.0, "abc")
    for value in (1.0, 2.0, 3.0):  # the second and third by what was found out for the first
        sender.send(filled(value, "ca"))
        # Nor by accident, after it was told so once.
        with pytest.raises(WeightsMismatchError, match="'b'"):
            receiver.load_into(target)
        assert values(target) == {"a": value - 1, "b": 0.0, "c": value - 1}
        assert receiver.load_into(target, partial=True) == value
        assert values(target) == {"a": value, "b": 0.0, "c": value}


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (filled(1.0, "ad"), "the target has no d"),
        (filled(1.0, "a") | {"b": torch.ones(4)}, "published b float32.4., target b float32"),
        (filled(1.0, "a") | {"b": torch.ones(5).int()}, "published b int32"),
    ],
)
def test_what_is_published_must_fit(sender, receiver, weights, problem):
    target = filled(0.0, "abc")
    sender.send(weights)
    with pytest.raises(WeightsMismatchError, match=problem):
        receiver.load_into(target, partial=True)
    assert values(target) == {"a": 0.0, "b": 0.0, "c": 0.0}
    sender.send(filled(2.0, "a"))  # what was refused has brought nothing
    assert receiver.load_into(target, partial=True) == 2


def test_less_than_earlier_versions_contained_is_refused(sender, receiver):
    """Of what such a version lacks, the earlier one's tensors would stay."""
    target = filled(0.0, "abc")
    for names in ("a", "ab"):
        sender.send(filled(1.0, names))
        receiver.load_into(target, partial=True)
    for names, lost in (("bc", r"version 3 .*'a' .*version 1"), ("a", r"version 4 .*'b' .*n 2")):
        sender.send(filled(2.0, names))
        with pytest.raises(WeightsMismatchError, match=lost):
            # A new dictionary of the same tensors is the same target.
            receiver.load_into(dict(target), partial=True)
    assert values(target) == {"a": 1.0, "b": 1.0, "c": 0.0}
    sender.send(filled(5.0, "cba"))
    assert receiver.load_into(target) == 5, "whole"
    sender.send(filled(6.0, "ab"))
    with pytest.raises(WeightsMismatchError, match="'c' of version 5"):
        receiver.load_into(target, partial=True)
    assert values(target) == {"a": 5.0, "b": 5.0, "c": 5.0}


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_function_may_have_touched_counts(sender, receiver, fails):
    target = filled(0.0, "ab")

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            target[name].copy_(tensor)
            if fails:
                raise KeyError(name)

    sender.send(filled(1.0, "ab"))
    if fails:
        with pytest.raises(KeyError):
            receiver.load_into(load, partial=True)
    else:
        receiver.load_into(load, partial=True)
    sender.send(filled(2.0, "b"))
    for other in (load, target):
        with pytest.raises(WeightsMismatchError, match="'a' of version 1"):
            receiver.load_into(other, partial=True)
    assert values(target) == {"a": 1.0, "b": 0.0 if fails else 1.0}


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_tensor_comes_under_all_its_names(sender, receiver, tied):
    source, target = Tied(), Tied(tied=tied)
    before = {name: tensor.clone() for name, tensor in target.norm.state_dict().items()}
    sender.send({name: t for name, t in source.state_dict().items() if "norm" not in name})
    receiver.load_into(target, partial=True)
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.head.weight, source.embed.weight)
    after = target.norm.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    sender.send({"embed.weight": torch.zeros(7, 4)})  # one that is tied no more must still come
    with pytest.raises(WeightsMismatchError, match=r"'head\.weight' of version 1"):
        receiver.load_into(target, partial=True)
    assert torch.equal(target.embed.weight, source.embed.weight)


def test_a_function_knows_no_ties(sender, receiver):
    tied = torch.ones(3)
    sender.send({"embed": tied, "head": tied})
    seen: dict[str, torch.Tensor] = {}
    receiver.load_into(lambda pairs: seen.update(pairs), partial=True)
    assert list(seen) == ["embed"]
    sender.send({"head": tied, "embed": tied})  # now it would be given "head" only
    with pytest.raises(WeightsMismatchError, match="'embed' of version 1"):
        receiver.load_into(lambda pairs: seen.update(pairs), partial=True)


def test_a_target_may_have_the_names_of_a_draft(sender, receiver):
    """As a snapshot of a version with a draft has them."""
    sender.send({"a": torch.ones(2)})
    target = {"a": torch.zeros(2), "__draft__.b": torch.zeros(1)}
    assert receiver.load_into(target, partial=True) == 1
    assert torch.equal(target["a"], torch.ones(2))
