"""`Bucket`: the objects under one prefix of an object storage, by obstore.

obstore signs requests, knows the services, and puts large files in parts, which it retries. All
other retries are ours: they are counted, and a caller knows that a conditional put may have been
repeated.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import logging
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import xxhash

from dbuffer.errors import (
    OptionError,
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE, RecordT, decode
from dbuffer.format.objects import (
    MAX_OBJECT_BYTES,
    RANGE_BYTES,
    Content,
    FileObject,
    Kind,
    file_object,
)
from dbuffer.io.tensors import join_digests
from dbuffer.runtime.closing import Closing
from dbuffer.runtime.cores import leave_core
from dbuffer.runtime.extras import needed_for
from dbuffer.runtime.messages import first_line
from dbuffer.runtime.timing import TIMING, doubling
from dbuffer.runtime.trouble import log_once

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT")

Tag: TypeAlias = dict[str, str]
"""ETag of an object's content, and on some services its version, for requests with a condition."""

NUM_REQUESTS = 8
"""Most requests that are made side by side: one alone does not fill a network."""

PART_BYTES = 16 << 20
"""Bytes that an upload puts by one request, at least."""
_MAX_PARTS = 10_000
"""Most parts of an object on S3."""
_PIECE_BYTES = 1 << 18
"""Bytes of an object that are handled together, at least."""

_ATTEMPTS = 6
_RANGE_ATTEMPTS = 80
"""Attempts at a range of a download, which keeps the bytes that came: some ten minutes."""
_MAX_PAUSE_S = 10.0
"""Longest pause between two attempts."""

_CONNECT_S = 10.0
"""Time to connect to an object storage."""
REQUEST_S = 30.0
"""Time without a byte of an answer after which a request has failed."""
TRANSFER_S = 120.0
"""Time without an answer after which a put of a part has failed. The answer comes after the last
byte: a link of 0.15 MB/s carries a part in time if it is put alone."""
UPLOAD_RETRIES_S = 180.0
"""Time from a part's first put during which it is put again."""

_LIST_PAGE = 1000
"""Objects that a service names in the answer to one request, at most."""

_REFUSED = re.compile(r"status code: 4(0[1345]|16) ")
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
        self._width = NUM_REQUESTS
        """Requests of a file side by side: half as many after a file that failed, and one more
        after a file that did not. Many at once may take longer on a slow link than a request may.
        """
        self.requests: collections.Counter[str] = collections.Counter()
        """Number of requests made, by kind: get, put, list, delete."""
        try:
            self._objects = self._open(REQUEST_S, retry_s=0.0)
            self._uploads = self._open(TRANSFER_S, retry_s=UPLOAD_RETRIES_S)
        except (self._errors.BaseError, ValueError) as error:
            raise OptionError(f"cannot use {self.url}: {first_line(error)}") from error

    def _open(self, silence_s: float, *, retry_s: float) -> Any:
        return self._obstore.store.from_url(
            self.url,
            # http is used only if the environment names an endpoint with it.
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "read_timeout": timedelta(seconds=silence_s),
                "timeout": timedelta(days=1),  # no limit but that on silence
            },
            retry_config={
                "max_retries": 1000 if retry_s else 0,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=TIMING.request_retry_s),
                    "max_backoff": timedelta(seconds=_MAX_PAUSE_S),
                },
            },
        )

    def close(self) -> None:
        """Let requests that fail from now on be given up at once."""
        self._stop.set()

    # Files

    def upload(self, version: VersionId, kind: Kind, data: memoryview) -> FileObject:
        """Put a file of a version, in parts side by side."""

        def hash_range(start: int) -> int:
            return xxhash.xxh3_64_intdigest(data[start : start + RANGE_BYTES])

        digests = self.in_parallel(hash_range, range(0, len(data), RANGE_BYTES))
        file = file_object(version, kind, _content(len(data), digests))
        self.requests["put"] += num_puts(len(data)) - 1  # one is counted below
        with self._transfer() as width:
            put = functools.partial(
                self._obstore.put,
                *(self._uploads, file.name, data),
                chunk_size=_part_bytes(len(data)),
                max_concurrency=width,
            )
            self._request("put", file.name, put, attempts=1)
        return file

    def download(self, file: FileObject, place: Callable[[int, memoryview], None]) -> None:
        """Get a file, in ranges side by side.

        ``place`` is called with pieces, each with its offset in the file, from several threads.

        Raises:
            StoreCorruptError: the content differs from the published file.
        """
        size = file.content.num_bytes

        def get_range(start: int) -> int:
            return self._download_range(file, start, min(start + RANGE_BYTES, size), place)

        for _ in range(2):  # the network may have damaged it
            with self._transfer() as width:
                digests = self.in_parallel(get_range, range(0, size, RANGE_BYTES), width)
            if _content(size, digests) == file.content:
                return
        raise StoreCorruptError(f"{self.name_of(file.name)} differs from the published file")

    def _download_range(
        self, file: FileObject, start: int, end: int, place: Callable[[int, memoryview], None]
    ) -> int:
        """Get a range of a file, and return its digest.

        A request that breaks off is followed by one for the bytes that did not come.
        """
        hasher, at = xxhash.xxh3_64(), start

        def request() -> None:
            nonlocal at
            if at == end:  # it broke off behind the last one
                return
            result = self._obstore.get(self._objects, file.name, options={"range": (at, end)})
            if result.meta["size"] != file.content.num_bytes:
                name = self.name_of(file.name)
                raise StoreCorruptError(f"{name} has not the size that was published")
            # A piece is copied and hashed while it is in a core's cache.
            for piece in result.stream(min_chunk_size=_PIECE_BYTES):
                data = memoryview(piece)
                place(at, data)
                hasher.update(data)
                at += data.nbytes

        self._request("get", file.name, request, attempts=_RANGE_ATTEMPTS)
        return hasher.intdigest()

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[int]:
        """Give the requests that a file may make side by side."""
        try:
            yield self._width
        except StoreAccessError:
            self._width = max(1, self._width // 2)
            raise
        self._width = min(NUM_REQUESTS, self._width + 1)

    # Records

    def get_range(self, name: str, start: int, end: int) -> memoryview:
        """Return some bytes of an object."""
        get = self._obstore.get_range

        def request() -> memoryview:
            return memoryview(get(self._objects, name, start=start, end=end))

        data = self._request("get", name, request)
        if data.nbytes != end - start:
            raise StoreCorruptError(f"{self.name_of(name)} is shorter than the published file")
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

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, if they are there."""

        def delete(name: str) -> None:
            with contextlib.suppress(StoreNotFoundError):
                self._request("delete", name, lambda: self._obstore.delete(self._objects, name))

        self.in_parallel(delete, names)

    def in_parallel(
        self, action: Callable[[ItemT], T], items: Iterable[ItemT], width: int = NUM_REQUESTS
    ) -> list[T]:
        """Return the results of a function for each item, called from several threads."""
        with ThreadPoolExecutor(width, "dbuffer-bucket", leave_core) as pool:
            return list(pool.map(action, items))

    def list(self, prefix: str) -> dict[str, Listed]:
        """Return all objects under a prefix, by name."""

        def request() -> dict[str, Listed]:
            listed: dict[str, Listed] = {}
            pages = self._obstore.list(self._objects, prefix, chunk_size=_LIST_PAGE)
            for count, page in enumerate(pages):
                self.requests["list"] += count > 0  # each page is a request
                for meta in page:
                    put_at = meta["last_modified"].timestamp()
                    listed[meta["path"]] = Listed(meta["e_tag"], meta["size"], put_at)
            return listed

        return self._request("list", prefix, request)

    def name_of(self, name: str) -> str:
        """Return an object's URL, for messages."""
        return f"{self.url}/{name}"

    def _put(self, name: str, data: bytes | memoryview, mode: Any) -> Tag:
        return _tag_of(self._obstore.put(self._objects, name, data, mode=mode, use_multipart=False))

    def _request(
        self, kind: str, name: str, action: Callable[[], T], *, attempts: int = _ATTEMPTS
    ) -> T:
        """Make a request, again and again if it fails."""
        for attempt, pause_s in enumerate(doubling(TIMING.request_retry_s, _MAX_PAUSE_S), 1):
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
            if attempt == _ATTEMPTS < attempts:
                log_once(logger, "trying again to %s %s: %s", kind, name, first_line(failure))
            # At random: many clients must not retry at once.
            if attempt == attempts or self._stop.wait(pause_s * random.uniform(0.5, 1)):  # noqa: S311
                break
        raise self._refused(kind, name, failure) from failure

    def _describe_credentials(self, error: Exception) -> str:
        scheme = self.url.partition(":")[0]
        return (
            f"no credentials for {self.url}: set {_VARIABLES.get(scheme, _AZURE)} in the "
            f"environment, or give this host a role ({first_line(error)})"
        )

    def _refused(self, kind: str, name: str, error: Exception) -> StoreAccessError:
        return StoreAccessError(f"cannot {kind} {self.name_of(name)}: {_described(error)}")


def num_puts(num_bytes: int) -> int:
    """Return the number of requests that put a file: of several parts, one more at both ends."""
    num_parts = -(-num_bytes // _part_bytes(num_bytes))
    return 1 if num_parts == 1 else num_parts + 2


def _part_bytes(num_bytes: int) -> int:
    return max(PART_BYTES, -(-num_bytes // _MAX_PARTS))


def _content(num_bytes: int, digests: list[int]) -> Content:
    """Return a file's content, from the digests of its ranges."""
    return Content(num_bytes, f"{join_digests(digests):016x}")


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
