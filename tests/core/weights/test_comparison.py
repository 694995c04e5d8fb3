"""`dbuffer ls STORE --against MODEL_DIR`: what would fit, before anything is loaded."""

import collections
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
from tests.support.commands import call


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


@pytest.mark.parametrize("needed", [["a", "b"], ["a"], ["b"]], ids=str)
def test_any_name_of_a_tied_tensor_will_do(needed):
    published = Layout.of([spec("a", 2)], {"b": "a"})
    assert compare(published, [spec(name, 2) for name in needed]).fits


def test_a_tied_tensor_that_nobody_needs_is_left_over():
    published = Layout.of([spec("a", 2), spec("c", 2)], {"b": "a"})
    assert names_of(compare(published, [spec("c", 2)]).left_over) == ["a", "b"]


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


def publish(store, weights):
    with dbuffer.WeightSender(store) as sender:
        sender.send(weights)


def test_the_command_says_that_it_fits(capsys, tmp_path, model):
    publish(tmp_path / "store", {"layer.weight": torch.zeros(2, 3)})
    code, out, _ = call(capsys, "ls", tmp_path / "store", "--against", model)
    assert (code, out) == (0, "1 match, 0 differ in shape, 0 missing, 0 left over\n")


def test_the_command_lists_what_does_not(capsys, tmp_path, model):
    publish(tmp_path / "store", {"[x].weight": torch.zeros(2, 3)})
    code, out, _ = call(capsys, "ls", tmp_path / "store", "--against", model)
    assert code == 1
    assert "left over" in out
    assert "[x].weight" in out
    assert "missing" in out
    assert "layer.weight" in out
    code, out, _ = call(capsys, "ls", tmp_path / "store", "--against", model, "--json")
    assert code == 1
    assert json.loads(out) == {
        "version": 1,
        "fits": False,
        "fits_exactly": False,
        "matching": [],
        "missing": [{"name": "layer.weight", "dtype": "float32", "shape": [2, 3]}],
        "left_over": [{"name": "[x].weight", "dtype": "float32", "shape": [2, 3]}],
        "differing": [],
        "renamed": {},
        "recast": [],
        "unused_rules": [],
        "suggestion": "with rename=dbuffer.NameMap().prefix('[x].', 'layer.') of the sender, "
        "they would fit",
    }


def test_the_command_tries_names_before_they_are_used(capsys, tmp_path, model):
    publish(tmp_path / "store", {"x.weight": torch.zeros(2, 3)})
    names = tmp_path / "names.json"
    names.write_text('{"rules": [{"prefix": "x.", "to": "layer."}, {"name": "y", "to": "z"}]}')
    store = tmp_path / "store"
    code, out, _ = call(capsys, "ls", store, "--against", model, "--rename", names, "--json")
    assert code == 0
    assert json.loads(out)["matching"] == ["layer.weight"]
    assert json.loads(out)["renamed"] == {"layer.weight": ["x.weight"]}
    assert json.loads(out)["unused_rules"] == [{"name": "y", "to": "z"}]
    assert call(capsys, "publish", model, store, "--rename", names)[0] == 0
    assert call(capsys, "ls", store, "--rename", names)[0] == 2
    assert call(capsys, "ls", store, "--against", tmp_path / "nowhere")[0] == 1


def test_the_command_shows_what_rules_make_of_tensors(capsys, tmp_path, model):
    publish(tmp_path / "store", {"actor.fused.weight": torch.zeros(3, 4), "rest": torch.zeros(1)})
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
        [[rules]]
        preset = "actor."
        [[rules]]
        transpose = "fused.*"
        [[rules]]
        split = "fused.*"
        to = ["layer.*", "other.*"]
        """
    )
    arguments = ("ls", tmp_path / "store", "--against", model, "--rename", rules)
    code, out, _ = call(capsys, *arguments, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["matching"] == ["layer.weight"]
    assert found["renamed"] == {
        "layer.weight": ["actor.fused.weight"],
        "other.weight": ["actor.fused.weight"],
    }
    assert [spec["name"] for spec in found["left_over"]] == ["other.weight", "rest"]
    assert found["unused_rules"] == []
    code, out, _ = call(capsys, *arguments)
    assert code == 1
    assert "1 match, 0 differ in shape, 0 missing, 2 left over; 2 are renamed" in " ".join(
        out.split()
    )
    assert "renamed" in out


def test_the_command_tells_what_is_cast(capsys, tmp_path, model):
    publish(tmp_path / "store", {"layer.weight": torch.zeros(2, 3).half()})
    code, out, _ = call(capsys, "ls", tmp_path / "store", "--against", model)
    assert code == 0
    assert "is cast" in out
    assert "1 of those that match have another dtype" in " ".join(out.split())


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
                try:
                    receiver.load_into(target)
                except dbuffer.WeightsMismatchError:
                    loaded = False
                else:
                    loaded = True
            assert found["fits_exactly"] == loaded, (found, target)
            assert (code == 0) == found["fits"]
            assert not found["fits_exactly"] or found["fits"]
            verdicts[loaded, bool(found["recast"])] += 1
    assert min(verdicts[loaded, False] for loaded in (True, False)) > 5
    assert verdicts[False, True] > 2
