"""Names of a store's directories and files."""

from __future__ import annotations

import re
from pathlib import Path

from dbuffer.format.lineage import VersionId

BUFFERS = ("A", "B")

POINTER_FILE = "CURRENT"
MANIFEST_FILE = "manifest.json"
WRITER_FILE = "writer.json"
WRITER_LOCK_FILE = "writer.lock"
MIRROR_LOCK_FILE = "mirror.lock"
"""Name of the file that a mirror locks while it copies into the store, so that only one mirror
does."""
RECEIVERS_DIRECTORY = "receivers"
DELTAS_DIRECTORY = "deltas"
KEPT_DIRECTORY = "kept"
PIN_FILE = "pinned"
REFUSED_DIRECTORY = "refused"
"""Name of the directory with one file per version that a canary engine refused. The version's id is
the name of the file."""
DROPPED_FILE = "dropped.json"
"""Name of a kept version's manifest while the version is being dropped."""
SCRATCH_DIRECTORY = "tmp"
"""Name of the directory where files are written before they are renamed. These files are not
written beside their final names, for two reasons: over NFSv3, other hosts miss the second of two
changes of a directory within one tick of the server's clock; and watchdog delays the first of two
events in one directory."""

_RECORD_FILE = re.compile(r"(.+)\.[0-9a-f]{16}\.json")
WEIGHTS_FILE = re.compile(r"weights-[0-9a-f]{16}-[0-9]{1,19}\.td")
_DELTA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,19}\.delta")


def receiver_of(name: str) -> str | None:
    """Return the receiver id from the file name of a receiver's record, or None for other names."""
    match = _RECORD_FILE.fullmatch(name)
    return match and match[1]


def part_path(path: Path, part: int | None) -> Path:
    """Return the path of a part of the weights file at ``path``, or ``path`` if part is None."""
    return path if part is None else path.with_name(f"{path.stem}.r{part}.td")


def version_file(name: str) -> str:
    """Return the name of the weights file that a part file belongs to, or ``name`` unchanged."""
    return re.sub(r"\.r[0-9]+\.td$", ".td", name)


def is_weights_file(name: str) -> bool:
    return WEIGHTS_FILE.fullmatch(version_file(name)) is not None


def is_delta_file(name: str) -> bool:
    return _DELTA_FILE.fullmatch(name) is not None


def kept_buffer(version: VersionId | str) -> str:
    return f"{KEPT_DIRECTORY}/{version}"


def is_kept(buffer: str) -> bool:
    """Whether a buffer is a kept version's directory: any buffer other than ``A`` and ``B``."""
    return buffer not in BUFFERS
