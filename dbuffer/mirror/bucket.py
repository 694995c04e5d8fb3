"""`Bucket`: the objects under one prefix of an object storage, by obstore.

obstore signs requests and knows the services; each call of it is one request here. Retries are
ours: they are counted, and a caller knows that a conditional put may have been repeated.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import xxhash

from dbuffer.errors import (
    OptionError,
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.format.manifest import UNDECODABLE, RecordT, decode
from dbuffer.format.objects import MAX_OBJECT_BYTES
from dbuffer.io.copier import Copier
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.messages import first_line
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tag: TypeAlias = dict[str, str]
"""ETag of an object's content, and on some services its version, for requests with a condition."""

NUM_REQUESTS = 8
"""Requests that are made side by side: one alone does not fill a network."""

_PIECE_BYTES = 1 << 18
"""Bytes of an object that are handled together, at least."""

_ATTEMPTS = 6
_MAX_PAUSE_S = 10.0
"""Longest pause between two attempts."""

_LIST_PAGE = 1000
"""Objects that a service names in the answer to one request, at most."""

_REFUSED = re.compile(r"status code: 40[1345] ")
"""Answer that no retry changes, in the text of an error that has no class of its own."""

_REASON = re.compile(
    r"status code: (\d+) .*<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL
)
"""Reason for an answer, as S3, GCS and Azure give it."""

_NO_CREDENTIALS = re.compile(r"/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")
"""Address of a cloud's service for the roles of its hosts, in the text of an error.

obstore asks it if the environment has no credentials.
"""

_S3 = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_VARIABLES = {"s3": _S3, "s3a": _S3, "gs": "GOOGLE_APPLICATION_CREDENTIALS (a file)"}
"""Variables for credentials, by the scheme of a URL; of all others Azure's."""

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_CONNECT_S = 10.0
"""Time to connect to an object storage."""
REQUEST_S = 120.0
"""Time without a byte of an answer after which a request has failed. An upload has no answer before
its end: a part of 32 MiB needs 0.3 MB/s."""
_OUTAGE_S = 600.0
"""Time without a byte after which a download is given up, with the parts that came."""
_NO_LIMIT = timedelta(days=1)


class Listed(NamedTuple):
    """An object, as a service lists it."""

    e_tag: str | None
    num_bytes: int
    put_at: float
    """Time of its last put, by the service's clock, in seconds since the epoch."""


class Bucket(Closing):
    """Objects under a URL such as ``s3://bucket/prefix``. Any number of threads may use it.

    Errors that may pass (429, 5xx, a connection that broke) are retried with backoff, a few times.

    Raises, in all its methods:
        StoreNotFoundError: there is no such object.
        StoreAccessError: there is no such bucket, access was refused, or the service does not
            answer.
        OptionError: there are no credentials, before anything has worked.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._obstore = _obstore()
        self._errors = self._obstore.exceptions
        self._stop = threading.Event()
        self._has_credentials = False
        self._copier = Copier(NUM_REQUESTS)
        self._width = _Width()
        self.requests: collections.Counter[str] = collections.Counter()
        """Number of requests made, by kind: get, put, list, delete."""
        try:
            self._objects = self._open()
        except (self._errors.BaseError, ValueError) as error:
            raise OptionError(f"cannot use {self.url}: {first_line(error)}") from error

    def _open(self) -> Any:
        return self._obstore.store.from_url(
            self.url,
            # http is used only if the environment names an endpoint with it.
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "read_timeout": timedelta(seconds=REQUEST_S),
                "timeout": _NO_LIMIT,
            },
            retry_config={"max_retries": 0},
        )

    def end_retries(self) -> None:
        """Let requests that fail from now on be given up at once."""
        self._stop.set()

    def close(self) -> None:
        self.end_retries()
        self._copier.close()

    def get_pieces(
        self, name: str, num_bytes: int, place: Callable[[int, memoryview], None]
    ) -> str:
        """Get the content of an object of a known size piece by piece, and return its digest.

        A request that breaks off is followed by one for the bytes that did not come.

        Args:
            name: the object's.
            num_bytes: its size.
            place: called with pieces of the content, each with its offset, in this order.
        """
        hasher, end, came_at = xxhash.xxh3_64(), 0, time.monotonic()

        def request() -> None:
            nonlocal end, came_at
            if end == num_bytes:  # it broke off behind the last one
                return
            options: Any = {"range": (end, num_bytes)} if end else None
            with self._width.request():
                result = self._obstore.get(self._objects, name, options=options)
                if result.meta["size"] != num_bytes:
                    raise self._wrong_size(name)
                # A piece is copied and hashed while it is in a core's cache.
                for piece in result.stream(min_chunk_size=_PIECE_BYTES):
                    data = memoryview(piece)
                    if end + data.nbytes > num_bytes:
                        raise self._wrong_size(name)
                    place(end, data)
                    hasher.update(data)
                    end += data.nbytes
                    came_at = time.monotonic()

        self._request("get", name, request, lambda: came_at)
        if end < num_bytes:
            raise self._wrong_size(name)
        return hasher.hexdigest()

    def _wrong_size(self, name: str) -> StoreCorruptError:
        return StoreCorruptError(f"{self.name_of(name)} has not the size that was published")

    def get_range(self, name: str, start: int, end: int) -> memoryview:
        """Return some bytes of an object."""
        get = self._obstore.get_range

        def request() -> memoryview:
            return memoryview(get(self._objects, name, start=start, end=end))

        data = self._request("get", name, request)
        if data.nbytes != end - start:
            raise StoreCorruptError(f"{self.name_of(name)} is shorter than what was published")
        return data

    def read(
        self, kind: type[RecordT], name: str, tag: Tag | None = None
    ) -> tuple[RecordT, Tag] | None:
        """Read a record, and its tag, or return None if the tag is still ``tag``."""
        options: Any = None if tag is None else {"if_none_match": tag["e_tag"]}

        def request() -> tuple[bytes, Tag] | None:
            try:
                result = self._obstore.get(self._objects, name, options=options)
                if result.meta["size"] > MAX_OBJECT_BYTES:
                    raise StoreCorruptError(f"{self.name_of(name)} is too large for a record")
                data = bytes(result.buffer())
            except self._errors.NotModifiedError:
                return None
            return data, _tag_of(result.meta)

        result = self._request("get", name, request)
        if result is None:
            return None
        try:
            return decode(kind, result[0]), result[1]
        except UNDECODABLE as error:
            raise type(error)(f"{self.name_of(name)}: {error}") from None

    def put(self, name: str, data: bytes | memoryview) -> Tag:
        """Put an object, whatever was there."""
        return self._request("put", name, lambda: self._put(name, data, "overwrite"))

    def put_if(self, name: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Put an object if it still has the content of ``tag``, or with None is not there.

        Returns:
            The tag of the new content, or None if the object has another content. That may be this
            one, if the answer to a put that succeeded was lost.
        """

        def request() -> Tag | None:
            try:
                return self._put(name, data, "create" if tag is None else tag)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return None

        return self._request("put", name, request)

    def list(self, prefix: str) -> dict[str, Listed]:
        """Return all objects under a prefix, by name."""

        def request() -> dict[str, Listed]:
            listed: dict[str, Listed] = {}
            pages = self._obstore.list(self._objects, prefix, chunk_size=_LIST_PAGE)
            for count, page in enumerate(pages):
                self.requests["list"] += count > 0  # each page is a request
                for each in page:
                    put_at = each["last_modified"].timestamp()
                    listed[each["path"]] = Listed(each["e_tag"], each["size"], put_at)
            return listed

        return self._request("list", prefix, request)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, if they are there."""

        def delete(name: str) -> None:
            with contextlib.suppress(StoreNotFoundError):
                request = functools.partial(self._obstore.delete, self._objects, name)
                self._request("delete", name, request)

        self.in_parallel(delete, names)

    def in_parallel(self, action: Callable[[T], Any], items: Sequence[T]) -> None:
        """Call a function with each item, from several threads."""

        def work(index: int, _: int) -> None:
            action(items[index])

        self._copier.in_parallel(work, [(index, index + 1) for index in range(len(items))])

    def name_of(self, name: str) -> str:
        """Return an object's URL, for messages."""
        return f"{self.url}/{name}"

    def _put(self, name: str, data: bytes | memoryview, mode: Any) -> Tag:
        with self._width.request():
            put = self._obstore.put
            return _tag_of(put(self._objects, name, data, mode=mode, use_multipart=False))

    def _request(
        self,
        kind: str,
        name: str,
        action: Callable[[], T],
        came_at: Callable[[], float] | None = None,
    ) -> T:
        """Make a request, again and again if it fails.

        ``came_at``: returns the time of the last byte, of a request that goes on where it broke
        off. It is given up only when none has come for long.
        """
        started, pause_s, attempts = time.monotonic(), TIMING.request_retry_s, 0
        while True:
            attempts += 1
            self.requests[kind] += 1
            try:
                result = action()
            except FileNotFoundError as error:
                self._has_credentials = True
                if any(code in str(error) for code in _NO_BUCKET):
                    raise self._refused(kind, name, error) from error
                raise StoreNotFoundError(f"there is no {self.name_of(name)}") from error
            except self._errors.GenericError as error:
                if _NO_CREDENTIALS.search(str(error)) and not self._has_credentials:
                    raise OptionError(self._describe_credentials(error)) from error
                if _REFUSED.search(str(error)):
                    raise self._refused(kind, name, error) from error
                failure = error
            except (self._errors.BaseError, NotImplementedError) as error:
                raise self._refused(kind, name, error) from error
            else:
                self._has_credentials = True
                return result
            logger.debug("%s of %s failed: %s", kind, name, first_line(failure))
            # The caller logs what lasts, and tries again.
            now = time.monotonic()
            if came_at is None:
                has_lasted = attempts == _ATTEMPTS or now - started > REQUEST_S
            else:
                has_lasted = now - came_at() > _OUTAGE_S
                if attempts == _ATTEMPTS:
                    problem = first_line(failure)
                    log_once(logger, "trying again to get parts of %s: %s", self.url, problem)
            # At random: many clients must not retry at once.
            if has_lasted or self._stop.wait(pause_s * random.uniform(0.5, 1)):  # noqa: S311
                break
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        raise self._refused(kind, name, failure) from failure

    def _describe_credentials(self, error: Exception) -> str:
        scheme = self.url.partition(":")[0]
        return (
            f"no credentials for {self.url}: set {_VARIABLES.get(scheme, _AZURE)} in the "
            f"environment, or give this host a role ({first_line(error)})"
        )

    def _refused(self, kind: str, name: str, error: Exception) -> StoreAccessError:
        return StoreAccessError(f"cannot {kind} {self.name_of(name)}: {_described(error)}")


class _Width:
    """Requests side by side: half as many after a time-out, and more again as requests succeed.

    Many at once may take longer on a slow link than each may alone.
    """

    def __init__(self) -> None:
        self._has_changed = threading.Condition()
        self._limit = float(NUM_REQUESTS)
        self._running = 0
        self._narrowed_at = -math.inf

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Wait for a place, and keep it for the length of a request."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._running < int(self._limit))
            self._running += 1
        started, has_failed = time.monotonic(), True
        try:
            yield
            has_failed = False
        finally:
            now = time.monotonic()
            with self._has_changed:
                self._running -= 1
                if not has_failed:
                    self._limit = min(NUM_REQUESTS, self._limit + 1 / self._limit)
                # Requests that ran at that time have met the same time-out.
                elif now - started >= REQUEST_S and started > self._narrowed_at:
                    self._limit, self._narrowed_at = max(1.0, self._limit / 2), now
                self._has_changed.notify_all()


def _tag_of(described: Mapping[str, Any]) -> Tag:
    return {name: described[name] for name in ("e_tag", "version") if described[name] is not None}


def _described(error: Exception) -> str:
    reason = _REASON.search(str(error))
    if reason is None:
        return first_line(error)
    status, code, message = reason.groups()
    return f"{status} {code}: {message:.300}"


def _obstore() -> Any:
    with needed_for("a bucket"):
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
