"""Random worlds of two mirrors with a bucket between them: readers open published versions only."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from dbuffer.format.objects import POINTER_OBJECT
from dbuffer.mirror import bucket
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.mirror import Mirror
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child
from tests.support.object_store import FAULTS, FaultyProxy, Request, set_environment, slow
from tests.support.patterns import SPARSE
from tests.support.soak import is_soak
from tests.support.stores import remove_store

NUM_WORLDS = 500 if is_soak() else 20
NUM_GROUPS = 4
NUM_STEPS = 10
POLL_S = 0.03

START_S = 0.1
"""Wait for a start, which goes on trying if it is not fit to be read by then."""
MAX_POLLS = 2
"""Most polls of the bucket after a version was put, until one gets the version."""

pytestmark = pytest.mark.timing(
    bucket_list_s=0.05,
    bucket_records_s=0.05,
    bucket_heartbeat_s=0.3,
    request_retry_s=0.005,
    retry_min_s=0.02,
    retry_max_s=0.1,
    settle_s=0.2,
)


class World:
    """A trainer's store, a bucket and a node's store; each version has weights of its own number.

    Weights tell a count of all publishes, whatever runs there were.
    """

    def __init__(self, root: Path, url: str, proxy: FaultyProxy, seed: int) -> None:
        self.random = random.Random(seed)
        self.near, self.far = root / f"near-{seed}", root / f"far-{seed}"
        with pytest.MonkeyPatch.context() as patch:  # no fault is the test's own
            set_environment(proxy.server.url, patch)
            self.bucket = Bucket(f"{url}/{seed}")
        self.proxy = proxy
        self.published: dict[dbuffer.VersionId, int] = {}
        self.saved: list[tuple[str, bytes]] = []
        self._ends: dict[str, Mirror] = {}
        self._sender: dbuffer.WeightSender | None = None
        self.publish()
        for end in ("up", "down"):
            self.start(end)

    def publish(self) -> None:
        if self._sender is None:
            self._sender = dbuffer.WeightSender(self.near, checksum=True, delta=True)
        count = len(self.published) + 1
        version = self._sender.send(SPARSE.weights(count), metadata={"count": count})
        self.published[version.id] = count

    def start_over(self) -> None:
        """Begin another run, in the same store or in a new one; it publishes nothing yet."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self.random.random() < 0.7 and self.near.exists():
            remove_store(self.near)

    def ends_of(self, end: str) -> tuple[Path | str, Path | str]:
        """Return source and target of a mirror."""
        return (self.near, self.bucket.url) if end == "up" else (self.bucket.url, self.far)

    def start(self, end: str) -> None:
        self._ends[end] = one = quick(*self.ends_of(end))
        with contextlib.suppress(dbuffer.WaitTimeoutError):
            one.start(START_S)

    def stop(self, end: str) -> None:
        one = self._ends.pop(end, None)
        if one is not None:
            one.close()
            assert one.error is None, f"{end} has ended"

    def restart(self) -> None:
        end = self.random.choice(("up", "down"))
        self.stop(end)
        self.start(end)

    def kill(self) -> None:
        """Kill a mirror, in a process of its own, while it starts or copies; start another one."""
        end = self.random.choice(("up", "down"))
        self.stop(end)
        self.publish()
        with Child(mirror_for_ever, *self.ends_of(end)) as child:
            child.receive()
            time.sleep(self.random.uniform(0.0, 0.3))
            child.kill()
        self.start(end)

    def fail(self) -> None:
        """Let some of the next requests fail, or all of them for a while."""
        fault = FAULTS[self.random.choice(list(FAULTS))]
        nth, times = self.random.choice(((1, 3), (2, 1), (1, 12), (5, 2)))
        self.proxy.inject(fault, nth=nth, times=times)

    def slow_down(self) -> None:
        def is_file(request: Request) -> bool:
            return "/versions/" in request.path

        self.proxy.inject(slow(100_000), when=is_file, times=4)

    def save(self) -> None:
        self.saved = [
            (name, bytes(self.bucket.get_range(name, 0, each.num_bytes)))
            for name, each in self.bucket.list("").items()
            if not name.startswith("receivers/")
        ]

    def put_back(self) -> None:
        """Restore the saved objects, and delete all later ones or none."""
        if self.random.random() < 0.5:
            self.bucket.delete(list(self.bucket.list("versions")))
        for name, data in self.saved:
            self.bucket.put(name, data)

    def lose(self) -> None:
        """Delete some objects, at random, and put others for some of them."""
        names = [name for name in self.bucket.list("") if self.random.random() < 0.3]
        self.bucket.delete(names)
        for name in self.random.sample(names, min(2, len(names))):
            self.bucket.put(name, b"garbled")

    def read(self) -> None:
        """See that a new reader of the node's store finds a version that was published, whole."""
        with dbuffer.WeightReceiver(self.far, receiver_id=None, verify=True) as receiver:
            with contextlib.suppress(dbuffer.DBufferError):  # nothing is there, or just going
                with receiver.open(timeout_s=0) as snapshot:
                    count = SPARSE.version_of(dict(snapshot.tensors))
                    assert count == snapshot.metadata["count"] == self.published[snapshot.id]

    def settle(self) -> None:
        """See that the newest version arrives after the faults have ended."""
        self.proxy.heal()
        self.publish()
        for end in ("up", "down"):
            if end not in self._ends:
                self.start(end)
        if not self.bucket.list("versions") and not self.bucket.list("receivers"):
            # A garbled record alone may be another program's: the user removes it.
            self.bucket.delete([POINTER_OBJECT])
        newest = DoubleBuffer(self.near).pointer().id
        until("the newest version is there", lambda: newest_in(self.far) == newest, TIMEOUT_S)
        self.read()
        self.count_polls()
        for end in ("up", "down"):
            self.stop(end)

    def count_polls(self) -> None:
        """See that the next version arrives with the first poll or two after it was put."""
        self.publish()
        newest = DoubleBuffer(self.near).pointer().id
        self._ends["up"].wait_until_current(TIMEOUT_S)
        source: Any = self._ends["down"]._source
        look, looks = source._look, list[int]()
        source._look = lambda: looks.append(look()) or looks[-1]
        until("the next version is there", lambda: newest_in(self.far) == newest, TIMEOUT_S)
        assert sum(number != newest.number for number in looks) < MAX_POLLS, looks
        self.read()

    def close(self) -> None:
        self.proxy.heal()
        for one in self._ends.values():
            one.close()
        if self._sender is not None:
            self._sender.close()
        self.bucket.close()
        for store in (self.near, self.far):
            shutil.rmtree(store, ignore_errors=True)


def quick(source: Path | str, target: Path | str) -> Mirror:
    return Mirror(source, target, poll_interval_s=POLL_S, num_threads=2)


def mirror_for_ever(connection: Connection, source: Path | str, target: Path | str) -> None:
    connection.send("begins")
    quick(source, target).run()


def newest_in(store: Path) -> Any:
    pointer = DoubleBuffer(store).undamaged_pointer()
    return None if pointer is None else pointer.id


STEPS: dict[str, Callable[[World], None]] = {
    "publish": World.publish,
    "start over": World.start_over,
    "restart": World.restart,
    "kill": World.kill,
    "fail": World.fail,
    "slow": World.slow_down,
    "save": World.save,
    "put back": World.put_back,
    "lose": World.lose,
    "read": World.read,
}
WEIGHTS = (6, 1, 2, 1, 3, 1, 1, 1, 1, 4)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.timeout(3600 if is_soak() else 300)
def test_worlds(shm_path, proxy, bucket_url, monkeypatch, group):
    monkeypatch.setattr(bucket, "RANGE_BYTES", 5000)
    for seed in range(group, NUM_WORLDS, NUM_GROUPS):
        steps: list[str] = []
        with contextlib.closing(World(shm_path, bucket_url, proxy, seed)) as world:
            try:
                for _ in range(NUM_STEPS):
                    [step] = world.random.choices(list(STEPS), WEIGHTS)
                    steps.append(step)
                    with contextlib.suppress(dbuffer.StoreNotFoundError, dbuffer.StoreCorruptError):
                        STEPS[step](world)
                world.settle()
            except BaseException as error:
                error.add_note(f"world {seed}: {', '.join(steps)}")
                raise
