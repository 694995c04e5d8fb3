"""The NFS lab: a real server and real clients, in a kernel that runs as an ordinary process.

A scenario is a test that runs inside::

    from guest import Guest
    from lab import scenario

    @scenario()
    def test_a_file_is_seen_by_the_other_client(guest: Guest) -> None:
        (guest.path("w") / "file").write_text("hello")
        assert (guest.path("r") / "file").read_text() == "hello"

It becomes one pytest test for each NFS version. Its body runs in a process of its own in the
guest, with root's rights there; :class:`guest.Guest` says what it can do: `guest.on("r",
function, ...)` runs a function on a client, `guest.cut("w")` pulls a cable, and so on. A scenario
fails by an assertion or any other exception; what it prints is shown then. Whatever it has started
or cut off is ended and repaired after it.

Booting takes 5 s of processor time and importing dbuffer in the guest 10 s, so one guest runs all
scenarios that pytest has selected; each test waits for its result. Each client has mounted the
server twice, over NFSv3 and NFSv4.2, with caches of their own. So that the guest does not idle:

* most scenarios run one by one, and may do what they like to the clients w, r and r2;
* ``quiet=True``: it mostly waits, and runs beside those, on clients of its own: q, q2 and q3;
* ``disruptive=True``: it touches the server, its disk or all caches, and runs when the quiet ones
  have ended.

Outside of soaks only those with ``both=True`` run over NFSv3 too: what rests on its protocol.

`pytest tests/lab` needs Linux on x86-64, a distribution with apt-get, and on a processor with AMX a
C compiler; elsewhere the tests are skipped. Set DBUFFER_NFS_LAB=require to let them fail instead.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.lab import uml
from tests.support import ROOT
from tests.support.soak import Record, is_soak

VERSIONS = ("3", "4.2")
CLIENTS = ("w", "r", "r2", "q", "q2", "q3")
EXPORT_MB = 1024
MEMORY_MB = 2560

LIMIT_S = 2000.0 if is_soak() else 400.0
"""A scenario that takes longer hangs. Most take 10 s; beside other work, on a slow machine, 100;
and in a soak one takes 650."""

HERE = Path(__file__).resolve().parent

_STALL_S = LIMIT_S + 100.0
"""A guest that has had no result for so long hangs: longer than a scenario may take there."""

_SIGN_OF_LIFE = "lab: the kernel is up"
"""What `init_root.sh` says first; after that, a failure is the lab's own."""

_GUARD = """
exec 3<&0
setsid "$@" </dev/null 3<&- &
guest=$!
{ read -r _ <&3; [ -e "$0/ended" ] || kill -s KILL -- "-$guest"; } &
wait "$guest"
: > "$0/ended"
wait
rm -rf "$0"
"""
"""A guest is many processes, in a session of their own. This shell ends them all, and removes the
folder that is its first argument, when its input ends: pytest has closed it, or is dead. The
file ``ended`` tells that the guest has ended by itself."""


@dataclass(frozen=True)
class Scenario:
    """Function to be run in the guest."""

    module: str
    name: str
    quiet: bool
    disruptive: bool
    both: bool


@dataclass(frozen=True)
class Result:
    """What came of a scenario."""

    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    detail: str
    output: str
    duration_s: float
    figures: dict[str, int]
    """As for ``record_property``; see `soak.Record`."""


def scenario(
    *, quiet: bool = False, disruptive: bool = False, both: bool = False
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a test of a function that runs in the guest; see the top of this file."""

    def decorate(function: Callable[[Any], None]) -> Callable[..., None]:
        described = Scenario(function.__module__, function.__name__, quiet, disruptive, both)

        def test(result_of: Callable[[Scenario], Result], record_property: Record) -> None:
            result = result_of(described)
            for name, number in result.figures.items():
                record_property(name, number)
            print(f"{result.output}({result.duration_s:.1f} s in the guest)")
            if result.outcome == "skipped":
                pytest.skip(result.detail)
            if result.outcome != "passed":
                pytest.fail(result.detail, pytrace=False)

        test.__name__, test.__qualname__ = function.__name__, function.__qualname__
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        test.scenario = described  # type: ignore[attr-defined]
        test.body = function  # type: ignore[attr-defined]
        return test

    return decorate


class Lab:
    """A guest, from its boot to its end, and the scenarios that it runs."""

    def __init__(self, queue: list[tuple[Scenario, str]]) -> None:
        self._changed_s = time.monotonic()
        self._num_results = 0
        parts = uml.parts()
        self._job = Path(tempfile.mkdtemp(prefix="dbuffer-nfs-"))
        try:
            self._prepare(queue)
            self._guard = self._boot(parts)
        except BaseException:
            shutil.rmtree(self._job)
            raise

    def result_of(self, version: str, scenario: Scenario) -> Result:
        """Wait for a scenario's end."""
        path = self._job / f"{scenario.name}-v{version}.json"
        while not path.exists():
            self._check_alive()
            time.sleep(0.05)
        return Result(**json.loads(path.read_text()))

    def close(self) -> None:
        """Switch the guest off."""
        self._guard.communicate()  # closes its input

    def _prepare(self, queue: list[tuple[Scenario, str]]) -> None:
        for script in HERE.glob("init_*.sh"):
            shutil.copy(script, self._job)
        described = [{**asdict(scenario), "version": version} for scenario, version in queue]
        (self._job / "queue.json").write_text(json.dumps(described))
        settings = {
            "VERSIONS": " ".join(VERSIONS),
            "CLIENTS": " ".join(CLIENTS),
            "EXPORT_MB": str(EXPORT_MB),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        if is_soak():
            settings["DBUFFER_SOAK"] = "1"
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
        (self._job / "settings.sh").write_text("".join(lines))

    def _boot(self, parts: Path) -> subprocess.Popen[bytes]:
        kernel = [
            *uml.preloaded(self._job),
            str(parts / "uml/usr/bin/linux.uml"),
            f"mem={MEMORY_MB}M",
            "root=/dev/root rootfstype=hostfs rootflags=/ ro",
            f"init={self._job}/init_root.sh",
            f"parts={parts}",
            f"job={self._job}",
            f"uml_dir={self._job}",
            "con=null con0=null,fd:1 quiet loglevel=1 selinux=0",
        ]
        words = [word for part in kernel for word in part.split(" ")]
        with (self._job / "console.txt").open("wb") as console:
            return subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, str(self._job), *words],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(_memory_directory())},
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def _check_alive(self) -> None:
        num_results = len(list(self._job.glob("*-v*.json")))
        if num_results != self._num_results:
            self._num_results, self._changed_s = num_results, time.monotonic()
        has_ended = (self._job / "ended").exists()
        if not has_ended and time.monotonic() - self._changed_s < _STALL_S:
            return
        console = (self._job / "console.txt").read_text(errors="replace")
        if _SIGN_OF_LIFE not in console:
            skip_or_fail(uml.UnavailableError(f"cannot boot User-Mode Linux:\n{console}"))
        problem = "ended" if has_ended else f"has done nothing for {_STALL_S} s"
        pytest.fail(f"the guest {problem}; its console:\n{console[-3000:]}", pytrace=False)


def skip_or_fail(error: uml.UnavailableError) -> NoReturn:
    """Skip the test, unless the lab is required."""
    if os.environ.get("DBUFFER_NFS_LAB") == "require":
        pytest.fail(f"the NFS lab {error}", pytrace=False)
    pytest.skip(f"the NFS lab {error}")


def _memory_directory() -> Path:
    """Where a guest's memory can lie, as a file that has no name: it is mapped and run from."""
    for path in (Path("/dev/shm"), Path(tempfile.gettempdir()), uml.cache_directory()):
        if path.is_dir() and os.access(path, os.W_OK):
            found = os.statvfs(path)
            has_room = found.f_bavail * found.f_frsize > MEMORY_MB << 20
            if has_room and not found.f_flag & os.ST_NOEXEC:
                return path
    raise uml.UnavailableError(f"no directory has {MEMORY_MB} MB for a guest's memory")
