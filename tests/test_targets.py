"""`load_into`: what can be filled, and what is refused before anything is touched."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from dbuffer import WeightReceiver, WeightSender, WeightsMismatchError
from dbuffer.layout import ITEM_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {
        "a.w": torch.arange(6.0).view(2, 3) + value,
        "a.n": torch.tensor(int(value)),
        "b": torch.full((5,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def sender(store):
    with WeightSender(store) as sender:
        yield sender


@pytest.fixture(params=[{}, {"num_threads": 1}, {"num_threads": 5}, {"verify": True}], ids=repr)
def receiver(request, store):
    with WeightReceiver(store, **request.param) as receiver:
        yield receiver


@pytest.fixture
def load(store):
    """Publish, and load what was published."""

    def load(weights, target) -> int | None:
        with WeightSender(store, checksum=True) as sender:
            sender.send(weights)
        with WeightReceiver(store) as receiver:
            return receiver.load_into(target)

    return load


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, tensor), expected in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name


class TestKinds:
    def test_a_dictionary(self, store, receiver):
        target = {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}
        before = dict(target)
        with WeightSender(store, checksum=True) as sender:
            for version in (1, 2, 3, 4):
                sender.send(weights_of(version))
                assert receiver.load_into(target) == version
                for name, tensor in weights_of(version).items():
                    assert torch.equal(target[name], tensor)
                    assert target[name] is before[name]

    @pytest.mark.parametrize("name", ITEM_BYTES)
    def test_every_dtype(self, load, name):
        dtype = getattr(torch, name)
        num_bytes = 12 * dtype.itemsize
        data = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8)
        weights = {"w": data.view(dtype).view(3, 4), "x": torch.ones(2)}
        target = {"w": torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(3, 4)}
        target["x"] = torch.zeros(2)
        assert load(weights, target) == 1
        assert bits(target["w"]) == bits(weights["w"])

    def test_in_another_order(self, load):
        target = {name: torch.zeros_like(t) for name, t in reversed(weights_of(0).items())}
        load(weights_of(3), OrderedDict(target))
        assert all(torch.equal(target[name], tensor) for name, tensor in weights_of(3).items())

    def test_a_module(self, store, receiver):
        model, target = Model(), Model()
        scratch = target.scratch.clone()
        with WeightSender(store, checksum=True) as sender:
            for version in (1, 2, 3):
                nn.init.normal_(model.embed.weight)
                model.norm.num_batches_tracked.add_(1)
                sender.send(model)
                assert receiver.load_into(target) == version
                assert_same_state(target, model)
        assert torch.equal(target.scratch, scratch)

    def test_a_modules_parameters_stay_parameters_that_train(self, load):
        target = Model()
        parameters = list(target.parameters())
        load(Model(), target)
        assert all(map(lambda one, other: one is other, parameters, target.parameters()))
        assert all(p.requires_grad and p.is_leaf and p.grad_fn is None for p in parameters)
        target.embed.weight.sum().backward()
        assert target.embed.weight.grad is not None

    def test_a_compiled_module_and_one_with_a_wrappers_names(self, load):
        model, target = Model(), Model()
        wrapped = nn.Module()
        wrapped.module = target
        load(model, wrapped)
        assert_same_state(target, model)

    def test_a_flat_tensordict(self, load):
        target = TensorDict({name: torch.zeros_like(t) for name, t in weights_of(0).items()})
        load(weights_of(2), target)
        assert all(torch.equal(target[name], tensor) for name, tensor in weights_of(2).items())

    @pytest.mark.parametrize("wrap", [TensorDict, TensorDict.lock_, TensorDictParams])
    def test_a_nested_tensordict(self, load, wrap):
        weights = {"a.w": torch.randn(2, 3), "a.b.c": torch.randn(2)}
        nested = TensorDict({"a": {"w": torch.zeros(2, 3), "b": {"c": torch.zeros(2)}}})
        target = wrap(nested)
        load(weights, target)
        assert torch.equal(target["a", "w"].detach(), weights["a.w"])
        assert torch.equal(target["a", "b", "c"].detach(), weights["a.b.c"])

    def test_tensors_made_in_inference_mode(self, load):
        with torch.inference_mode():
            target = {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}
        load(weights_of(2), target)
        assert all(torch.equal(target[name], tensor) for name, tensor in weights_of(2).items())

    def test_under_inference_mode(self, load):
        with torch.inference_mode():
            target = Model()
            model = Model()
            load(model, target)
            assert_same_state(target, model)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
    def test_parameters_under_any_grad_mode(self, load, mode):
        weights = {name: t for name, t in weights_of(2).items() if t.is_floating_point()}
        target = {name: nn.Parameter(torch.zeros_like(t)) for name, t in weights.items()}
        with mode():
            load(weights, target)
        assert all(torch.equal(target[name], tensor) for name, tensor in weights.items())

    def test_tensors_that_are_not_contiguous(self, store, receiver):
        weights = {"t": torch.randn(4, 6), "s": torch.randn(4), "d": torch.randn(3)}
        around = torch.zeros(4, 8)
        target = {
            "t": torch.zeros(6, 4).t(),
            "s": around[:, 3],
            "d": torch.zeros(3, 3).diagonal(),
        }
        with WeightSender(store, checksum=True) as sender:
            for version in (1, 2, 3):
                weights = {name: tensor + 1 for name, tensor in weights.items()}
                sender.send(weights)
                assert receiver.load_into(target) == version
                assert all(torch.equal(target[name], weights[name]) for name in weights)
        assert around.count_nonzero() == 4

    def test_conjugate_views_are_filled_or_refused(self, load):
        weights = {"a": torch.randn(3), "c": torch.randn(4, dtype=torch.complex64)}
        target = {"a": torch.zeros(3), "c": torch.zeros(4, dtype=torch.complex64).conj()}
        try:
            load(weights, target)
        except WeightsMismatchError:
            assert not target["a"].any()
            assert not target["c"].any()
        else:
            assert torch.equal(target["c"], weights["c"])

    def test_another_target_later(self, store, receiver):
        targets = [
            {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}
            for _ in range(2)
        ]
        with WeightSender(store, checksum=True) as sender:
            for version in (1, 2, 3, 4):
                sender.send(weights_of(version))
                receiver.load_into(targets[version % 2])
        for target, version in zip(targets, (4, 3), strict=True):
            for name, tensor in weights_of(version).items():
                assert torch.equal(target[name], tensor)


class TestFunctions:
    def test_get_pairs(self, load):
        seen = {}

        def load_weights(pairs):
            seen.update((name, tensor.clone()) for name, tensor in pairs)

        assert load(weights_of(4), load_weights) == 1
        assert list(seen) == list(weights_of(4))
        assert all(torch.equal(seen[name], tensor) for name, tensor in weights_of(4).items())

    def test_methods_and_objects_will_do(self, sender, store):
        class Loader:
            num_loaded = 0

            def load_weights(self, weights):
                self.num_loaded += len(list(weights))
                return {"ignored"}

            __call__ = load_weights

        loader = Loader()
        with WeightReceiver(store) as receiver:
            for target in (loader.load_weights, loader):
                sender.send(weights_of(1))
                receiver.load_into(target)
        assert loader.num_loaded == 6

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
    @pytest.mark.parametrize("as_stream", [False, True], ids=["module", "stream"])
    @pytest.mark.parametrize("tied", [False, True], ids=["into untied", "into tied"])
    def test_from_a_tied_module(self, load, tied, as_stream):
        model, target = Model(tied=True), Model(tied=tied)
        load(iter(model.state_dict().items()) if as_stream else model, target)
        assert_same_state(target, model)
        assert (target.head.weight is target.embed.weight) == tied

    def test_into_a_dictionary_with_all_names(self, load):
        model = Model(tied=True)
        target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        load(model, target)
        assert torch.equal(target["head.weight"], model.embed.weight)

    def test_into_a_dictionary_with_the_first_name_only(self, load):
        model = Model(tied=True)
        target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        del target["head.weight"]
        load(model, target)
        assert torch.equal(target["embed.weight"], model.embed.weight)

    def test_a_store_with_one_name_fills_a_tied_module(self, load):
        model, target = Model(tied=True), Model(tied=True)
        weights = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
        load(weights, target)
        assert_same_state(target, model)

    def test_an_alias_must_fit_too(self, load):
        tensor = torch.ones(3)
        target = {"a": torch.zeros(3), "b": torch.zeros(4)}
        with pytest.raises(WeightsMismatchError, match=r"b float32\[3\]"):
            load({"a": tensor, "b": tensor}, target)
        assert not target["a"].any()

    def test_again_and_again(self, store, receiver):
        model, target = Model(tied=True), Model(tied=False)
        with WeightSender(store, checksum=True) as sender:
            for _ in range(3):
                nn.init.normal_(model.embed.weight)
                sender.send(model)
                receiver.load_into(target)
                assert_same_state(target, model)


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
        (
            "a shape to broadcast to",
            change("a.n", lambda t: t.expand(3).clone()),
            r"a\.n int64\[3\]",
        ),
        ("a shape with a one", change("b", lambda t: t[None]), r"b bfloat16\[1, 5\]"),
        ("a dtype", change("b", torch.Tensor.half), r"b float16\[5\]"),
        ("a wider dtype", change("b", torch.Tensor.float), r"b float32\[5\]"),
        ("no tensor", change("b", torch.Tensor.tolist), "'b' of the target is a list"),
        ("meta", change("b", lambda t: torch.empty_like(t, device="meta")), "meta"),
        ("expanded", change("b", lambda t: t[:1].expand(5)), "expanded"),
        (
            "overlapping",
            change("a.w", lambda t: torch.zeros(4).as_strided((2, 3), (1, 1))),
            r"a\.w",
        ),
        ("sparse", change("b", lambda t: torch.zeros(5).bfloat16().to_sparse()), "'?b'?"),
        ("another name", lambda target: target.update(d=target.pop("b")), "no b bfloat16.*'d'"),
    )

    @pytest.mark.parametrize("loads_before", [0, 1, 2])
    @pytest.mark.parametrize(
        ("change", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
    )
    def test_nothing_is_touched(self, sender, store, change, message, loads_before):
        good = {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}
        with WeightReceiver(store) as receiver:
            for version in range(1, loads_before + 1):
                sender.send(weights_of(version))
                assert receiver.load_into(good) == version
            sender.send(weights_of(9))
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
            assert receiver.load_into(good) == loads_before + 1
            assert torch.equal(good["a.w"], weights_of(9)["a.w"])

    def test_a_module_of_another_size(self, sender, store):
        sender.send(nn.Linear(3, 4))
        with WeightReceiver(store) as receiver:
            for target in (nn.Linear(4, 3), nn.Linear(3, 4, bias=False), nn.ReLU(), {}):
                with pytest.raises(WeightsMismatchError):
                    receiver.load_into(target)
            assert receiver.load_into(nn.Linear(3, 4)) == 1

    def test_a_new_layout_must_fit_again(self, sender, store):
        target = {"w": torch.zeros(3), "x": torch.zeros(2)}
        with WeightReceiver(store) as receiver:
            for _ in range(3):
                sender.send({"w": torch.ones(3), "x": torch.ones(2)})
                receiver.load_into(target)
            sender.send({"w": torch.ones(2), "x": torch.ones(3)})
            with pytest.raises(WeightsMismatchError, match=r"w float32\[2\]"):
                receiver.load_into(target)
            assert target["x"].tolist() == [1, 1]

    def test_all_differences_are_listed_up_to_a_few(self, sender, store):
        sender.send({f"layers.{n}": torch.ones(2) for n in range(20)})
        with WeightReceiver(store) as receiver:
            target = {f"layers.{n}": torch.ones(2) for n in range(20)}
            target["layers.3"], target["layers.7"] = torch.ones(3), torch.ones(2, 2)
            with pytest.raises(WeightsMismatchError) as caught:
                receiver.load_into(target)
            assert "layers.3 float32[3]" in str(caught.value)
            assert "layers.7 float32[2, 2]" in str(caught.value)
            with pytest.raises(WeightsMismatchError, match="and 12 more"):
                receiver.load_into({})

    @pytest.mark.parametrize("target", [None, 3, [torch.ones(1)], torch.ones(1), "path"], ids=repr)
    def test_what_is_no_target(self, sender, store, target):
        sender.send(weights_of(1))
        with WeightReceiver(store) as receiver:
            with pytest.raises(TypeError, match="cannot load into"):
                receiver.load_into(target)
            assert receiver.load_into(list) == 1
