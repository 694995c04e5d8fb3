"""Memory of processes and of the stores on their node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

_SAMPLE_S = 0.01


def anonymous_bytes(pid: int) -> int:
    """Return the size of a process's anonymous memory, which belongs to no file."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


class NodeMemory:
    """Memory of processes and of a store on one node.

    It consists of the processes' anonymous memory, the store's files, and dbuffer's files without a
    name (memfd). Each file counts once.
    """

    def __init__(self, pids: Sequence[int], store: Path) -> None:
        self._pids = pids
        self._store = store
        self.peak_bytes = 0

    def store_bytes(self) -> int:
        """Return the size of the store's files."""
        return 512 * sum(path.stat().st_blocks for path in self._store.glob("**/*"))

    def in_use(self) -> int:
        """Return the bytes that are in use now."""
        nameless = dict(item for pid in self._pids for item in _files_without_names(pid))
        return sum(map(anonymous_bytes, self._pids)) + sum(nameless.values()) + self.store_bytes()

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the memory until the ``with`` block ends, and set :attr:`peak_bytes`."""
        self.peak_bytes, is_over = 0, threading.Event()

        def sample() -> None:
            while not is_over.wait(_SAMPLE_S):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # removed or ended
                    self.peak_bytes = max(self.peak_bytes, self.in_use())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            is_over.set()
            sampler.join()


def _files_without_names(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    for place in (*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(place.readlink()).startswith("/memfd:dbuffer"):
                status = place.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512
