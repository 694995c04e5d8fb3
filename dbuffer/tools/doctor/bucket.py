"""Probes of a bucket. Each makes the requests itself, on objects of its own below the prefix."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dbuffer.errors import StoreAccessError, StoreNotFoundError
from dbuffer.format.layout import digest
from dbuffer.format.manifest import encode
from dbuffer.format.objects import PART_BYTES, RECEIVERS_PREFIX, BucketReceivers, is_of_receivers
from dbuffer.mirror.bucket import NUM_REQUESTS, Bucket
from dbuffer.mirror.download import newest_pointer
from dbuffer.runtime.messages import format_bytes
from dbuffer.runtime.timing import TIMING
from dbuffer.tools.doctor.probes import Finding, OnStep, Outcome, Probe, not_tried

logger = logging.getLogger(__name__)

PREFIX = ".dbuffer-doctor"
"""Beginning of the names of all objects that the doctor puts."""

_NUM_PUTS = 5
_NUM_GETS = 20
_NUM_OVERWRITES = 10


@dataclass(frozen=True, slots=True)
class Scratch:
    """Objects of this examination, which are removed at its end."""

    bucket: Bucket
    names: set[str]

    def name(self) -> str:
        """Return the name of a further object."""
        name = f"{PREFIX}/{secrets.token_hex(8)}"
        self.names.add(name)
        return name

    def put(self, data: bytes) -> str:
        """Put an object and return its name."""
        name = self.name()
        self.bucket.put(name, data)
        return name


def findings(bucket: Bucket, progress: OnStep) -> tuple[Finding, ...]:
    """Return the findings of all probes of a bucket."""
    with _scratch(bucket) as place:
        results = [_GET.try_on(place, progress)]
        if results[0].verdict == "broken":
            return (*results, not_tried((_LIST, _PUT, *_PROBES), "nothing can be read"))
        results += [_LIST.try_on(place, progress), _PUT.try_on(place, progress)]
        if results[-1].verdict == "broken":
            return (*results, not_tried(_PROBES, "nothing can be written"))
        return (*results, *(probe.try_on(place, progress) for probe in _PROBES))


@contextlib.contextmanager
def _scratch(bucket: Bucket) -> Iterator[Scratch]:
    place = Scratch(bucket, set())
    try:
        yield place
    finally:
        try:
            bucket.delete(sorted(place.names))
        except StoreAccessError as error:
            where = bucket.name_of(PREFIX)
            logger.warning(
                "objects below %s may be left, remove them by hand: %s", where, str(error)
            )


# ---------------------------------------------------------------------------------------------
# Rights


def _probe_get(place: Scratch) -> Outcome:
    pointer = newest_pointer(place.bucket)
    if pointer is None:
        return "good", "nothing was published yet", "readers wait for the first version"
    result = f"version {pointer.version} of run {pointer.id.run}"
    return "good", result, "readers get the pointer like this"


def _probe_list(place: Scratch) -> Outcome:
    num_mirrors = sum(map(is_of_receivers, place.bucket.list(RECEIVERS_PREFIX)))
    result = f"mirrors that have put records: {num_mirrors}"
    return "good", result, "acknowledgements come back like this"


def _probe_put(place: Scratch) -> Outcome:
    place.put(b"1")
    return "good", "an object was put", "versions and acknowledgements are put like this"


def _probe_delete(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.put(b"1")
    try:
        bucket.delete([name])
    except StoreAccessError as error:
        return "adapted", str(error), "old versions stay, and cost: give the right to delete"
    with contextlib.suppress(StoreNotFoundError):
        bucket.get(name, 1)
        return "broken", "a deleted object is still there", "use a service that is consistent"
    return "good", "a deleted object is gone", "old versions are deleted"


# ---------------------------------------------------------------------------------------------
# Consistency


def _probe_overwrite(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.name()
    num_seen = 0
    for number in range(_NUM_OVERWRITES):
        data = b"%d" % (number % 10)
        bucket.put(name, data)
        num_seen += bytes(bucket.get(name, 1)) == data
    result = f"{num_seen} of {_NUM_OVERWRITES} gets had what was put before them"
    if num_seen < _NUM_OVERWRITES:
        return "broken", result, "readers would see older versions; use a consistent service"
    return "good", result, "readers see a version at their next look"


def _probe_listing(place: Scratch) -> Outcome:
    name = place.put(b"1")
    there = place.bucket.list(PREFIX)
    listed = there.get(name)
    place.names.update(  # objects of doctors that were killed
        each for each in there if time.time() - there[each].put_at > TIMING.doctor_stale_s
    )
    if listed is None:
        return "adapted", "an object is listed late", "acknowledgements come late"
    if listed.e_tag is None:
        return "broken", "objects are listed without ETags", "changed records are not noticed"
    skew_s = time.time() - listed.put_at
    result = f"an object is listed after its put; clocks differ by {abs(skew_s):.0f} s"
    if abs(skew_s) > TIMING.bucket_presumed_dead_after_s / 2:
        consequence = "`dbuffer status` may take living receivers for dead: set the clock"
        return "adapted", result, consequence
    return "good", result, "acknowledgements come with the next listing"


def _probe_create(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.name()
    bucket.put_if(name, b"1", None)
    is_taken = bucket.put_if(name, b"2", None) is not None
    if is_taken or bytes(bucket.get(name, 1)) != b"1":
        return (
            "broken",
            "an object that is there was put again (If-None-Match: *)",
            "two mirrors could both be the writer; use a service with conditional puts",
        )
    return "good", "a put of what is there is refused", "of two mirrors one is the first writer"


def _probe_replace(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.name()
    stale = bucket.put_if(name, b"1", None)
    if stale is None or not stale.get("e_tag"):
        return "broken", "a put returns no ETag", "no mirror can tell whether it is the writer"
    is_taken = bucket.put_if(name, b"2", stale) is not None
    is_stale_taken = bucket.put_if(name, b"3", stale) is not None
    if is_stale_taken or bytes(bucket.get(name, 1)) == b"3":
        return (
            "broken",
            "a put with a stale ETag was taken (If-Match)",
            "a mirror that was superseded could put an older version back",
        )
    if not is_taken:
        return "broken", "a put with the right ETag was refused", "no version can be published"
    return "good", "a stale ETag is refused, the right one taken", "the pointer never goes back"


# ---------------------------------------------------------------------------------------------
# Reading


def _probe_if_changed(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.name()
    first, second = (encode(BucketReceivers(records=[], updated_at=at)) for at in (1.0, 2.0))
    bucket.put(name, first)
    read = bucket.read(BucketReceivers, name)
    assert read is not None  # noqa: S101 - without a tag it is read
    tag = read[1]
    if not tag.get("e_tag"):
        return "broken", "objects have no ETags", "a reader cannot ask for what has changed"
    is_sent_again = bucket.read(BucketReceivers, name, tag) is not None
    bucket.put(name, second)
    changed = bucket.read(BucketReceivers, name, tag)
    if changed is None or changed[0].updated_at != 2.0:
        return "broken", "a changed object counts as unchanged", "readers miss new versions"
    if is_sent_again:
        return "adapted", "objects are always sent", "each look at the pointer fetches it"
    return "good", "not sent again until it changes", "a look at the pointer is answered with 304"


def _probe_ranges(place: Scratch) -> Outcome:
    data = os.urandom(4096)
    name = place.put(data)
    if bytes(place.bucket.get_range(name, 1000, 3001)) != data[1000:3001]:
        return "broken", "other bytes came than those of the range", "layouts cannot be read"
    return "good", "the bytes of a range came", "layouts are read without the weights"


def _probe_latency(place: Scratch) -> Outcome:
    bucket, name = place.bucket, place.put(b"1")
    get_s = statistics.median(_seconds(lambda: bucket.get(name, 1)) for _ in range(_NUM_GETS))
    put_s = statistics.median(_seconds(lambda: bucket.put(name, b"1")) for _ in range(_NUM_PUTS))
    result = f"{1e3 * get_s:.1f} ms a get, {1e3 * put_s:.1f} ms a put (medians)"
    consequence = "a delta comes by three gets in a row: pointer, record, part"
    return "adapted" if max(get_s, put_s) > 1 else "good", result, consequence


def _probe_throughput(place: Scratch) -> Outcome:
    bucket, name, data = place.bucket, place.name(), os.urandom(PART_BYTES)
    received: list[str] = []
    put_s = _seconds(lambda: bucket.put(name, data))
    get_s = _seconds(lambda: received.append(digest(bucket.get(name, PART_BYTES))))
    if received != [digest(data)]:
        return "broken", "other bytes came than were put", "versions would be refused as damaged"
    result = (
        f"a part of {format_bytes(PART_BYTES)}: put at {format_bytes(PART_BYTES / put_s)}/s, "
        f"got at {format_bytes(PART_BYTES / get_s)}/s"
    )
    if max(put_s, get_s) * NUM_REQUESTS > TIMING.request_s:
        consequence = f"a request fails after {TIMING.request_s:g} s, and {NUM_REQUESTS} share this"
        return "adapted", result, consequence
    return "good", result, f"{NUM_REQUESTS} parts go side by side"


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


_GET = Probe(
    "get",
    _probe_get,
    1,
    "nothing can be read. Without the right to list, a service refuses what is not there",
)
_LIST = Probe(
    "list", _probe_list, 3, "no mirror into the bucket can begin; one out of it needs no listing"
)
_PUT = Probe(
    "put",
    _probe_put,
    3,
    "no mirror into the bucket can publish; one out of it works, without acknowledgements",
)
_PROBES = (
    Probe("delete", _probe_delete, 3, "old versions stay, and cost"),
    Probe("get after put", _probe_overwrite, 2, "the version pointer cannot be flipped"),
    Probe("list after put", _probe_listing, 5, "acknowledgements do not come back"),
    Probe("put if absent", _probe_create, 2, "two mirrors could both be the writer"),
    Probe("put if unchanged", _probe_replace, 2, "the version pointer cannot be flipped"),
    Probe("get if changed", _probe_if_changed, 2, "the version pointer cannot be read"),
    Probe("ranges", _probe_ranges, 1, "layouts cannot be read"),
    Probe("latency", _probe_latency, 5, "requests fail"),
    Probe("throughput", _probe_throughput, 5, "parts cannot be put, or got"),
)
