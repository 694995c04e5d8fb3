"""`versions_of` on outputs of each engine and server, in the shapes that they come in.

Real outputs are in the tests of each engine; here are those that they have in no test, and what is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import dbuffer
from dbuffer.integrations.version_spans import VersionSpan, versions_of

RUN = "0123456789abcdef"
SPANS = [
    {"version": "7", "run": RUN, "metadata": {"step": 70}, "start": 0, "end": 2},
    {"version": "unknown", "start": 2, "end": 3},
]
EXPECTED = [VersionSpan(7, 0, 2, RUN, {"step": 70}), VersionSpan(None, 2, 3)]


@dataclass
class Span:
    version: str
    start: int
    end: int


@pytest.mark.parametrize(
    "output",
    [
        {"weight_versions": SPANS},
        {"choices": [{"weight_versions": SPANS}]},
        {"meta_info": {"weight_version": "7", "weight_versions": SPANS}},
        {"choices": [{}], "metadata": {"weight_version": "7", "weight_versions": SPANS}},
        SimpleNamespace(outputs=[SimpleNamespace(weight_versions=SPANS)]),
        SimpleNamespace(model_dump=lambda: {"choices": [{"weight_versions": SPANS}]}),
    ],
)
def test_spans_are_read_in_each_shape(output):
    assert versions_of(output) == EXPECTED


def test_label_that_carries_more_than_the_version_is_taken_apart():
    spans = [Span(f'7 {{"run": "{RUN}", "metadata": {{"step": 70}}}}', 0, 2)]
    assert versions_of(SimpleNamespace(weight_versions=spans)) == EXPECTED[:1]


def test_output_without_tokens_has_no_spans():
    assert versions_of({"weight_versions": []}) == []


@pytest.mark.parametrize(
    "output",
    [
        {},
        "text",
        {"weight_versions": None},  # of a beam search
        {"choices": [{"index": 0}]},
        SimpleNamespace(outputs=[SimpleNamespace(weight_versions=None)]),
        {"meta_info": {"weight_version": "7"}},
    ],
)
def test_output_that_does_not_tell_is_refused(output):
    with pytest.raises(dbuffer.OptionError, match="X-Weight-Versions"):
        versions_of(output)


def test_one_of_several_outputs_is_not_chosen():
    with pytest.raises(dbuffer.OptionError, match="choices"):
        versions_of({"choices": [{"weight_versions": SPANS}] * 2})
