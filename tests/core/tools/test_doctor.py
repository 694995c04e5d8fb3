"""`dbuffer doctor`: what it finds on real mounts, with real peers, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import ctypes
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

import pytest

import dbuffer
from dbuffer.runtime.timing import TIMING, Timing
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.tools import doctor
from dbuffer.tools.doctor import peer, scratch
from dbuffer.tools.doctor.process import OtherProcess
from dbuffer.tools.render import doctor_parts, terminal_lines
from tests.support.children import Child, Command, preload
from tests.support.commands import call
from tests.support.forked_program import fork_programs
from tests.support.moments import die
from tests.support.patterns import SMALL, newest
from tests.support.stores import contents, fill, small_disk, without_flock
from tests.support.waiting import TIMEOUT_S, until

MEGABYTE = 1 << 20
NOBODY = 65534

preload("dbuffer.tools.doctor", "tests.support.forked_program")

WATCH_S = Timing().doctor_watch_s

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def as_users_have_it() -> None:
    """For a test whose examinations start interpreters."""


@pytest.fixture(autouse=True)
def quick_examinations(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, timing: Timing
) -> None:
    timing.doctor_watch_s = WATCH_S / 10  # by two processes at full speed
    if "as_users_have_it" not in request.fixturenames:
        fork_programs(monkeypatch)


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


def found_by(examination: doctor.Examination, probe: str) -> doctor.Finding:
    (finding,) = (each for each in examination.findings if each.probe == probe)
    return finding


def broken_guarantees(examination: doctor.Examination) -> dict[str, int | None]:
    return {finding.probe: finding.guarantee for finding in examination.broken}


def left_behind(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith(scratch.PREFIX)]


# A place where all is well


@pytest.mark.usefixtures("as_users_have_it")
def test_a_good_place(any_place: Path, timing: Timing) -> None:
    timing.doctor_watch_s = WATCH_S
    said: list[str] = []
    examination = doctor.examine(any_place, progress=said.append)
    assert said == [each.probe for each in examination.findings if each.probe != "other hosts"]
    assert examination.broken == ()
    assert examination.probed_in == str(any_place)
    assert not examination.is_network
    for probe in (
        *("write and flush", "private directories", "replacing a file", "locks (flock)"),
        *("allocation", "shared mappings", "inotify", "other hosts"),
    ):
        assert found_by(examination, probe).verdict == "good", found_by(examination, probe)
    assert list(any_place.iterdir()) == []


def test_where_a_mount_comes_from(disk):
    """Of a directory that is not there, which is not made."""
    examination = doctor.examine(disk / "on the way" / "store")
    assert (examination.probed_in, examination.broken) == (str(disk), ())
    assert (examination.filesystem, examination.source) == ("tmpfs", "dbuffer-test")
    assert f"size={8 * MEGABYTE // 1024}k" in examination.options
    assert "8.39 MB" in found_by(examination, "room").result
    assert list(disk.iterdir()) == []


def test_what_is_no_place_or_has_none(capsys, place):
    """A path is refused if nothing of it exists, and noted if more is missing than its end."""
    for more in (), ("--peer", "--timeout-s", "0"):
        code, out, err = call(capsys, "doctor", "/shraed/policy", *more)
        assert (code, out) == (2, "")
        assert "there is no /shraed, and probes of / would tell of another mount" in err
    path = place / "shraed" / "policy"
    out = call(capsys, "doctor", path)[1]
    row = next(line for line in out.splitlines() if "owner and mode" in line)
    assert row.startswith("note\t")
    assert f"{path} does not exist, nor does {path.parent}" in row
    assert "note\towner and mode" not in call(capsys, "doctor", place / "policy")[1]
    (place / "file").touch()
    for path in (place / "file", place / "file" / "store"):
        with pytest.raises(dbuffer.StoreAccessError):
            doctor.examine(path)


def test_a_store_is_not_touched(damaged):
    def state() -> tuple[dict[str, bytes | None], list[int]]:
        return contents(damaged), [path.stat().st_mtime_ns for path in sorted(damaged.rglob("*.*"))]

    before = state()
    assert doctor.examine(damaged).broken == ()
    assert state() == before
    assert newest(damaged) == 3
    with dbuffer.WeightSender(damaged) as sender:
        assert doctor.examine(damaged).broken == ()
        sender.send(SMALL.weights(4))
    assert newest(damaged) == 4


# Places where a guarantee cannot hold


def test_no_room_and_read_only(disk):
    for leave_bytes in (0, MEGABYTE // 2):
        filler = fill(disk, leave_bytes)
        examination = doctor.examine(disk)
        assert broken_guarantees(examination) == {"room": 3, "write and flush": 3}
        assert list(disk.iterdir()) == [filler]
        filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk.parent)], check=True)
    examination = doctor.examine(disk)
    assert broken_guarantees(examination) == {"write and flush": 3}
    assert "Read-only file system" in found_by(examination, "write and flush").result
    assert "not tried" in found_by(examination, "the rest").result


def assert_refused_unless_shared(place: Path) -> None:
    assert broken_guarantees(doctor.examine(place)) == {"owner and mode": 6}
    assert doctor.examine(place, allow_shared_store=True).broken == ()


def test_a_directory_that_others_can_write_to(place):
    """One for everybody may hold stores, and be none."""
    for mode in (0o777, 0o770, 0o707):
        place.chmod(mode)
        assert_refused_unless_shared(place)
    place.chmod(0o1777)  # as /dev/shm
    assert found_by(doctor.examine(place), "owner and mode").verdict == "adapted"
    with dbuffer.WeightSender(place, allow_shared_store=True) as sender:
        sender.send(SMALL.weights(1))
    assert_refused_unless_shared(place)


@needs_root
def test_a_store_of_somebody_else(damaged):
    os.chown(damaged, NOBODY, -1)
    assert_refused_unless_shared(damaged)


def fail(number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def replace_slowly(path: Path, data: bytes, *, scratch: Path, durable: bool = False) -> None:
    """As a filesystem without renames would."""
    with path.open("wb") as file:
        file.write(data[:1])
        file.flush()
        file.write(data[1:-1] + b"!")


def replace_by_unlinking(path: Path, data: bytes, *, scratch: Path, durable: bool = False) -> None:
    (scratch / "new").write_bytes(data)
    path.unlink(missing_ok=True)
    time.sleep(0.001)
    (scratch / "new").rename(path)


def allocate_nothing(descriptor: int, num_bytes: int, path: Path) -> None:
    os.truncate(descriptor, num_bytes)


def make_open_directory(path: Path, *, parents: bool = False) -> None:
    path.mkdir()
    path.chmod(0o755)


class DeafProcess(OtherProcess):
    """Process that writes nothing into mappings."""

    def ask(self, task: str, *arguments: Any) -> Any:
        return None if task == "write_mapped" else super().ask(task, *arguments)


def mapping_of(kind: int) -> type[mmap.mmap]:
    class Mapping(mmap.mmap):
        def __new__(cls, file: int, num_bytes: int, *_: int) -> Any:
            return super().__new__(cls, file, num_bytes, kind)

    return Mapping


FILESYSTEM, PROBES = "dbuffer.store.filesystem", "dbuffer.tools.doctor.probes"


@pytest.mark.parametrize(
    ("name", "behaviour", "broken"),
    [
        (f"{FILESYSTEM}.sync_file", fail(errno.EIO), {"write and flush": 3}),
        (f"{FILESYSTEM}.sync_directory", fail(errno.EINVAL), {"write and flush": 3}),
        (f"{FILESYSTEM}.replace_file", replace_slowly, {"replacing a file": 1}),
        (f"{FILESYSTEM}.replace_file", replace_by_unlinking, {"replacing a file": 1}),
        (f"{FILESYSTEM}.try_lock", fail(errno.ENOLCK), {"locks (flock)": 1}),
        (f"{FILESYSTEM}.allocate", allocate_nothing, {"allocation": 3}),
        (f"{FILESYSTEM}.make_directory", make_open_directory, {"private directories": 6}),
        (f"{PROBES}.mmap.mmap", mapping_of(mmap.MAP_PRIVATE), {"shared mappings": 1}),
        (f"{PROBES}.mmap.mmap", mapping_of(mmap.MAP_SHARED), {"shared mappings": 1}),
        (f"{PROBES}.OtherProcess", DeafProcess, {"shared mappings": 1}),
    ],
)
def test_what_does_not_work(place, monkeypatch, name, behaviour, broken, timing):
    monkeypatch.setattr(name, behaviour)
    if name.endswith("replace_file"):
        timing.doctor_watch_s = WATCH_S
    assert broken_guarantees(doctor.examine(place)) == broken
    assert list(place.iterdir()) == []


def test_every_error_leaves_nothing_behind(place, monkeypatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for function in ("replace_file", "allocate", "make_directory", "sync_file", "try_lock"):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, function, stop)
            with pytest.raises(KeyboardInterrupt):
                doctor.examine(place)
        assert list(place.iterdir()) == [], function


# What dbuffer does without


def test_without_locks(place, monkeypatch):
    for name in ("try_lock", "lock_within", "unlock"):
        monkeypatch.setattr(filesystem, name, getattr(filesystem, name))
    without_flock()
    examination = doctor.examine(place)
    assert examination.broken == ()
    assert found_by(examination, "locks (flock)").verdict == "adapted"


@pytest.mark.timing(doctor_event_s=0.1)
def test_without_events(place, monkeypatch, caplog):
    monkeypatch.setattr("dbuffer.store.watcher.BaseObserver.start", fail(errno.EMFILE))
    examination = doctor.examine(place)
    assert examination.broken == ()
    finding = found_by(examination, "inotify")
    assert finding.verdict == "adapted"
    assert "poll_interval_s" in finding.consequence


def test_few_inotify_instances(place, monkeypatch):
    class Library:
        """Of a kernel that has two more to give."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._left = 2

        def inotify_init1(self, flags: int) -> int:
            self._left -= 1
            return os.open(os.devnull, os.O_RDONLY) if self._left >= 0 else -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    finding = found_by(doctor.examine(place), "inotify instances")
    assert (finding.verdict, finding.result) == ("adapted", "only 2 free")


def test_on_a_network_mount(place, monkeypatch):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, "network")
    examination = doctor.examine(place)
    assert examination.is_network
    assert examination.broken == ()
    assert "DBUFFER_MOUNT=network" in found_by(examination, "mount").result
    assert "read into memory" in found_by(examination, "mount").consequence
    assert "polling" in found_by(examination, "mount").consequence
    others = found_by(examination, "other hosts")
    assert others.verdict == "unknown"
    assert f"dbuffer doctor {place} --peer" in others.consequence


# Two hosts: two processes here, and real ones over NFS in tests/lab


def be_peer(
    connection: Connection,
    place: Path,
    change: Callable[[], object] = lambda: None,
    error: type[Exception] | None = None,
) -> None:
    """Wait for a host, after a change of this process, which makes it fail."""
    change()
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        connection.send(peer.wait_for_host(place, timeout_s=TIMEOUT_S))


def wait_for_peers(place: Path, count: int = 1) -> None:
    def have_come() -> bool:
        return len(list(place.glob(f"{scratch.PREFIX}peer-*/peer.json"))) >= count

    until("peers wait", have_come, TIMEOUT_S)


def examine_with(place: Path, ends_with: int, *peer: object) -> doctor.Examination:
    """Examine a place where another host waits, which ends in this way."""
    with Child(be_peer, place, *peer) as child:
        wait_for_peers(place)
        examination = doctor.examine(place)
        assert child.wait() == ends_with
    return examination


@pytest.mark.parametrize("waits_first", ["peer", "host"])
def test_two_hosts_measure_together(any_place, waits_first):
    with Child(be_peer, any_place) as child:
        peer_pid = child.pid
        if waits_first == "peer":
            wait_for_peers(any_place)
        examination = doctor.examine(any_place, timeout_s=0 if waits_first == "peer" else TIMEOUT_S)
        report = child.receive()
        assert child.wait() == 0
    (meeting,) = examination.peers
    assert (meeting.pid, report["pid"]) == (peer_pid, os.getpid())
    assert meeting.locks_exclude is True
    assert meeting.is_same_kernel
    assert (meeting.is_late, meeting.problem) == (False, None)
    assert len(meeting.delays_ms) == 20
    assert all(0 < delay_ms < 10_000 for delay_ms in meeting.delays_ms)
    assert report["num_seen"] == 1 + 20 + 1  # the first is not counted, the last is for the locks
    assert examination.broken == ()
    assert list(any_place.iterdir()) == []


def test_several_peers_are_measured_with_in_turn(place):
    with Child(be_peer, place) as one, Child(be_peer, place) as other:
        wait_for_peers(place, 2)
        examination = doctor.examine(place)
        assert {meeting.pid for meeting in examination.peers} == {one.pid, other.pid}
        assert one.receive()["pid"] == other.receive()["pid"] == os.getpid()


def be_on_a_network() -> None:
    os.environ[filesystem.MOUNT_VARIABLE] = "network"


def see_nothing_new() -> None:
    DoubleBuffer.newest_pointer = lambda store, seen=None: seen or store.pointer()


def read_other_bytes() -> None:
    be_on_a_network()
    filesystem.read_into = lambda descriptor, offset, memory: memory.nbytes


@pytest.mark.parametrize(
    ("change", "error", "here", "broken", "text"),
    [
        (be_on_a_network, None, "local", [1], "set DBUFFER_MOUNT=network here"),
        (without_flock, None, "local", [], "by its epoch"),
        (see_nothing_new, dbuffer.StoreAccessError, "local", [5], "would not see new versions"),
        (read_other_bytes, dbuffer.StoreCorruptError, "network", [1], "damaged"),
    ],
)
def test_another_host_on_which_not_all_is_well(
    place, monkeypatch, timing, change, error, here, broken, text
):
    monkeypatch.setenv(filesystem.MOUNT_VARIABLE, here)
    if change is see_nothing_new:
        timing.peer_limit_s = 0.1
    examination = examine_with(place, 0, change, error)
    (meeting,) = examination.peers
    assert meeting.is_late is (change is see_nothing_new)
    assert (meeting.locks_exclude is False) is (change is without_flock)
    assert [finding.guarantee for finding in examination.broken] == broken
    assert any(text in f"{each.result} {each.consequence}" for each in examination.findings)
    assert list(place.iterdir()) == []


def die_when_met() -> None:
    peer._receive = lambda _: die()


@pytest.mark.timing(peer_answer_s=0.5)
def test_a_peer_that_dies(place):
    examination = examine_with(place, -signal.SIGKILL, die_when_met)
    assert examination.peers == ()
    assert found_by(examination, "other hosts").verdict == "unknown"
    assert list(place.iterdir()) == []


def be_host_that_dies(connection: Connection, place: Path) -> None:
    peer._locks_exclude = lambda _: die()
    doctor.examine(place, timeout_s=TIMEOUT_S)


@pytest.mark.timing(peer_silence_s=1.0)
def test_a_first_host_that_dies(place):
    with Child(be_host_that_dies, place):
        with pytest.raises(dbuffer.StoreAccessError):
            peer.wait_for_host(place, timeout_s=TIMEOUT_S)
    assert list(place.iterdir()) == []


@needs_root
@pytest.mark.parametrize("kind", ["of somebody else", "open to others", "a link"])
def test_what_only_looks_like_a_peer_is_left_alone(place, tmp_path, kind):
    trap = place / f"{scratch.PREFIX}peer-trap"
    trap.mkdir()
    (trap / "peer.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (trap / "store").symlink_to(tmp_path / "elsewhere")
    trap.chmod(0o777 if kind == "open to others" else 0o700)
    if kind == "of somebody else":
        os.chown(trap, NOBODY, -1)
    elif kind == "a link":
        shutil.copytree(trap, tmp_path / "real", symlinks=True)
        shutil.rmtree(trap)
        trap.symlink_to(tmp_path / "real")
    examination = doctor.examine(place)
    assert examination.peers == ()
    assert {path.name for path in trap.iterdir()} == {"peer.json", "store"}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_killed_doctors_left_goes_after_a_while(place):
    old, young = place / f"{scratch.PREFIX}peer-old", place / f"{scratch.PREFIX}probe-young"
    for path in (old, young):
        (path / "inside").mkdir(parents=True)
        path.chmod(0o700)
    os.utime(old, (time.time() - 2 * TIMING.doctor_stale_s,) * 2)
    doctor.examine(place)
    assert left_behind(place) == [young]


# The command


def test_command(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    """It names the guarantee that cannot hold, if there is one."""
    path, before = place / "[bold]a store", signal.getsignal(signal.SIGTERM)
    path.mkdir(mode=0o700)
    code, out, _ = call(capsys, "doctor", path)
    assert (code, "BROKEN" in out) == (0, False)
    for finding in doctor.examine(path).findings:
        assert finding.probe in out
    assert signal.getsignal(signal.SIGTERM) is before
    path.chmod(0o777)
    code, out, _ = call(capsys, "doctor", path)
    assert (code, "BROKEN" in out) == (1, True)
    assert "guarantee 6 (Bad input is rejected) cannot hold here" in out
    shown = "\n".join(terminal_lines(doctor_parts(doctor.examine(path)), 400))
    assert shown.count("[bold]a store") == 3, "not taken for markup"
    found = {}
    for option, is_sound in ((), False), (("--allow-shared-store",), True):
        code, out, _ = call(capsys, "doctor", path, "--json", *option)
        found = json.loads(out)
        assert (code, found["is_sound"]) == (int(not is_sound), is_sound)
        broken = [f["guarantee"] for f in found["findings"] if f["verdict"] == "broken"]
        assert broken == ([] if is_sound else [6])
    assert {finding["verdict"] for finding in found["findings"]} <= {"good", "adapted"}


@pytest.mark.usefixtures("as_users_have_it")
def test_command_when_the_other_host_does_not_come(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert call(capsys, "doctor", place, "--timeout-s", 0.1)[0] == 3
    code, _, err = call(capsys, "doctor", place, "--peer", "--timeout-s", 0.1)
    assert code == 3
    assert err.startswith(f"dbuffer: no 'dbuffer doctor {place}' came")
    assert list(place.iterdir()) == []


def test_commands_on_two_hosts(place, tmp_path):
    arguments = ("doctor", place, "--timeout-s", 60, "--json")
    with Command(tmp_path, *arguments, "--peer") as waiting, Command(tmp_path, *arguments) as host:
        results = []
        for command in (host, waiting):
            code, out, errors = command.communicate()
            assert code == 0, errors
            results.append(json.loads(out))
    found, report = results
    (meeting,) = found["peers"]
    assert (len(meeting["delays_ms"]), meeting["problem"]) == (20, None)
    assert report.keys() == {"host", "pid", "num_seen"}
    assert report["num_seen"] == 22
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_that_is_told_to_stop(place, tmp_path, number):
    with Command(tmp_path, "doctor", place, "--peer") as waiting:
        wait_for_peers(place)
        waiting.signal(number)
        assert waiting.wait() != 0
    assert list(place.iterdir()) == []
