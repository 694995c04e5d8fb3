"""`dbuffer ls STORE --against MODEL_DIR`: what would fit, before anything is loaded."""

import collections
import functools
import json
import random

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.comparison import compare
from dbuffer.weights.names import NameMap
from dbuffer.weights.rules import Rule
from tests.support.children import call
from tests.support.waiting import error_of


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name, dtype, shape)


def names_of(specs):
    return [one.name for one in specs]


def test_each_tensor_is_in_one_list():
    published = Layout.of([spec("a", 2), spec("b", 3), spec("c", 4)])
    found = compare(published, [spec("a", 2, dtype="bfloat16"), spec("b", 5), spec("d", 6)])
    assert found.matching == [spec("a", 2)]
    assert found.recast == [(spec("a", 2), spec("a", 2, dtype="bfloat16"))]
    assert found.differing == [(spec("b", 3), spec("b", 5))]
    assert found.missing == [spec("d", 6)]
    assert found.left_over == [spec("c", 4)]
    assert not found.fits


def test_names_are_compared_as_they_are_renamed():
    published = Layout.of([spec("model.a", 2), spec("b", 3)])
    rename = NameMap([Rule("prefix", "model.", ""), Rule("prefix", "mdoel.", "")])
    found = compare(published, [spec("a", 2), spec("b", 3)], rename)
    assert found.fits
    assert found.unused_rules == [Rule("prefix", "mdoel.", "")]


def test_a_part_of_a_tensor_that_nobody_needs_is_left_over():
    published = Layout.of([spec("a", 4, 2)], {"tied": "a"})
    rename = NameMap().split("*", ["*.x", "*.y"])
    found = compare(published, [spec("a.x", 2, 2), spec("tied.x", 2, 2)], rename)
    assert names_of(found.matching) == ["a.x", "tied.x"]
    assert names_of(found.left_over) == ["a.y", "tied.y"]
    assert compare(published, [spec("a.x", 2, 2), spec("tied.y", 2, 2)], rename).fits


def test_any_name_of_a_tied_tensor_will_do():
    published = Layout.of([spec("a", 2)], {"b": "a"})
    for needed in ("ab", "a", "b"):
        assert compare(published, [spec(name, 2) for name in needed]).fits
    assert names_of(compare(published, []).left_over) == ["a", "b"]


def test_two_tensors_that_become_one_name_are_refused():
    published = Layout.of([spec("x.a", 2), spec("y.a", 2)])
    with pytest.raises(dbuffer.InvalidWeightsError, match=r"'a'.*'y\.a'"):
        compare(published, [], NameMap([Rule("prefix", "x.", ""), Rule("prefix", "y.", "")]))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"layer.weight": torch.ones(2, 3)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def against(capsys, tmp_path, model):
    """Publish weights, and compare them with the model by the command, as text and as JSON."""

    def run(weights, *options):
        with dbuffer.WeightSender(tmp_path / "store") as sender:
            sender.send(weights)
        arguments = ("ls", tmp_path / "store", "--against", model, *options)
        code, out, _ = call(capsys, *arguments)
        code_of_json, as_json, _ = call(capsys, *arguments, "--json")
        assert code == code_of_json
        return code, " ".join(out.split()), json.loads(as_json)

    return run


def test_the_command_says_what_fits_and_what_does_not(against):
    code, out, _ = against({"layer.weight": torch.zeros(2, 3)})
    assert (code, out) == (0, "1 match")
    code, out, _ = against({"layer.weight": torch.zeros(2, 3).half()})
    assert code == 0
    assert "1 match, 1 other dtype (engines cast, and load_into raises)" in out
    code, out, found = against({"[x].weight": torch.zeros(2, 3)})
    assert code == 1
    for part in ("left over", "[x].weight", "missing", "layer.weight"):
        assert part in out
    assert found == {
        "version": 3,
        "fits": False,
        "num_matching": 0,
        "tensors": [
            {
                "name": "layer.weight",
                "problem": "missing",
                "published": None,
                "needed": "float32 [2, 3]",
            },
            {
                "name": "[x].weight",
                "problem": "left over",
                "published": "float32 [2, 3]",
                "needed": None,
            },
        ],
        "renamed": {},
        "unused_rules": [],
        "suggestion": "with rename=dbuffer.NameMap().prefix('[x].', 'layer.') of the sender, "
        "they would fit",
    }


def test_the_command_tries_names_before_they_are_used(capsys, tmp_path, against, model):
    names, store = tmp_path / "names.json", tmp_path / "store"
    names.write_text('{"rules": [{"prefix": "x.", "to": "layer."}, {"name": "y", "to": "z"}]}')
    code, out, found = against({"x.weight": torch.zeros(2, 3)}, "--rename", names)
    assert code == 0
    assert "1 match, 1 renamed" in out
    assert "renamed layer.weight x.weight" in out
    assert found["num_matching"] == 1
    assert found["renamed"] == {"layer.weight": ["x.weight"]}
    assert found["unused_rules"] == ['{"name": "y", "to": "z"}']
    assert call(capsys, "publish", model, store, "--rename", names)[0] == 0
    assert call(capsys, "ls", store, "--rename", names)[0] == 2
    assert call(capsys, "ls", store, "--against", tmp_path / "nowhere")[0] == 1


def random_weights(rng):
    """Up to three names, some of them of one tensor, of two shapes and two dtypes."""
    kinds = [((2,), torch.float32)] * 9 + [((3,), torch.float32), ((2,), torch.float16)]
    pool = [torch.ones(shape, dtype=dtype) for shape, dtype in rng.choices(kinds, k=3)]
    names = rng.sample("abc", rng.randint(1, 3))
    return {name: rng.choice(pool) for name in names}


def test_it_says_what_load_into_does(capsys, tmp_path):
    rng = random.Random(0)
    verdicts = collections.Counter()
    with dbuffer.WeightSender(tmp_path / "store") as sender:
        for _ in range(70):
            sender.send(random_weights(rng))
            target = {name: t.clone() for name, t in random_weights(rng).items()}
            save_file(target, tmp_path / "model.safetensors")
            arguments = (tmp_path / "store", "--against", tmp_path / "model.safetensors", "--json")
            code, out, _ = call(capsys, "ls", *arguments)
            found = json.loads(out)
            with dbuffer.WeightReceiver(tmp_path / "store") as receiver:
                error = error_of(functools.partial(receiver.load_into, target))
            loaded = error is None
            assert loaded or error.startswith("WeightsMismatchError")
            assert (not found["tensors"]) == loaded, (found, target)
            assert (code == 0) == found["fits"]
            assert found["fits"] or not loaded
            kinds = {tensor["problem"] for tensor in found["tensors"]}
            verdicts[loaded, "other dtype" in kinds] += 1
    assert min(verdicts[loaded, False] for loaded in (True, False)) > 5
    assert verdicts[False, True] > 2
