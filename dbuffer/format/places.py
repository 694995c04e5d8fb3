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
"""Lock of the mirror, of several, that copies into the store."""
RECEIVERS_DIRECTORY = "receivers"
DELTAS_DIRECTORY = "deltas"
KEPT_DIRECTORY = "kept"
PIN_FILE = "pinned"
DROPPED_FILE = "dropped.json"
"""Name that a manifest has while its kept version is being dropped."""
SCRATCH_DIRECTORY = "tmp"
"""Directory where files are written before they are renamed. It is one of its own: over
NFSv3 a second change of a directory within one tick of the server's clock is not seen by other
hosts until the next one, and watchdog holds back the first of two events in one directory."""

_RECORD_FILE = re.compile(r"(.+)\.[0-9a-f]{16}\.json")
WEIGHTS_FILE = re.compile(r"weights-[0-9a-f]{16}-[0-9]{1,19}\.td")
_DELTA_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,19}\.delta")


def record_file(receiver_id: str, token: str) -> str:
    """Name of the file of a receiver's record."""
    return f"{receiver_id}.{token}.json"


def receiver_of(name: str) -> str | None:
    """The id of the receiver whose record has this file name; None if it is no record's."""
    match = _RECORD_FILE.fullmatch(name)
    return match and match[1]


def part_name(file: str, part: int) -> str:
    """Name of a part of the weights file of this name; see `layout`."""
    return f"{file.removesuffix('.td')}.r{part}.td"


def version_file(name: str) -> str:
    """Return the weights file of a part, or the name itself if it is no part."""
    return re.sub(r"\.r[0-9]+\.td$", ".td", name)


def is_weights_file(name: str) -> bool:
    """Whether a file of this name is a weights file, or a part of one."""
    return WEIGHTS_FILE.fullmatch(version_file(name)) is not None


def delta_file(version: VersionId) -> str:
    """Name of the file of the delta that leads to this version."""
    return f"{version}.delta"


def is_delta_file(name: str) -> bool:
    """Whether a file of this name is a delta."""
    return _DELTA_FILE.fullmatch(name) is not None


def kept_buffer(version: VersionId | str) -> str:
    """Name of the buffer that the version of this id, or of its text, is kept in."""
    return f"{KEPT_DIRECTORY}/{version}"


def is_kept(buffer: str) -> bool:
    """Whether a buffer holds a kept version, and is neither A nor B."""
    return buffer not in BUFFERS


def is_part_of(name: str, file: str) -> bool:
    """Whether a file of this name is a part of the weights file ``file``."""
    return name.startswith(f"{file.removesuffix('.td')}.r") and name.endswith(".td")
