"""Rules that rename, and files that hold them."""

import copy
import itertools
import json
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbuffer
from dbuffer.weights.names import PRESETS, NameMap, Rule
from tests.support.patterns import assert_same, received

NAMES = st.text(alphabet="abc._", max_size=8)
RULES = st.one_of(
    st.builds(Rule, st.just("name"), NAMES, NAMES),
    st.builds(Rule, st.just("prefix"), NAMES, NAMES),
    st.builds(
        Rule, st.just("part"), st.sampled_from(["a", "_b"]), st.sampled_from(["", "c", "a.b"])
    ),
    st.builds(
        Rule,
        st.just("pattern"),
        st.sampled_from(["(a)(.*)", "b.*", "[abc]+", "(.)?c", ""]),
        st.just("x"),
    ),
)


def changed(rule, name):
    """Return the name that one rule makes of a name; None: it does not fit."""
    if rule.kind == "name":
        return rule.to if name == rule.text else None
    if rule.kind == "prefix":
        return rule.to + name[len(rule.text) :] if name.startswith(rule.text) else None
    if rule.kind == "pattern":
        return rule.to if re.fullmatch(rule.text, name) else None
    parts = name.split(".")
    # The last part is a name of its own, which is not left out.
    kept = [rule.to if part == rule.text else part for part in parts]
    if not rule.to and parts[-1] == rule.text:
        kept[-1] = rule.text
    left_out = [part for part, old in zip(kept, parts, strict=True) if part or not old]
    return None if kept == parts else ".".join(left_out)


@given(st.lists(RULES, max_size=8), NAMES)
def test_rules_apply_in_turn_and_those_for_whole_names_are_tables(rules, name):
    expected = name
    for is_exact, some in itertools.groupby(rules, lambda rule: rule.kind == "name"):
        if is_exact:
            table = [new for rule in some if (new := changed(rule, expected)) is not None]
            expected = [*table, expected][0]
        else:
            for rule in some:
                new = changed(rule, expected)
                expected = expected if new is None else new
    assert NameMap(rules)(name) == expected
    assert list(NameMap(rules).convert({name: torch.ones(1)})) == [expected]


@given(st.lists(RULES, max_size=8))
def test_rules_come_back_from_what_a_file_holds(rules):
    names = NameMap(rules)
    assert (
        NameMap.parse({"rules": [json.loads(str(rule)) for rule in names.rules]}, "here").rules
        == names.rules
    )


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_of_mappings_as_atropos_has_it(tmp_path):
    mappings = {"a": {"vllm_name": "b", "shape": [2]}, "c": {"vllm_name": "c"}}
    content = {"model": "m", "param_mappings": mappings}
    names = NameMap.read(write(tmp_path / "names.json", content))
    assert [names(name) for name in "acd"] == ["b", "c", "d"]


def test_a_file_that_is_none_is_refused(tmp_path):
    for content in (
        *("no json", "[" * 100_000, [], {}),
        *({"rules": {}}, {"rules": [], "more": 1}, {"rules": ["a"]}),
        {"rules": [{"name": "a"}]},
        {"rules": [{"name": "a", "to": 1}]},
        {"rules": [{"name": 1, "to": "a"}]},
        {"rules": [{"nmae": "a", "to": "b"}]},
        {"rules": [{"name": "a", "prefix": "a", "to": "b"}]},
        {"rules": [{"pattern": "(", "to": "b"}]},
        {"rules": [{"preset": "mine"}]},
        {"rules": [{"split": "a", "to": "b"}]},
        {"rules": [{"split": "a", "to": ["b"], "dim": "0"}]},
        {"rules": [{"split": "a.*", "to": ["b"]}]},
        {"rules": [{"split": "a", "to": []}]},
        {"rules": [{"stack": "a", "to": "b"}]},
        {"rules": [{"stack": ["a"], "to": ["b"]}]},
        {"rules": [{"transpose": "a", "dims": [0]}]},
        {"rules": [{"transpose": "a", "to": "b"}]},
        {"param_mappings": {"a": {}}},
        {"param_mappings": {"a": {"vllm_name": None}}},
        {"param_mappings": []},
    ):
        file = write(tmp_path / "names.json", content)
        with pytest.raises(dbuffer.OptionError, match=r"names\.json|rule"):
            NameMap.read(file)
    with pytest.raises(dbuffer.OptionError, match=r"nowhere\.json"):
        NameMap.read(tmp_path / "nowhere.json")


def test_many_exact_rules_take_no_longer_than_a_look():
    names = NameMap([Rule("name", f"a.{i}", f"b.{i}") for i in range(50_000)])
    assert [names(f"a.{i}") for i in range(50_000)] == [f"b.{i}" for i in range(50_000)]


WEIGHTS = {
    "h.0.qkv.weight": torch.arange(24.0).reshape(6, 4),
    "h.1.qkv.weight": -torch.arange(24.0).reshape(6, 4),
    "h.0.up": torch.arange(12.0).reshape(2, 3, 2),
    "conv.weight": torch.arange(6.0).reshape(2, 3),
    "rest": torch.ones(1),
}
CUT = (
    NameMap()
    .split("h.*.qkv.weight", ["h.*.q.weight", "h.*.k.weight", "h.*.v.weight"])
    .split("h.*.up", "h.*.experts.#.up.weight")
    .transpose("conv.weight")
    .prefix("h.", "layers.")
)
JOIN = (
    NameMap()
    .prefix("layers.", "h.")
    .transpose("conv.weight")
    .stack("h.*.experts.#.up.weight", "h.*.up")
    .stack(["h.*.q.weight", "h.*.k.weight", "h.*.v.weight"], "h.*.qkv.weight")
)
"""Undoes `CUT`."""


def as_cut(weights):
    cut = {
        f"layers.{layer}.{name}.weight": part
        for layer in (0, 1)
        for name, part in zip("qkv", weights[f"h.{layer}.qkv.weight"].chunk(3), strict=True)
    }
    cut |= {f"layers.0.experts.{n}.up.weight": part for n, part in enumerate(weights["h.0.up"])}
    return cut | {"conv.weight": weights["conv.weight"].t(), "rest": weights["rest"]}


def test_tensors_are_cut_and_transposed_without_a_copy():
    got, expected = CUT.convert(WEIGHTS), as_cut(WEIGHTS)
    assert list(got) == list(expected)
    assert_same(got, expected)
    places = {tensor.untyped_storage().data_ptr() for tensor in WEIGHTS.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in got.values()} == places
    assert_same(JOIN.convert(got), WEIGHTS)


@pytest.mark.parametrize("delta", [False, True])
def test_a_sender_applies_them(tmp_path, delta):
    weights = copy.deepcopy(WEIGHTS)
    with dbuffer.WeightSender(tmp_path / "cut", rename=CUT, delta=delta) as sender:
        with dbuffer.WeightSender(tmp_path / "back", rename=JOIN, delta=delta) as back:
            for _ in range(3):
                sender.send(weights)
                cut = received(tmp_path / "cut")
                assert_same(cut, as_cut(weights))
                back.send(cut)
                assert_same(received(tmp_path / "back"), weights)
                weights["h.1.qkv.weight"][5] += 1


def test_an_iterator_is_not_cut(tmp_path):
    with dbuffer.WeightSender(tmp_path / "store", rename=CUT) as sender:
        with pytest.raises(dbuffer.UnsupportedError, match="an iterator come one by one"):
            sender.send(iter(WEIGHTS.items()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (NameMap().split("rest", ["a", "b"]), "its size 1 in dimension 0 is not divisible by 2"),
        (NameMap().split("rest", ["a", "b"], dim=1), r"whose shape is \[1\]"),
        (NameMap().transpose("rest"), r"whose shape is \[1\]"),
        (NameMap().stack(["rest", "more"], "all"), "part 1 is not among the weights"),
        (NameMap().stack(["rest", "conv.weight"], "all"), "cannot make 'all'"),
        (CUT.exact("rest", "conv.weight"), r"several tensors the same name: \['conv\.weight'\]"),
        (NameMap().prefix("h.0.", "").exact("up", "rest"), "same name: .*rest"),
    ],
)
def test_what_does_not_fit_the_tensors_is_refused(tmp_path, names, message):
    with dbuffer.WeightSender(tmp_path / "store", rename=names) as sender:
        with pytest.raises(dbuffer.InvalidWeightsError, match=message):
            sender.send(WEIGHTS)


def test_two_tensors_that_are_one_part_are_refused(tmp_path):
    weights = {name: torch.ones(2) for name in ("e.0.w", "e.1.w", "e.00.w")}
    names = NameMap().stack("e.#.w", "e.w")
    with dbuffer.WeightSender(tmp_path / "store", rename=names) as sender:
        with pytest.raises(dbuffer.InvalidWeightsError, match=r"'e\.00\.w' and another tensor are"):
            sender.send(weights)


def test_presets():
    examples = {
        "_orig_mod.": ("_orig_mod.layers.0._orig_mod.weight", "layers.0.weight"),
        "_fsdp_wrapped_module.": ("a._fsdp_wrapped_module.b", "a.b"),
        "module.": ("module.a.module.b", "a.module.b"),
        "actor.": ("actor.model.a", "model.a"),
        "base_model.model.": ("base_model.model.a.q_proj.base_layer.weight", "a.q_proj.weight"),
        "model.language_model.": ("model.language_model.layers.0.a", "model.layers.0.a"),
    }
    assert examples.keys() == PRESETS.keys()
    for preset, (name, expected) in examples.items():
        assert NameMap().preset(preset)(name) == expected
    names = NameMap().preset("module.").preset("_orig_mod.").preset("base_model.model.")
    assert names("module._orig_mod.base_model.model.a.base_layer.weight") == "a.weight"
    with pytest.raises(dbuffer.OptionError, match=r"use one of _orig_mod\."):
        names.preset("mine")


def test_a_map_that_was_used_is_pickled():
    names = CUT.pattern("(.*)", r"\1.x").exact("a", "b")
    used = names.convert(WEIGHTS)
    again = pickle.loads(pickle.dumps(names))
    assert again.rules == names.rules
    assert_same(again.convert(WEIGHTS), used)


def test_a_file_has_every_kind_of_rule(tmp_path):
    rules = [
        {"preset": "actor."},
        {"name": "a", "to": "b"},
        {"pattern": r"h\.(\d+)\.gamma", "to": r"layers.\1.weight"},
        {"part": "base_layer", "to": ""},
        {"split": "*.qkv", "to": ["*.q", "*.k"], "dim": 1},
        {"split": "*.kv", "to": ["*.k", "*.v"]},
        {"stack": "*.#.up", "to": "*.up"},
        {"transpose": "a", "dims": [1, 2]},
    ]
    names = NameMap.read(write(tmp_path / "rules.json", {"rules": rules}))
    built = NameMap().prefix("actor.", "").exact("a", "b")
    built = built.pattern(r"h\.(\d+)\.gamma", r"layers.\1.weight")
    assert names.rules == (
        *built.rules,
        Rule("part", "base_layer", ""),
        Rule("split", "*.qkv", ("*.q", "*.k"), (1,)),
        Rule("split", "*.kv", ("*.k", "*.v"), (0,)),
        Rule("stack", "*.#.up", "*.up", (0,)),
        Rule("transpose", "a", dims=(1, 2)),
    )
    assert (
        NameMap.parse({"rules": [json.loads(str(rule)) for rule in names.rules]}, "here").rules
        == names.rules
    )
    for pattern, to in (("(", ""), ("(a)", r"\2"), ("a", r"\g<x>")):
        with pytest.raises(dbuffer.OptionError):
            names.pattern(pattern, to)
