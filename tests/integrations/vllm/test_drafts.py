"""Drafts that follow with their target, against fresh engines with that target and that draft.

All tokens and all proposals are compared: after versions with a draft and without, after versions
that do not fit, and after loads that fail. Most cases run in soaks alone; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_drafts.py -k mtp`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.programs.vllm_drafts import CASES
from tests.support.engines.vllm_engines import ANSWERS_TELL_VERSIONS, NEEDS_VLLM, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM

FORMS = "float32 packed", "bfloat16 packed", "float32 live"
"""Dtype, and whether layers are packed, as on a CPU, or live, as on a GPU."""
ALWAYS = (("eagle", "float32 packed"),)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS else IN_SOAKS_ALONE)
        for case in product(CASES, FORMS)
    ],
)
def test_drafts_follow_with_their_target(tmp_path, kind, form):
    observe("vllm_drafts.py", tmp_path, kind, form)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(*case, marks=[] if case == ("eagle", "float32 live") else IN_SOAKS_ALONE)
        for case in product(CASES, FORMS)
    ],
)
@ANSWERS_TELL_VERSIONS
def test_a_draft_follows_a_store_of_its_own(tmp_path, kind, form):
    """The draft's trainer is killed at any moment, and started again."""
    observe("vllm_draft_store.py", tmp_path, kind, form)


@IN_SOAKS_ALONE
def test_a_draft_that_follows_is_accepted_as_often_as_at_first(tmp_path, record_property):
    shares = observe("vllm_drafts.py", tmp_path)
    for figure in shares.items():
        record_property(*figure)
    assert shares["at first"] > 0.5
    assert shares["at last, with drafts"] > 0.5
    assert shares["at last, without"] < 0.1
