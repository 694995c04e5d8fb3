"""Size of a delta, and the times to make and to apply it."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import delta_stores, models, report
from benchmarks.copying import scatter
from benchmarks.delta_stores import Stores
from benchmarks.measure import median, timed
from benchmarks.models import Shapes
from benchmarks.targets import Check
from benchmarks.transfers import Times
from dbuffer.format import delta
from dbuffer.format.layout import Layout, TensorSpec
from dbuffer.format.lineage import VersionId
from dbuffer.io.changes import Changes, find_changes
from dbuffer.io.copier import Copier
from dbuffer.io.delta import apply_delta, encode_delta
from dbuffer.io.tensors import FileTensors

_RUN = "0" * 16
_THREADS = 2

_SPREAD = 0.02
"""Standard deviation of the weights, in bf16."""

_UPDATES = {1e-7: 1.46, 7e-7: 1.12, 3e-6: 0.98, 1e-5: 0.84, 4e-5: 0.70}
"""Target size of a delta in bytes per changed element, by the standard deviation of an update.

15 % more are allowed. The updates change about 0.5, 2.5, 8, 20 and 47 % of the elements."""

_MAX_SHARE = 0.007
"""Target size of a delta, as a share of all tensors' bytes, if 1 % of the elements changed by one
unit in the last place."""

_MAX_MEAN_SHARE = 0.023
_MAX_PATCH_TIME = 0.3
_MAX_LOADED_TIME = 0.25
_MIN_SPEEDS = {"dense": 0.45, "experts": 0.35}
_MAX_TIME = 0.6
_WARM_UPS = 1

MEMCPY, FIND, HASHED, APPLY = "memcpy", "find, encode", "find, encode, checksums", "apply"
COMPARE, TAKE, SCATTER = (
    "floor of find: compare alone",
    "floor of find: compare, take what differs",
    "floor of apply: write alone",
)
"""Lower bounds, measured with numpy as if all tensors were one: to compare all words of 8 bytes; to
also copy the words that differ; and to write the changed elements at known places."""

_PIECE = 1 << 17
"""Number of 8-byte words that are compared at a time. They fit in a core's cache."""


class _Versions(NamedTuple):
    before: FileTensors
    after: FileTensors
    layout_xxh3: str


def main(options: Namespace) -> int:
    """Measure and print. Return 1 if a target was missed."""
    directory: Path = options.dir[0]
    environment = report.begin([directory])
    copier = Copier(_THREADS)
    sizes = {spread: _bytes_an_element(spread, copier) for spread in _UPDATES}
    checks = [_size_check(spread, *found) for spread, found in sizes.items()]
    models_of = {
        "dense": models.qwen2_0_5b(width=0.25 if options.quick else 0.75),
        "experts": models.qwen3_30b_a3b(narrowing=8, layers=4 if options.quick else 48),
    }
    times_s: dict[str, Times] = {}
    for name, shapes in models_of.items():
        share, times_s[name] = _measure(shapes, copier, samples=3 if options.quick else 7)
        size = f"{models.num_bytes(shapes) / 1e9:.2f} GB in {len(shapes):,} tensors"
        print(f"\n{size}, 1 % changed, {_THREADS} threads\n\n{_table(times_s[name])}", flush=True)
        checks += _checks(f"{name}, {size}", share, times_s[name], _MIN_SPEEDS[name])
    stores = delta_stores.run(directory, quick=options.quick)
    checks += _store_checks(stores)
    found = {"times_s": times_s, "stores": asdict(stores)}
    return report.conclude(environment, checks, found, options.json, reference=report.LIMIT)


def _store_checks(stores: Stores) -> list[Check]:
    size = f"{stores.num_bytes / 1e9:.2f} GB"
    share, mean, patch = stores.share, stores.mean_share, stores.patch_share
    num = len(stores.written_bytes)
    whole_s, delta_s = median(stores.whole_s), median(stores.delta_s)
    print(
        f"\nPublish to loaded on a network mount of 1 GB/s: {1e3 * whole_s:.0f} ms for a whole "
        f"version, {1e3 * delta_s:.0f} ms for 1 % changed"
    )
    print(
        f"\nPatches of 1 % in shared memory: {patch:.2f} of a send's time; to write them into two "
        f"buffers at known places, and no more: {stores.patch_floor_share:.2f}"
    )
    return [
        _share_check(f"bytes of a publish on a network mount, 1 % changed, {size}", share),
        _share_check(
            f"mean over {num} such publishes, anchors included", mean, most=_MAX_MEAN_SHARE
        ),
        Check(
            "network mount of 1 GB/s, 1 % changed, publish to loaded",
            f"<= {_MAX_LOADED_TIME:.2f} of a whole version's",
            f"{stores.loaded_share:.2f}",
            stores.loaded_share <= _MAX_LOADED_TIME,
        ),
        Check(
            "publish of patches in shared memory, 1 % changed",
            f"<= {_MAX_PATCH_TIME:.2f} of a send's time",
            f"{patch:.2f}",
            patch <= _MAX_PATCH_TIME,
            f"{stores.patch_floor_share:.2f}",
        ),
    ]


def _share_check(what: str, share: float, most: float = _MAX_SHARE) -> Check:
    return Check(what, f"<= {100 * most:g}% of the whole", f"{share:.2%}", share <= most)


def _bytes_an_element(spread: float, copier: Copier) -> tuple[float, float]:
    """Return the share of elements that an update changes, and the bytes per changed element."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4_000_000, generator=generator).mul_(_SPREAD)
    update = torch.randn(4_000_000, generator=generator).mul_(spread)
    versions = _versions([weights.bfloat16()], [(weights + update).bfloat16()])
    found = _find(versions, copier)
    num_changed = sum(chunk.num_changed for chunk, _ in found.chunks)
    return num_changed / len(weights), _num_bytes(_file(versions, found)) / num_changed


def _size_check(spread: float, share: float, num_bytes: float) -> Check:
    most = 1.15 * _UPDATES[spread]
    what = f"bytes a changed element, {share:.1%} changed"
    return Check(what, f"<= {most:.2f}", f"{num_bytes:.2f}", num_bytes <= most)


def _measure(shapes: Shapes, copier: Copier, *, samples: int) -> tuple[float, Times]:
    """Return a delta's share of all bytes if 1 % changed, and times in seconds, by action."""
    before = [torch.randn(shape).mul_(_SPREAD).bfloat16() for shape in shapes.values()]
    versions = _versions(before, [models.nudged(tensor) for tensor in before])
    found = _find(versions, copier)
    encoded, *chunks = _file(versions, found)
    layout = versions.before.layout
    decoded = delta.decode_header(
        lambda start, size: encoded[start : start + size], layout, versions.layout_xxh3
    )
    target, copied = _contents(layout), _contents(layout)
    words, old, new = (
        np.frombuffer(one.raw, np.uint16) for one in (target, versions.before, versions.after)
    )
    (places,) = (old != new).nonzero()
    values = new[places]
    tensors = versions.after.views
    del before
    times_s: Times = defaultdict(list)
    for turn in range(_WARM_UPS + samples):
        target.data.copy_(versions.before.data)
        actions = {
            MEMCPY: lambda: copier.write(copied, tensors),
            FIND: lambda: _find(versions, copier),
            HASHED: lambda: _find_and_hash(versions, copier),
            APPLY: lambda: apply_delta(decoded, chunks.__getitem__, target.data, copier),
            COMPARE: lambda: _compare(versions.before, copied, copier, takes=False),
            TAKE: lambda: _compare(versions.before, copied, copier, takes=True),
            SCATTER: lambda: scatter(places, values, words, copier),
        }
        for name, action in actions.items():
            took_s = timed(action)
            if turn >= _WARM_UPS:
                times_s[name].append(took_s)
    return _num_bytes([encoded, *chunks]) / layout.num_bytes, times_s


def _find(versions: _Versions, copier: Copier) -> Changes:
    before, after = versions.before, versions.after
    return find_changes(before.data, after.data, before.layout, copier)


def _find_and_hash(versions: _Versions, copier: Copier) -> None:
    copier.checksums(versions.before, _find(versions, copier).tensors)


def _compare(before: FileTensors, after: FileTensors, copier: Copier, *, takes: bool) -> None:
    """Compare words of 8 bytes with numpy. If ``takes``, also copy the words that differ."""
    old, new = (np.frombuffer(one.raw, np.uint64) for one in (before, after))
    cuts = [(at, min(at + _PIECE, len(old))) for at in range(0, len(old), _PIECE)]

    def work(first: int, end: int) -> None:
        mask = np.empty(_PIECE, np.bool_)
        for at, to in cuts[first:end]:
            differs = np.not_equal(old[at:to], new[at:to], out=mask[: to - at])
            if takes:
                (places,) = differs.nonzero()
                old[at:to].take(places), new[at:to].take(places)

    copier.in_parallel(work, copier.cut_work([to - at for at, to in cuts]))


def _versions(before: list[torch.Tensor], after: list[torch.Tensor]) -> _Versions:
    specs = [TensorSpec(f"t{i}", "bfloat16", tuple(t.shape)) for i, t in enumerate(before)]
    layout = Layout.of(specs)
    sides = _contents(layout), _contents(layout)
    for side, tensors in zip(sides, (before, after), strict=True):
        for view, tensor in zip(side.views, tensors, strict=True):
            view.copy_(tensor)
    return _Versions(*sides, layout.xxh3)


def _contents(layout: Layout) -> FileTensors:
    return FileTensors(torch.zeros(layout.checksums_offset, dtype=torch.uint8), layout)


def _file(versions: _Versions, found: Changes) -> list[bytes]:
    return encode_delta(
        found.chunks,
        None,
        base=VersionId(_RUN, 1),
        version=VersionId(_RUN, 2),
        layout_xxh3=versions.layout_xxh3,
    )


def _num_bytes(parts: list[bytes]) -> int:
    return sum(map(len, parts))


def _table(times_s: Times) -> str:
    copied_s = median(times_s[MEMCPY])
    rows = [
        (name, f"{1e3 * median(taken):.1f}", f"{median(taken) / copied_s:.2f}")
        for name, taken in times_s.items()
    ]
    return report.table(("", "ms", "of memcpy's time"), rows)


def _checks(what: str, share: float, times_s: Times, min_speed: float) -> list[Check]:
    copied_s = median(times_s[MEMCPY])
    speed = copied_s / median(times_s[FIND])
    applied = median(times_s[APPLY]) / copied_s
    return [
        _share_check(f"bytes of a delta, 1 % changed by one in the last place, {what}", share),
        Check(
            f"find + encode, {what}",
            f">= {min_speed:.2f} of memcpy's speed",
            f"{speed:.2f}",
            speed >= min_speed,
            f"{copied_s / median(times_s[TAKE]):.2f}",
        ),
        Check(
            f"decode + apply, {what}",
            f"<= {_MAX_TIME:.2f} of a copy's time",
            f"{applied:.2f}",
            applied <= _MAX_TIME,
            f"{median(times_s[SCATTER]) / copied_s:.2f}",
        ),
    ]
