"""SLURM's lists of hosts, expanded without calling ``scontrol``.

A list is ``a1,b[2-4,7]-gpu[01-02]``: commas between entries; in each, brackets of numbers and
ranges, of which all combinations are meant, the last bracket counting fastest. A number keeps the
width that it is written with. The syntax is that of the manual pages of sinfo and scontrol.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping

from dbuffer.errors import BridgeSetupError, OptionError

NODELIST_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""The second is the older name of the first."""

MAX_HOSTS = 65536
"""No cluster has so many; ``n[0-999999999]`` is a mistake that would fill the memory."""

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


def inference_nodes(
    num_inference_nodes: int, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The nodes of this job that run engines: its last ones, as Atropos has it."""
    variable = next((name for name in NODELIST_VARIABLES if environment.get(name)), None)
    if variable is None:
        raise BridgeSetupError(
            f"num_inference_nodes is {num_inference_nodes}, but {NODELIST_VARIABLES[0]} is not "
            "set: run in a SLURM job, or set it to the job's nodes, those with engines last"
        )
    nodes = expand_hostlist(environment[variable])
    if num_inference_nodes > len(nodes):
        raise BridgeSetupError(
            f"num_inference_nodes is {num_inference_nodes}, but the job has {len(nodes)} nodes: "
            f"{variable}={environment[variable]!r:.200}"
        )
    return nodes[-num_inference_nodes:]


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
