"""Pictures: drawn by their programs from the results, well formed, and shown by a page."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree

import pytest

from tests.support.documents import DOCS, PAGES

MADE = runpy.run_path(str(DOCS / "make_pictures.py"))
RECORDED = runpy.run_path(str(DOCS / "make_recording.py"))
PICTURES = DOCS / "pictures"
NAMES = sorted(MADE["pictures"]())
RECORDING = RECORDED["PICTURE"].name
SVG = "{http://www.w3.org/2000/svg}"


def texts(name: str) -> list[str]:
    root = ElementTree.parse(PICTURES / name).getroot()
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_pictures_are_current():
    kept = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.iterdir()}
    recording = RECORDED["CAST"].read_text(encoding="utf-8")
    assert kept == MADE["pictures"]() | {RECORDING: RECORDED["draw"](recording)}, (
        "the program or the results have changed: run python3 docs/make_pictures.py, and python3 "
        "docs/make_recording.py --draw"
    )


@pytest.mark.parametrize("name", [*NAMES, RECORDING])
def test_a_picture_is_shown_by_a_page_and_explains_itself(name):
    shown = re.compile(rf"!\[[^\]]{{20,}}\]\([\w/.]*pictures/{re.escape(name)}\)")
    assert any(shown.search(page.read_text(encoding="utf-8")) for page in PAGES)
    root = ElementTree.parse(PICTURES / name).getroot()
    named = root.get("aria-labelledby", "").split()
    said = {each.get("id"): each.text or "" for each in root}
    assert all(len(said[each].split()) >= 2 for each in named)
    assert (len(named), root.get("role")) == (2, "img")


# The recording.


def test_the_recording_is_a_demo_that_succeeded():
    shown = texts(RECORDING)
    assert shown[0] == "$ python examples/demo.py"
    steps = [line.split() for line in shown if re.match(r" +\d+ ", line)]
    assert [int(step) for step, *_ in steps] == list(range(1, 41))
    assert shown[-1] == "success: the engine followed its trainer"
    assert len((PICTURES / RECORDING).read_bytes()) <= 300_000
