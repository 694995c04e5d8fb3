"""`free_port`: a port for a server of a test."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_port() -> int:
    """A free port: nobody listens at it, and nobody else gets it while this process lives.

    It lies below those that the system gives to connections: one of these is free only as long
    as no connection is made. The name that takes it from other tests ends with the process.
    """
    for_connections = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = int(for_connections.split()[0])
    while True:
        port = random.SystemRandom().randrange(end // 2, end)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0dbuffer-test-port-{port}")
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            name.detach()
            return port
