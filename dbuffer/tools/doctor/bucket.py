"""Probes of a bucket's rights and semantics, with objects that mirrors ignore."""

from __future__ import annotations

import time
from collections.abc import Callable

from dbuffer.errors import StoreAccessError
from dbuffer.format.manifest import encode
from dbuffer.format.objects import (
    RECEIVERS_PREFIX,
    VERSIONS_PREFIX,
    BucketReceivers,
    is_of_receivers,
)
from dbuffer.mirror.bucket import Bucket, Listed, Tag
from dbuffer.mirror.bucket_source import newest_version
from dbuffer.tools.doctor.probes import Finding, Outcome, find

NAME = ".dbuffer-doctor"

_RECORD, _VERSION = f"{RECEIVERS_PREFIX}/{NAME}", f"{VERSIONS_PREFIX}/{NAME}"
_AT_BOTH_ENDS = "needed by the trainer's mirror and by the engines' mirrors"
_AT_TRAINER = "needed by the trainer's mirror"
_MAX_SKEW_S = 900.0
"""Difference of clocks above which S3 refuses requests."""


def examine_bucket(url: str) -> list[Finding]:
    """Test whether a bucket, and the rights to it, allow what mirrors at both ends do with it."""
    with Bucket(url) as bucket:
        probes = _Probes(bucket)
        return [
            find("get", probes.get, "no mirror can read"),
            find(
                "list",
                probes.list,
                "no mirror can start: without this right, a get of a missing object is refused",
            ),
            find("put records", probes.put_records, ""),
            find("get after put", probes.get_after_put, "mirrors would miss versions"),
            find("list after put", probes.list_after_put, "acknowledgements would be missed"),
            find("conditional get", probes.get_on_condition, "each poll would download a record"),
            find("ranges", probes.get_range, "no mirror can download a version"),
            find("clock", probes.clock, "compare the clocks of this host and of the service"),
            find("put versions", probes.put_versions, ""),
            find("conditional put", probes.put_on_condition, "no mirror can publish a version"),
            find("put in parts", probes.put_in_parts, "no mirror can upload a large version"),
            find("delete", probes.delete, ""),
        ]


class _Probes:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._may_put: set[str] = set()
        """Names of the probes' objects that this host has the right to put."""
        self._num_puts = 0

    def get(self) -> Outcome:
        version = newest_version(self._bucket)
        newest = "nothing was published yet" if version is None else f"version {version.id.number}"
        return "good", newest, _AT_BOTH_ENDS

    def list(self) -> Outcome:
        num_mirrors = sum(map(is_of_receivers, self._bucket.list(RECEIVERS_PREFIX)))
        return "good", f"mirrors that have put records: {num_mirrors}", _AT_BOTH_ENDS

    def put_records(self) -> Outcome:
        use_without = "weights arrive, but the sender gets no acknowledgements from here"
        return self._granted(lambda: self._put(_RECORD), _AT_BOTH_ENDS, use_without)

    def get_after_put(self) -> Outcome:
        def works() -> bool:
            for _ in range(2):
                self._put(_RECORD)
                read = self._bucket.read(BucketReceivers, _RECORD)
            return read is not None and read[0].updated_at == self._num_puts

        return self._tested(_RECORD, works, "a get returned an earlier put's content")

    def list_after_put(self) -> Outcome:
        def works() -> bool:
            self._put(_RECORD)
            before = self._listed()
            self._put(_RECORD)
            now = self._listed()
            return before is not None and now is not None and before.e_tag != now.e_tag

        return self._tested(_RECORD, works, "a list missed a put, or has no ETags")

    def get_on_condition(self) -> Outcome:
        def works() -> bool:
            tag = self._put(_RECORD)
            is_unchanged = self._bucket.read(BucketReceivers, _RECORD, tag) is None
            self._put(_RECORD)
            return is_unchanged and self._bucket.read(BucketReceivers, _RECORD, tag) is not None

        return self._tested(_RECORD, works, "the condition was ignored")

    def get_range(self) -> Outcome:
        def works() -> bool:
            self._bucket.put(_RECORD, b"0123456789")
            return bytes(self._bucket.get_range(_RECORD, 3, 7)) == b"3456"

        return self._tested(_RECORD, works, "another range was returned")

    def clock(self) -> Outcome:
        if _RECORD not in self._may_put:
            return _untested()
        self._put(_RECORD)
        now, listed = time.time(), self._listed()
        if listed is None:
            return "unknown", "the list missed the put", ""
        skew_s = listed.put_at - now
        if abs(skew_s) > _MAX_SKEW_S:
            return "broken", f"the clocks differ by {skew_s:.0f} s", "set this host's clock"
        return "good", f"the clocks differ by {abs(skew_s):.0f} s", _AT_BOTH_ENDS

    def put_versions(self) -> Outcome:
        return self._granted(lambda: self._put(_VERSION))

    def put_on_condition(self) -> Outcome:
        def works() -> bool:
            tag = self._put(_VERSION)
            tags = [
                self._bucket.put_if(_VERSION, b"2", condition) for condition in (None, tag, tag)
            ]
            return [tag is not None for tag in tags] == [False, True, False]

        return self._tested(_VERSION, works, "the condition was ignored, or refused", _AT_TRAINER)

    def put_in_parts(self) -> Outcome:
        def works() -> bool:
            self._bucket.put_in_parts(_VERSION, b"parts")
            return bytes(self._bucket.get_range(_VERSION, 0, 5)) == b"parts"

        return self._tested(_VERSION, works, "a get returned other bytes than the put", _AT_TRAINER)

    def delete(self) -> Outcome:
        return self._granted(lambda: self._bucket.delete([_RECORD, _VERSION]))

    def _put(self, name: str) -> Tag:
        # Put different content each time, so that the ETag changes.
        self._num_puts += 1
        record = BucketReceivers(records=[], updated_at=float(self._num_puts))
        tag = self._bucket.put(name, encode(record))
        self._may_put.add(name)
        return tag

    def _listed(self) -> Listed | None:
        return self._bucket.list(RECEIVERS_PREFIX).get(_RECORD)

    def _granted(
        self,
        action: Callable[[], object],
        use: str = _AT_TRAINER,
        use_without: str = f"{_AT_TRAINER}, not at an engine's",
    ) -> Outcome:
        try:
            action()
        except StoreAccessError as error:
            return "adapted", str(error), use_without
        return "good", "granted", use

    def _tested(
        self, name: str, works: Callable[[], bool], fault: str, use: str = _AT_BOTH_ENDS
    ) -> Outcome:
        if name not in self._may_put:
            return _untested()
        if works():
            return "good", "works", use
        return "broken", fault, "mirrors can stop, or serve old versions"


def _untested() -> Outcome:
    return "unknown", "not tested: this host has no right to write the test's object", ""
