"""`Bucket`: the objects under a prefix of an object storage, accessed through obstore.

obstore uploads large files in parts, and retries each part. `Bucket` retries all other requests
itself, so that it can count the retries. The retry of a conditional put fails if the first put
succeeded but its response was lost: see `Bucket.put_if`.
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
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

from dbuffer.errors import (
    OptionError,
    StoreAccessError,
    StoreCorruptError,
    StoreNotFoundError,
)
from dbuffer.format.manifest import UNDECODABLE, RecordT, decode
from dbuffer.format.objects import MAX_OBJECT_BYTES, FileObject
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
"""ETag of an object, and the object's version if the service keeps versions of objects."""

NUM_REQUESTS = 8
"""Maximum number of parallel requests. A single request does not use all of the bandwidth."""

RANGE_BYTES = 32 << 20
"""Largest range of a file that one request downloads. The overhead of each request is then small.
"""
PART_BYTES = 16 << 20
"""Largest part of a file that one request uploads, unless a file would have too many parts."""
_MIN_PART_BYTES = 5 << 20  # on S3, except for a file's last part
_MAX_PARTS = 10_000  # of an object on S3
_PIECE_BYTES = 1 << 18

_ATTEMPTS = 6
_RANGE_ATTEMPTS = 80
"""Maximum number of attempts to download a range of a file, which take about ten minutes."""
_MAX_PAUSE_S = 10.0
"""Longest pause between two attempts of a request."""

_CONNECT_S = 10.0
REQUEST_S = 30.0
"""Time without a byte of the response after which a request fails."""
TRANSFER_S = 120.0
"""Time without a response after which the upload of a part fails.

The service responds after a part's last byte, so the time includes the upload of the part. A link
of 0.15 MB/s is fast enough.
"""
UPLOAD_RETRIES_S = 180.0
"""Time after the first attempt to upload a part when obstore stops retrying that part."""

_LIST_PAGE = 1000  # objects in the response to a list request

_REASON = re.compile(
    r"status code: (\d+) .*<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL
)
"""Pattern of the status, code and message in an error response from S3, GCS or Azure."""

# URLs of the clouds' metadata services. obstore requests credentials there if the environment has
# none. So if a request to such a URL fails, there are no credentials, at least for now.
_NO_CREDENTIALS = re.compile(r"/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")
_REFUSED = re.compile(rf"status code: 4(0[1345]|16) |{_NO_CREDENTIALS.pattern}")
"""Pattern of errors that end a request without a retry: some HTTP statuses, or missing
credentials."""

_S3 = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_VARIABLES = {"s3": _S3, "s3a": _S3, "gs": "GOOGLE_APPLICATION_CREDENTIALS (a file)"}
"""Environment variables for credentials, by URL scheme. All other schemes use `_AZURE`."""

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")


class Listed(NamedTuple):
    """Tag, size and time of an object, from a listing of the bucket."""

    e_tag: str | None
    num_bytes: int
    put_at: float
    """Time on the storage service's clock when the object was last put."""


class Parallelism:
    """Limit of parallel requests: halved if a request fails, raised by one if a request succeeds.

    On a slow link, many requests in parallel would all time out.
    """

    def __init__(self) -> None:
        self.limit = NUM_REQUESTS
        self._num_active = 0
        self._has_changed = threading.Condition()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Wait until the limit allows one more request, which runs in the ``with`` block."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._num_active < self.limit)
            self._num_active += 1
        has_succeeded = False
        try:
            yield
            has_succeeded = True
        finally:
            with self._has_changed:  # other requests may end at the same time
                raised, halved = min(NUM_REQUESTS, self.limit + 1), max(1, self.limit // 2)
                self.limit = raised if has_succeeded else halved
                self._num_active -= 1
                self._has_changed.notify_all()


class Bucket(Closing):
    """Thread-safe access to the objects under a URL such as ``s3://bucket/prefix``.

    Transient errors (429, 5xx, a broken connection) are retried a few times with backoff.

    Every method can raise:
        StoreNotFoundError: the object does not exist.
        StoreAccessError: the bucket does not exist, access was refused, there are no credentials,
            or the service does not respond.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with needed_for("a bucket"):
            importlib.import_module("obstore.store")
            self._obstore: Any = importlib.import_module("obstore")
        self._errors = self._obstore.exceptions
        self._stop = threading.Event()
        self._parallelism = Parallelism()
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
            # Allow plain HTTP: obstore uses it only for an ``http://`` endpoint in the environment.
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "read_timeout": timedelta(seconds=silence_s),
                "timeout": timedelta(days=1),  # only silence ends a request
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
        """Stop retrying failed requests. obstore still retries the parts of a current upload."""
        self._stop.set()

    def upload(self, name: str, data: memoryview) -> FileObject:
        """Upload a file, in parallel parts."""
        self.requests["put"] += num_puts(len(data)) - 1  # `_request` counts one put
        put = functools.partial(
            self._obstore.put,
            *(self._uploads, name, data),
            chunk_size=part_bytes(len(data)),
            max_concurrency=self._parallelism.limit,
        )
        with self._parallelism.request():
            self._request("put", name, put, attempts=1)
        return FileObject(name, len(data))

    def download(self, file: FileObject, place: Callable[[int, memoryview], None]) -> None:
        """Download a file, in parallel ranges.

        Several threads call ``place`` with the offset of a piece in the file and the piece's bytes.

        Raises:
            StoreCorruptError: the file has another size than was published.
        """
        starts = range_starts(file.num_bytes)

        def get_range(start: int) -> None:
            self._download_range(file, start, min(start + starts.step, file.num_bytes), place)

        self.in_parallel(get_range, starts)

    def _download_range(
        self, file: FileObject, start: int, end: int, place: Callable[[int, memoryview], None]
    ) -> None:
        at = start  # position of the next byte: a retry requests only the bytes from there on

        def request() -> None:
            nonlocal at
            if at == end:  # the last request failed after its last byte
                return
            with self._parallelism.request():
                result = self._obstore.get(self._objects, file.name, options={"range": (at, end)})
                if result.meta["size"] != file.num_bytes:
                    name = self.name_of(file.name)
                    raise StoreCorruptError(f"{name} has another size than the published file")
                for piece in result.stream(min_chunk_size=_PIECE_BYTES):
                    data = memoryview(piece)
                    place(at, data)
                    at += data.nbytes

        self._request("get", file.name, request, attempts=_RANGE_ATTEMPTS)

    def get_range(self, name: str, start: int, end: int) -> memoryview:
        get = functools.partial(self._obstore.get_range, self._objects, name, start=start, end=end)
        data = memoryview(self._request("get", name, get))
        if data.nbytes != end - start:
            raise StoreCorruptError(f"{self.name_of(name)} is shorter than the published file")
        return data

    def read(
        self, kind: type[RecordT], name: str, tag: Tag | None = None
    ) -> tuple[RecordT, Tag] | None:
        """Read an object; return its record and its tag, or None if the tag is still ``tag``."""
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
        """Put an object. An object with the same name is replaced."""
        return self._request("put", name, lambda: self._put(name, data, "overwrite"))

    def put_in_parts(self, name: str, data: bytes) -> None:
        """Put a few bytes with the requests of a large file's upload, as one part."""
        put = functools.partial(self._obstore.put, self._objects, name, data, use_multipart=True)
        self._request("put", name, put)

    def put_if(self, name: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Put an object if its tag is still ``tag``. If ``tag`` is None, put only a new object.

        Return the new tag, or None if the object has another tag. After None, the caller must read
        the object to find out who put it. It may be the caller: if the response to a
        successful put is lost, `Bucket` retries the put, and the retry finds the new tag.
        """

        def request() -> Tag | None:
            try:
                return self._put(name, data, "create" if tag is None else tag)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return None

        return self._request("put", name, request)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. A missing object is no error."""

        def delete(name: str) -> None:
            with contextlib.suppress(StoreNotFoundError):
                self._request("delete", name, lambda: self._obstore.delete(self._objects, name))

        self.in_parallel(delete, names)

    def in_parallel(self, action: Callable[[ItemT], T], items: Iterable[ItemT]) -> list[T]:
        """Call ``action`` for each item, in several threads, and return the results in order."""
        with ThreadPoolExecutor(NUM_REQUESTS, "dbuffer-bucket", leave_core) as pool:
            futures = [pool.submit(action, item) for item in items]
            try:
                for future in futures:
                    # Keep each wait short: Python handles a signal only after the wait.
                    while not future.done():
                        wait([future], TIMING.stop_check_s)
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def list(self, prefix: str) -> dict[str, Listed]:
        """Return all objects whose names begin with ``prefix``, keyed by name."""

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
        return f"{self.url}/{name}"

    def _put(self, name: str, data: bytes | memoryview, mode: Any) -> Tag:
        return _tag_of(self._obstore.put(self._objects, name, data, mode=mode, use_multipart=False))

    def _request(
        self, kind: str, name: str, action: Callable[[], T], *, attempts: int = _ATTEMPTS
    ) -> T:
        for attempt, pause_s in enumerate(doubling(TIMING.request_retry_s, _MAX_PAUSE_S), 1):
            self.requests[kind] += 1
            try:
                return action()
            except (self._errors.BaseError, FileNotFoundError, NotImplementedError) as error:
                is_missing = isinstance(error, FileNotFoundError)
                if is_missing and not any(code in str(error) for code in _NO_BUCKET):
                    raise StoreNotFoundError(f"there is no {self.name_of(name)}") from error
                failure, cause = self._failure(kind, name, error), error
            logger.debug("%s", failure)
            # The retries of a download's range take minutes, and the caller logs only the last
            # error. So log one earlier error here, after ``_ATTEMPTS`` attempts.
            if attempt == _ATTEMPTS < attempts:
                log_once(logger, "trying again: %s", str(failure))
            is_lasting = not isinstance(cause, self._errors.GenericError)
            if is_lasting or _REFUSED.search(str(cause)) or attempt == attempts:
                break
            # A random pause keeps many clients from retrying at the same time.
            if self._stop.wait(pause_s * random.uniform(0.5, 1)):  # noqa: S311
                break
        raise failure from cause

    def _failure(self, kind: str, name: str, error: Exception) -> StoreAccessError:
        reason = first_line(error)
        if _NO_CREDENTIALS.search(str(error)):
            variables = _VARIABLES.get(self.url.partition(":")[0], _AZURE)
            return StoreAccessError(
                f"no credentials for {self.url}: set {variables} in the environment, or give this "
                f"host a role ({reason})"
            )
        if (match := _REASON.search(str(error))) is not None:
            status, code, message = match.groups()
            reason = f"{status} {code}: {message:.300}"
        return StoreAccessError(f"cannot {kind} {self.name_of(name)}: {reason}")


def num_puts(num_bytes: int) -> int:
    """Return the number of put requests that an upload of ``num_bytes`` needs."""
    num_parts = -(-num_bytes // part_bytes(num_bytes))
    return 1 if num_parts == 1 else num_parts + 2  # plus a first and a last request


def part_bytes(num_bytes: int) -> int:
    """Return the size in bytes of each part of a file's upload, except for the last part."""
    return max(min(PART_BYTES, _share(num_bytes)), -(-num_bytes // _MAX_PARTS))


def range_starts(num_bytes: int) -> range:
    """Return the offset of each range of a file's download."""
    return range(0, num_bytes, min(RANGE_BYTES, _share(num_bytes)))


def _share(num_bytes: int) -> int:
    """Return the number of bytes that each of the parallel requests for one file moves.

    It is an equal share of the file, but not less than the minimum that is worth a request.
    """
    return max(_MIN_PART_BYTES, -(-num_bytes // NUM_REQUESTS))


def _tag_of(described: Mapping[str, Any]) -> Tag:
    return {name: described[name] for name in ("e_tag", "version") if described[name] is not None}
