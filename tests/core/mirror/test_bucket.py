"""Versions and acknowledgements through a bucket, on a real S3 server."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock, call

import pytest
import torch
from prometheus_client import CollectorRegistry

import dbuffer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import ReceiverRecord, encode
from dbuffer.format.objects import (
    POINTER_OBJECT,
    RECEIVERS_PREFIX,
    FileObject,
    file_name,
    receivers_object,
    version_of,
)
from dbuffer.integrations import metrics
from dbuffer.mirror import bucket as buckets
from dbuffer.mirror.bucket import NUM_REQUESTS, Bucket
from dbuffer.mirror.bucket_source import newest_version
from dbuffer.mirror.bucket_target import KEEP_ANCHORS
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.mirror.records import AcknowledgementRelay, BucketRecords, ReceiversOfBucket
from dbuffer.runtime.timing import TIMING, Timing
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import OwnRecord
from dbuffer.testing.patterns import Sparse
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support import ROOT
from tests.support.children import Child
from tests.support.object_store import (
    FAULTS,
    Answer,
    Exchange,
    Hold,
    Request,
    lose_answer,
    status,
    truncate_answer,
)
from tests.support.patterns import OTHER, SMALL, SPARSE, Pattern, newest
from tests.support.stores import remove_store
from tests.support.waiting import Gate, meanwhile

pytestmark = pytest.mark.timing(
    bucket_list_s=0.05,
    bucket_records_s=0.05,
    request_retry_s=0.02,
    retry_min_s=0.05,
    retry_max_s=0.1,
)

POLL_S = 0.05
LONG = Sparse(num_tensors=9, numel=1 << 14)
RANGE_BYTES = 1 << 18  # LONG has 1.2 MB
PAGE_RANGE_BYTES = buckets.RANGE_BYTES


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "RANGE_BYTES", RANGE_BYTES)


@pytest.fixture
def bucket(bucket_url: str) -> Iterator[Bucket]:
    with Bucket(bucket_url) as bucket:
        yield bucket


def mirror(source: Path | str, target: Path | str, **options: Any) -> Mirror:
    options = {"poll_interval_s": POLL_S, "num_threads": 2, **options}
    return Mirror(source, target, **options).start()


class Way:
    """Way of a sender's versions: into a bucket by one mirror, and out of it by another.

    Without a bucket, one mirror copies from store to store.
    """

    def __init__(self, remote: Path, url: str | None, local: Path, **options: Any) -> None:
        with contextlib.ExitStack() as stack:
            self.local = local
            options = {"checksum": True, **options}
            self.sender = stack.enter_context(dbuffer.WeightSender(remote, **options))
            self.up = stack.enter_context(mirror(remote, url or local))
            self.down = self.up if url is None else stack.enter_context(mirror(url, local))
            self._opened = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def carry(self, version: int, pattern: Pattern = SMALL, **options: Any) -> None:
        """Send a version, and see it arrive whole."""
        self.sender.send(pattern.weights(version), version=version, **options)
        for each in (self.up, self.down):
            each.wait_until_current(TIMEOUT_S)
        assert_copied(self.local, pattern, version)

    @property
    def failures(self) -> list[float]:
        return [each.stats["failures"] for each in (self.up, self.down)]


def send(sender: dbuffer.WeightSender, up: Mirror, *versions: int, pattern: Pattern = LONG) -> None:
    """Send versions, of which the mirror into the bucket copies each."""
    for version in versions:
        sender.send(pattern.weights(version))
        up.wait_until_current(TIMEOUT_S)


def assert_copied(local: Path, pattern: Pattern, version: int) -> None:
    until(f"version {version} is copied", lambda: newest(local, pattern) == version)
    with dbuffer.WeightReceiver(local, receiver_id="checks", verify="auto") as receiver:
        with receiver.open(timeout_s=5, acknowledge=False) as snapshot:
            assert snapshot.version == version
            assert pattern.version_of(dict(snapshot.tensors)) == version


def manifest_of(store: Path) -> Any:
    buffers = DoubleBuffer(store)
    return buffers.manifest_of(buffers.pointer().id)


# What is copied


@pytest.mark.parametrize("has_bucket", [True, False], ids=["bucket", "direct"])
@pytest.mark.parametrize(
    ("mount", "checksum", "delta"),
    [
        ("local", True, True),
        ("local", True, False),
        ("local", False, True),
        ("local", False, False),
        ("network", True, True),
    ],
    indirect=["mount"],
)
def test_a_version_is_the_same_at_the_far_end(
    remote, local, bucket, mount, checksum, delta, has_bucket
):
    """Also of stores on a network mount, where versions stand on anchors, and none is mapped."""
    url = bucket.url if has_bucket else None
    with Way(remote, url, local, checksum=checksum, delta=delta) as way:
        for version in (1, 2, 3, 7):
            way.carry(version, LONG, metadata={"step": 10 * version})
            there, here = manifest_of(remote), manifest_of(local)
            for field in ("id", "runs", "metadata", "num_tensors", "num_bytes", "published_at"):
                assert getattr(there, field) == getattr(here, field)
            assert here.is_copy
            assert (here.checksums_xxh3 is not None) is (checksum or has_bucket)
        assert way.failures == [0, 0]
    anchors = [name for name in bucket.list("") if name.endswith(".weights")]
    assert len(anchors) == (0 if url is None else 1 if delta and checksum else 4)


def test_an_anchor_is_the_weights_file(remote, bucket):
    """With its gaps and its footer."""
    weights = {f"odd {index}": torch.arange(100_001) * index for index in range(3)}
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket.url) as up:
        sender.send(weights)
        up.wait_until_current(TIMEOUT_S)
    file, manifest = newest_version(bucket).weights_file, manifest_of(remote)
    [weights_file] = (remote / DoubleBuffer(remote).pointer().buffer).glob(manifest.file)
    assert list(bucket.list("versions")) == [file.name]
    content = bucket.get_range(file.name, 0, file.num_bytes)
    assert content == weights_file.read_bytes()


def anchors_in(bucket: Bucket) -> list[int]:
    """Return the numbers of the anchors of which parts are in a bucket."""
    versions = [version_of(name) for name in bucket.list("") if name.endswith(".weights")]
    return sorted({version.number for version in versions if version is not None})


def test_another_layout_is_an_anchor_of_its_own(remote, local, bucket_url):
    """Also one of tensors without elements."""
    weights = {"none": torch.empty(0, 3), "one": torch.ones(1), "also none": torch.empty(0)}
    with Way(remote, bucket_url, local, delta=True) as way:
        for version, pattern in enumerate((SMALL, OTHER, SMALL), start=1):
            way.carry(version, pattern)
        way.sender.send(weights)
        for each in (way.up, way.down):
            each.wait_until_current(TIMEOUT_S)
    with dbuffer.WeightReceiver(local) as receiver, receiver.open(timeout_s=5) as snapshot:
        assert {name: tensor.tolist() for name, tensor in snapshot.tensors.items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }


# Readers


def test_a_version_that_goes_while_it_is_read_is_replaced_by_a_newer_one(
    remote, local, proxy, bucket_url, bucket, timing
):
    timing.bucket_grace_s, timing.bucket_heartbeat_s = 0.0, 0.05
    held = Hold()
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket_url) as up:
        send(sender, up, 1)
        proxy.inject(
            held, nth=2, when=lambda each: each.method == "GET" and each.path.endswith(".weights")
        )
        with mirror(bucket_url, local) as down:
            assert held.is_there.wait(TIMEOUT_S)
            send(sender, up, *range(2, KEEP_ANCHORS + 3))
            until("it is deleted", lambda: 1 not in anchors_in(bucket))
            held.may_go_on.set()
            assert_copied(local, LONG, KEEP_ANCHORS + 2)
            assert down.stats["failures"] == 0


def test_a_reader_that_cannot_read_deltas_gets_an_anchor(remote, local, bucket):
    """Of several mirrors each that is stuck says so in its record, which is relayed."""

    def is_known() -> bool:
        unreadable = [each.unreadable for each in DoubleBuffer(remote).receivers()]
        return any(each is not None and each.number == 2 for each in unreadable)

    with dbuffer.WeightSender(remote, checksum=True, delta=True) as sender:
        with mirror(remote, bucket.url) as up:
            send(sender, up, 1, 2)
            [delta] = [name for name in bucket.list("") if name.endswith(".delta")]
            bucket.put(delta, b"damaged")
            with mirror(bucket.url, local):
                until("the sender's store knows", is_known)
                sender.send(LONG.weights(3))
                assert_copied(local, LONG, 3)
    assert newest_version(bucket).manifest.file_version.number == 3


def test_a_late_reader_gets_each_delta_once(remote, local, shm_path, proxy, bucket_url):
    """It applies, verifies and copies a delta, and applies it to its other buffer later."""
    with Way(remote, bucket_url, local, delta=True) as way:
        for version in range(1, 5):
            way.carry(version, LONG)
        way.down.close()
        before, way.local = len(proxy.requests), shm_path / "late"
        with mirror(bucket_url, way.local) as way.down:
            for version in range(5, 9):
                way.carry(version, LONG)
    gets = Counter(
        each.path
        for each in proxy.requests[before:]
        if each.method == "GET" and each.path.endswith(".delta")
    )
    assert len(gets) == 7
    assert max(gets.values()) == 1


# Writers


def test_the_mirror_that_was_started_last_is_the_writer(remote, bucket, caplog):
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket.url) as first:
        send(sender, first, 1)
        writer = newest_version(bucket).writer
        with mirror(remote, bucket.url) as second:
            until("it has taken over", lambda: newest_version(bucket).writer != writer)
            send(sender, second, 2)
            until("the first one has ended", lambda: first.error is not None)
            assert isinstance(first.error, dbuffer.WriterSupersededError)
            send(sender, second, 3)
            assert newest_version(bucket).id.number == 3
    assert "has ended" in caplog.text


def test_a_record_of_the_writer_before_that_is_put_back_ends_no_mirror(remote, bucket, timing):
    """It is of the same version; a record of a mirror that is started later ends the writer."""
    timing.bucket_heartbeat_s = 0.1
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        with mirror(remote, bucket.url) as before:
            send(sender, before, 1)
            old = newest_version(bucket)
        with mirror(remote, bucket.url) as up:
            until("it has taken over", lambda: newest_version(bucket).writer != old.writer)
            writer = newest_version(bucket).writer
            bucket.put(POINTER_OBJECT, encode(old))
            until("it has done so again", lambda: newest_version(bucket).writer == writer)
            assert up.error is None
            later = newest_version(bucket).by("f" * 16)
            bucket.put(POINTER_OBJECT, encode(later))
            until("it has ended", lambda: up.error is not None)
            assert isinstance(up.error, dbuffer.WriterSupersededError)
    assert newest_version(bucket) == later


def test_a_store_that_is_copied_from_the_bucket_is_not_copied_into_it(remote, local, bucket):
    """Its mirror was started with source and target swapped: it ends, and the others go on."""
    with Way(remote, bucket.url, local) as way:
        way.carry(1)
        writer = newest_version(bucket).writer
        with mirror(local, bucket.url) as swapped:
            until("it has ended", lambda: swapped.error is not None)
            assert isinstance(swapped.error, dbuffer.OptionError)
            assert "did you swap source and target?" in str(swapped.error)
        assert newest_version(bucket).writer == writer
        way.carry(2)


@pytest.mark.parametrize(
    "damage",
    [
        *("no record", "old record", "garbled record", "no file", "cut file"),
        *("emptied", "garbled alone", "put that was lost"),
    ],
)
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "with the next version"])
def test_a_bucket_that_was_put_back_or_lost_objects_is_mended(
    remote, local, bucket, proxy, timing, caplog, damage, is_idle
):
    """By its only writer, without an end to it, and told."""
    timing.bucket_heartbeat_s = 0.3 if is_idle else 60.0

    def lose(exchange: Exchange) -> None:
        """Answer as if the object had been put."""
        exchange.body()
        exchange.answer(Answer(200, [("ETag", '"0"')], b""))

    def is_file(request: Request) -> bool:
        return request.method == "PUT" and "/versions/" in request.path

    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket.url) as up:
        send(sender, up, 1)
        old = encode(newest_version(bucket))
        if damage == "put that was lost":
            proxy.inject(lose, when=is_file)
        send(sender, up, 2)
        names = [POINTER_OBJECT] if damage == "no record" else list(bucket.list(""))
        file = newest_version(bucket).weights_file.name
        match damage:
            case "no record" | "emptied":
                bucket.delete(names)
            case "garbled record":
                bucket.put(POINTER_OBJECT, b"garbled")
            case "garbled alone":
                bucket.delete(names)
                bucket.put(POINTER_OBJECT, b"garbled")
            case "old record":
                bucket.put(POINTER_OBJECT, old)
            case "no file":
                bucket.delete([file])
            case "cut file":
                bucket.put(file, b"1")
        last = 2
        if not is_idle:
            if damage in ("no file", "cut file", "put that was lost"):
                up.close()
                up = mirror(remote, bucket.url)
            else:
                send(sender, up, 3)
                last = 3
        with up, mirror(bucket.url, local):
            assert_copied(local, LONG, last)
            assert up.error is None
    if is_idle:
        assert "uploading the newest version again" in caplog.text


@pytest.mark.parametrize("version", [1, 2])
def test_a_lost_answer_to_a_put_of_the_pointer_is_no_other_writer(
    remote, local, proxy, bucket_url, version
):
    def is_pointer_put(request: Request) -> bool:
        return request.method == "PUT" and request.path.endswith(f"/{POINTER_OBJECT}")

    proxy.inject(lose_answer, nth=version, when=is_pointer_put)
    with Way(remote, bucket_url, local) as way:
        for number in (1, 2, 3):
            way.carry(number)
        assert way.failures == [0, 0]
    assert [each.is_faulty for each in proxy.requests].count(True) == 1


@pytest.mark.parametrize("nth", [1, 2], ids=["a layout", "a range"])
def test_what_the_network_damages_is_fetched_again(remote, local, proxy, bucket_url, nth):
    """Of a version without checksums, too: the mirror into the bucket makes some."""
    proxy.inject(
        FAULTS["corrupt_answer"],
        nth=nth,
        when=lambda request: request.method == "GET" and "/versions/" in request.path,
    )
    with Way(remote, bucket_url, local, checksum=False) as way:
        way.carry(1, LONG)
    assert any(each.is_faulty for each in proxy.requests)


# What ends no mirror, and serves no version of another run


def no_bucket(exchange: Exchange) -> None:
    exchange.body()
    text = b"<Error><Code>NoSuchBucket</Code><Message>test</Message></Error>"
    exchange.answer(Answer(404, [("Content-Type", "application/xml")], text))


def test_mirrors_wait_for_a_bucket_that_is_made_later(remote, local, proxy, bucket_url):
    proxy.inject(no_bucket, times=1 << 30)
    up, down = (Mirror(*ends) for ends in ((remote, bucket_url), (bucket_url, local)))
    with dbuffer.WeightSender(remote, checksum=True) as sender, up, down:
        sender.send(SMALL.weights(1))
        up.start()
        with pytest.raises(dbuffer.WaitTimeoutError, match="NoSuchBucket"):
            down.start(0.1)
        until("both have failed", lambda: min(each.stats["failures"] for each in (up, down)) > 1)
        assert "NoSuchBucket" in DoubleBuffer(remote).receivers()[0].problem
        proxy.heal()
        assert_copied(local, SMALL, 1)
        assert up.error is down.error is None


def test_a_mirror_that_stands_by_is_elected_while_the_service_fails(
    remote, local, proxy, bucket_url
):
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket_url) as up:
        send(sender, up, 1)
        with Child(mirror_for_ever, bucket_url, local) as first:
            first.receive()
            assert_copied(local, LONG, 1)
            with mirror(bucket_url, local) as second:
                assert not second.is_elected
                proxy.inject(status(503), times=1 << 30)
                first.kill()
                until("it has failed", lambda: second.stats["failures"] > 1)
                assert second.error is None
                proxy.heal()
                send(sender, up, 2)
                assert_copied(local, LONG, 2)
                assert second.is_elected


def is_upload(request: Request) -> bool:
    return request.method == "PUT" and "/versions/" in request.path


def test_a_store_that_is_started_over_twice_during_an_upload_is_followed(
    remote, local, proxy, bucket_url
):
    """The upload of a run in between is refused in the end, when its store has gone."""
    gate = Gate()

    def refuse(exchange: Exchange) -> None:
        exchange.body()
        gate.hold_up()
        status(400)(exchange)

    with Way(remote, bucket_url, local) as way:
        way.carry(5)
        way.sender.close()
        proxy.inject(refuse, when=is_upload)
        for _ in range(2):
            remove_store(remote)
            with dbuffer.WeightSender(remote, checksum=True) as sender:
                last = sender.send(OTHER.weights(3))
                assert gate.is_there.wait(TIMEOUT_S)
        gate.may_go_on.set()
        until("it has arrived", lambda: DoubleBuffer(local).newest_pointer().id == last.id)
        assert way.up.error is way.down.error is None


@pytest.mark.parametrize("then", ["killed", "alive"])
def test_a_start_at_a_node_returns_when_readers_find_nothing_of_the_last_run(
    remote, local, proxy, bucket_url, then
):
    """While another mirror downloads the first version of a run, and after a kill in it."""
    held = Hold()
    with (
        dbuffer.WeightSender(remote, checksum=True) as before,
        mirror(remote, bucket_url) as up,
        Child(mirror_for_ever, bucket_url, local) as first,
    ):
        send(before, up, *range(1, 6))
        first.receive()
        assert_copied(local, LONG, 5)
        before.close()
        proxy.inject(
            held, when=lambda each: each.method == "GET" and each.path.endswith(".weights"), nth=2
        )
        remove_store(remote)
        with dbuffer.WeightSender(remote, checksum=True) as sender:
            sent = sender.send(LONG.weights(9), version=3)
            assert held.is_there.wait(TIMEOUT_S)
            assert newest(local, LONG) == 5
            if then == "killed":
                first.kill()
            with meanwhile(held.may_go_on.set, after_s=0.5), mirror(bucket_url, local):
                with dbuffer.WeightReceiver(local) as reader:
                    with reader.open(timeout_s=TIMEOUT_S) as snapshot:
                        assert snapshot.id == sent.id


def test_a_foreign_pointer_for_a_moment_leaves_a_node_usable(remote, local, shm_path, bucket):
    """Its mirror is started again when the pointer of its own run is back."""
    others = Bucket(f"{bucket.url}-others")
    with dbuffer.WeightSender(shm_path / "others") as sender:
        with mirror(shm_path / "others", others.url) as up:
            send(sender, up, *range(1, 4), pattern=OTHER)
    with others:
        foreign = {name: read_object(others, name) for name in others.list("versions")}
        foreign[POINTER_OBJECT] = read_object(others, POINTER_OBJECT)
    with Way(remote, bucket.url, local) as way:
        way.carry(1)
        own = read_object(bucket, POINTER_OBJECT)
        for name, data in foreign.items():
            bucket.put(name, data)
        until("the foreign one is there", lambda: newest(local, OTHER) == 3)
        way.down.close()
        bucket.put(POINTER_OBJECT, own)
        with mirror(bucket.url, local) as way.down:
            assert_copied(local, SMALL, 1)
            way.carry(2)
        assert way.up.error is None


def read_object(bucket: Bucket, name: str) -> bytes:
    return bytes(bucket.get_range(name, 0, bucket.list("")[name].num_bytes))


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_copy_of_a_copy_of_the_bucket_is_not_copied_into_it(remote, shm_path, bucket, hops):
    places = [bucket.url, *(shm_path / f"hop-{hop}" for hop in range(hops))]
    with contextlib.ExitStack() as stack:
        with dbuffer.WeightSender(remote) as sender:
            sender.send(SMALL.weights(1))
        up = stack.enter_context(mirror(remote, bucket.url))
        up.wait_until_current(TIMEOUT_S)
        for pair in itertools.pairwise(places):
            stack.enter_context(mirror(*pair)).wait_until_current(TIMEOUT_S)
        swapped = stack.enter_context(mirror(places[-1], bucket.url))
        until("it has ended", lambda: swapped.error is not None)
        assert "did you swap source and target?" in str(swapped.error)
        assert up.error is None


# Slow and broken links


@pytest.mark.timing(request_retry_s=0.005)
@pytest.mark.parametrize("times", [2, 8], ids=["twice", "more often than a request is made"])
def test_a_download_goes_on_where_it_broke_off(proxy, bucket_url, bucket, times, monkeypatch):
    monkeypatch.setattr(buckets, "RANGE_BYTES", 1 << 22)
    data = random.Random(1).randbytes(4 << 20)
    file = FileObject(file_name(VERSION, WRITER, "weights"), len(data))
    bucket.upload(file.name, memoryview(data))
    proxy.inject(truncate_answer, times=times, when=lambda each: each.path.endswith(".weights"))
    before, copy = len(proxy.requests), bytearray(len(data))

    def place(offset: int, piece: memoryview) -> None:
        copy[offset : offset + len(piece)] = piece

    with Bucket(bucket_url) as through_proxy:
        through_proxy.download(file, place)
    assert copy == data
    sent = sum(each.sent_bytes for each in proxy.requests[before:])
    assert sent < len(data) + times * (1 << 18), "no more than a piece is got again each time"


def test_a_run_that_is_stopped_retries_no_download(remote, local, proxy, bucket_url):
    def is_file(request: Request) -> bool:
        return request.method == "GET" and request.path.endswith(".weights")

    with dbuffer.WeightSender(remote) as sender, mirror(remote, bucket_url) as up:
        send(sender, up, 1, pattern=SMALL)
    proxy.inject(FAULTS["503"], nth=2, when=is_file, times=1 << 30)  # the first gets the layout
    stop, down = threading.Event(), Mirror(bucket_url, local)
    with meanwhile(down.run, stop, after_s=0):
        until("it retries", lambda: sum(map(is_file, proxy.requests)) > 8)
        stop.set()
        until("it has ended", lambda: not down._thread.is_alive(), 5.0)


def test_mirrors_put_one_version_under_names_of_their_own(remote, bucket):
    """A late put of a mirror that was overtaken replaces no object of the next one."""
    with dbuffer.WeightSender(remote) as sender:
        sender.send(SMALL.weights(1))
        for _ in range(2):
            with mirror(remote, bucket.url) as up:
                up.wait_until_current(TIMEOUT_S)
            bucket.delete([POINTER_OBJECT])
    first, second = bucket.list("versions")
    assert version_of(first) == version_of(second)


def test_downloads_that_time_out_lessen_the_requests_side_by_side(
    proxy, bucket_url, bucket, monkeypatch
):
    """On a link that carries few ranges at a time before the others have been silent for long."""
    monkeypatch.setattr(buckets, "REQUEST_S", 0.4)
    data, copy = bytes(range(256)) * (1 << 12), bytearray(1 << 20)
    file = FileObject("one", len(data))
    bucket.upload(file.name, memoryview(data))
    link = threading.Lock()

    def share(exchange: Exchange) -> None:
        with link:
            time.sleep(0.12)
        exchange.answer(exchange.forward())

    proxy.inject(share, times=1 << 30)
    limits = set()

    def place(offset: int, piece: memoryview) -> None:
        limits.add(through_proxy._parallelism.limit)
        copy[offset : offset + len(piece)] = piece

    monkeypatch.setattr(buckets, "RANGE_BYTES", len(data) // 16)
    with Bucket(bucket_url) as through_proxy:
        through_proxy.download(file, place)
    assert copy == data
    assert min(limits) <= NUM_REQUESTS // 2


def test_a_large_file_goes_up_in_parts(proxy, bucket_url, monkeypatch):
    """A part that fails is put again, and no other."""
    monkeypatch.setattr(buckets, "PART_BYTES", LEAST_PART_BYTES)
    data = random.Random(1).randbytes(4 * LEAST_PART_BYTES + 1)
    proxy.inject(FAULTS["drop"], nth=2, when=is_part)
    proxy.inject(FAULTS["503"], nth=3, when=is_part)
    with Bucket(bucket_url) as bucket:
        bucket.upload("one", memoryview(data))
        assert bucket.get_range("one", 0, len(data)) == data
        assert list(bucket.list("")) == ["one"]
    puts = [each for each in proxy.requests if each.method in ("PUT", "POST")]
    assert sum(map(is_part, puts)) == 5 + 2, "two were made again"
    assert bucket.requests["put"] == len(puts) - 2 == 5 + 2, "and two begin and end it"


VERSION, WRITER = VersionId("0" * 16, 1), "0" * 16
LEAST_PART_BYTES = 5 << 20  # of an object on S3


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber" in request.query


def test_uploads_that_fail_lessen_the_requests_side_by_side(proxy, bucket_url, monkeypatch):
    """On a link that carries few parts at a time within the time of one request."""
    monkeypatch.setattr(buckets, "PART_BYTES", LEAST_PART_BYTES)
    monkeypatch.setattr(buckets, "TRANSFER_S", 1.2)
    monkeypatch.setattr(buckets, "UPLOAD_RETRIES_S", 0.1)
    data = bytes(8 * LEAST_PART_BYTES)
    link = threading.Lock()

    def share(exchange: Exchange) -> None:
        """Pass on a body over a link of 17 MB/s that all requests share."""
        with link:
            time.sleep(LEAST_PART_BYTES / 17e6)
        exchange.answer(exchange.forward())

    proxy.inject(share, times=1 << 30, when=is_part)
    with Bucket(bucket_url) as bucket:
        for _ in range(30):  # a busy machine needs more
            with contextlib.suppress(dbuffer.StoreAccessError):
                bucket.upload("one", memoryview(data))
                break
        [file] = bucket.list("").values()
        assert file.num_bytes == len(data)
        assert bucket._parallelism.limit < NUM_REQUESTS


# Retention


def test_a_garbled_pointer_that_was_lost_before_is_replaced(
    remote, proxy, bucket_url, bucket, timing, caplog
):
    """Its mirror has put it, so it is no other program's, although nothing else is there."""
    timing.bucket_heartbeat_s = 0.1
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        with mirror(remote, bucket_url) as up:
            send(sender, up, 1, pattern=SMALL)
            proxy.inject(status(503), times=1 << 30, when=is_upload)
            bucket.delete(bucket.list(""))
            # If the mirror looks during the deletion, it reports missing files instead.
            until("the loss is told", lambda: "uploading the newest version again" in caplog.text)
            bucket.put(POINTER_OBJECT, b"garbled")
            proxy.heal()
            until("it is there", lambda: bucket.list("versions"))
            up.wait_until_current(TIMEOUT_S)
    assert newest_version(bucket).id.number == 1


@pytest.mark.parametrize("has_lost", [True, False], ids=["lost file", "outage"])
def test_an_idle_mirror_reports_a_problem_of_the_bucket_until_it_is_solved(
    remote, proxy, bucket_url, bucket, timing, caplog, has_lost
):
    """Although the mirror can read its source: that alone is no recovery."""
    timing.bucket_heartbeat_s = 0.1
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket_url) as up:
        send(sender, up, 1, pattern=SMALL)
        if has_lost:
            proxy.inject(status(503), times=1 << 30, when=is_upload)
            bucket.delete([newest_version(bucket).weights_file.name])
        else:
            proxy.inject(status(503), times=1 << 30, when=lambda request: True)
        until("it is told", lambda: up.stats["failures"] > 0)
        time.sleep(10 * timing.retry_max_s)
        assert DoubleBuffer(remote).receivers()[0].problem is not None
        assert "recovered" not in caplog.text
        proxy.heal()
        until("it is solved", lambda: DoubleBuffer(remote).receivers()[0].problem is None)
        assert "recovered" in caplog.text
        assert bucket.list("versions")


def test_a_garbled_pointer_beside_records_of_nodes_is_replaced(remote, bucket):
    """Also by a mirror that is started: no other program has such records."""
    bucket.put(POINTER_OBJECT, b"garbled")
    BucketRecords(bucket, OwnRecord(f"mirror-node-{0:016}")).write([])
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket.url) as up:
        send(sender, up, 1, pattern=SMALL)
    assert newest_version(bucket).id.number == 1


@pytest.mark.parametrize("content", [b"MANIFEST-000001", b"{}"])
def test_a_pointer_of_another_program_is_left_alone(remote, bucket, content):
    bucket.put(POINTER_OBJECT, content)
    with dbuffer.WeightSender(remote) as sender, mirror(remote, bucket.url) as up:
        sender.send(SMALL.weights(1))
        until("it has tried", lambda: up.stats["failures"] > 1)
        assert up.error is None
        problem = DoubleBuffer(remote).receivers()[0].problem
        remedy = "remove it, unless it is another program's"
        assert (remedy in problem) == (content != b"{}"), "which has another format"
    assert bytes(bucket.get_range(POINTER_OBJECT, 0, len(content))) == content


def test_old_objects_of_the_mirror_are_deleted_and_no_others(remote, bucket, timing):
    """Neither below the prefix nor beside it."""
    timing.bucket_grace_s, timing.bucket_heartbeat_s = 0.0, 0.05
    run = "0" * 16
    others = [
        "mine",
        f"{run}-1-{run}.weights",
        f"versions/{run}-1.weights",
        f"versions/{run}.json",
        "receivers/other.json",
        "receivers/notes",
    ]
    for name in others:
        bucket.put(name, b"mine")
    bucket.put(file_name(VersionId(run, 9), run, "weights"), b"of another run")
    beside = [Bucket(f"{bucket.url}{end}") for end in ("-2", ".txt")]
    for each in beside:
        each.put("CURRENT", b"mine")
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket.url) as up:
        send(sender, up, 1, pattern=SMALL)
        version = newest_version(bucket).id
        others += ["versions/notes.txt", f"versions/{version}.delta"]
        for name in others[-2:]:
            bucket.put(name, b"mine")
        send(sender, up, *range(2, 6), pattern=SMALL)
        until("others are deleted", lambda: anchors_in(bucket) == [4, 5])
    assert bucket.list("").keys() >= set(others)
    for each in beside:
        assert each.list("").keys() == {"CURRENT"}
        each.close()


def test_deltas_are_kept_as_long_as_their_anchor(remote, bucket, timing, monkeypatch):
    """An anchor stays for some time after the next one has come."""
    monkeypatch.setattr("dbuffer.format.chain.MAX_CHAIN", 3)

    def deltas() -> list[int]:
        return sorted(
            version_of(name).number for name in bucket.list("") if name.endswith(".delta")
        )

    with dbuffer.WeightSender(remote, checksum=True, delta=True) as sender:
        for version in range(1, 12):
            # Each is another mirror, which learns from the bucket what is there.
            with mirror(remote, bucket.url) as up:
                send(sender, up, version, pattern=SPARSE)
                if version == 10:
                    assert anchors_in(bucket) == [1, 5, 9], "a chain has three deltas"
                    assert len(deltas()) == 9
                    timing.bucket_grace_s = 0.0
    assert anchors_in(bucket) == [5, 9]
    assert deltas() == list(range(5, 12))
    names = bucket.list("")
    assert all(file.name in names for file in newest_version(bucket).files)


# Acknowledgements


@pytest.fixture
def far(local: Path) -> Iterator[dbuffer.WeightReceiver]:
    """A receiver of the far store."""
    with dbuffer.WeightReceiver(local, receiver_id="far", poll_interval_s=POLL_S) as receiver:
        yield receiver


def test_a_sender_hears_of_readers_behind_the_bucket(remote, local, bucket_url, far):
    with Way(remote, bucket_url, local) as way:
        for version in (1, 2, 3):
            way.sender.send(SMALL.weights(version), metadata={"step": version})
            with far.open(version - 1, timeout_s=TIMEOUT_S) as snapshot:
                assert snapshot.version == version
                with pytest.raises(dbuffer.WaitTimeoutError):
                    way.sender.wait_applied(version, receivers=["far"], timeout_s=0)
            far.acknowledge(version)
            way.sender.wait_applied(version, receivers=["far"], timeout_s=TIMEOUT_S)
        record = DoubleBuffer(remote).receiver("far")
        assert (record.is_relayed, record.metadata) == (True, {"step": 3})
        far.close()
        until("its end is relayed", lambda: DoubleBuffer(remote).receiver("far").has_ended)


@pytest.mark.timing(bucket_records_s=0.5)
def test_one_put_has_acknowledgements_and_their_mirrors_record(
    remote, local, proxy, bucket_url, far
):
    """The record of the mirror changes before they do."""
    with Way(remote, bucket_url, local) as way:
        for version in (1, 2):
            num_before = len(proxy.requests)
            way.sender.send(SMALL.weights(version))
            with far.open(version - 1, timeout_s=TIMEOUT_S):
                time.sleep(0.2)  # it takes a while to apply it
            way.sender.wait_applied(version, receivers=["far"], timeout_s=TIMEOUT_S)
            time.sleep(0.6)  # a record that changes next may be put at once
    requests = [each for each in proxy.requests[num_before:] if "/receivers/" in each.path]
    assert [each.method for each in requests].count("PUT") == 2  # and one as it ended


@pytest.mark.timing(bucket_records_s=1.0)
def test_records_are_put_once_an_interval(remote, local, proxy, bucket_url, far):
    """However many of them change meanwhile, and how often."""
    started = time.monotonic()
    with Way(remote, bucket_url, local) as way:
        for version in range(1, 21):
            way.carry(version)
            with far.open(version - 1, timeout_s=TIMEOUT_S):
                pass
        way.sender.wait_applied(20, receivers=["far"], timeout_s=TIMEOUT_S)
    num_puts = sum(each.method == "PUT" and "/receivers/" in each.path for each in proxy.requests)
    assert num_puts <= time.monotonic() - started + 2  # the first, and one as it ended


def mirror_for_ever(connection: Connection, source: Path | str, target: Path | str) -> None:
    with mirror(source, target):
        connection.send("started")
        connection.recv()


def test_a_reader_whose_mirror_died_has_ended(remote, local, bucket_url, far, timing):
    with dbuffer.WeightSender(remote, checksum=True) as sender, mirror(remote, bucket_url):
        sender.send(SMALL.weights(1))
        with Child(mirror_for_ever, bucket_url, local) as child:
            child.receive()
            with far.open(timeout_s=TIMEOUT_S):
                pass
            far.acknowledge(1)
            sender.wait_applied(1, receivers=["far"], timeout_s=TIMEOUT_S)
            child.kill()
        timing.bucket_heartbeat_s = 0.1
        until("it counts as dead", lambda: DoubleBuffer(remote).receiver("far").has_ended)


@pytest.mark.timing(bucket_heartbeat_s=0.4)
@pytest.mark.parametrize("is_node_cut_off", [False, True])
def test_an_outage_of_the_bucket_ends_no_receiver(bucket, monkeypatch, is_node_cut_off):
    worker, told = OwnRecord("worker"), list[list[ReceiverRecord]]()
    node = BucketRecords(bucket, OwnRecord(f"mirror-node-{0:016}"))
    node.write([worker.current])
    relay = AcknowledgementRelay(ReceiversOfBucket(bucket), Mock(write=told.append))
    until("it is relayed", lambda: told)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "list", Mock(side_effect=dbuffer.StoreAccessError("an outage")))
        time.sleep(TIMING.bucket_presumed_dead_after_s)
        if not is_node_cut_off:
            node.write([worker.current])
    num_before = len(told)
    until("it is relayed again", lambda: len(told) > num_before)
    relay.close()
    assert not [record for records in told for record in records if record.has_ended]


def test_a_receiver_whose_record_is_old_has_ended_soon(bucket, monkeypatch):
    """A reader that has just started gives a mirror two heartbeats to show life."""
    names = [f"mirror-{name}-{0:016}" for name in ("old", "new")]
    for name in names:
        BucketRecords(bucket, OwnRecord(name)).write([])
    listed = bucket.list(RECEIVERS_PREFIX)
    old = receivers_object(names[0])
    listed[old] = listed[old]._replace(put_at=time.time() - 3600)
    monkeypatch.setattr(bucket, "list", lambda _: listed)
    reader = ReceiversOfBucket(bucket)
    records = sorted(reader.receivers(), key=lambda record: record.receiver)
    assert [reader.may_live(record) for record in records] == [True, True]
    reader.watched_s += 2 * TIMING.bucket_heartbeat_s
    assert [reader.may_live(record) for record in records] == [True, False]


@pytest.mark.timing(retry_min_s=0.05, bucket_records_s=0.1)
def test_a_mirror_whose_target_was_removed_ends_its_earlier_record(
    remote, local, bucket_url, bucket
):
    """The directory that it makes anew gives it another id, and another object in the bucket."""

    def told() -> list[bool]:
        records = ReceiversOfBucket(bucket).receivers()
        return sorted(each.has_ended for each in records if each.receiver.startswith("mirror-"))

    with Way(remote, bucket_url, local) as way:
        way.carry(1)
        until("it has told", lambda: told() == [False])
        shutil.rmtree(local)
        way.carry(2)
        until("the earlier one has ended", lambda: told() == [False, True])


def test_a_mirror_counts_its_requests(remote, local, proxy, bucket_url):
    # The request is made again. Repeated puts of files are obstore's, and are not counted.
    proxy.inject(FAULTS["503"], when=lambda each: each.path.endswith(f"/{POINTER_OBJECT}"))
    with dbuffer.WeightSender(remote, checksum=True) as sender:
        with mirror(remote, bucket_url) as up:
            send(sender, up, 1)
        with mirror(bucket_url, local) as down:
            down.wait_until_current(TIMEOUT_S)
        with mirror(remote, local.with_name("other")) as beside:
            beside.wait_until_current(TIMEOUT_S)
    assert sum(up.requests.values()) + sum(down.requests.values()) == len(proxy.requests)
    assert up.requests["put"] == sum(
        each.method == "PUT" and "receivers" not in each.path for each in proxy.requests
    )
    assert beside.requests == {}
    registry = CollectorRegistry()
    metrics.register(up, registry)
    puts = registry.get_sample_value("dbuffer_mirror_requests_total", {"kind": "put"})
    assert puts == up.requests["put"]


def test_a_receiver_whose_mirror_changed_its_id_and_back_is_heard(bucket):
    """Its record is in two objects; the later record counts."""
    worker = OwnRecord("worker")
    of_mirrors = [BucketRecords(bucket, OwnRecord(f"mirror-{name}-{0:016}")) for name in "ab"]
    reader = ReceiversOfBucket(bucket)
    for count in (1, 2, 3):
        worker.write(metadata={"count": count})
        of_mirror = of_mirrors[count % 2]
        of_mirror.write([worker.current])
        of_mirror.close()
        [heard] = [each for each in reader.receivers() if each.receiver == "worker"]
        assert heard.metadata == {"count": count}
        assert reader.may_live(heard)


def test_a_mirror_that_relays_no_more_tells_its_end(bucket):
    """Its end comes after its last relayed records, for instance if their store is gone."""
    record = OwnRecord(f"mirror-node-{0:016}")
    writer = BucketRecords(bucket, record)
    writer.write([])
    record.set(has_ended=True)
    writer.close()
    [told] = ReceiversOfBucket(bucket).receivers()
    assert told.has_ended


@pytest.mark.timing(bucket_heartbeat_s=0.1)
def test_records_of_mirrors_that_have_gone_are_deleted(remote, bucket, timing):
    BucketRecords(bucket, OwnRecord(f"mirror-node-{0:016}")).write([])
    bucket.put("receivers/mine.json", b"mine")
    with dbuffer.WeightSender(remote) as sender, mirror(remote, bucket.url) as up:
        send(sender, up, 1)
        assert len(bucket.list("receivers")) == 2
        timing.forget_receivers_after_s = 0.0
        until("they have gone", lambda: list(bucket.list("receivers")) == ["receivers/mine.json"])


@pytest.mark.timing(retry_min_s=0.05, retry_max_s=60.0)
def test_a_node_that_may_only_read_tries_to_acknowledge_ever_more_rarely(
    remote, local, proxy, bucket_url, caplog
):
    def is_record(request: Request) -> bool:
        return request.method == "PUT" and "/receivers/" in request.path

    proxy.inject(status(403), when=is_record, times=1 << 30)
    with Way(remote, bucket_url, local) as way:
        way.carry(1)
        time.sleep(1.0)
        assert 2 <= sum(map(is_record, proxy.requests)) <= 6
    told = [each for each in caplog.records if "cannot relay" in each.message]
    assert len(told) <= 2


# Options


def test_a_url_is_for_mirrors(tmp_path, bucket_url):
    between = "`dbuffer mirror` copies between a bucket and a directory"
    for make in (dbuffer.WeightReceiver, dbuffer.WeightSender):
        for url in (bucket_url, Path(bucket_url)):
            with pytest.raises(dbuffer.OptionError, match=between):
                make(url)
    with pytest.raises(dbuffer.OptionError, match=between):
        EngineOptions(store=bucket_url)
    for source, target, message in (
        (bucket_url, bucket_url, "both buckets"),
        ("s3:///policy", tmp_path, "s3://bucket/policy"),
        (tmp_path, "memory://", "outlives the mirror"),
    ):
        with pytest.raises(dbuffer.OptionError, match=message):
            Mirror(source, target)


def test_receivers_of_a_node_start_a_mirror_of_a_bucket(remote, local, bucket_url):
    with dbuffer.WeightSender(remote) as sender, mirror(remote, bucket_url) as up:
        send(sender, up, 1, pattern=SMALL)
    with start_mirror(bucket_url, local, poll_interval_s=POLL_S) as down:
        down.wait_until_current(TIMEOUT_S)
    assert newest(local) == 1


def test_a_refusal_is_not_retried_and_its_reason_is_said(bucket_url, monkeypatch):
    with Bucket("s3://no-such-bucket/policy") as bucket:
        reason = "cannot list s3://no-such-bucket/policy.*: 404 NoSuchBucket: The specified bucket"
        with pytest.raises(dbuffer.StoreAccessError, match=reason):
            bucket.list("")
        with pytest.raises(dbuffer.StoreAccessError, match="NoSuchBucket"):
            newest_version(bucket)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with Bucket(bucket_url) as bucket:
        for request in (lambda: bucket.list(""), lambda: bucket.get_range("one", 0, 1)):
            with pytest.raises(dbuffer.StoreAccessError, match="403 SignatureDoesNotMatch"):
                request()
        assert bucket.requests == {"list": 1, "get": 1}


def test_each_poll_of_a_mirror_has_an_interval_of_its_own(bucket_url, tmp_path, monkeypatch):
    """A mirror that draws a short one does not poll so often for as long as it waits."""
    uniform = Mock(side_effect=lambda least, most: most)
    with Way(tmp_path / "remote", bucket_url, tmp_path / "local") as way:
        way.carry(1)
        monkeypatch.setattr(random, "uniform", uniform)
        until("three intervals", lambda: uniform.mock_calls.count(call(0.75, 1.25)) >= 3)


# Costs, as `docs/object-storage.md` has them


def test_the_page_has_the_figures_of_the_code():
    timing = Timing()
    page = " ".join((ROOT / "docs" / "object-storage.md").read_text(encoding="utf-8").split())
    assert (timing.bucket_list_s, timing.bucket_heartbeat_s) == (1.0, 60.0)
    for text in (
        f"one put per {buckets.PART_BYTES >> 20} MiB",
        f"one get per {PAGE_RANGE_BYTES >> 20} MiB",
        f"below {NUM_REQUESTS * buckets.PART_BYTES >> 20} MiB for puts",
        f"{NUM_REQUESTS * PAGE_RANGE_BYTES >> 20} MiB for gets",
        f"If no byte moves for {buckets.REQUEST_S:g} s in a download",
        f"A part has {buckets.TRANSFER_S:g} s",
        f"outage of up to {buckets.UPLOAD_RETRIES_S / 60:g} minutes, an upload repeats its current",
        f"if its mirror has put no records for {timing.bucket_presumed_dead_after_s:g} s",
        f"keeps the newest {('no', 'one', 'two')[KEEP_ANCHORS]} full versions",
        "and all files of the last hour" if timing.bucket_grace_s == 3600 else "",
        "the mirror that started first ends within a minute",
        "within a minute, the trainer's mirror uploads its newest version again",
    ):
        assert text, text
        assert text in page, text


RECORD_BYTES = 4000
"""Bound of the sizes of a version's record, of a mirror's records, and of a footer."""
IDLE_S = 1.5
IDLE_LIST_S = 0.2
IDLE = {"poll", "list of records", "get of records"}
"""Kinds of requests that mirrors repeat at intervals."""


def kind_of(request: Request) -> str:
    if "list-type" in request.query:
        return "list of records"
    if request.path.endswith("/CURRENT"):
        is_poll = request.method == "GET" and request.sent_bytes == 0
        return "poll" if is_poll else f"{request.method.lower()} of the version"
    what = "records" if "/receivers/" in request.path else "a file"
    return f"{request.method.lower()} of {what}"


def count_kinds(requests: list[Request]) -> Counter[str]:
    return Counter(map(kind_of, requests))


@pytest.mark.timing(bucket_records_s=1.0, bucket_heartbeat_s=2.0)
@pytest.mark.parametrize(("delta", "num_gets"), [(False, 6), (True, 1)], ids=["anchor", "delta"])
def test_requests_and_bytes_of_a_version(remote, local, proxy, bucket_url, delta, num_gets):
    """A weights file is got in five ranges and a request for its checksums."""
    far = DoubleBuffer(local)
    with Way(remote, bucket_url, local, delta=delta) as way:
        for count in (1, 2, 3):  # the first two go into both buffers of the far store
            before = len(proxy.requests)
            sent = way.sender.send(LONG.weights(count))

            def has_arrived(before: int = before, sent: dbuffer.Publication = sent) -> bool:
                pointer = far.newest_pointer() if far.exists() else None
                kinds = count_kinds(proxy.requests[before:])
                return pointer is not None and pointer.id == sent.id and kinds["put of records"] > 0

            until("it has arrived, and is acknowledged", has_arrived)
        requests = [each for each in proxy.requests[before:] if kind_of(each) not in IDLE]
    assert count_kinds(requests) == {
        "put of a file": 1,
        "put of the version": 1,
        "get of the version": 1,
        "get of a file": num_gets,
        "put of records": 1,
    }
    num_bytes = sum(each.received_bytes + each.sent_bytes for each in requests)
    file_bytes = sent.delta_bytes or manifest_of(remote).file_bytes
    assert 2 * file_bytes < num_bytes < 2 * file_bytes + 4 * RECORD_BYTES


@pytest.mark.timing(bucket_list_s=IDLE_LIST_S, bucket_records_s=0.1)
def test_requests_of_idle_mirrors(remote, local, proxy, bucket_url):
    with Way(remote, bucket_url, local) as way:
        way.carry(1)
        time.sleep(1.0)  # until the records have been relayed
        before = len(proxy.requests)
        time.sleep(IDLE_S)
        requests = proxy.requests[before:]
    kinds = count_kinds(requests)
    assert kinds.keys() <= {"poll", "list of records"}
    assert kinds["poll"] <= IDLE_S / (0.75 * POLL_S) + 1
    assert kinds["list of records"] <= IDLE_S / IDLE_LIST_S + 1
    assert min(kinds.values()) >= 3
    assert max(each.sent_bytes for each in requests) < RECORD_BYTES


def test_a_mirror_that_stands_by_makes_no_requests(remote, local, bucket_url):
    with Way(remote, bucket_url, local) as way:
        way.carry(1)
        with mirror(bucket_url, local) as second:
            assert not second.is_elected
            before = second.requests
            time.sleep(4 * TIMING.retry_min_s)
            assert second.requests == before
