"""Nodes of a SLURM job, and addresses that Atropos' programs use."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

from dbuffer.errors import NotReadyError

NODELIST_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")

NCCL_PORT, GLOO_PORT, INFERENCE_PORT = 26756, 26757, 26758
"""Atropos' ports for process groups. dbuffer's bridge does not use these ports."""

_HOSTS_FILE = Path("/etc/hosts")
_SCONTROL_TIMEOUT_S = 60.0


def _job_nodes() -> list[str]:
    hostlist = next(filter(None, map(os.environ.get, NODELIST_VARIABLES)), None)
    if hostlist is None:
        return []
    command = ["scontrol", "show", "hostnames", hostlist]
    try:
        result = subprocess.run(  # noqa: S603 - no shell; the list is one argument
            command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotReadyError(
            f"cannot expand SLURM's host list {hostlist!r:.200} without scontrol ({error}): "
            "install SLURM's client commands where the trainer runs, and put them on its PATH"
        ) from error
    # If the host list is invalid, scontrol exits with 0 but prints no host.
    if result.returncode or not result.stdout.strip():
        raise NotReadyError(
            f"{' '.join(command):.200} printed no hosts (exit status {result.returncode}): "
            f"{result.stderr.strip():.500}"
        )
    return result.stdout.split()


def get_inference_urls(
    num_inference_nodes: int,
) -> tuple[str | None, str | None, str | None, list[str] | None]:
    """Return the addresses of Atropos' process groups, and the nodes that run engines.

    The first three values are ``host:port`` of the NCCL, Gloo and inference groups; the last value
    is the list of nodes. If ``num_inference_nodes`` is 0, all addresses are on this machine. If the
    SLURM job has fewer nodes than ``num_inference_nodes``, the list has all nodes of the job, as in
    Atropos. If the number is negative, or if there is no SLURM job, all four values are None.
    """
    if num_inference_nodes == 0:
        first, nodes = "localhost", ["localhost"]
    else:
        if num_inference_nodes < 0 or not (job := _job_nodes()):
            return None, None, None, None
        first, nodes = job[0], job[-num_inference_nodes:]
    return f"{first}:{NCCL_PORT}", f"{first}:{GLOO_PORT}", f"{nodes[0]}:{INFERENCE_PORT}", nodes


def get_local_hostname() -> list[str]:
    """Return this host's address and names from its line in ``/etc/hosts``.

    Lines with loopback addresses are ignored. If the file has no other line for this host, return
    the address that the host's name resolves to (if it resolves), and the name.
    """
    name = socket.gethostname()
    address = ""
    with contextlib.suppress(OSError):  # the name may resolve to nothing
        address = socket.gethostbyname(name)
    with contextlib.suppress(OSError):
        for line in _HOSTS_FILE.read_text().splitlines():
            words = line.partition("#")[0].split()
            is_ours = len(words) > 1 and (words[0] == address or name in words)
            if is_ours and not words[0].startswith("127."):
                return words
    return [word for word in (address, name) if word]
