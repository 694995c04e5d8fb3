"""The lab itself: what the other scenarios rely on is so."""

from __future__ import annotations

import errno
import os
import socket
import time
from multiprocessing.connection import Connection
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


def read_when_told(connection: Connection, path: Path, name: str) -> None:
    """Each time it is told to: read a file, and send the bytes and how long that took."""
    connection.send(socket.gethostname())
    while True:
        connection.recv()
        started = time.monotonic()
        data = (path / name).read_bytes()
        connection.send((data, time.monotonic() - started))


@IN_SOAKS_ALONE
@scenario()
def test_clients_have_names_of_their_own_and_see_each_others_files(guest: Guest) -> None:
    (guest.path("w") / "file").write_text("hello")
    for client in ("w", "r", "r2"):
        with guest.on(client, read_when_told, "file") as child:
            assert child.receive() == client
            child.send()
            assert child.receive()[0] == b"hello"
    assert socket.gethostname() == "server"


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
def test_counters_count_what_comes_from_the_server(guest: Guest) -> None:
    write_synced(guest.path("w") / "file", os.urandom(4 * MB))

    def read(client: str) -> int:
        before = guest.nfs_read_bytes(client)
        (guest.path(client) / "file").read_bytes()
        return guest.nfs_read_bytes(client) - before

    assert read("r") == 4 * MB
    assert read("r") == 0
    guest.drop_caches()
    assert read("r") == 4 * MB
    assert read("r2") == 4 * MB


@IN_SOAKS_ALONE
@scenario()
def test_a_client_that_is_cut_off_waits_until_it_is_not(guest: Guest) -> None:
    (guest.path("w") / "file").write_text("hello")
    with guest.on("r", read_when_told, "file") as child:
        child.receive()
        guest.cut("r")
        child.send()
        assert not child._connection.poll(2)
        assert (guest.path("r2") / "file").read_text() == "hello"
        guest.restore("r")
        data, took_s = child.receive()
    print(f"the read took {took_s:.1f} s")
    assert data == b"hello"


@IN_SOAKS_ALONE
@scenario()
def test_a_delay_delays(guest: Guest) -> None:
    def time_to_read_s(name: str) -> float:
        (guest.path("w") / name).write_text("hello")
        with guest.on("r", read_when_told, name) as child:
            child.receive()
            child.send()
            return float(child.receive()[1])

    guest.delay("r", 300)
    slow_s = time_to_read_s("slowly")
    guest.delay("r", 0)
    fast_s = time_to_read_s("fast")
    print(f"{slow_s:.3f} s, then {fast_s:.3f} s")
    assert slow_s > 0.3 > fast_s


@IN_SOAKS_ALONE
@scenario(disruptive=True)
def test_a_full_disk_is_full_until_it_is_freed(guest: Guest) -> None:
    guest.fill_disk(free_bytes=MB)
    try:
        write_synced(guest.path("w") / "large", bytes(8 * MB))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("8 MB went into 1 MB")
    guest.free_disk()
    write_synced(guest.path("w") / "large", bytes(8 * MB))


@IN_SOAKS_ALONE
@scenario(disruptive=True)
def test_a_server_that_restarts_keeps_open_files_open(guest: Guest) -> None:
    with (guest.path("w") / "file").open("wb") as file:
        file.write(b"before ")
        started = time.monotonic()
        guest.restart_server()
        file.write(b"after")
        file.flush()
        os.fsync(file.fileno())
    print(f"back after {time.monotonic() - started:.1f} s")
    assert (guest.path("r") / "file").read_bytes() == b"before after"


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
