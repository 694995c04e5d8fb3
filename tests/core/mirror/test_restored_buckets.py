"""Buckets whose objects were replaced: by a replica that lags, by versioning, by another run's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dbuffer
from dbuffer.format.objects import POINTER_OBJECT
from dbuffer.mirror.bucket import Bucket
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.patterns import SMALL, newest

pytestmark = pytest.mark.timing(
    bucket_list_s=0.05,
    bucket_records_s=0.05,
    bucket_heartbeat_s=0.2,
    request_retry_s=0.02,
    retry_min_s=0.05,
    retry_max_s=0.1,
)


@pytest.fixture
def bucket(bucket_url: str) -> Iterator[Bucket]:
    with Bucket(bucket_url) as bucket:
        yield bucket


def mirror(source: Path | str, target: Path | str) -> dbuffer.Mirror:
    return dbuffer.Mirror(source, target, poll_interval_s=0.05, num_threads=1).start()


def carry(sender: dbuffer.WeightSender, up: dbuffer.Mirror, version: int) -> None:
    sender.send(SMALL.weights(version))
    up.wait_until_current(TIMEOUT_S)


def copy_objects(
    source: Bucket, target: Bucket, when: Callable[[str], bool] = lambda _: True
) -> None:
    for name, listed in source.list("").items():
        if when(name):
            target.put(name, source.get_range(name, 0, listed.num_bytes))


def test_a_replica_in_which_files_come_after_the_pointer(remote, local, bucket):
    """The node keeps its version, tells why, and copies the newest once its files are there."""
    with (
        Bucket(f"{bucket.url}-replica") as replica,
        dbuffer.WeightSender(remote, checksum=True) as sender,
        mirror(remote, bucket.url) as up,
    ):
        carry(sender, up, 1)
        copy_objects(bucket, replica)
        with mirror(replica.url, local) as down:
            until("version 1 is copied", lambda: newest(local) == 1)
            carry(sender, up, 2)
            copy_objects(bucket, replica, lambda name: name == POINTER_OBJECT)
            until("it fails", lambda: down.stats["failures"] > 1)
            assert newest(local) == 1
            assert down.error is None
            copy_objects(bucket, replica)
            until("version 2 is copied", lambda: newest(local) == 2)


def test_a_record_of_receivers_that_versioning_rolled_back(remote, local, bucket):
    """No acknowledgement is taken back, and the next one arrives."""
    with (
        dbuffer.WeightSender(remote, checksum=True) as sender,
        mirror(remote, bucket.url) as up,
        mirror(bucket.url, local),
        dbuffer.WeightReceiver(local, receiver_id="far", poll_interval_s=0.05) as far,
    ):
        for version in (1, 2, 3):
            carry(sender, up, version)
            far.wait_for_version(version - 1, timeout_s=TIMEOUT_S)
            far.load_into(SMALL.empty())
            sender.wait_applied(version, receivers=["far"], timeout_s=TIMEOUT_S)
            [(name, listed)] = bucket.list("receivers").items()
            record = bytes(bucket.get_range(name, 0, listed.num_bytes))
            if version == 1:
                old = record
            if version == 2:
                bucket.put(name, old)
                sender.wait_applied(2, receivers=["far"], timeout_s=TIMEOUT_S)
        assert not DoubleBuffer(remote).receiver("far").has_ended


def test_a_pointer_that_versioning_rolled_back(remote, local, bucket):
    """Without the trainer's mirror, the node keeps its version; the mirror mends the bucket."""
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        with mirror(remote, bucket.url) as up:
            carry(sender, up, 1)
            size = bucket.list("")[POINTER_OBJECT].num_bytes
            old = bytes(bucket.get_range(POINTER_OBJECT, 0, size))
            carry(sender, up, 2)
        with mirror(bucket.url, local) as down:
            until("version 2 is copied", lambda: newest(local) == 2)
            bucket.put(POINTER_OBJECT, old)
            until("it fails", lambda: down.stats["failures"] > 1)
            assert newest(local) == 2
            assert down.error is None
            with mirror(remote, bucket.url) as up:
                carry(sender, up, 3)
                until("version 3 is copied", lambda: newest(local) == 3)


@pytest.mark.parametrize("is_later", [False, True], ids=["started before", "started later"])
def test_a_bucket_with_the_objects_of_another_run(shm_path, remote, local, bucket, is_later):
    """The run's mirror puts its version again; or ends, if the other run's was started later."""

    def publish_other() -> None:
        other = shm_path / "other"
        with (
            dbuffer.WeightSender(other, checksum=True) as sender,
            mirror(other, of_other.url) as up,
        ):
            for version in (1, 2, 3, 4):
                carry(sender, up, version)

    with contextlib.ExitStack() as stack:
        of_other = stack.enter_context(Bucket(f"{bucket.url}-other"))
        if not is_later:
            publish_other()
        time.sleep(1.1)  # the mirror that starts later has the higher token
        sender = stack.enter_context(dbuffer.WeightSender(remote, checksum=True))
        up = stack.enter_context(contextlib.closing(mirror(remote, bucket.url)))
        down = stack.enter_context(mirror(bucket.url, local))
        carry(sender, up, 1)
        carry(sender, up, 2)
        until("version 2 is copied", lambda: newest(local) == 2)
        if is_later:
            time.sleep(1.1)
            publish_other()
        bucket.delete(bucket.list("versions"))
        copy_objects(of_other, bucket, lambda name: not name.startswith("receivers"))
        if is_later:
            until("it has ended", lambda: up.error is not None)
            assert isinstance(up.error, dbuffer.WriterSupersededError)
            until("the node follows the other run", lambda: newest(local) == 4)
        else:
            until("it fails", lambda: up.stats["failures"] > 0)
            until("it is put again, and copied", lambda: newest(local) == 2)
            assert up.error is None
        assert down.error is None
