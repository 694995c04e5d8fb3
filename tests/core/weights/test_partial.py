"""`load_into(target, partial=True)`: parts of a target, and never parts of two versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from dbuffer import WeightReceiver, WeightSender, WeightsMismatchError


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


def filled(value: float, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((5,), value) for name in names}


def values(target: Mapping[str, torch.Tensor]) -> dict[str, float]:
    assert all((tensor == tensor[0]).all() for tensor in target.values())
    return {name: tensor[0].item() for name, tensor in target.items()}


class TestSubset:
    def test_what_is_missing_stays(self, sender, receiver):
        target = filled(0.0, "a", "b", "c")
        for value in (1.0, 2.0, 3.0):  # the second and third by what was found out for the first
            sender.send(filled(value, "c", "a"))
            assert receiver.load_into(target, partial=True) == value
            assert values(target) == {"a": value, "b": 0.0, "c": value}

    def test_without_being_told_it_is_refused(self, sender, receiver):
        target = filled(0.0, "a", "b", "c")
        for value in (1.0, 2.0):
            sender.send(filled(value, "a", "c"))
            with pytest.raises(WeightsMismatchError, match="'b'"):
                receiver.load_into(target)
            assert values(target) == {"a": 0.0, "b": 0.0, "c": 0.0}
        # Neither by accident, after it was told so once.
        receiver.load_into(target, partial=True)
        sender.send(filled(3.0, "a", "c"))
        with pytest.raises(WeightsMismatchError, match="'b'"):
            receiver.load_into(target)
        assert values(target) == {"a": 2.0, "b": 0.0, "c": 2.0}

    @pytest.mark.parametrize(
        ("weights", "problem"),
        [
            (filled(1.0, "a", "d"), "the target has no d"),
            (filled(1.0, "a") | {"b": torch.ones(4)}, "published b float32.4., target b float32"),
            (filled(1.0, "a") | {"b": torch.ones(5).int()}, "published b int32"),
        ],
    )
    def test_what_is_published_must_fit(self, sender, receiver, weights, problem):
        target = filled(0.0, "a", "b", "c")
        sender.send(weights)
        with pytest.raises(WeightsMismatchError, match=problem):
            receiver.load_into(target, partial=True)
        assert values(target) == {"a": 0.0, "b": 0.0, "c": 0.0}

    def test_of_a_module(self, sender, receiver):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        bias = torch.tensor([1.0, 2.0, 3.0])
        sender.send({"2.bias": bias})
        receiver.load_into(model, partial=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, bias if name == "2.bias" else before[name]), name


class TestMixes:
    """A version that lacks what an earlier one brought would leave that one's tensors."""

    def test_less_than_before_is_refused(self, sender, receiver):
        target = filled(0.0, "a", "b", "c")
        sender.send(filled(1.0, "a"))
        receiver.load_into(target, partial=True)
        sender.send(filled(2.0, "a", "b"))
        receiver.load_into(target, partial=True)
        sender.send(filled(3.0, "b", "c"))
        with pytest.raises(WeightsMismatchError, match=r"version 3 .*'a' .*version 1"):
            receiver.load_into(target, partial=True)
        sender.send(filled(4.0, "a"))
        with pytest.raises(WeightsMismatchError, match=r"version 4 .*'b' .*version 2"):
            receiver.load_into(target, partial=True)
        assert values(target) == {"a": 2.0, "b": 2.0, "c": 0.0}
        sender.send(filled(5.0, "c", "b", "a"))
        assert receiver.load_into(target, partial=True) == 5
        assert values(target) == {"a": 5.0, "b": 5.0, "c": 5.0}

    def test_less_than_a_whole_one_is_refused(self, sender, receiver):
        target = filled(0.0, "a", "b")
        sender.send(filled(1.0, "a", "b"))
        receiver.load_into(target)
        sender.send(filled(2.0, "a"))
        with pytest.raises(WeightsMismatchError, match="'b' of version 1"):
            receiver.load_into(target, partial=True)
        assert values(target) == {"a": 1.0, "b": 1.0}

    def test_a_new_dictionary_of_the_same_tensors_is_the_same_target(self, sender, receiver):
        model = nn.Linear(5, 5)
        for weights in ({"weight": torch.ones(5, 5), "bias": torch.ones(5)}, filled(2.0, "bias")):
            sender.send(weights)
            expected = "weight" in weights
            try:
                receiver.load_into(dict(model.named_parameters()), partial=True)
            except WeightsMismatchError:
                assert not expected
        assert torch.equal(model.bias, torch.ones(5))

    def test_functions(self, sender, receiver):
        target = filled(0.0, "a", "b")

        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                target[name].copy_(tensor)

        sender.send(filled(1.0, "a", "b"))
        receiver.load_into(load, partial=True)
        sender.send(filled(2.0, "b"))
        with pytest.raises(WeightsMismatchError, match="'a' of version 1"):
            receiver.load_into(load, partial=True)
        assert values(target) == {"a": 1.0, "b": 1.0}

    def test_what_a_function_that_failed_may_have_touched_counts(self, sender, receiver):
        target = filled(0.0, "a", "b")

        def fail(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            name, tensor = next(iter(pairs))
            target[name].copy_(tensor)
            raise KeyError(name)

        sender.send(filled(1.0, "a", "b"))
        with pytest.raises(KeyError):
            receiver.load_into(fail, partial=True)
        sender.send(filled(2.0, "b"))
        with pytest.raises(WeightsMismatchError, match="'a' of version 1"):
            receiver.load_into(target, partial=True)
        assert values(target) == {"a": 1.0, "b": 0.0}

    def test_a_refused_version_has_brought_nothing(self, sender, receiver):
        target = filled(0.0, "a", "b")
        sender.send(filled(1.0, "a", "b", "c"))
        with pytest.raises(WeightsMismatchError):
            receiver.load_into(target, partial=True)
        sender.send(filled(2.0, "a"))
        assert receiver.load_into(target, partial=True) == 2


class TestTies:
    def make_model(self, *, tied: bool) -> nn.Module:
        model = nn.Module()
        model.embed = nn.Embedding(4, 3)
        model.head = nn.Linear(3, 4, bias=False)
        model.norm = nn.Linear(3, 3)
        if tied:
            model.head.weight = model.embed.weight
        return model

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_tied_tensor_comes_under_all_its_names(self, sender, receiver, tied):
        source, target = self.make_model(tied=True), self.make_model(tied=tied)
        norm = target.norm.weight.clone()
        sender.send({name: t for name, t in source.state_dict().items() if "norm" not in name})
        receiver.load_into(target, partial=True)
        assert torch.equal(target.embed.weight, source.embed.weight)
        assert torch.equal(target.head.weight, source.embed.weight)
        assert torch.equal(target.norm.weight, norm)

    def test_one_that_is_tied_no_more_must_still_come(self, sender, receiver):
        source, target = self.make_model(tied=True), self.make_model(tied=False)
        sender.send({name: t for name, t in source.state_dict().items() if "norm" not in name})
        receiver.load_into(target, partial=True)
        sender.send({"embed.weight": torch.zeros(4, 3)})
        with pytest.raises(WeightsMismatchError, match=r"'head\.weight' of version 1"):
            receiver.load_into(target, partial=True)
        assert torch.equal(target.embed.weight, source.embed.weight)

    def test_a_function_knows_no_ties(self, sender, receiver):
        tied = torch.ones(3)
        sender.send({"embed": tied, "head": tied})
        seen: dict[str, torch.Tensor] = {}
        receiver.load_into(lambda pairs: seen.update(pairs), partial=True)
        assert list(seen) == ["embed"]
        sender.send({"head": tied, "embed": tied})  # now it would be given "head" only
        with pytest.raises(WeightsMismatchError, match="'embed' of version 1"):
            receiver.load_into(lambda pairs: seen.update(pairs), partial=True)
