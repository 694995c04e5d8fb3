"""A network link between two processes: real packets, with a chosen rate, delay and loss.

Each process moves into a network namespace of its own, whose only way out is a TUN device. `Link`
passes packets between the two devices, so the kernel's TCP retransmits and slows down as on a real
link. Needs root, and the program `ip`.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Self

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
CONGESTION_CONTROL = "cubic"
"""Linux's default, which treats each lost packet as congestion."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MTU = 1500


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a link, the same in both directions."""

    bits_per_s: float
    round_trip_s: float
    loss: float = 0.0
    """Share of packets that are lost, at random."""

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8

    @property
    def is_hard_on_tcp(self) -> bool:
        """Whether TCP, rather than the link's rate, limits a few connections."""
        return self.loss > 0 or self.round_trip_s > 0.1

    @property
    def queue_s(self) -> float:
        """Longest time that a packet queues. A packet that would queue longer is dropped."""
        return max(0.1, self.round_trip_s)


def join_link(connection: Connection, address: str) -> None:
    """Move this process to one end of a link, and send the end's device to the parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace; are you root?")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"emulated", _IFF_TUN | _IFF_NO_PI))
    peer = CLIENT if address == SERVER else SERVER
    for command in (
        "link set lo up",
        f"addr add {address} peer {peer} dev emulated",
        f"link set emulated mtu {_MTU} up",
        f"route replace {peer} dev emulated src {address} congctl {CONGESTION_CONTROL}",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    reduction.send_handle(connection, device, os.getppid())
    os.close(device)


class Link:
    """Link between the devices that two children have sent with `join_link`."""

    def __init__(self, ends: tuple[Connection, Connection], shape: Shape) -> None:
        self.shape = shape
        self.is_cut = False
        self._devices = tuple(reduction.recv_handle(end) for end in ends)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()
        for device in self._devices:
            os.close(device)

    def _run(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        """Arrival time, number, destination and bytes of each packet on its way."""
        free_at, count = dict.fromkeys(self._devices, 0.0), 0
        others = dict(zip(self._devices, reversed(self._devices), strict=True))
        while not self._is_closed.is_set():
            wait_s = under_way[0][0] - time.monotonic() if under_way else 0.1
            readable, _, _ = select.select(self._devices, (), (), max(0.0, min(wait_s, 0.1)))
            now, shape = time.monotonic(), self.shape
            for device in readable:
                for packet in _packets(device):
                    sent_at = max(now, free_at[device]) + len(packet) / shape.bytes_per_s
                    if self.is_cut or sent_at - now > shape.queue_s:
                        continue
                    free_at[device] = sent_at
                    if random.random() < shape.loss:
                        continue
                    count += 1
                    arrival = sent_at + shape.round_trip_s / 2
                    heapq.heappush(under_way, (arrival, count, others[device], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(under_way)
                with suppress(BlockingIOError):
                    os.write(device, packet)


def _packets(device: int) -> list[bytes]:
    packets = []
    with suppress(BlockingIOError):
        for _ in range(64):
            packets.append(os.read(device, _MTU))
    return packets


class Relay:
    """TCP server at an end of a link, which passes bytes on to a local port and counts them."""

    def __init__(self, address: str, port: int) -> None:
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._port = port
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"
        self.num_bytes = [0, 0]
        """Bytes that came from clients, and bytes that were sent to them."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            for index, (source, target) in enumerate(((client, server), (server, client))):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass, args=(index, source, target)).start()

    def _pass(self, index: int, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                with self._lock:
                    self.num_bytes[index] += len(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
