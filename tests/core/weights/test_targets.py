"""`load_into`: what can be filled, and what is refused before anything is touched."""

from __future__ import annotations

import operator
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dbuffer import OptionError, WeightReceiver, WeightSender, WeightsMismatchError
from dbuffer.format.layout import ITEM_BYTES
from tests.support.patterns import NO_MEMORY, Tied, assert_same, bits, random_bits, tensordict_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {
        "a.w": torch.arange(6.0).view(2, 3) + value,
        "a.n": torch.tensor(int(value)),
        "b": torch.full((5,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def sender(store):
    with WeightSender(store, checksum=True) as sender:
        yield sender


@pytest.fixture(params=[{"num_threads": 1}, {"num_threads": 5, "verify": True}], ids=repr)
def receiver(request, store):
    with WeightReceiver(store, **request.param) as receiver:
        yield receiver


@pytest.fixture
def load(store):
    def load(weights, target) -> int | None:
        with WeightSender(store, checksum=True) as sender:
            sender.send(weights)
        with WeightReceiver(store) as receiver:
            return receiver.load_into(target)

    return load


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are on their way out
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})


def assert_equal(target: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    assert [name for name, one in weights.items() if not torch.equal(target[name], one)] == []


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}


class TestKinds:
    @pytest.mark.parametrize(
        "make",
        [
            zeros,
            lambda: OrderedDict(reversed(zeros().items())),
            lambda: tensordict_of(zeros()),
            torch.inference_mode()(zeros),
        ],
        ids=["dictionary", "another order", "flat TensorDict", "made in inference mode"],
    )
    def test_named_tensors(self, receiver, sender, make):
        targets = [make(), make()]
        before = [dict(target.items()) for target in targets]
        for version in (1, 2, 3, 4):
            sender.send(weights_of(version))
            assert receiver.load_into(targets[version % 2]) == version
        for target, own, version in zip(targets, before, (4, 3), strict=True):
            assert_equal(target, weights_of(version))
            assert all(target[name] is tensor for name, tensor in own.items())

    def test_every_dtype(self, load):
        weights = {name: random_bits(getattr(torch, name), 3, 4) for name in ITEM_BYTES}
        target = {name: random_bits(one.dtype, 3, 4) for name, one in weights.items()}
        assert load(weights | {"x": torch.ones(2)}, target | {"x": torch.zeros(2)}) == 1
        assert_same(target, weights)

    def test_a_module_whose_parameters_stay_parameters_that_train(self, sender, receiver):
        model, target = Tied(tied=False), Tied(tied=False)
        wrapped = nn.Module()
        wrapped.module = target
        scratch, parameters = target.scratch.clone(), list(target.parameters())
        for version, one in enumerate((target, target, target, wrapped), 1):
            nn.init.normal_(model.embed.weight)
            model.norm.num_batches_tracked.add_(1)
            sender.send(model)
            assert receiver.load_into(one) == version
            assert_same(target.state_dict(), model.state_dict())
        assert torch.equal(target.scratch, scratch)
        assert all(map(lambda one, other: one is other, parameters, target.parameters()))
        assert all(p.requires_grad and p.is_leaf and p.grad_fn is None for p in parameters)
        target.embed.weight.sum().backward()
        assert target.embed.weight.grad is not None

    @pytest.mark.parametrize("wrap", ["TensorDict", "TensorDict.lock_", "TensorDictParams"])
    def test_a_nested_tensordict(self, load, wrap):
        import tensordict

        weights = {"a.w": torch.randn(2, 3), "a.b.c": torch.randn(2)}
        nested = tensordict.TensorDict({"a": {"w": torch.zeros(2, 3), "b": {"c": torch.zeros(2)}}})
        target = operator.attrgetter(wrap)(tensordict)(nested)
        load(weights, target)
        assert torch.equal(target["a", "w"].detach(), weights["a.w"])
        assert torch.equal(target["a", "b", "c"].detach(), weights["a.b.c"])

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
    def test_under_any_grad_mode(self, load, mode):
        weights = {name: t for name, t in weights_of(2).items() if t.is_floating_point()}
        target = {name: nn.Parameter(torch.zeros_like(t)) for name, t in weights.items()}
        with mode():
            load(weights, target)
            model, other = Tied(tied=False), Tied(tied=False)
            load(model, other)
            assert_same(other.state_dict(), model.state_dict())
        assert_equal(target, weights)

    def test_tensors_that_are_not_contiguous(self, sender, receiver):
        weights = {"t": torch.randn(4, 6), "s": torch.randn(4), "d": torch.randn(3)}
        around = torch.zeros(4, 8)
        target = {"t": torch.zeros(6, 4).t(), "s": around[:, 3], "d": torch.zeros(3, 3).diagonal()}
        for version in (1, 2, 3):
            weights = {name: tensor + 1 for name, tensor in weights.items()}
            sender.send(weights)
            assert receiver.load_into(target) == version
            assert_equal(target, weights)
        assert around.count_nonzero() == 4

    def test_a_conjugate_view_of_what_was_filled_is_refused(self, sender, receiver):
        """With others whose copies come first."""
        others = {f"x{index}": torch.zeros(1000) for index in range(8)}
        last = torch.zeros(1000, dtype=torch.complex64)
        for view in (torch.Tensor.conj, torch._neg_view):
            sender.send({name: tensor + 1 for name, tensor in others.items()} | {"z": last + 1j})
            assert receiver.load_into(others | {"z": last}) is not None
            before = {name: tensor.clone() for name, tensor in others.items()}
            sender.send({name: tensor + 1 for name, tensor in others.items()} | {"z": last + 1j})
            with pytest.raises(WeightsMismatchError, match="'z' of the target is a lazily"):
                receiver.load_into(others | {"z": view(last)})
            assert_equal(others, before)


class TestFunctions:
    def test_a_kept_tensor_stays_as_it_is(self, sender, receiver):
        kept: dict[str, torch.Tensor] = {}
        for version in (1, 4, 7):
            sender.send(weights_of(version), version=version)
            assert receiver.load_into(kept.update) == version
            for later in (version + 1, version + 2):
                sender.send(weights_of(later), version=later)
                assert_equal(kept, weights_of(version))

    def test_that_fail_are_called_again_next_time(self, sender, store):
        sender.send(weights_of(1))

        def fail(pairs):
            next(pairs)
            raise KeyError("mine")

        with WeightReceiver(store) as receiver:
            with pytest.raises(KeyError, match="mine"):
                receiver.load_into(fail)
            with pytest.raises(TimeoutError):
                sender.wait_applied(1, timeout_s=0)
            assert receiver.load_into(list) == 1
            sender.wait_applied(1, timeout_s=0)
            assert receiver.load_into(list) is None


class TestTies:
    @pytest.mark.parametrize("tied", [False, True], ids=["into untied", "into tied"])
    def test_from_a_tied_module(self, sender, receiver, tied):
        model, target = Tied(), Tied(tied=tied)
        kinds = [lambda: model, lambda: iter(model.state_dict().items())]
        if tied:  # one name will do
            kinds.append(lambda: {n: t for n, t in model.state_dict().items() if "head" not in n})
        for make in 2 * kinds:
            nn.init.normal_(model.embed.weight)
            sender.send(make())
            receiver.load_into(target)
            assert_same(target.state_dict(), model.state_dict())
        assert (target.head.weight is target.embed.weight) == tied

    @pytest.mark.parametrize("left_out", [None, "head.weight", "embed.weight"])
    def test_into_a_dictionary(self, receiver, sender, left_out):
        model = Tied()
        target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        target.pop(left_out, None)
        for version in (1, 2, 3):
            nn.init.normal_(model.embed.weight)
            sender.send(model)
            assert receiver.load_into(target) == version
            assert_equal(model.state_dict(), target)

    def test_an_alias_must_fit_too(self, load):
        tensor = torch.ones(3)
        target = {"a": torch.zeros(3), "b": torch.zeros(4)}
        with pytest.raises(WeightsMismatchError, match=r"b float32\[3\]"):
            load({"a": tensor, "b": tensor}, target)
        assert not target["a"].any()


class TestSharedMemory:
    """Targets that cannot hold what several tensors of the store hold."""

    @pytest.mark.parametrize("partial", [False, True])
    def test_an_untied_module_into_a_tied_one(self, mount, receiver, partial, sender):
        untied, tied, other = Tied(tied=False), Tied(), Tied(tied=False)
        expected = tied.state_dict()["embed.weight"].clone()
        for version in (1, 2, 3):  # names, shapes and dtypes were right the second time
            sender.send(untied)
            with pytest.raises(WeightsMismatchError, match=r"'embed\.weight' and 'head\.weight'"):
                receiver.load_into(tied, partial=partial)
            assert torch.equal(tied.embed.weight, expected)
            assert receiver.load_into(other, partial=partial) == version

    def test_of_equal_values_the_same_is_right(self, receiver, sender):
        untied, tied = Tied(tied=False), Tied()
        for version in (1, 2, 3):
            nn.init.normal_(untied.embed.weight)
            untied.head.weight.data.copy_(untied.embed.weight)
            sender.send(untied)
            assert receiver.load_into(tied) == version
            assert_same(tied.state_dict(), untied.state_dict())
        untied.head.weight.data[3, 1] += 1
        sender.send(untied)
        with pytest.raises(WeightsMismatchError):
            receiver.load_into(tied)
        assert torch.equal(tied.embed.weight, untied.embed.weight)

    def test_a_target_like_one_before_whose_tensors_overlap(self, sender, receiver):
        memory = torch.zeros(12)
        targets = [
            {"a": torch.zeros(4), "b": torch.zeros(4)},
            {"a": memory[0:4], "b": memory[4:8]},
        ]
        for version, target in enumerate(targets, 1):
            sender.send({"a": torch.full((4,), 1.0 * version), "b": torch.zeros(4)})
            assert receiver.load_into(target) == version
            assert target["a"].tolist() == [version] * 4
        sender.send({"a": torch.full((4,), 3.0), "b": torch.zeros(4)})
        with pytest.raises(WeightsMismatchError):
            receiver.load_into({"a": memory[0:4], "b": memory[3:7]})
        assert memory[:4].tolist() == [2] * 4

    OVERLAPS = (
        lambda m: {"a": m[0:4], "b": m[2:6]},
        lambda m: {"a": m[0:4], "b": m[3:7]},
        lambda m: {"a": m[0:8:2], "b": m[4:8]},
        lambda m: {"a": m[0:8].view(4, 2).t()[0], "b": m[0:16:4]},
    )

    @pytest.mark.parametrize("published_as_one", [False, True])
    def test_memory_in_common(self, load, published_as_one):
        memory = torch.zeros(24).half()
        weights = {"a": torch.ones(4).half(), "b": torch.ones(4).half()}
        if published_as_one:
            weights["b"] = weights["a"]
        for make in self.OVERLAPS:
            with pytest.raises(WeightsMismatchError, match=r"'[ab]' and '[ab]'"):
                load(weights, make(memory))
            assert not memory.any()

    def test_neighbours_in_one_memory_are_filled(self, load):
        weights = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 9}
        memory = torch.zeros(4, 4)
        for target in (
            {"a": memory[0], "b": memory[1]},
            {"a": memory[:2, :2].reshape(-1), "b": memory[2]},
        ):
            load(weights, target)
            assert_equal(target, weights)

    def test_columns_of_one_matrix_are_refused(self, load):
        """Their ranges of addresses overlap."""
        memory = torch.zeros(4, 4)
        with pytest.raises(WeightsMismatchError, match="interleaved in memory"):
            load({"a": torch.ones(4), "b": torch.ones(4)}, {"a": memory[:, 0], "b": memory[:, 1]})
        assert not memory.any()


class Copying(nn.Linear):
    """Saves copies, as what gathers or converts its weights does."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in destination.items():
            destination[name] = tensor.detach().clone()


class Half(nn.Linear):
    """Saves a view of its own memory."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.weight.detach()[:1]


class Scaled(nn.Linear):
    """Has a scale that is neither parameter nor buffer."""

    def __init__(self, extra):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Made(UserDict):
    """Makes its tensors at each access."""

    def __getitem__(self, name):
        return self.data[name].clone()


def stack_of(*names: str):
    from tensordict import TensorDict, lazy_stack

    return lazy_stack([TensorDict({name: torch.zeros(2)}) for name in names])


def masked() -> Any:
    from tensordict import TensorDict

    whole = TensorDict({"w": torch.zeros(4, 2)}, [4])
    return whole._get_sub_tensordict(torch.tensor([True, False, True, False]))


def plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in module.state_dict().items() if isinstance(t, torch.Tensor)}


class TestOutOfReach:
    """Tensors that would be filled in vain are refused, and the rest is not touched."""

    @pytest.mark.parametrize(
        ("target", "weights", "message"),
        [
            (lambda: Copying(2, 2), lambda _: nn.Linear(2, 2), "'weight'"),
            (
                lambda: nn.Sequential(Scaled(torch.tensor([1.0]))),
                lambda _: nn.Sequential(Scaled(torch.tensor([3.0]))),
                r"'0\._extra_state'.*set_extra_state",
            ),
            (
                lambda: Scaled({"scale": 3}),
                lambda _: plain_tensors(nn.Linear(2, 2)),
                "'_extra_state' .*dict",
            ),
            (quantised, plain_tensors, r"'0\._packed_params.dtype' .*dtype"),
            (
                lambda: nn.ModuleDict(
                    {"a": nn.PReLU(), "_orig_mod": nn.ModuleDict({"a": nn.PReLU()})}
                ),
                lambda _: {"a.weight": torch.ones(1)},
                r"same name: \['a.weight'\]",
            ),
            (lambda: stack_of("w", "w"), lambda _: {"w": torch.ones(2, 2)}, "a lazy stack"),
            (masked, lambda _: {"w": torch.ones(2, 2)}, None),
            (lambda: Made({"w": torch.zeros(3)}), lambda _: {"w": torch.ones(3)}, "'w'"),
            (
                lambda: {"w": TwoTensor(torch.zeros(3), torch.zeros(3))},
                lambda _: {"w": torch.ones(3)},
                None,
            ),
        ],
        ids=[
            *("copies", "extra state that is a tensor", "extra state that is none", "quantised"),
            "a name twice",
            *(
                "a lazy stack",
                "a part by a mask",
                "a mapping that makes its tensors",
                "made of others",
            ),
        ],
    )
    def test_is_refused(self, load, target, weights, message):
        target = target()
        tensors = list(target.parameters()) if isinstance(target, nn.Module) else []
        before = [tensor.detach().clone() for tensor in tensors]
        with pytest.raises(WeightsMismatchError, match=message):
            load(weights(target), target)
        assert all(map(torch.equal, before, tensors))

    def test_a_modules_copies_after_another_module(self, sender, receiver):
        for version in (1, 2):
            sender.send(nn.Linear(2, 2))
            assert receiver.load_into(nn.Linear(2, 2)) == version
        sender.send(nn.Linear(2, 2))
        with pytest.raises(WeightsMismatchError):
            receiver.load_into(Copying(2, 2))

    def test_a_view_of_a_modules_parameter_is_filled(self, load):
        target = Half(2, 2)
        assert load({"weight": torch.full((1, 2), 7.0)}, target) == 1
        assert target.weight[0].tolist() == [7, 7]
        assert load(target, Half(2, 2)) == 2

    def test_none_as_extra_state_is_left_out(self, load):
        assert load(plain_tensors(nn.Linear(2, 2)), Scaled(None)) == 1


class TestStrictness:
    """A target that does not fit is left as it was, and a good one can be loaded after."""

    @staticmethod
    def change(name, make):
        def apply(target):
            target[name] = make(target[name])

        return apply

    CHANGES = (
        ("a name is missing", lambda target: target.pop("b"), "no b bfloat16"),
        ("a name is left over", lambda target: target.update(c=torch.ones(1)), "'c'"),
        ("a number is left over", lambda target: target.update(c=3), "'c'"),
        ("a shape", change("a.w", torch.t), r"a\.w float32\[3, 2\]"),
        ("a shape of as many", change("a.w", torch.flatten), r"a\.w float32\[6\]"),
        ("to broadcast to", change("a.n", lambda t: t.expand(3).clone()), r"a\.n int64\[3\]"),
        ("a shape with a one", change("b", lambda t: t[None]), r"b bfloat16\[1, 5\]"),
        ("a dtype", change("b", torch.Tensor.half), r"b float16\[5\]"),
        ("a wider dtype", change("b", torch.Tensor.float), r"b float32\[5\]"),
        ("no tensor", change("b", torch.Tensor.tolist), "'b' of the target is a list"),
        ("meta", change("b", lambda t: torch.empty_like(t, device="meta")), "meta"),
        ("expanded", change("b", lambda t: t[:1].expand(5)), "expanded"),
        ("overlapping", change("a.w", lambda t: t.as_strided((2, 3), (1, 1))), r"a\.w"),
        ("sparse", change("b", lambda t: torch.zeros(5).bfloat16().to_sparse()), "'?b'?"),
        ("a name twice", lambda target: target.update({"_orig_mod.b": target["b"]}), "same name"),
        ("another name", lambda target: target.update(d=target.pop("b")), "no b bfloat16.*'d'"),
    )

    @pytest.mark.parametrize("make", NO_MEMORY.values(), ids=NO_MEMORY)
    def test_a_tensor_without_memory_is_refused(self, sender, store, make):
        sender.send({"w": torch.ones(3)})
        with WeightReceiver(store) as receiver:
            for _ in range(2):
                with pytest.raises(WeightsMismatchError, match="target has no memory"):
                    receiver.load_into({"w": make()})
                receiver.load_into({"w": torch.zeros(3)})
                sender.send({"w": torch.ones(3)})

    @pytest.mark.parametrize(
        ("change", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
    )
    def test_nothing_is_touched(self, sender, store, change, message):
        good = zeros()
        with WeightReceiver(store) as receiver:
            for version in (1, 2, 3):  # the second and third after what was found out for the first
                sender.send(weights_of(version))
                target = {name: tensor.clone() for name, tensor in good.items()}
                change(target)
                plain = {
                    name: bits(tensor)
                    for name, tensor in target.items()
                    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
                    if not tensor.is_meta
                }
                with pytest.raises(WeightsMismatchError, match=message):
                    receiver.load_into(target)
                assert all(bits(target[name]) == data for name, data in plain.items())
                assert receiver.load_into(good) == version
                assert_equal(good, weights_of(version))

    def test_a_module_of_another_size(self, sender, receiver):
        sender.send(nn.Linear(3, 4))
        for target in (nn.Linear(4, 3), nn.Linear(3, 4, bias=False), nn.ReLU(), {}):
            with pytest.raises(WeightsMismatchError):
                receiver.load_into(target)
        for target in (None, 3, [torch.ones(1)], torch.ones(1), "path"):
            with pytest.raises(OptionError):
                receiver.load_into(target)
        assert receiver.load_into(nn.Linear(3, 4)) == 1

    def test_a_new_layout_must_fit_again(self, sender, receiver):
        target = {"w": torch.zeros(3), "x": torch.zeros(2)}
        for _ in range(3):
            sender.send({"w": torch.ones(3), "x": torch.ones(2)})
            receiver.load_into(target)
        sender.send({"w": torch.ones(2), "x": torch.ones(3)})
        with pytest.raises(WeightsMismatchError, match=r"w float32\[2\]"):
            receiver.load_into(target)
        assert target["x"].tolist() == [1, 1]

    def test_all_differences_are_listed_up_to_a_few(self, sender, receiver):
        sender.send({f"layers.{n}": torch.ones(2) for n in range(20)})
        target = {f"layers.{n}": torch.ones(2) for n in range(20)}
        target["layers.3"], target["layers.7"] = torch.ones(3), torch.ones(2, 2)
        listed = r"layers\.3 float32\[3\].*layers\.7 float32\[2, 2\]"
        with pytest.raises(WeightsMismatchError, match=listed):
            receiver.load_into(target)
        with pytest.raises(WeightsMismatchError, match=" 12 "):
            receiver.load_into({})
