"""Comparison of a version with a model: what would fit, before anything is loaded."""

import pytest

import dbuffer
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.weights.comparison import compare
from dbuffer.weights.names import NameMap
from dbuffer.weights.rules import Rule


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name, dtype, shape)


def names_of(specs):
    return [one.name for one in specs]


def test_each_tensor_is_in_one_list():
    published = Layout.of([spec("a", 2), spec("b", 3), spec("c", 4)])
    found = compare(published, [spec("a", 2, dtype="bfloat16"), spec("b", 5), spec("d", 6)])
    assert found.recast == [(spec("a", 2), spec("a", 2, dtype="bfloat16"))]
    assert found.differing == [(spec("b", 3), spec("b", 5))]
    assert found.missing == [spec("d", 6)]
    assert found.left_over == [spec("c", 4)]
    assert not found.fits


def test_names_are_compared_as_they_are_renamed():
    published = Layout.of([spec("model.a", 2), spec("b", 3)])
    rename = NameMap([Rule("prefix", "model.", "")])
    assert compare(published, [spec("a", 2), spec("b", 3)], rename).fits


def test_any_name_of_a_tied_tensor_will_do():
    published = Layout.of([spec("a", 2)], {"b": "a"})
    for needed in ("ab", "a", "b"):
        assert compare(published, [spec(name, 2) for name in needed]).fits
    assert names_of(compare(published, []).left_over) == ["a", "b"]


def test_two_tensors_that_become_one_name_are_refused():
    published = Layout.of([spec("x.a", 2), spec("y.a", 2)])
    with pytest.raises(dbuffer.InvalidWeightsError, match=r"'a'.*'y\.a'"):
        compare(published, [], NameMap([Rule("prefix", "x.", ""), Rule("prefix", "y.", "")]))
