"""Rules that rename, and files that hold them."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbuffer
from dbuffer.weights.names import NameMap, Rule

NAMES = st.text(alphabet="abc._", max_size=8)
RULES = st.one_of(
    st.builds(Rule, st.just("name"), NAMES, NAMES),
    st.builds(Rule, st.just("prefix"), NAMES, NAMES),
    st.builds(
        Rule,
        st.just("pattern"),
        st.sampled_from(["(a)(.*)", "b.*", "[abc]+", "(.)?c", ""]),
        st.just("x"),
    ),
)


def first_that_fits(rules, name):
    for rule in rules:
        if rule.kind == "name" and name == rule.text:
            return rule.to
        if rule.kind == "prefix" and name.startswith(rule.text):
            return rule.to + name.removeprefix(rule.text)
        if rule.kind == "pattern" and dbuffer.weights.names.re.fullmatch(rule.text, name):
            return rule.to
    return name


@given(st.lists(RULES, max_size=8), NAMES)
def test_the_first_rule_that_fits_wins(rules, name):
    assert NameMap(rules)(name) == first_that_fits(rules, name)


@given(st.lists(RULES, max_size=8), st.lists(NAMES, max_size=8))
def test_unused_rules_are_those_without_which_nothing_changes(rules, names):
    unused = NameMap(rules).unused_rules(names)
    used = NameMap([rule for rule in rules if all(rule is not one for one in unused)])
    assert [used(name) for name in names] == [NameMap(rules)(name) for name in names]


def test_groups_of_a_pattern():
    names = NameMap([Rule("pattern", r"h\.(\d+)\.(.*)\.gamma", r"layers.\1.\2.weight")])
    assert names("h.12.norm.gamma") == "layers.12.norm.weight"
    assert names("h.12.norm.gamma.x") == "h.12.norm.gamma.x"  # the whole name must fit


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule("pattern", "(", ""),
        lambda: Rule("pattern", "(a)", r"\2"),
        lambda: Rule("pattern", "a", r"\g<x>"),
    ],
    ids=["no expression", "no such group", "no such name"],
)
def test_a_bad_pattern_is_refused_at_once(make):
    with pytest.raises(dbuffer.OptionError):
        make()


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_map_builds_its_rules():
    names = NameMap().exact("a", "b").prefix("model.", "").pattern(r"(.*)\.gamma", r"\1.weight")
    assert names.rules == (
        Rule("name", "a", "b"),
        Rule("prefix", "model.", ""),
        Rule("pattern", r"(.*)\.gamma", r"\1.weight"),
    )
    assert [names(name) for name in ("a", "model.x", "n.gamma", "c")] == ["b", "x", "n.weight", "c"]
    with pytest.raises(dbuffer.OptionError):
        names.pattern("(a)", r"\2")


def test_a_file_of_rules(tmp_path):
    rules = [
        {"name": "score.weight", "to": "head.weight"},
        {"prefix": "model.visual.", "to": "visual."},
        {"pattern": r"(.*)\.gamma", "to": r"\1.weight"},
    ]
    names = NameMap.read(write(tmp_path / "names.json", {"rules": rules}))
    assert names.rules == (
        Rule("name", "score.weight", "head.weight"),
        Rule("prefix", "model.visual.", "visual."),
        Rule("pattern", r"(.*)\.gamma", r"\1.weight"),
    )


@given(st.lists(RULES, max_size=8))
def test_rules_come_back_from_what_a_file_holds(rules):
    names = NameMap(rules)
    assert NameMap.parse(json.loads(json.dumps(names.as_json())), "here").rules == names.rules


def test_a_file_of_mappings_as_atropos_has_it(tmp_path):
    mappings = {"a": {"vllm_name": "b", "shape": [2]}, "c": {"vllm_name": "c"}}
    content = {"model": "m", "param_mappings": mappings}
    names = NameMap.read(write(tmp_path / "names.json", content))
    assert [names(name) for name in "acd"] == ["b", "c", "d"]


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[" * 100_000,
        [],
        {},
        {"rules": {}},
        {"rules": [], "more": 1},
        {"rules": [{"name": "a"}]},
        {"rules": [{"name": "a", "to": 1}]},
        {"rules": [{"name": 1, "to": "a"}]},
        {"rules": [{"nmae": "a", "to": "b"}]},
        {"rules": [{"name": "a", "prefix": "a", "to": "b"}]},
        {"rules": [{"pattern": "(", "to": "b"}]},
        {"rules": ["a"]},
        {"param_mappings": {"a": {}}},
        {"param_mappings": {"a": {"vllm_name": None}}},
        {"param_mappings": []},
    ],
    ids=str,
)
def test_a_file_that_is_none_is_refused(tmp_path, content):
    file = write(tmp_path / "names.json", content)
    with pytest.raises(dbuffer.OptionError, match=r"names\.json|rule"):
        NameMap.read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(dbuffer.OptionError, match=r"nowhere\.json"):
        NameMap.read(tmp_path / "nowhere.json")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "names.json"
    with file.open("wb") as sparse:
        sparse.truncate(dbuffer.weights.names.MAX_FILE_BYTES + 1)
    with pytest.raises(dbuffer.OptionError):
        NameMap.read(file)


def test_many_exact_rules_take_no_longer_than_a_look(tmp_path):
    names = NameMap([Rule("name", f"a.{i}", f"b.{i}") for i in range(50_000)])
    assert [names(f"a.{i}") for i in range(50_000)] == [f"b.{i}" for i in range(50_000)]


def test_a_sender_renames_by_rules(tmp_path):
    names = NameMap([Rule("prefix", "model.visual.", "visual."), Rule("prefix", "model.", "")])
    with dbuffer.WeightSender(tmp_path / "store", rename=names) as sender:
        sender.send({"model.visual.x": torch.ones(1), "model.y": torch.ones(1)})
    with dbuffer.WeightReceiver(tmp_path / "store") as receiver, receiver.open() as snapshot:
        assert list(snapshot.tensors) == ["visual.x", "y"]


def test_two_tensors_of_one_name_are_refused(tmp_path):
    names = NameMap([Rule("prefix", "a.", ""), Rule("prefix", "b.", "")])
    with dbuffer.WeightSender(tmp_path / "store", rename=names) as sender:
        with pytest.raises(dbuffer.InvalidWeightsError, match="x"):
            sender.send({"a.x": torch.ones(1), "b.x": torch.ones(1)})
