"""The lab itself: what the other scenarios rely on is so."""

from __future__ import annotations

import os
from pathlib import Path

from tests.lab.guest import Guest
from tests.lab.lab import scenario
from tests.support.soak import IN_SOAKS_ALONE

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


@IN_SOAKS_ALONE
@scenario(disruptive=True)
def test_a_power_cut_loses_what_was_not_synced_and_nothing_else(guest: Guest) -> None:
    write_synced(guest.path("w") / "from-client", b"1" * MB)
    write_synced(guest.server_path / "synced", b"2" * MB)
    # Of a client, none is lost: it keeps what the server has not confirmed, and sends it again.
    (guest.server_path / "not-synced").write_bytes(b"3" * MB)
    guest.power_cut()
    write_synced(guest.server_path / "after", b"4" * MB)
    guest.power_restore()
    assert (guest.path("r") / "from-client").read_bytes() == b"1" * MB
    assert (guest.path("r") / "synced").read_bytes() == b"2" * MB
    assert not (guest.path("r") / "after").exists()
    lost = guest.path("r") / "not-synced"
    assert not lost.exists() or lost.read_bytes() != b"3" * MB
