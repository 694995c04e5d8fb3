"""Requests to object storage, by kind, and their cost at list prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dbuffer.mirror.bucket import num_puts, range_starts

Requests = Mapping[str, float]
"""Number of requests by kind."""

KINDS = ("put", "get", "list", "delete")

DOLLARS_PER_1000 = {"put": 0.005, "list": 0.005, "get": 0.0004, "delete": 0.0}
PRICES = (
    "S3 Standard, us-east-1: $0.005 for 1,000 put or list requests, $0.0004 for 1,000 get requests "
    "(304 answers count), deletes and traffic within the region free; "
    "aws.amazon.com/s3/pricing, as of March 2026, without storage"
)

_LISTED_AT_ONCE = 1000
"""Objects in an answer to a list request."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Requests of the trainer's mirror and of a reading mirror, for a version or an idle hour."""

    trainer: Requests
    reader: Requests
    num_bytes: int = 0
    """Size of the file that was put in parts and read in ranges."""

    def of_size(self, num_bytes: float) -> Ends:
        """Return the requests for a file of another size, with its number of parts and ranges."""
        puts = num_puts(int(num_bytes)) - num_puts(self.num_bytes)
        gets = len(range_starts(int(num_bytes))) - len(range_starts(self.num_bytes))
        return Ends(_with(self.trainer, put=puts), _with(self.reader, get=gets))

    def dollars(self, num_readers: int) -> float:
        """Return the price of the requests, with ``num_readers`` mirrors that read the bucket.

        The trainer's mirror gets the receivers' records of each of these mirrors.
        """
        pages = math.ceil(num_readers / _LISTED_AT_ONCE)
        trainer = {
            **self.trainer,
            "get": self.trainer.get("get", 0) * num_readers,
            "list": self.trainer.get("list", 0) * pages,
        }
        return _dollars(trainer) + num_readers * _dollars(self.reader)


def _with(requests: Requests, **more: int) -> Requests:
    return {**requests, **{kind: requests.get(kind, 0) + count for kind, count in more.items()}}


def _dollars(requests: Requests) -> float:
    return sum(DOLLARS_PER_1000[kind] * count / 1000 for kind, count in requests.items())
