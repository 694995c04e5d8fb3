"""The nodes of a SLURM job, and addresses under Atropos' names for programs that ask for them.

SLURM's lists of hosts are expanded without calling ``scontrol``. A list is
``a1,b[2-4,7]-gpu[01-02]``: commas between entries; in each, brackets of numbers and ranges, of
which all combinations are meant, the last bracket counting fastest. A number keeps the width that
it is written with. The syntax is that of the manual pages of sinfo and scontrol.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from dbuffer.errors import NotReadyError, OptionError

NODELIST_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""The second is the older name of the first."""

MAX_HOSTS = 65536
"""No cluster has so many; ``n[0-999999999]`` is a mistake that would fill the memory."""

NCCL_PORT, GLOO_PORT, INFERENCE_PORT = 26756, 26757, 26758
"""Atropos' own. The bridge itself joins no process group, and needs none of them."""

Urls: TypeAlias = tuple[str | None, str | None, str | None, list[str] | None]

_HOSTS_FILE = Path("/etc/hosts")
_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of a list as SLURM writes it, in its order.

    Raises:
        OptionError: (a ``ValueError``) it is not such a list.
    """
    hosts: list[str] = []
    for entry in _entries(hostlist):
        pieces = [_expand_piece(match, hostlist) for match in _PIECE.finditer(entry)]
        for names in itertools.product(*pieces):
            hosts.append("".join(names))
            if len(hosts) > MAX_HOSTS:
                raise OptionError(
                    f"the host list {hostlist!r:.200} has more than {MAX_HOSTS} hosts"
                )
    return hosts


def job_nodes() -> list[str]:
    """The nodes of this SLURM job; none outside of one."""
    hostlist = next(filter(None, map(os.environ.get, NODELIST_VARIABLES)), None)
    return [] if hostlist is None else expand_hostlist(hostlist)


def inference_nodes(num_inference_nodes: int) -> list[str]:
    """The nodes of this job that run engines: its last ones, as Atropos has it."""
    nodes = job_nodes()
    if not nodes:
        raise NotReadyError(
            f"num_inference_nodes is {num_inference_nodes}, but {NODELIST_VARIABLES[0]} is not "
            "set: run in a SLURM job, or set it to the job's nodes, those with engines last"
        )
    if num_inference_nodes > len(nodes):
        raise NotReadyError(
            f"num_inference_nodes is {num_inference_nodes}, but the job has {len(nodes)} nodes: "
            f"{','.join(nodes):.200}"
        )
    return nodes[-num_inference_nodes:]


def get_inference_urls(num_inference_nodes: int) -> Urls:
    """Where Atropos' processes meet, and the nodes that run engines.

    Args:
        num_inference_nodes: 0: this machine; below 0, or outside of a SLURM job: none. Above the
            job's number of nodes: all of them, as Atropos has it; the bridge itself refuses that.

    Returns:
        ``host:port`` of its NCCL, Gloo and inference groups, and the nodes; or None four times.

    Raises:
        OptionError: (a ``ValueError``) its list of nodes is none.
    """
    if num_inference_nodes == 0:
        first, nodes = "localhost", ["localhost"]
    else:
        if num_inference_nodes < 0 or not (job := job_nodes()):
            return None, None, None, None
        first, nodes = job[0], job[-num_inference_nodes:]
    return f"{first}:{NCCL_PORT}", f"{first}:{GLOO_PORT}", f"{nodes[0]}:{INFERENCE_PORT}", nodes


def get_local_hostname() -> list[str]:
    """Address and names of this host: its line in ``/etc/hosts``, or else what it is called.

    A line of a loopback address does not count.
    """
    name = socket.gethostname()
    address = ""
    with contextlib.suppress(OSError):  # a name that nobody knows
        address = socket.gethostbyname(name)
    with contextlib.suppress(OSError):
        for line in _HOSTS_FILE.read_text().splitlines():
            words = line.partition("#")[0].split()
            is_ours = len(words) > 1 and (words[0] == address or name in words)
            if is_ours and not words[0].startswith("127."):
                return words
    return [word for word in (address, name) if word]


def _entries(hostlist: str) -> Iterator[str]:
    """What stands between the commas that are in no bracket."""
    position = 0
    while match := _ENTRY.match(hostlist, position):
        yield match[0]
        position = match.end()
        if hostlist[position : position + 1] != ",":
            break
        position += 1
    if position != len(hostlist) or not hostlist or hostlist.endswith(","):
        raise OptionError(
            f"{hostlist!r:.200} is not a host list of SLURM: unexpected text at character "
            f"{position + 1}"
        )


def _expand_piece(piece: re.Match[str], hostlist: str) -> list[str]:
    """A bracket's numbers, or the text between brackets."""
    if piece[2] is not None:
        return [piece[2]]
    numbers: list[str] = []
    for item in piece[1].split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last) or int(last) - int(first) >= MAX_HOSTS:
            raise OptionError(f"{hostlist!r:.200}: {item!r:.80} is not a range of host numbers")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
