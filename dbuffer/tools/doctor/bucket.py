"""Probes of the access rights to a bucket, with objects that mirrors ignore."""

from __future__ import annotations

from collections.abc import Callable

from dbuffer.errors import StoreAccessError
from dbuffer.format.objects import RECEIVERS_PREFIX, VERSIONS_PREFIX, is_of_receivers
from dbuffer.mirror.bucket import Bucket, Tag
from dbuffer.mirror.download import newest_version
from dbuffer.tools.doctor.probes import Finding, Outcome, find

NAME = ".dbuffer-doctor"


def examine_bucket(url: str) -> list[Finding]:
    """Test the rights to a bucket that the mirrors of a trainer and of engines need."""
    record, version = f"{RECEIVERS_PREFIX}/{NAME}", f"{VERSIONS_PREFIX}/{NAME}"

    def get() -> Outcome:
        version = newest_version(bucket)
        newest = "nothing was published yet" if version is None else f"version {version.id.number}"
        return "good", newest, "needed at both ends"

    def list_() -> Outcome:
        num_mirrors = sum(map(is_of_receivers, bucket.list(RECEIVERS_PREFIX)))
        return "good", f"mirrors that have put records: {num_mirrors}", "needed at both ends"

    def granted(
        action: Callable[[], object],
        use: str = "needed at the trainer's end",
        use_without: str = "needed at the trainer's end, not at an engine's",
    ) -> Outcome:
        try:
            action()
        except StoreAccessError as error:
            return "adapted", str(error), use_without
        return "good", "granted", use

    def put_record() -> Outcome:
        use_without = "weights arrive, and the sender gets no acknowledgements from here"
        return granted(lambda: bucket.put(record, b"1"), "needed at both ends", use_without)

    def put_on_condition() -> Outcome:
        tags: list[Tag | None] = []

        def put() -> None:
            tag = bucket.put(version, b"1")
            tags.extend(bucket.put_if(version, b"2", condition) for condition in (None, tag, tag))

        outcome = granted(put)
        if [tag is not None for tag in tags] in ([], [False, True, False]):
            return outcome
        return "broken", "the condition was ignored, or refused", "two mirrors could write by turns"

    with Bucket(url) as bucket:
        return [
            find("get", get, "no mirror can read"),
            find("list", list_, "no mirror can begin: a pointer that is not there looks refused"),
            find("put records", put_record, ""),
            find("put versions", lambda: granted(lambda: bucket.put(version, b"1")), ""),
            find("conditional put", put_on_condition, ""),
            find("delete", lambda: granted(lambda: bucket.delete([record, version])), ""),
        ]
