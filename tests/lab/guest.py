"""What runs inside a guest: the scenarios, one process each, and what they can do to the machines.

The guest is the server; its clients are network namespaces, mounted at ``/nfs/NAME``. `init_nfs.sh`
calls `main`, which runs the queue that `lab.py` has made.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.testing.waiting import until
from tests.lab.lab import LIMIT_S
from tests.support import children
from tests.support.soak import is_soak

LAB = Path("/lab")
EXPORT = Path("/export")
_DEVICE = "/dev/mapper/export"
_CLONE_NEWUTS = 0x04000000
_ONE_PAGE_CACHE = "1\n"


class Guest:
    """The machines of the lab, as one scenario sees them.

    Everything that is cut, filled, slowed or stopped here is repaired when the scenario has ended.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        """Of NFS: ``3`` (mounted with nolock) or ``4.2``."""
        self.clients = os.environ["CLIENTS"].split()
        self.server_path = EXPORT / name
        """The scenario's own directory as the server itself sees it, with no NFS between."""
        self.server_path.mkdir(mode=0o700)
        self.figures: dict[str, int] = {}
        """What a soak is to tell that was done."""
        self._disturbed = Path("/run", f"{name}.disturbed")
        """There is something to repair. A file, since the process that repairs is another one."""

    def path(self, client: str) -> Path:
        """The scenario's own directory as a client sees it."""
        return Path("/nfs", self.version, client, self.name)

    def on(
        self, client: str, function: Callable[..., None], *args: Any, **options: Any
    ) -> children.Child:
        """Run ``function(connection, path, *args)`` on a client; talk with it as in `support`.

        ``path`` is the scenario's directory there. The process has the client's host name, which
        is how dbuffer tells machines apart.
        """
        # Importing torch takes the guest 10 s: children are forks of this process, which has done
        # so, and not of a server that would do it again.
        fork = multiprocessing.get_context("fork")
        place = self.path(client)
        return children.Child(_as_host, client, function, (place, *args), options, processes=fork)

    def cut(self, client: str) -> None:
        """Pull a client's cable. Its system calls on the mount hang until it is back."""
        self._disturbed.touch()
        _do(f"ip link set v{client} down")

    def restore(self, client: str) -> None:
        """Plug it in again."""
        _do(f"ip link set v{client} up")

    def delay(self, client: str, delay_ms: float) -> None:
        """Let whatever the server sends to a client come later by so much; 0: as usual."""
        self._disturbed.touch()
        if delay_ms:
            _do(f"tc qdisc replace dev v{client} root netem delay {delay_ms}ms limit 100000")
        else:
            _do(f"tc qdisc del dev v{client} root", check=False)

    def stop_server(self) -> None:
        """Stop the server. It forgets its clients; they wait for it."""
        self._disturbed.touch()
        _do("rpc.nfsd 0")

    def start_server(self) -> None:
        """Start it. On v4, clients have 10 s to say what they had open; others wait meanwhile."""
        _do("rpc.nfsd --grace-time 10 --lease-time 10 8")

    def restart_server(self) -> None:
        """Stop it and start it again."""
        self.stop_server()
        self.start_server()

    def fill_disk(self, free_bytes: int = 0) -> None:
        """Leave so many bytes free on the server's disk."""
        self._disturbed.touch()
        self.free_disk()
        found = os.statvfs(EXPORT)
        left = found.f_bavail * found.f_frsize - free_bytes
        size, step = 0, 64 << 20
        with (EXPORT / "ballast").open("wb") as file:
            while step >= found.f_frsize:
                # How many blocks go into the file's own map is not known before.
                try:
                    if size + step <= left:
                        os.posix_fallocate(file.fileno(), size, step)
                        size += step
                        continue
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                step //= 4
            os.fsync(file.fileno())

    def free_disk(self) -> None:
        """Take away what `fill_disk` has put there."""
        (EXPORT / "ballast").unlink(missing_ok=True)
        _do("sync --file-system /export")  # ext4 gives freed blocks out again after a commit

    def drop_caches(self) -> None:
        """Let every client, and the server, forget the clean pages that it holds."""
        Path("/proc/sys/vm/drop_caches").write_text(_ONE_PAGE_CACHE)

    def power_cut(self) -> None:
        """From now on nobody hears of the server, and nothing that it writes reaches its disk."""
        for client in self.clients:
            self.cut(client)
        _set_disk("flakey {disk} 0 0 60 1 drop_writes")
        self.stop_server()

    def power_restore(self) -> None:
        """Boot the server again, from what its disk holds: what it had in memory is gone."""
        _do("exportfs -ua")
        _do("exportfs -f")
        until("/export is unmounted", lambda: _do("umount /export", check=False), 20, every_s=0.2)
        _set_disk("linear {disk} 0")
        _do(f"mount {_DEVICE} /export")
        _do("exportfs -ra")
        self.start_server()
        for client in self.clients:
            self.restore(client)

    def nfs_read_bytes(self, client: str) -> int:
        """Bytes that a client has read from the server so far, by its kernel's own count."""
        lines = iter(Path("/proc/self/mountstats").read_text().splitlines())
        for line in lines:
            if f" mounted on /nfs/{self.version}/{client} " in line:
                counts = next(line for line in lines if line.startswith("\tbytes:"))
                return int(counts.split()[5])
        raise LookupError(f"no mount of client {client}")

    def _repair(self) -> None:
        if not self._disturbed.exists():
            return
        if "flakey" in _output("dmsetup table export"):
            self.power_restore()
        for client in self.clients:
            self.restore(client)
            self.delay(client, 0)
        if Path("/proc/fs/nfsd/threads").read_text().strip() == "0":
            self.start_server()
        if (EXPORT / "ballast").exists():
            self.free_disk()


def _as_host(
    connection: Connection,
    client: str,
    function: Callable[..., None],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(client)
    function(connection, *args, **options)


def _set_disk(target: str) -> None:
    """Put another target under the export; ``{disk}`` is the device below."""
    _, num_sectors, *_ = _output("dmsetup table export").split()
    disk = _output("losetup --noheadings --output NAME --associated /run/disk/image").strip()
    _do("dmsetup suspend --nolockfs export")
    _do(f"dmsetup load export --table '0 {num_sectors} {target.format(disk=disk)}'")
    _do("dmsetup resume export")


def _do(command: str, *, check: bool = True) -> bool:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip() or done.returncode}")
    return done.returncode == 0


def _output(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def times_to_look(guest: Guest) -> int:
    """How often to try to look between two changes of a directory, which v3 may take for one."""
    return 5 if guest.version == "3" or is_soak() else 2


class Running:
    """A scenario's process, and all that it starts."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.described = described
        self.name = f"{described['name']}-v{described['version']}"
        self._started = time.monotonic()
        self._output = Path("/run", f"{self.name}.output")
        self._result = Path("/run", f"{self.name}.result")
        self._guest = Guest(self.name, described["version"])
        self._pid = os.fork()
        if self._pid == 0:
            self._run()

    def has_ended(self) -> bool:
        """Whether it is over; then its result is written and its traces are removed."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        took_s = time.monotonic() - self._started
        is_late = not pid and took_s > LIMIT_S
        if not pid and not is_late:
            return False
        if is_late:
            _signal_session(self._pid, signal.SIGABRT)  # faulthandler says where they are
            time.sleep(1)
        _end_session(self._pid)
        if not pid:
            os.waitpid(self._pid, 0)
        ended_by = f"took longer than {LIMIT_S} s"
        if pid:
            ended_by = f"its process ended with {os.waitstatus_to_exitcode(status)}"
        self._report(ended_by, took_s)
        if not self.described["quiet"]:
            self._guest._repair()
        _do(f"rm -rf {self._guest.server_path}")
        return True

    def _report(self, ended_by: str, took_s: float) -> None:
        outcome, detail, figures = "failed", ended_by, {}
        if self._result.exists():
            outcome, detail, figures = json.loads(self._result.read_text())
        if outcome == "failed":
            detail += "\nthe kernel said:\n" + _output("dmesg | tail -n 12")
        result = {
            "outcome": outcome,
            "detail": detail,
            "output": self._output.read_text(errors="replace")[-20_000:],
            "duration_s": took_s,
            "figures": figures,
        }
        temporary = LAB / f"{self.name}.tmp"
        with temporary.open("w") as file:
            json.dump(result, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(LAB / f"{self.name}.json")

    def _run(self) -> None:
        os.setsid()
        number = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(number, 1)
        os.dup2(number, 2)
        faulthandler.enable()
        outcome, detail = "passed", ""
        try:
            module = importlib.import_module(self.described["module"])
            warnings.simplefilter("error")
            getattr(module, self.described["name"]).body(self._guest)
        except pytest.skip.Exception as reason:
            outcome, detail = "skipped", str(reason)
        except BaseException as error:
            own = error.__traceback__.tb_next if error.__traceback__ else None
            described = traceback.TracebackException(
                type(error), error, own, capture_locals=True, compact=True
            )
            outcome, detail = "failed", "".join(described.format())
        sys.stdout.flush()
        temporary = self._result.with_suffix(".tmp")
        temporary.write_text(json.dumps((outcome, detail, self._guest.figures)))
        temporary.rename(self._result)
        os._exit(0)


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its_session, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_session) == session and state != "Z":
                members.append(int(path.parent.name))
    return members


def _signal_session(session: int, number: int) -> None:
    for pid in _members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end_session(session: int) -> None:
    _signal_session(session, signal.SIGKILL)
    until("the scenario's processes are gone", lambda: not _members(session), 20)


def run_all(queue: list[dict[str, Any]]) -> None:
    """Quiet scenarios at once, others one by one beside them, disruptive ones when all are done."""
    running = [Running(described) for described in queue if described["quiet"]]
    others = [described for described in queue if not described["quiet"]]
    for described in sorted(others, key=lambda one: one["disruptive"]):
        _wait(running, at_most=0 if described["disruptive"] else len(running))
        alone = Running(described)
        while not alone.has_ended():
            _wait(running, at_most=len(running))
            time.sleep(0.1)
    _wait(running, at_most=0)


def _wait(running: list[Running], *, at_most: int) -> None:
    """Take those that have ended off the list, until so many are left."""
    while True:
        running[:] = [one for one in running if not one.has_ended()]
        if len(running) <= at_most:
            return
        time.sleep(0.1)


def main() -> None:
    """Run the queue; imports come first, and not in each of the many processes forked off this."""
    _do("dmesg --clear")  # of the boot
    queue = json.loads((LAB / "queue.json").read_text())
    for module in dict.fromkeys(one["module"] for one in queue):
        importlib.import_module(module)
    for name in dbuffer.__all__:
        getattr(dbuffer, name)
    for module in ("zstandard", "multiprocessing.popen_fork", "tests.support.frozen"):
        importlib.import_module(module)
    run_all(queue)
