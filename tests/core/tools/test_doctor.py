"""`dbuffer doctor`: what it finds on real mounts, with real peers, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dbuffer
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.store import filesystem, records
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.moments import die
from dbuffer.testing.waiting import TIMEOUT_S, until
from dbuffer.tools.doctor import peer, probes
from dbuffer.tools.doctor.probes import PREFIX, Finding, examine, scratch
from tests.support.children import Child, Command, call
from tests.support.patterns import SMALL, newest
from tests.support.stores import contents, fill, small_disk, without_flock
from tests.support.waiting import meanwhile

MEGABYTE = 1 << 20
NOBODY = 65534


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def place(shm_path: Path) -> Path:
    """A directory of the user's own."""
    (shm_path / "place").mkdir(mode=0o700)
    return shm_path / "place"


@pytest.fixture(params=["tmpfs", "disk"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same, in shared memory and in the system's directory for temporary files."""
    if request.param == "disk":
        (tmp_path / "place").mkdir(mode=0o700)
        return tmp_path / "place"
    path: Path = request.getfixturevalue("place")
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small filesystem of its own, with a directory in it that is the user's own."""
    with small_disk(tmp_path / "disk", 8 * MEGABYTE) as path:
        (path / "place").mkdir(mode=0o700)
        yield path / "place"


def found_by(findings: list[Finding], probe: str) -> Finding:
    (finding,) = (each for each in findings if each["probe"] == probe)
    return finding


def broken(findings: list[Finding]) -> set[str]:
    return {finding["probe"] for finding in findings if finding["verdict"] == "broken"}


# A place where all is well


def test_a_good_place(any_place: Path) -> None:
    findings = examine(any_place)
    assert [each["probe"] for each in findings] == [
        *("mount", "room", "trust", "locks", "mapping", "events")
    ]
    assert not broken(findings)
    assert {each["verdict"] for each in findings[1:]} == {"good"}
    assert list(any_place.iterdir()) == []


def test_of_a_directory_that_is_not_there_its_mount_is_probed(disk):
    findings = examine(disk / "on the way" / "store")
    assert not broken(findings)
    assert found_by(findings, "mount")["result"] == "tmpfs from dbuffer-test: local"
    assert "8.39 MB" in found_by(findings, "room")["result"]
    assert list(disk.iterdir()) == []


def test_what_is_no_place_or_has_none(capsys, place):
    """A path is refused if nothing of it exists, and noted if more is missing than its end."""
    for more in (), ("--peer",):
        code, out, err = call(capsys, "doctor", "/shraed/policy", *more)
        assert (code, out) == (2, "")
        assert "there is no /shraed, and probes of / would test another mount" in err
    path = place / "shraed" / "policy"
    finding = found_by(examine(path), "trust")
    assert finding["verdict"] == "adapted"
    assert f"{path} does not exist, nor does {path.parent}" in finding["result"]
    assert found_by(examine(place / "policy"), "trust")["verdict"] == "good"
    (place / "file").touch()
    for path in (place / "file", place / "file" / "store"):
        with pytest.raises(dbuffer.StoreAccessError):
            examine(path)


def test_a_store_is_not_touched(damaged):
    def state() -> tuple[dict[str, bytes | None], list[int]]:
        return contents(damaged), [path.stat().st_mtime_ns for path in sorted(damaged.rglob("*.*"))]

    before = state()
    assert not broken(examine(damaged))
    assert state() == before
    assert newest(damaged) == 3
    with dbuffer.WeightSender(damaged) as sender:
        assert not broken(examine(damaged))
        sender.send(SMALL.weights(4))
    assert newest(damaged) == 4


# Places where a store would not be safe


def test_no_room_and_read_only(disk):
    for leave_bytes in (0, MEGABYTE // 2):
        filler = fill(disk, leave_bytes)
        assert "room" in broken(examine(disk))
        assert list(disk.iterdir()) == [filler]
        filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk.parent)], check=True)
    findings = examine(disk)
    assert broken(findings) == {"room", "trust", "locks", "mapping", "events"}
    assert "Read-only file system" in found_by(findings, "room")["result"]


def assert_refused(place: Path) -> None:
    findings = examine(place)
    assert broken(findings) == {"trust"}
    assert "--allow-shared-store" in found_by(findings, "trust")["consequence"]


def test_a_directory_that_others_can_write_to(place):
    """One for everybody may hold stores, and be none."""
    for mode in (0o777, 0o770, 0o707):
        place.chmod(mode)
        assert_refused(place)
    place.chmod(0o1777)  # as /dev/shm
    assert found_by(examine(place), "trust")["verdict"] == "adapted"
    with dbuffer.WeightSender(place, allow_shared_store=True) as sender:
        sender.send(SMALL.weights(1))
    assert_refused(place)


@needs_root
def test_a_store_of_somebody_else(damaged):
    os.chown(damaged, NOBODY, -1)
    assert_refused(damaged)


def fail(number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


class PrivateMapping(mmap.mmap):
    def __new__(cls, file: int, num_bytes: int, *_: int) -> Any:
        return super().__new__(cls, file, num_bytes, mmap.MAP_PRIVATE)


def make_for_nobody(path: Path, mode: int, make: Callable[..., None] = os.mkdir) -> None:
    """As an export with squashed users does."""
    make(path, mode)
    os.chown(path, NOBODY, -1)


FILESYSTEM, PROBES = "dbuffer.store.filesystem", "dbuffer.tools.doctor.probes"


@pytest.mark.parametrize(
    ("name", "behaviour", "probe"),
    [
        (f"{FILESYSTEM}.sync_file", fail(errno.EIO), "room"),
        pytest.param(f"{PROBES}.os.mkdir", make_for_nobody, "trust", marks=needs_root),
        (f"{FILESYSTEM}.try_lock", fail(errno.ENOLCK), "locks"),
        (f"{FILESYSTEM}.allocate", fail(errno.EOPNOTSUPP), "mapping"),
        (f"{PROBES}.mmap.mmap", PrivateMapping, "mapping"),
    ],
)
def test_what_does_not_work(place, monkeypatch, name, behaviour, probe):
    monkeypatch.setattr(name, behaviour)
    assert broken(examine(place)) == {probe}
    assert list(place.iterdir()) == []


def test_every_error_leaves_nothing_behind(place, monkeypatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for function in ("replace_file", "allocate", "make_directory", "sync_file", "try_lock"):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, function, stop)
            with pytest.raises(KeyboardInterrupt):
                examine(place)
        assert list(place.iterdir()) == [], function


# What dbuffer does without


def test_without_locks(place, monkeypatch):
    for name in ("try_lock", "lock_within", "unlock"):
        monkeypatch.setattr(filesystem, name, getattr(filesystem, name))
    without_flock()
    findings = examine(place)
    assert not broken(findings)
    assert found_by(findings, "locks")["verdict"] == "adapted"


def test_without_events(place, monkeypatch, caplog):
    monkeypatch.setattr(probes, "_EVENT_S", 0.1)
    monkeypatch.setattr("dbuffer.store.watcher.BaseObserver.start", fail(errno.EMFILE))
    finding = found_by(examine(place), "events")
    assert finding["verdict"] == "adapted"
    assert "poll_interval_s" in finding["consequence"]


def test_on_a_network_mount(place, monkeypatch):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    findings = examine(place)
    assert not broken(findings)
    assert "DBUFFER_MOUNT=network" in found_by(findings, "mount")["result"]
    assert "read into memory" in found_by(findings, "mount")["consequence"]
    assert "poll" in found_by(findings, "events")["consequence"]


# Two hosts, which are two processes


def be_peer(
    connection: Connection,
    place: Path,
    change: Callable[[], object] = lambda: None,
    error: type[Exception] | None = None,
) -> None:
    """Wait for a host, after a change of this process, which may make it fail."""
    change()
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        connection.send(peer.wait_for_host(place))


def wait_for_peers(place: Path) -> None:
    until("a peer waits", lambda: list(place.glob(f"{PREFIX}peer-*")), TIMEOUT_S)


def measure_with(place: Path, ends_with: int, *peers: object) -> list[Finding]:
    """Measure with another host that waits, and ends in this way."""
    with Child(be_peer, place, *peers) as child:
        wait_for_peers(place)
        findings = peer.measure_with_peers(place)
        assert child.wait() == ends_with
    assert list(place.iterdir()) == []
    return findings


def put_the_clock_forward() -> None:
    anew = records._anew

    def later(record: ReceiverRecord, **changes: Any) -> ReceiverRecord:
        return msgspec.structs.replace(anew(record, **changes), updated_at=time.time() + 3600.0)

    records._anew = later


def be_on_a_network() -> None:
    os.environ[filesystem.MOUNT_VARIABLE] = "network"


def see_nothing_new() -> None:
    DoubleBuffer.newest_pointer = lambda store, last=None: last or store.pointer()


def read_other_bytes() -> None:
    be_on_a_network()
    filesystem.read_into = lambda descriptor, offset, memory: memory.nbytes


def die_when_met() -> None:
    peer._receive = lambda _: die()


@pytest.mark.timing(peer_answer_s=1.0)
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (see_nothing_new, None, "was not seen within"),
        (read_other_bytes, dbuffer.StoreCorruptError, "damaged"),
        (die_when_met, None, "was not seen within"),
    ],
)
def test_another_host_on_which_not_all_is_well(place, monkeypatch, change, error, text):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    ends_with = -signal.SIGKILL if change is die_when_met else 0
    versions, *_ = measure_with(place, ends_with, change, error)
    assert versions["verdict"] == "broken"
    assert text in versions["result"]


def test_clocks_that_are_apart(place):
    versions, clocks = measure_with(place, 0, put_the_clock_forward)
    assert versions["verdict"] in ("good", "adapted")
    assert clocks["verdict"] == "adapted"
    assert clocks["result"].startswith(("3600.0", "3599.9"))


def be_host_that_dies(connection: Connection, place: Path) -> None:
    dbuffer.WeightSender.wait_applied = lambda *_, **__: die()
    peer.measure_with_peers(place)


@pytest.mark.timing(peer_answer_s=0.2)
def test_a_first_host_that_dies(place):
    def be_first_host() -> None:
        wait_for_peers(place)
        with Child(be_host_that_dies, place) as child:
            child.wait()

    with (
        meanwhile(be_first_host),
        pytest.raises(dbuffer.StoreAccessError, match="no longer publishes"),
    ):
        peer.wait_for_host(place)
    assert list(place.iterdir()) == []


@needs_root
@pytest.mark.parametrize("kind", ["of somebody else", "open to others", "a link"])
def test_what_only_looks_like_a_peer_is_left_alone(place, tmp_path, kind):
    trap = place / f"{PREFIX}peer-trap"
    trap.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (trap / "store").symlink_to(tmp_path / "elsewhere")
    trap.chmod(0o777 if kind == "open to others" else 0o700)
    if kind == "of somebody else":
        os.chown(trap, NOBODY, -1)
    elif kind == "a link":
        shutil.copytree(trap, tmp_path / "real", symlinks=True)
        shutil.rmtree(trap)
        trap.symlink_to(tmp_path / "real")
    assert peer.measure_with_peers(place) == []
    assert {path.name for path in trap.iterdir()} == {"store"}
    assert list((tmp_path / "elsewhere").iterdir()) == []


# The command


def test_command(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    path, before = place / "[bold]a store", signal.getsignal(signal.SIGTERM)
    path.mkdir(mode=0o700)
    code, out, _ = call(capsys, "doctor", path)
    assert (code, "broken" in out) == (0, False)
    assert "[bold]a store" in out, "not taken for markup"
    for finding in examine(path):
        assert finding["probe"] in out
    assert signal.getsignal(signal.SIGTERM) is before
    path.chmod(0o777)
    code, out, _ = call(capsys, "doctor", path)
    assert (code, "broken" in out) == (1, True)
    code, out, _ = call(capsys, "doctor", path, "--json")
    found = json.loads(out)
    assert (code, found["is_sound"]) == (1, False)
    assert [it["probe"] for it in found["findings"] if it["verdict"] == "broken"] == ["trust"]


def test_command_when_the_other_host_does_not_come(
    capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "WAIT_S", 0.1)
    code, _, err = call(capsys, "doctor", place, "--peer")
    assert code == 3
    assert err.startswith(f"dbuffer: no 'dbuffer doctor {place}' began")
    assert list(place.iterdir()) == []


def test_commands_on_two_hosts(any_place, tmp_path):
    with Command(tmp_path, "doctor", any_place, "--peer", "--json") as waiting:
        wait_for_peers(any_place)
        with Command(tmp_path, "doctor", any_place, "--json") as host:
            results = []
            for command in (host, waiting):
                code, out, errors = command.communicate()
                assert code == 0, errors
                results.append(json.loads(out))
    found, report = results
    *_, versions, clocks = found["findings"]
    assert versions["verdict"] in ("good", "adapted")  # late beside other work
    assert versions["result"].startswith("20 versions seen, ")
    assert clocks["verdict"] == "good"
    assert report == {"num_seen": 1 + 20}  # the first is not counted
    assert list(any_place.iterdir()) == []


def test_an_interrupt_at_once_leaves_no_directory(place, monkeypatch):
    make = os.mkdir

    def make_and_be_interrupted(*arguments, **options):
        make(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", make_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt), scratch(place):
        pass
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_that_is_told_to_stop(place, tmp_path, number):
    with Command(tmp_path, "doctor", place, "--peer") as waiting:
        wait_for_peers(place)
        waiting.signal(number)
        assert waiting.wait() != 0
    assert list(place.iterdir()) == []
