"""Rights on a bucket, each tried on objects that mirrors ignore."""

from __future__ import annotations

from collections.abc import Callable

from dbuffer.errors import StoreAccessError
from dbuffer.format.objects import RECEIVERS_PREFIX, VERSIONS_PREFIX, is_of_receivers
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.download import newest_pointer
from dbuffer.tools.doctor.finding import Finding, Outcome, find

NAME = ".dbuffer-doctor"
"""Name of the objects that are put below the prefixes of records and versions, and deleted."""


def examine_bucket(url: str) -> list[Finding]:
    """Try the rights that the mirrors at the two ends need.

    Raises:
        OptionError: it is no bucket's URL, or there are no credentials.
        DBufferError: the client for it is not installed.
    """
    record, version = f"{RECEIVERS_PREFIX}/{NAME}", f"{VERSIONS_PREFIX}/{NAME}"

    def get() -> Outcome:
        pointer = newest_pointer(bucket)
        newest = "nothing was published yet" if pointer is None else f"version {pointer.version}"
        return "good", newest, "needed at both ends"

    def list_() -> Outcome:
        num_mirrors = sum(map(is_of_receivers, bucket.list(RECEIVERS_PREFIX)))
        return "good", f"mirrors that have put records: {num_mirrors}", "needed at both ends"

    def put_record() -> Outcome:
        bucket.put(record, b"1")
        return "good", "an object was put", "needed at both ends"

    def at_the_trainer(action: Callable[[], None]) -> Outcome:
        try:
            action()
        except StoreAccessError as error:
            return "adapted", str(error), "needed at the trainer's end, not at an engine's"
        return "good", "granted", "needed at the trainer's end"

    with Bucket(url) as bucket:
        return [
            find("get", get, "no mirror can read"),
            find("list", list_, "no mirror can begin: a pointer that is not there looks refused"),
            find("put records", put_record, "acknowledgements do not come back"),
            find("put versions", lambda: at_the_trainer(lambda: bucket.put(version, b"1")), ""),
            find("delete", lambda: at_the_trainer(lambda: bucket.delete([record, version])), ""),
        ]
