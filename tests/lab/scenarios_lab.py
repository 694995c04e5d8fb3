"""The lab itself: what the other scenarios rely on is so."""

from __future__ import annotations

import os
from pathlib import Path

from tests.lab.guest import Guest
from tests.lab.lab import scenario

MB = 1 << 20


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_directory(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


@scenario()
def test_a_pointer_polled_by_its_name_alone_is_stale(guest: Guest) -> None:
    """Why readers open the directory first; and the clients' caches are real."""
    written, read = guest.path("w"), guest.path("r")
    stale = {"alone": 0, "after the directory": 0}
    write_synced(written / "CURRENT", b"0")
    with (read / "CURRENT").open("rb"):
        for number in range(1, 101):
            write_synced(written / "next", b"%d" % number)
            (written / "next").replace(written / "CURRENT")
            stale["alone"] += (read / "CURRENT").read_bytes() != b"%d" % number
            open_directory(read)
            stale["after the directory"] += (read / "CURRENT").read_bytes() != b"%d" % number
    print(stale)
    assert stale["after the directory"] == 0
    if guest.version == "4.2":
        assert stale["alone"] > 0
