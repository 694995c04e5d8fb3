"""The fan-out benchmark: its simulation against closed forms, and a small tree of real mirrors."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks import fleet as benchmark
from benchmarks.__main__ import main
from benchmarks.fleet import Fleet, Link, Transfer, simulate

A, B, C = Link("a"), Link("b"), Link("c")


def ends(transfers: list[Transfer], **bytes_per_s: float) -> list[float]:
    return simulate(transfers, bytes_per_s).ended_s


def test_transfers_share_links_and_wait_for_those_before_them():
    outcome = simulate([Transfer(100, (A, B, C))], {"a": 10, "b": 4, "c": 5})
    assert outcome.ended_s == pytest.approx([25])
    assert outcome.waited_for == pytest.approx({"b": 25})
    assert ends([Transfer(100, (A,))] * 1000, a=10) == pytest.approx([10_000] * 1000)
    # Two share 10; one of them is held to 2 elsewhere, so the other one has 8.
    assert ends([Transfer(80, (A, B)), Transfer(80, (A,))], a=10, b=2) == pytest.approx([40, 10])
    # At 5 each until 4 s; then the longer one has all.
    assert ends([Transfer(20, (A,)), Transfer(100, (A,))], a=10) == pytest.approx([4, 12])
    chain = [Transfer(100, (A,)), Transfer(100, (B,), after=0), Transfer(100, (C,), after=1)]
    assert ends(chain, a=10, b=20, c=50) == pytest.approx([10, 15, 17])
    numbered = [Transfer(100, (Link("a", number),)) for number in (1, 2)]
    assert ends(numbered, a=10) == pytest.approx([10, 10]), "links of their own"


def test_a_fleet_waits_for_the_server_or_a_node_for_its_own_copy():
    fleet = Fleet(num_bytes=140e9, nodes=1000, server=12.5e9)
    [one] = [a for a in benchmark.arrivals(fleet, []) if a.way == "NFS server, a mirror a node"]
    assert one.published_s == pytest.approx(11.2)
    assert one.all_s == one.half_s == pytest.approx(11.2 + 1000 * 11.2)
    assert one.bottleneck == benchmark.SERVER
    fleet = Fleet(num_bytes=80e9, nodes=1, copy=8e9)
    one = benchmark._arrival("", simulate(fleet.flat(benchmark.SERVER), fleet.links))
    assert one.all_s == pytest.approx(80 / 12.5 + 10)
    assert one.bottleneck == benchmark.COPY


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


def test_a_delta_is_found_then_read_then_written():
    fleet = Fleet(num_bytes=100e9, nodes=2, copy=10e9, server=10e9, network=10e9, find=5e9)
    flat, tree = (
        benchmark._arrival("", simulate(fleet.deltas(fan_out), fleet.links), each=2)
        for fan_out in (None, 1)
    )
    delta_s = fleet.delta_share * 10
    assert flat.published_s == tree.published_s == pytest.approx(20 + delta_s)
    # Both read from the server at once; or the second from the first, when that has it whole.
    assert flat.ended_s == pytest.approx([20 + 3 * delta_s + 10] * 2)
    assert tree.ended_s == pytest.approx([20 + 2 * delta_s + 10, 20 + 3 * delta_s + 20])


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
