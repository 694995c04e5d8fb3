"""`Process`: identity of the process that wrote a record, and whether the process has ended.

Process ids differ between containers, the kernel reuses them, and containers may share a host name.
So a record also names the boot id, the PID namespace and the start time of its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dbuffer.format.manifest import OwnedRecord

_STARTED_FIELD = 19
"""Index of the process's start time among the fields that follow its name in ``/proc/PID/stat``."""


@dataclass(frozen=True, slots=True)
class Process:
    """Identity of a process that lets other processes recognize it."""

    host: str
    boot: str
    """Boot id of the kernel, or "" if unknown. All containers of a machine share it, and it changes
    at each boot."""
    pid_namespace: int
    pid: int
    started: int

    @classmethod
    def here(cls) -> Process:
        return _of_pid(os.getpid())

    @classmethod
    def of(cls, record: OwnedRecord) -> Process:
        return cls(record.host, record.boot, record.pid_namespace, record.pid, record.started)

    @property
    def machine(self) -> str:
        return self.boot or self.host

    @property
    def can_be_seen(self) -> bool:
        """Whether the process id is valid here: boot and PID namespace are this process's."""
        this = Process.here()
        return (self.boot, self.pid_namespace) == (this.boot, this.pid_namespace) and (
            bool(self.boot) or self.host == this.host
        )

    @property
    def state(self) -> str:
        """Problem of the process, such as "has ended", or "" if none can be seen from here."""
        if self.has_ended():
            return "has ended"
        is_stopped = self.can_be_seen and _state_of(self.pid)[0] in ("T", "t")
        return "is stopped (SIGSTOP)" if is_stopped else ""

    def has_ended(self) -> bool:
        """Whether the process is known to be gone, or to be a zombie."""
        if not self.can_be_seen:
            return False
        if not _has_process(self.pid):
            return True
        state, started = _state_of(self.pid)
        if not state:  # hidden, or reaped by its parent meanwhile
            return not _has_process(self.pid)
        return state in ("Z", "X") or (0 not in (started, self.started) and started != self.started)


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OverflowError:  # larger than any process id
        return False
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def owner_fields() -> dict[str, str | int]:
    return dataclasses.asdict(Process.here())


@functools.lru_cache(maxsize=1)
def _of_pid(pid: int) -> Process:
    boot, namespace = "", 0
    with contextlib.suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    return Process(socket.gethostname(), boot, namespace, pid, _state_of(pid)[1])


def _state_of(pid: int) -> tuple[str, int]:
    """Return state and start time of a process from ``/proc``, or "" and 0 if they are unknown."""
    try:
        # If /proc is of another PID namespace, its process ids name other processes.
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
            return "", 0
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux, hidden from this user, or ended meanwhile
        return "", 0
    return fields[0], int(fields[_STARTED_FIELD])
