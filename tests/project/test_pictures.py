"""Pictures are those that their programs draw from the results."""

from __future__ import annotations

import runpy

from tests.support.documents import DOCS

MADE = runpy.run_path(str(DOCS / "make_pictures.py"))
RECORDED = runpy.run_path(str(DOCS / "make_recording.py"))
PICTURES = DOCS / "pictures"
RECORDING = RECORDED["PICTURE"].name


def test_the_pictures_are_current():
    kept = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.iterdir()}
    recording = RECORDED["CAST"].read_text(encoding="utf-8")
    assert kept == MADE["pictures"]() | {RECORDING: RECORDED["draw"](recording)}, (
        "the program or the results have changed: run python3 docs/make_pictures.py, and python3 "
        "docs/make_recording.py --draw"
    )
