"""Names of a store's directories and files."""

from __future__ import annotations

import re

from dbuffer.format.lineage import VersionId

BUFFERS = ("A", "B")

POINTER_FILE = "CURRENT"
MANIFEST_FILE = "manifest.json"
WRITER_FILE = "writer.json"
WRITER_LOCK_FILE = "writer.lock"
MIRROR_LOCK_FILE = "mirror.lock"
"""File that a mirror locks while it copies into the store, so that only one does."""
RECEIVERS_DIRECTORY = "receivers"
DELTAS_DIRECTORY = "deltas"
KEPT_DIRECTORY = "kept"
PIN_FILE = "pinned"
DROPPED_FILE = "dropped.json"
"""Name of a kept version's manifest while the version is being dropped."""
SCRATCH_DIRECTORY = "tmp"
"""Directory where files are written before they are renamed. No other file is in it: over NFSv3,
other hosts do not see a second change of a directory within one tick of the server's clock, and
watchdog delays the first of two events in one directory."""

_RECORD_FILE = re.compile(r"(.+)\.[0-9a-f]{16}\.json")
WEIGHTS_FILE = re.compile(r"weights-[0-9a-f]{16}-[0-9]{1,19}\.td")
_DELTA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,19}\.delta")


def record_file(receiver_id: str, token: str) -> str:
    """Return the name of the file with a receiver's record."""
    return f"{receiver_id}.{token}.json"


def receiver_of(name: str) -> str | None:
    """Return the id of the receiver whose record has this file name, or None for other names."""
    match = _RECORD_FILE.fullmatch(name)
    return match and match[1]


def part_name(file: str, part: int) -> str:
    """Return the name of a part of the weights file ``file``; see `layout`."""
    return f"{file.removesuffix('.td')}.r{part}.td"


def version_file(name: str) -> str:
    """Return the name of a part's weights file. Other names are returned as they are."""
    return re.sub(r"\.r[0-9]+\.td$", ".td", name)


def is_weights_file(name: str) -> bool:
    """Whether a file of this name is a weights file, or a part of one."""
    return WEIGHTS_FILE.fullmatch(version_file(name)) is not None


def delta_file(version: VersionId) -> str:
    """Return the name of the file with the delta that leads to this version."""
    return f"{version}.delta"


def is_delta_file(name: str) -> bool:
    """Whether a file of this name is a delta."""
    return _DELTA_FILE.fullmatch(name) is not None


def kept_buffer(version: VersionId | str) -> str:
    """Return the name of a kept version's buffer, by the version's id or the id's text."""
    return f"{KEPT_DIRECTORY}/{version}"


def is_kept(buffer: str) -> bool:
    """Whether a buffer is one of a kept version, and not ``A`` or ``B``."""
    return buffer not in BUFFERS


def is_part_of(name: str, file: str) -> bool:
    """Whether a file of this name is a part of the weights file ``file``."""
    return name.startswith(f"{file.removesuffix('.td')}.r") and name.endswith(".td")
