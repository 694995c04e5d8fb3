"""Runs a SeaweedFS server in a directory until standard input ends, then removes what it left.

The arguments are the directory, the ports, and the command after ``--``. Standard input ends when
the test run does, however it ends. The program needs neither dbuffer nor its packages.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end = sys.argv.index("--")
    directory, *ports = sys.argv[1:end]
    with (Path(directory) / "log").open("wb") as log:
        server = subprocess.Popen(
            sys.argv[end + 1 :],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,
        )
    sys.stdin.read()
    server.kill()
    server.wait()
    shutil.rmtree(directory)
    for port in ports:  # no option moves these sockets
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink()


if __name__ == "__main__":
    main()
