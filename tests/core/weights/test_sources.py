"""What can be published, how it is named, what is refused; all by way of a real store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dbuffer
from dbuffer import InvalidWeightsError, LazyTensor, WeightReceiver, WeightSender
from dbuffer.format.layout import ITEM_BYTES
from tests.support.patterns import NO_MEMORY, Tied, assert_same, random_bits, tensordict_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

MB = 1 << 20


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Published(NamedTuple):
    publication: dbuffer.Publication
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]


@pytest.fixture
def publish(store):
    def publish(weights, **options) -> Published:
        with WeightSender(store, **options) as sender:
            publication = sender.send(weights)
        with WeightReceiver(store) as receiver, receiver.open(timeout_s=5) as snapshot:
            tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
            return Published(publication, tensors, dict(snapshot.aliases))

    return publish


def check(published: Published, expected: dict[str, torch.Tensor]) -> None:
    assert list(published.tensors) == list(expected)
    assert_same(published.tensors, expected)
    assert published.publication.num_tensors == len(expected)
    assert published.publication.num_bytes == sum(tensor.nbytes for tensor in expected.values())


AS_STREAM = pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])


def pairs_of(weights: dict[str, torch.Tensor], as_stream: bool):
    return iter(weights.items()) if as_stream else weights


class TestNames:
    NAMES = (
        *("shape", "device", "_type", "<NJT>x", "", "batch_size", "data", "keys", "cls", "0"),
        *("format", "tensors", "aliases", "CURRENT", "manifest.json", "None", "module", "module."),
        *("a.b.c", "a/b", "/etc/passwd", "../../x", ".", "..", "...", " ", "\x00", "\n", "\t"),
        *('"quoted"', "back\\slash", "моделЬ", "重み.バイアス", "\N{GRINNING FACE}", "\x7f"),
        *("\u00e9", "e\u0301", "\ud800", "\udfff.weight", "\u202e", "\ufeff", "\uffff"),
        *("x" * 5_000, "\u6f22" * 5_000, "layer." * 1_000 + "weight"),
    )

    @AS_STREAM
    def test_any_name(self, publish, store, as_stream):
        from tensordict import TensorDict

        weights = {name: torch.full((2,), float(n)) for n, name in enumerate(self.NAMES)}
        check(publish(pairs_of(weights, as_stream)), weights)
        target = {name: torch.zeros(2) for name in weights}
        with WeightReceiver(store) as receiver:
            receiver.load_into(target)
            assert_same(target, weights)
            with receiver.open() as snapshot:
                assert_same(dict(snapshot.tensordict.items()), weights)
                opened = TensorDict.from_consolidated(snapshot.path)
        del weights["<NJT>x"]  # what TensorDict takes for a nested tensor
        assert_same(dict(opened.items()), weights)

    @AS_STREAM
    def test_a_name_that_json_makes_another_name_of_is_refused(self, publish, as_stream):
        # Two surrogates in a row are one character to JSON.
        with pytest.raises(InvalidWeightsError, match="JSON cannot store"):
            publish(pairs_of({"\ud83d\ude00": torch.zeros(2)}, as_stream))

    CLEANED = (
        ("module.a.weight", "a.weight"),
        ("_orig_mod.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("module._orig_mod.a.weight", "a.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.weight", "a.weight"),
        ("a._checkpoint_wrapped_module._orig_mod.weight", "a.weight"),
        ("a.module.weight", "a.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("submodule.weight", "submodule.weight"),
    )

    @AS_STREAM
    def test_what_wrappers_put_into_names_goes(self, publish, as_stream):
        for given_name, kept in self.CLEANED:
            names = given_name, given_name.replace("weight", "bias")
            published = publish(pairs_of(dict.fromkeys(names, torch.zeros(1)), as_stream))
            assert [*published.tensors, *published.aliases] == [
                kept,
                kept.replace("weight", "bias"),
            ]
        # Of no wrapper, if not all names have it.
        some = {"module.a": torch.zeros(1), "b": torch.ones(1)}
        assert list(publish(pairs_of(some, as_stream)).tensors) == ["module.a", "b"]

    @AS_STREAM
    def test_rename(self, publish, as_stream):
        weights = {"_orig_mod.a.w": torch.zeros(1), "_orig_mod.b.w": torch.ones(1)}
        for rename, expected in (
            ({"a.w": "first", "none": "unused"}, ["first", "b.w"]),
            ("model.{}".format, ["model.a.w", "model.b.w"]),
        ):
            published = publish(pairs_of(weights, as_stream), rename=rename)
            assert list(published.tensors) == expected
        for rename in (lambda _: "x", {"a.w": "b.w"}, lambda _: None):
            with pytest.raises(InvalidWeightsError):
                publish(pairs_of(weights, as_stream), rename=rename)


class TestTies:
    def test_a_module(self, publish):
        model = Tied()
        for weights in (model, model.state_dict()):
            published = publish(weights)
            check(published, {n: t for n, t in model.state_dict().items() if n != "head.weight"})
            assert published.aliases == {"head.weight": "embed.weight"}

    def test_names_of_one_tensor_among_views_of_it(self, publish):
        tensor = torch.randn(4, 4, dtype=torch.complex64)
        weights = {
            "row": tensor[0],
            "whole": tensor,
            "transposed": tensor.t(),
            "flat": tensor.view(-1),
            "expanded": tensor[:1].expand(9, 4),
            "as floats": tensor.view(torch.float32),
            "conjugate": tensor.conj(),
            "imaginary part": tensor.imag,
            "negative of it": tensor.conj().imag,
            "empty": torch.empty(0),
            "empty, too": torch.empty(0),
        }
        published = publish(weights | {"b": tensor, "c": tensor.detach()}, rename="x.{}".format)
        check(published, {f"x.{name}": value for name, value in weights.items()})
        assert published.aliases == {"x.b": "x.whole", "x.c": "x.whole"}

    def test_a_tie_may_come_and_go(self, sender, receiver):
        one, other = torch.ones(3), torch.full((3,), 2.0)
        target = {"a": torch.zeros(3), "b": torch.zeros(3)}
        for a, b in [(one, other), (one, one), (other, other), (other, one), (one, other)]:
            assert sender.send({"a": a, "b": b}).num_tensors == (1 if a is b else 2)
            receiver.load_into(target)
            assert torch.equal(target["a"], a)
            assert torch.equal(target["b"], b)


class Wrapped(nn.Module):
    """As FSDP wraps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class WithState(nn.Linear):
    def __init__(self, state):
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class TestModules:
    @pytest.fixture
    def model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
        model.register_buffer("scratch", torch.zeros(100), persistent=False)
        model.register_buffer("kept", torch.arange(3))
        model[0].bias.requires_grad_(False)
        return model

    def test_extra_state(self, publish):
        assert list(publish(WithState(None)).tensors) == ["weight", "bias"]
        published = publish(WithState(torch.ones(3)))
        assert published.tensors["_extra_state"].tolist() == [1, 1, 1]
        for state in ({"version": 3}, 7, b"bytes"):
            message = rf"lost: '1\._extra_state' \({type(state).__name__}\)"
            with pytest.raises(InvalidWeightsError, match=message):
                publish(nn.Sequential(nn.Linear(2, 2), WithState(state)))

    @compiles
    def test_a_wrapped_module(self, publish, model, process_group):
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        ddp = nn.parallel.DistributedDataParallel
        both = torch.compile(ddp(Wrapped(model)))
        assert next(iter(both.state_dict())).startswith("_orig_mod.module._fsdp_wrapped_module.")
        for wrapped in (torch.compile(model), Wrapped(model), ddp(model), both):
            check(publish(wrapped), expected)
        model[2] = torch.compile(model[2])
        assert "2._orig_mod.0.weight" in model.state_dict()
        check(publish(model), expected)

    def test_what_has_no_names_of_its_own_is_refused(self, publish):
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(2))
        model._orig_mod = nn.Module()
        model._orig_mod.w = nn.Parameter(torch.zeros(2))
        with pytest.raises(InvalidWeightsError, match="w"):
            publish(model)
        with pytest.raises(InvalidWeightsError):
            publish(nn.ReLU())


class TestTensorDicts:
    def test_nested_keys_are_joined(self, publish):
        from tensordict import TensorDict, TensorDictParams

        nested = TensorDict(
            {"a": {"b": {"w": torch.randn(3)}, "w": torch.ones(2)}, "c": torch.ones(1)}
        )
        flat = {"a.b.w": nested["a", "b", "w"], "a.w": nested["a", "w"], "c": nested["c"]}
        for weights in (nested, TensorDictParams(nested)):
            check(publish(weights), flat)
        batched = TensorDict({"x": torch.randn(3, 2)}, batch_size=[3]).lock_()
        check(publish(batched), {"x": batched["x"]})
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        published = publish(TensorDict.from_module(model))
        assert published.tensors.keys() == model.state_dict().keys()

    def test_two_keys_of_one_joined_name_are_refused(self, publish):
        from tensordict import TensorDict

        weights = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})
        with pytest.raises(InvalidWeightsError, match=r"a\.b"):
            publish(weights)

    @pytest.mark.parametrize("nested", [False, True])
    def test_a_lazy_stack_is_refused(self, publish, nested):
        from tensordict import TensorDict, lazy_stack

        stack = lazy_stack([TensorDict({"w": torch.ones(2)}), TensorDict({"w": torch.zeros(2)})])
        with pytest.raises(InvalidWeightsError, match="'in' is a lazy" if nested else "Dict is a"):
            publish(TensorDict({"in": stack, "c": torch.ones(1)}) if nested else stack)


class TestPairs:
    WEIGHTS: ClassVar = {"a": torch.randn(3), "b": torch.arange(4)}

    def test_any_iterable(self, publish):
        weights = self.WEIGHTS
        for pairs in (
            list(weights.items()),
            tuple(weights.items()),
            [list(pair) for pair in weights.items()],
            weights.items(),
            iter(weights.items()),
            zip(weights, weights.values(), strict=True),
        ):
            check(publish(pairs), weights)
        model = nn.Linear(2, 3)
        check(publish(model.named_parameters()), dict(model.named_parameters()))

    def test_a_generator_is_streamed(self, store):
        references: list[weakref.ref] = []

        def generate():
            for number in range(10):
                tensor = torch.full((MB,), float(number))
                references.append(weakref.ref(tensor))
                yield f"layers.{number}", tensor
                assert sum(reference() is not None for reference in references) <= 2

        with WeightSender(store) as sender:
            assert sender.send(generate()).num_bytes == 10 * 4 * MB
            # As from a trainer that gathers each layer into one buffer.
            buffer = torch.empty(3)
            sender.send((str(number), buffer.fill_(number)) for number in range(5))
        with WeightReceiver(store) as receiver:
            with receiver.open(version=1) as snapshot:
                for number, tensor in enumerate(snapshot.tensors.values()):
                    assert (tensor == number).all()
            with receiver.open() as snapshot:
                values = [tensor.tolist() for tensor in snapshot.tensors.values()]
                assert values == [[number] * 3 for number in range(5)]


class TestRefusals:
    """Whatever is refused, the last version stays, and the next publish works."""

    GOOD: ClassVar = {"good": torch.ones(3), "w": torch.zeros(3)}

    BAD_TENSORS: ClassVar = {
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.ones(3).to_sparse(),
        "compressed": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "made of others": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        "of four bits": lambda: torch.empty(3, dtype=torch.uint4),
        "an array": lambda: torch.ones(3).numpy(),
        "a number": lambda: 3.0,
        "nothing": lambda: None,
        "a dictionary": lambda: {"w": torch.ones(3)},
        "a TensorDict": lambda: tensordict_of({"w": torch.ones(3)}),
        **NO_MEMORY,
    }

    @pytest.fixture
    def refuse(self, store):
        """A sender with one good version, and a check that it refuses something."""
        with WeightSender(store) as sender, WeightReceiver(store) as receiver:

            def refuse(weights, match=None):
                with pytest.raises(InvalidWeightsError, match=match):
                    sender.send(weights)
                with receiver.open(timeout_s=5) as snapshot:
                    assert snapshot.version == 1
                    assert list(snapshot.tensors) == ["good", "w"]
                    assert snapshot.tensors["good"].tolist() == [1, 1, 1]

            sender.send(self.GOOD)
            yield refuse
            assert sender.send(self.GOOD).version == 2

    @pytest.mark.filterwarnings("ignore:.*(beta|prototype|quantiz|deprecated)")
    @pytest.mark.parametrize("kind", BAD_TENSORS)
    def test_what_is_no_plain_tensor(self, refuse, kind):
        bad = self.BAD_TENSORS[kind]()
        weights = {"good": torch.ones(3), "the.bad": bad}
        refuse(weights, match=r"'the\.bad'")
        refuse(list(weights.items()), match=r"'the\.bad'")
        refuse(iter(weights.items()), match=r"'the\.bad'")

    @pytest.mark.filterwarnings("ignore:.*beta")
    def test_what_was_a_plain_tensor_in_the_last_version(self, refuse):
        plain = self.GOOD["w"]
        meta, nested = torch.empty(3, device="meta"), torch.nested.nested_tensor([plain])
        others = [make() for make in NO_MEMORY.values()]
        for changed in (plain.to_sparse(), plain.to_mkldnn(), meta, nested, *others):
            refuse({**self.GOOD, "w": changed}, match="'w'")

    def test_what_is_no_named_tensors(self, refuse):
        for weights in (
            *(None, 3, b"path", ..., torch.ones(3), [], {}, (), iter(())),
            *([1], ["ab"], [("a",)], [("a", 1, 2)], {"a"}),
            *({1: torch.ones(3)}, {None: torch.ones(3)}, {("a", "b"): torch.ones(3)}),
        ):
            refuse(weights)

    def test_a_name_that_comes_twice(self, refuse):
        pairs = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("a", torch.ones(2))]
        refuse(pairs, match="'a'")
        refuse(iter(pairs), match="'a'")


INDEX = "model.safetensors.index.json"
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OUTSIDE = ("../outside.safetensors", "/etc/passwd", "sub/x.safetensors")


def write_index(directory: Path, weight_map: dict[str, object]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))


def file_of(header: object, num_bytes: int = 4) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes)


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SPOILED_FILES = [
    *(b"", b"\xff" * 8, file_of([]), file_of({}, 1), file_of({"model.embed.weight": 3})),
    *(file_of({"model.embed.weight": one}) for one in ({}, entry("F3"), entry(shape=3))),
    *(file_of({"model.embed.weight": one}) for one in (entry(offsets=(0, 8)), entry(shape=[2]))),
    *(file_of({"model.embed.weight": one}) for one in (entry(offsets=(4,)), entry(shape=["a"]))),
    file_of({"model.embed.weight": entry(shape=[-1, -1])}),
    file_of({"model.embed.weight": entry(offsets=(-4, 0))}, 0),
    *(
        file_of(
            {"model.embed.weight": one, "model.empty": entry(shape=[0], offsets=(end, end))}, end
        )
        for one, end in (
            *((entry(offsets=(0.0, 4)), 4), (entry(shape=[1.0]), 4)),
            (entry(offsets=(4, 8)), 8),  # a gap before it
        )
    ),
    file_of({"model.embed.weight": entry(), "model.empty": entry()}),  # the same bytes
]


def remove_files(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


class TestCheckpoints:
    WEIGHTS: ClassVar = {
        "model.embed.weight": torch.randn(5, 3),
        "model.norm.weight": torch.randn(3, dtype=torch.bfloat16),
        "model.empty": torch.empty(0, 2),
        "model.scale": torch.tensor(2.0),
    }

    @pytest.fixture
    def directory(self, tmp_path):
        path = tmp_path / "checkpoint with spaces"
        path.mkdir()
        return path

    @pytest.fixture
    def sharded(self, directory):
        names = list(self.WEIGHTS)
        shards = {FIRST: names[1::2], LAST: names[0::2]}
        for file, held in shards.items():
            tensors = {name: self.WEIGHTS[name] for name in held}
            safetensors.torch.save_file(tensors, directory / file)
        write_index(directory, {n: file for file, held in shards.items() for n in held})
        return directory

    def test_one_file(self, publish, directory):
        path = directory / "model.safetensors"
        safetensors.torch.save_file(self.WEIGHTS, path)
        for source in (directory, str(directory), path, str(path)):
            assert_same(publish(source, checksum=source is path).tensors, self.WEIGHTS)

    def test_shards_that_the_index_names(self, publish, sharded):
        safetensors.torch.save_file({"other": torch.ones(1)}, sharded / "consolidated.safetensors")
        assert_same(publish(sharded).tensors, self.WEIGHTS)
        blobs = sharded.parent / "blobs"
        blobs.mkdir()
        for path in sharded.glob("*.safetensors"):  # as in a download cache
            path.rename(blobs / path.name)
            path.symlink_to(blobs / path.name)
        assert_same(publish(sharded).tensors, self.WEIGHTS)

    def test_every_dtype_that_safetensors_holds(self, publish, directory, tmp_path):
        weights = {}
        for name in ITEM_BYTES:
            one = {name: random_bits(getattr(torch, name), 4, 6)}
            with contextlib.suppress(KeyError, ValueError, AttributeError, SafetensorError):
                safetensors.torch.save_file(one, tmp_path / "one.safetensors")
                safetensors.torch.load_file(tmp_path / "one.safetensors")
                weights |= one
        assert weights.keys() >= {"float32", "bfloat16", "float8_e4m3fn"}
        safetensors.torch.save_file(weights, directory / "model.safetensors")
        assert_same(publish(directory).tensors, weights)

    def test_is_streamed(self, store, directory):
        # Above 32 MB, the C library gives memory back when it is freed.
        weights = {f"layers.{n}": torch.full((10 * MB,), float(n)) for n in range(5)}
        safetensors.torch.save_file(weights, directory / "model.safetensors")
        del weights
        growth, progress = [], []
        before = anonymous_bytes()

        def note(done: int, total: int) -> None:
            growth.append(anonymous_bytes() - before)
            progress.append((done, total))

        with WeightSender(store) as sender:
            sender.send(directory, progress=note)
        assert max(growth) < 120 * MB
        assert progress == [(40 * MB * n, 5 * 40 * MB) for n in range(1, 6)]

    def test_a_pickled_checkpoint_is_never_read(self, publish, directory):
        class Bomb:
            def __reduce__(self):
                return (Path.touch, (directory / "exploded",))

        torch.save({"w": Bomb()}, directory / "pytorch_model.bin")
        with pytest.raises(InvalidWeightsError, match="safe_serialization"):
            publish(directory)
        with pytest.raises(InvalidWeightsError, match=r"pytorch_model\.bin"):
            publish(directory / "pytorch_model.bin")
        assert not (directory / "exploded").exists()

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (shutil.rmtree, "there is no checkpoint"),
            (remove_files, "safetensors"),
            (lambda path: (path / INDEX).write_bytes(b"\xff\xfe\x00"), None),
            *(
                (lambda path, text=text: (path / INDEX).write_text(text), None)
                for text in ("", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}')
            ),
            *(
                (lambda path, file=file: write_index(path, {"w": file}), None)
                for file in (*OUTSIDE, "", ".", "..", 3, None)
            ),
            (lambda path: write_index(path, {"none": FIRST}), "none"),  # which its shard lacks
            *(
                (lambda path, data=data: (path / LAST).write_bytes(data), LAST)
                for data in SPOILED_FILES
            ),
            (lambda path: (path / LAST).unlink(), LAST),
            (lambda path: os.truncate(path / LAST, (path / LAST).stat().st_size - 4), LAST),
            (  # of a later save; transformers would load it
                lambda path: shutil.copy(path / FIRST, path / "model.safetensors"),
                "two checkpoints: model.safetensors",
            ),
            (
                lambda path: shutil.copy(path / FIRST, (path / INDEX).rename(path / LAST)),
                f"{FIRST} and {LAST} both hold model.norm.weight, model.scale",
            ),
        ],
    )
    def test_a_spoiled_checkpoint_is_refused(self, publish, sharded, spoil, message):
        safetensors.torch.save_file({"w": torch.ones(1)}, sharded.parent / "outside.safetensors")
        spoil(sharded)
        with pytest.raises(InvalidWeightsError, match=message):
            publish(sharded)

    @pytest.mark.parametrize("delta", [False, True])
    def test_a_file_that_is_cut_off_meanwhile_is_refused(self, store, directory, delta):
        path = directory / "model.safetensors"
        safetensors.torch.save_file({name: torch.ones(1 << 20) for name in "abcd"}, path)

        def cut_off(name: str) -> str:
            os.truncate(path, path.stat().st_size // 3)
            return name

        with WeightSender(store, delta=delta, rename=cut_off) as sender:
            with pytest.raises(InvalidWeightsError, match="while it was being published"):
                sender.send(directory)
            assert sender.send({"w": torch.ones(1)}).version == 1

    @pytest.mark.parametrize("save", [shutil.copyfile, os.replace])
    @pytest.mark.parametrize("delta", [False, True])
    def test_what_is_saved_anew_meanwhile_is_not_published(
        self, store, directory, tmp_path, save, delta
    ):
        """Written over, half of its tensors would be those of the next checkpoint."""
        path, later = directory / "model.safetensors", tmp_path / "later.safetensors"
        safetensors.torch.save_file({name: torch.zeros(1 << 20) for name in "abcd"}, path)
        safetensors.torch.save_file({name: torch.ones(1 << 20) for name in "abcd"}, later)

        def progress(done: int, total: int) -> None:
            if done >= total // 2 and later.exists():
                save(later, path)
                later.unlink(missing_ok=True)

        with WeightSender(store, delta=delta) as sender:
            with pytest.raises(InvalidWeightsError, match="while it was being published"):
                sender.send(directory, progress=progress)
            assert sender.send(directory).version == 1
        with WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert all(tensor.eq(1).all() for tensor in snapshot.tensors.values())


class TestLazyTensors:
    def lazy(self, tensor: torch.Tensor, **more) -> LazyTensor:
        return LazyTensor(tensor.dtype, tuple(tensor.shape), tensor.clone, **more)

    @pytest.mark.parametrize("kind", [dict, list, iter])
    def test_are_made_when_they_are_written(self, publish, kind):
        one, other = torch.randn(5, 3), torch.randn(4).bfloat16()
        pairs = [("one", self.lazy(one)), ("other", other), ("last", self.lazy(other))]
        check(publish(kind(pairs)), {"one": one, "other": other, "last": other})
        cast = publish(kind(pairs[:1]), dtype=torch.float16, rename={"one": "two"})
        check(cast, {"two": one.half()})

    def test_ties_are_told_by_identity(self, publish):
        one = torch.randn(5, 3)
        pairs = {name: self.lazy(one, identity=-number) for name, number in (("a", 1), ("b", 1))}
        pairs |= {"c": self.lazy(one, identity=-2), "d": self.lazy(one)}
        got = publish(pairs)
        assert list(got.tensors) == ["a", "c", "d"]
        assert got.aliases == {"b": "a"}

    def test_each_publish_makes_them_anew_in_the_same_files(self, store, sender, receiver):
        made = torch.zeros(1000)
        lazy = LazyTensor(made.dtype, (1000,), made.clone)
        files = []
        for version in range(1, 5):
            made += 1
            sender.send({"made": lazy, "plain": made})
            target = {"made": torch.zeros(1000), "plain": torch.zeros(1000)}
            receiver.load_into(target)
            assert target["made"][0] == target["plain"][0] == version
            files.append({path.stat().st_ino for path in store.glob("[AB]/weights-*")})
        assert files[1] == files[2] == files[3]

    @pytest.mark.parametrize("kind", [dict, iter])
    @pytest.mark.parametrize("made", [torch.ones(3), torch.ones(4).half(), torch.ones(2, 2)])
    def test_what_turns_out_otherwise_is_refused(self, sender, receiver, kind, made):
        sender.send({"w": torch.zeros(4)})
        with pytest.raises(InvalidWeightsError):
            sender.send(kind([("w", LazyTensor(torch.float32, (4,), lambda: made))]))
        target = {"w": torch.ones(4)}
        assert receiver.load_into(target) == 1
        assert torch.equal(target["w"], torch.zeros(4))
