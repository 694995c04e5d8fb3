"""Drafts that follow with their target, against fresh engines with that target and that draft.

All tokens and all proposals are compared: after versions with a draft and without, after versions
that do not fit, and after loads that fail. Most cases run in soaks alone; by hand,
`DBUFFER_SOAK=1 python3 dev.py test tests/integrations/vllm/test_following_drafts.py -k mtp`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.soak import IN_SOAKS_ALONE

pytestmark = NEEDS_VLLM

KINDS = "draft model", "eagle", "eagle3", "eagle3 with a head", "medusa", "mtp"
ALWAYS = ("draft model", "packed"), ("eagle", "live")
"""A kind of draft, and whether layers are packed, as on a CPU, or live, as on a GPU."""


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS else IN_SOAKS_ALONE)
        for case in product(KINDS, ("packed", "live"))
    ],
)
def test_drafts_follow_with_their_target(tmp_path, kind, form, record_property):
    for figure in observe("vllm_following_drafts.py", tmp_path, kind, form).items():
        record_property(*figure)


def test_a_draft_that_follows_is_accepted_as_often_as_at_first(tmp_path, record_property):
    shares = observe("vllm_acceptance.py", tmp_path)
    for figure in shares.items():
        record_property(*figure)
    assert shares["at first"] > 0.5
    assert shares["at last, with drafts"] > 0.5
    assert shares["at last, without"] < 0.1
