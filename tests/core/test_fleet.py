"""The fan-out benchmark: its simulation against a closed form, and a small tree of real mirrors."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks import fleet as benchmark
from benchmarks.__main__ import main
from benchmarks.fleet import Fleet, simulate


@pytest.mark.parametrize(("fan_out", "levels"), [(2, 9), (3, 6), (4, 5), (10, 3)])
def test_a_full_tree_takes_as_long_as_its_levels(fan_out, levels):
    """On each, a network goes out to so many children, one version each."""
    nodes = sum(fan_out**level for level in range(1, levels + 1))
    fleet = Fleet(num_bytes=140e9, nodes=nodes)
    one = benchmark._arrival("", simulate(fleet.tree(fan_out), fleet.links))
    assert one.all_s == pytest.approx(11.2 * (1 + levels * fan_out))
    assert one.bottleneck == benchmark.OUT
    assert one.ended_s[0] == pytest.approx(11.2 * (1 + fan_out))
    assert len(one.ended_s) == nodes


def test_a_tree_of_real_mirrors(shm_path):
    found = benchmark.real_tree(shm_path, fan_out=2, levels=2, versions=2)
    assert len(found.reads) == 6
    assert all(1 <= reads < 1.05 for reads in found.reads), "a version is read once a mirror"
    assert not list(shm_path.iterdir())


def test_the_command(tmp_path, capsys):
    results_file, plot = tmp_path / "results.json", tmp_path / "plot.png"
    arguments = ["fleet", "--no-real", "--nodes", "30", "--fan-out", "3"]
    assert main([*arguments, "--json", f"{results_file}", "--plot", f"{plot}"]) == 0
    printed = capsys.readouterr().out
    assert "| NFS server, tree of mirrors, 3 each " in printed
    results = json.loads(results_file.read_text())
    ways = [way["way"] for way in results["ways"]]
    assert {f"NFS server, tree of mirrors, 3 each{end}" for end in ("", ", a delta")} < set(ways)
    assert plot.read_bytes().startswith(b"\x89PNG")
