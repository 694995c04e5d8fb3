"""Addresses under Atropos' names, for programs around the bridge that ask for them.

The bridge itself joins no process group, and needs none of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TypeAlias

from dbuffer.integrations.atropos.slurm import NODELIST_VARIABLES, expand_hostlist, inference_nodes

NCCL_PORT, GLOO_PORT, INFERENCE_PORT = 26756, 26757, 26758
"""Atropos' own."""

_HOSTS_FILE = Path("/etc/hosts")

Urls: TypeAlias = tuple[str | None, str | None, str | None, list[str] | None]


def get_inference_urls(num_inference_nodes: int) -> Urls:
    """Where Atropos' processes meet, and the nodes that run engines.

    Args:
        num_inference_nodes: 0: this machine; below 0, or outside of a SLURM job: none.

    Returns:
        ``host:port`` of its NCCL, Gloo and inference groups, and the nodes; or None four times.

    Raises:
        BridgeSetupError: the job has fewer nodes.
        OptionError: (a ``ValueError``) its list of nodes is none.
    """
    if num_inference_nodes == 0:
        first, nodes = "localhost", ["localhost"]
    else:
        job = next(filter(None, map(os.environ.get, NODELIST_VARIABLES)), None)
        if num_inference_nodes < 0 or job is None:
            return None, None, None, None
        first, nodes = expand_hostlist(job)[0], inference_nodes(num_inference_nodes)
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
