"""Time until one publish reaches a fleet: simulated, and measured with mirrors on this machine.

A simulated transfer passes through several links. Transfers share a link by max-min fairness: none
can get a higher rate without lowering the rate of a transfer that is not faster. A transfer that
reads from a mirror begins when the mirror has the whole version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import dbuffer
from benchmarks import models
from benchmarks.measure import median
from benchmarks.processes import bytes_read, child, reply, scratch_folder
from benchmarks.report import table

_GB = 1e9
_AT_ONCE = 1 + 1e-9
"""Tolerance: shares and times that differ by a smaller factor are equal."""


class Link(NamedTuple):
    """Link that transfers share. Links of one kind are numbered."""

    kind: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of one version to one place."""

    num_bytes: float
    links: tuple[Link, ...]
    after: int | None = None
    """Index of the transfer that must end first, or None to begin at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of each transfer, and the links that limited transfers."""

    ended_s: list[float]
    waited_for: dict[str, float]
    """Total time that each kind of link limited transfers, by kind."""


def simulate(transfers: Sequence[Transfer], bytes_per_s: dict[str, float]) -> Outcome:
    """Simulate all transfers. ``bytes_per_s`` has the rate of each kind of link."""
    followers: dict[int | None, list[int]] = {}
    for index, transfer in enumerate(transfers):
        followers.setdefault(transfer.after, []).append(index)
    left = {index: transfers[index].num_bytes for index in followers.get(None, [])}
    outcome = Outcome([0.0] * len(transfers), defaultdict(float))
    now_s = 0.0
    while left:
        rates = _fair_rates({index: transfers[index].links for index in left}, bytes_per_s)
        step_s = min(left[index] / rate for index, (rate, _) in rates.items())
        now_s += step_s
        for index, (rate, limit) in rates.items():
            outcome.waited_for[limit] += step_s
            if left[index] <= step_s * rate * _AT_ONCE:
                del left[index]
                outcome.ended_s[index] = now_s
                left.update(
                    (next_, transfers[next_].num_bytes) for next_ in followers.get(index, [])
                )
            else:
                left[index] -= step_s * rate
    return outcome


def _fair_rates(
    flows: dict[int, tuple[Link, ...]], bytes_per_s: dict[str, float]
) -> dict[int, tuple[float, str]]:
    """Return each transfer's fair rate, and the kind of link that limits it."""
    free = {link: bytes_per_s[link.kind] for links in flows.values() for link in links}
    users = Counter(link for links in flows.values() for link in links)
    rates: dict[int, tuple[float, str]] = {}
    while len(rates) < len(flows):
        shares = {link: free[link] / count for link, count in users.items() if count}
        lowest = min(shares.values())
        full = {link for link, share in shares.items() if share <= lowest * _AT_ONCE}
        for index, links in flows.items():
            if index not in rates and (limit := next((x for x in links if x in full), None)):
                rates[index] = lowest, limit.kind
                for link in links:
                    free[link] -= lowest
                    users[link] -= 1
    return rates


@dataclass(frozen=True, slots=True)
class Fleet:
    """Publish to a fleet of nodes. Speeds are in bytes per second, in each direction."""

    num_bytes: float = 140 * _GB
    nodes: int = 1000
    ranks_per_node: int = 8
    server: float = 12.5 * _GB
    """Speed of the NFS server: of its network, or of its disks if they are slower."""
    filesystem: float = 200 * _GB
    """Speed of all servers of a parallel filesystem together."""
    network: float = 12.5 * _GB
    """Speed of a node's network."""
    copy: float = 8 * _GB
    """Speed at which a node's mirror verifies bytes and writes them into shared memory."""
    delta_share: float = 0.0064
    """Size of a delta, as a share of a version: measured by `python -m benchmarks delta`, with 1 %
    changed."""
    find: float = 0.18 * 8 * _GB
    """Speed at which a trainer compares weights and encodes a delta. Its share of a copy's speed
    comes from a slow run of the same benchmark."""

    @property
    def links(self) -> dict[str, float]:
        """Rate of each kind of link."""
        return {
            SERVER_IN: self.server,
            SERVER: self.server,
            FILESYSTEM_IN: self.filesystem,
            FILESYSTEM: self.filesystem,
            TRAINER: self.network,
            IN: self.network,
            OUT: self.network,
            COPY: self.copy,
            FIND: self.find,
        }

    def flat(self, server: str, *, reads: int = 1) -> list[Transfer]:
        """Return transfers: a publish to a server, which each node reads ``reads`` times."""
        before = SERVER_IN if server == SERVER else FILESYSTEM_IN
        publish = Transfer(self.num_bytes, (Link(TRAINER), Link(before)))
        return [publish] + [
            Transfer(
                reads * self.num_bytes,
                (Link(server), Link(IN, node), *([Link(COPY, node)] if reads == 1 else [])),
                after=0,
            )
            for node in range(1, self.nodes + 1)
        ]

    def tree(self, fan_out: int) -> list[Transfer]:
        """Return transfers for a tree: ``fan_out`` nodes read the server, and as many each node."""
        publish = Transfer(self.num_bytes, (Link(TRAINER), Link(SERVER_IN)))
        return [publish] + [
            Transfer(
                self.num_bytes,
                (
                    Link(OUT, parent) if (parent := (node - 1) // fan_out) else Link(SERVER),
                    Link(IN, node),
                    Link(COPY, node),
                ),
                after=parent,
            )
            for node in range(1, self.nodes + 1)
        ]

    def deltas(self, fan_out: int | None) -> list[Transfer]:
        """Return transfers for a delta through a tree, or with None from the server to all nodes.

        The trainer first finds the changes. Each node has two transfers: the delta over the
        network, then the update of its version, at the speed of a copy of the whole version.
        """
        delta_bytes = self.delta_share * self.num_bytes
        transfers = [
            Transfer(self.num_bytes, (Link(FIND),)),
            Transfer(delta_bytes, (Link(TRAINER), Link(SERVER_IN)), after=0),
        ]
        for node in range(1, self.nodes + 1):
            parent = 0 if fan_out is None else (node - 1) // fan_out
            source = Link(OUT, parent) if parent else Link(SERVER)
            transfers.append(Transfer(delta_bytes, (source, Link(IN, node)), after=2 * parent + 1))
            transfers.append(
                Transfer(self.num_bytes, (Link(COPY, node),), after=len(transfers) - 1)
            )
        return transfers


TRAINER = "trainer's network"
SERVER_IN = "NFS server, writing"
SERVER = "NFS server"
FILESYSTEM_IN = "filesystem, writing"
FILESYSTEM = "filesystem"
IN = "node's network, in"
OUT = "mirror's network, out"
COPY = "copy in the node"
FIND = "finding what changed"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Times at which a publish reached the nodes in one way."""

    way: str
    published_s: float
    half_s: float
    all_s: float
    bottleneck: str
    ended_s: list[float]
    """Sorted times at which the nodes had the version. The publish began at 0."""


def arrivals(fleet: Fleet, fan_outs: Sequence[int]) -> list[Arrival]:
    """Simulate all ways to distribute a version."""
    ways = {
        f"NFS server, {fleet.ranks_per_node} ranks a node read": fleet.flat(
            SERVER, reads=fleet.ranks_per_node
        ),
        "NFS server, a mirror a node": fleet.flat(SERVER),
        f"filesystem, {fleet.ranks_per_node} ranks a node read": fleet.flat(
            FILESYSTEM, reads=fleet.ranks_per_node
        ),
        "filesystem, a mirror a node": fleet.flat(FILESYSTEM),
        **{f"NFS server, tree of mirrors, {k} each": fleet.tree(k) for k in fan_outs},
    }
    found = [_arrival(way, simulate(transfers, fleet.links)) for way, transfers in ways.items()]
    deltas = {
        "NFS server, a mirror a node, a delta": fleet.deltas(None),
        **{f"NFS server, tree of mirrors, {k} each, a delta": fleet.deltas(k) for k in fan_outs},
    }
    return found + [
        _arrival(way, simulate(transfers, fleet.links), each=2) for way, transfers in deltas.items()
    ]


def _arrival(way: str, outcome: Outcome, *, each: int = 1) -> Arrival:
    """Return the arrivals. Publish and nodes have ``each`` transfers; the last one counts."""
    published_s, *ended_s = outcome.ended_s[each - 1 :: each]
    ended_s.sort()
    bottleneck = max(outcome.waited_for, key=outcome.waited_for.__getitem__)
    half_s = ended_s[(len(ended_s) - 1) // 2]
    return Arrival(way, published_s, half_s, ended_s[-1], bottleneck, ended_s)


# ---------------------------------------------------------------------------------------------
# With real mirrors, all on this machine


@dataclass(frozen=True, slots=True)
class RealTree:
    """Measurements of a tree of real mirrors."""

    fan_out: int
    levels: int
    version_bytes: int
    versions: int
    seconds: list[float]
    """Time from the beginning of each publish until the last mirror had the version."""
    reads: list[float]
    """Bytes that each mirror read per version, as a multiple of the version's size. The kernel
    counted the bytes."""


def real_tree(directory: Path, *, fan_out: int = 4, levels: int = 2, versions: int = 5) -> RealTree:
    """Publish to a tree of mirror processes, and verify the last version at its leaves."""
    weights = models.random_weights(models.qwen3_30b_a3b(narrowing=64, layers=4))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(directory))
        sender = stack.enter_context(dbuffer.WeightSender(folder / "root", checksum=True))
        version_bytes = sender.send(weights).num_bytes
        mirrors = []
        level = [folder / "root"]
        for _ in range(levels):
            pairs = [(up, up.with_name(f"{up.name}.{k}")) for up in level for k in range(fan_out)]
            mirrors += [stack.enter_context(child(_mirror, *pair)) for pair in pairs]
            level = [local for _, local in pairs]
        for connection in mirrors:
            reply(connection)
        before = [_ask(connection, None)[0] for connection in mirrors]
        seconds = []
        for _ in range(versions):
            started_s = time.perf_counter()
            version = sender.send(weights).version
            for connection in mirrors:
                connection.send(version)
            for connection in mirrors:
                reply(connection)
            seconds.append(time.perf_counter() - started_s)
        counts = [_ask(connection, None) for connection in mirrors]
        for local in level:
            with dbuffer.WeightReceiver(local, verify=True) as receiver, receiver.open() as newest:
                if newest.version != version:
                    raise AssertionError(f"{local} has version {newest.version}, not {version}")
    num_bytes = versions * version_bytes
    reads = [(after - first) / num_bytes for first, (after, _) in zip(before, counts, strict=True)]
    return RealTree(fan_out, levels, version_bytes, versions, seconds, reads)


def _ask(connection: Connection, question: int | None) -> Any:
    connection.send(question)
    return reply(connection)


def _mirror(connection: Connection, remote: Path, local: Path) -> None:
    """Run a mirror, and answer requests with the number of bytes read.

    For a request with a version number, first wait until the version is here.
    """
    with dbuffer.Mirror(remote, local, poll_interval_s=1.0, num_threads=1).start() as mirror:
        mirror.wait_until_current()
        with dbuffer.WeightReceiver(local) as receiver:
            receiver.wait_for_version()
            connection.send(0)
            while True:
                version = connection.recv()
                if version is not None:
                    receiver.wait_for_version(version - 1)
                connection.send((bytes_read(), mirror.stats["copied"]))


# ---------------------------------------------------------------------------------------------
# The command


def main(arguments: Sequence[str]) -> int:
    """Print the simulated arrivals, and the measurements of the real tree."""
    options = _parse(arguments)
    fleet = Fleet(
        num_bytes=options.gigabytes * _GB,
        nodes=options.nodes,
        ranks_per_node=options.ranks,
        server=options.server_gbytes_s * _GB,
        filesystem=options.filesystem_gbytes_s * _GB,
        network=options.node_gbytes_s * _GB,
        copy=options.copy_gbytes_s * _GB,
        delta_share=options.delta_share,
        find=options.find_gbytes_s * _GB,
    )
    found = arrivals(fleet, options.fan_out)
    print(_caption(fleet), "\n")
    print(_table(found), flush=True)
    real = None if options.no_real else real_tree(options.dir)
    if real is not None:
        print(f"\n{_describe(real)}")
    if options.plot is not None:
        _save_plot(found, options.plot, _caption(fleet))
    if options.json is not None:
        results = {
            "fleet": asdict(fleet),
            "ways": [_without_nodes(one) for one in found],
            "real": None if real is None else asdict(real),
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    fleet = Fleet()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fleet",
        description="Simulate how one publish reaches many nodes; then publish through a tree of "
        "20 real mirrors on this machine. Takes half a minute and 1 GB of memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=fleet.num_bytes / _GB, help="size of a version, GB")
    add("--nodes", type=int, default=fleet.nodes, help="number of nodes")
    add("--ranks", type=int, default=fleet.ranks_per_node, help="readers per node without mirror")
    add("--server-gbytes-s", type=float, default=fleet.server / _GB, help="the NFS server, GB/s")
    add(
        "--filesystem-gbytes-s",
        type=float,
        default=fleet.filesystem / _GB,
        help="a parallel filesystem, GB/s",
    )
    add("--node-gbytes-s", type=float, default=fleet.network / _GB, help="a node's network, GB/s")
    add("--copy-gbytes-s", type=float, default=fleet.copy / _GB, help="a mirror's copy, GB/s")
    add("--delta-share", type=float, default=fleet.delta_share, help="a delta's share of a version")
    add("--find-gbytes-s", type=float, default=fleet.find / _GB, help="finding a delta, GB/s")
    add("--fan-out", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32], help="fan-outs of trees")
    add("--dir", type=Path, default=Path("/dev/shm"), help="directory for the real tree")
    add("--no-real", action="store_true", help="simulate only")
    add("--json", type=Path, metavar="FILE", help="write all results into this file")
    add("--plot", type=Path, metavar="FILE.png", help="draw the arrivals into this file")
    return parser.parse_args(arguments)


def _caption(fleet: Fleet) -> str:
    return (
        f"{fleet.num_bytes / _GB:,.0f} GB to {fleet.nodes:,} nodes. NFS server "
        f"{fleet.server / _GB:g} GB/s, filesystem {fleet.filesystem / _GB:g} GB/s, a node's "
        f"network {fleet.network / _GB:g} GB/s each way, its copy {fleet.copy / _GB:g} GB/s; "
        f"a delta has {fleet.delta_share:.2%} of the bytes, "
        f"found at {fleet.find / _GB:.3g} GB/s"
    )


def _table(found: list[Arrival]) -> str:
    header = ("way", "published", "half have it", "all have it", "bottleneck")
    rows = [
        (
            one.way,
            _duration(one.published_s),
            _duration(one.half_s),
            _duration(one.all_s),
            one.bottleneck,
        )
        for one in found
    ]
    return table(header, rows)


def _duration(seconds: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def _describe(real: RealTree) -> str:
    counts = " → ".join(str(real.fan_out**level) for level in range(real.levels + 1))
    megabytes = f"{real.version_bytes / 1e6:.0f} MB"
    return (
        f"{counts} real mirrors here, {real.versions} versions of {megabytes}: all mirrors got all "
        f"versions. For each, a mirror read {min(real.reads):.3f} to {max(real.reads):.3f} times "
        f"its bytes; {median(real.seconds):.2f} s from the publish to the last mirror"
    )


def _without_nodes(one: Arrival) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "ended_s"}


def _save_plot(found: list[Arrival], path: Path, caption: str) -> None:
    """Draw the number of nodes that have the version over time, with a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 4.2), layout="constrained")
    found = [one for one in found if "delta" not in one.way]
    trees = [one for one in found if "tree" in one.way]
    for one in found:
        is_tree = one in trees
        color = _blue(trees.index(one), len(trees)) if is_tree else _COLORS[one.way.split(",")[0]]
        axis.step(
            [one.published_s, *one.ended_s],
            range(len(one.ended_s) + 1),
            where="post",
            color=color,
            linewidth=1.6,
            linestyle=":" if "ranks" in one.way else "-",
            label=f"{one.way}: {_duration(one.all_s)}",
        )
    axis.set_xscale("log")
    axis.set_xticks(_TICKS_S, [_duration(seconds) for seconds in _TICKS_S])
    axis.set_xticks([], minor=True)
    axis.set_ylabel("nodes that have it", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle("A publish on its way to a fleet (simulated)", fontsize=12)
    without_delta = caption.partition("; a delta")[0]
    figure.supxlabel(without_delta, fontsize=7.5)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


_COLORS = {"NFS server": "#a33b20", "filesystem": "#e08e45"}
_TICKS_S = (15, 30, 60, 120, 300, 900, 3600, 4 * 3600, 24 * 3600)


def _blue(index: int, count: int) -> tuple[float, float, float]:
    light = 0.75 * index / max(count - 1, 1)
    return (0.04 + 0.7 * light, 0.38 + 0.47 * light, 0.77 + 0.2 * light)
