"""Read the newest version of a store without dbuffer, as docs/design.md describes the format.

    python examples/plain_reader.py STORE

A starting point for a receiver in another language. It reads full versions, in one file or in
parts, and verifies their checksums. It does not apply deltas, and no sender may write to the store
meanwhile. Needs torch and xxhash.
"""

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import xxhash


def read_newest(
    directory: str | pathlib.Path,
) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:
    """Return version, metadata and tensors of a store. No sender may write to it meanwhile."""
    store = pathlib.Path(directory)
    pointer = json.loads((store / "CURRENT").read_bytes())
    buffer = store / pointer["buffer"]
    manifest = json.loads((buffer / "manifest.json").read_bytes())
    assert pointer["format"] == 1
    assert manifest["state"] == "complete"
    for field in ("id", "runs", "generation", "writer"):
        assert manifest[field] == pointer[field]
    assert manifest["anchor"] is None  # this program cannot read deltas

    path = buffer / manifest["file"]
    data = path.read_bytes()
    assert len(data) == manifest["file_bytes"]
    start = manifest["layout_offset"]
    encoded = data[start : start + manifest["layout_bytes"]]
    assert xxhash.xxh3_64_hexdigest(encoded) == manifest["layout_xxh3"]
    layout = json.loads(encoded)

    size_of = dict(_sizes(layout))
    memory = bytearray(data[: manifest["checksums_offset"]])
    parts = [
        path.with_name(f"{path.stem}.r{number}.td").read_bytes() if size else b""
        for number, size in enumerate(layout["parts"])
    ]
    for tensor, offset, num_bytes, part, place in layout["pieces"]:
        if parts:
            at = layout["tensors"][tensor][3] + offset
            memory[at : at + num_bytes] = parts[part][place : place + num_bytes]

    if manifest["checksums_xxh3"] is not None:
        start = manifest["checksums_offset"]
        table = data[start : start + 8 * manifest["num_tensors"]]
        assert xxhash.xxh3_64_hexdigest(table) == manifest["checksums_xxh3"]
        for index, (name, _, _, offset) in enumerate(layout["tensors"]):
            expected = int.from_bytes(table[8 * index : 8 * index + 8], "little")
            data_read = memory[offset : offset + size_of[name]]
            assert _checksum(data_read, _piece_starts(layout, index)) == expected, name

    tensors = {}
    for name, dtype, shape, offset in layout["tensors"]:
        raw = torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + size_of[name]]
        tensors[name] = raw.view(getattr(torch, dtype)).reshape(shape)
    tensors |= {alias: tensors[name] for alias, name in layout["aliases"].items()}
    _, number = manifest["id"]
    return number, manifest["metadata"], tensors


def _sizes(layout: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, dtype, shape, _ in layout["tensors"]:
        count = 1
        for length in shape:
            count *= length
        yield name, count * getattr(torch, dtype).itemsize


def _piece_starts(layout: dict[str, Any], index: int) -> list[int]:
    return [offset for tensor, offset, *_ in layout["pieces"] if tensor == index] or [0]


def _checksum(data: bytes | bytearray, starts: list[int], block: int = 1 << 20) -> int:
    ends = [*starts[1:], len(data)]
    blocks = [
        data[at : min(at + block, end)]
        for start, end in zip(starts, ends, strict=True)
        for at in range(start, max(end, start + 1), block)
    ]
    digests = [xxhash.xxh3_64_intdigest(bytes(each)) for each in blocks]
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_64_intdigest(b"".join(value.to_bytes(8, "little") for value in digests))


if __name__ == "__main__":
    version, metadata, tensors = read_newest(sys.argv[1])
    print(f"version {version}, metadata {metadata}")
    for name, tensor in tensors.items():
        print(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
