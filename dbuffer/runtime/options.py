"""Checks of options. A check raises an `OptionError`, which names the option and the rule.

An unchecked option fails late: a wait of NaN seconds never ends, since no comparison with NaN is
true.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

import msgspec

from dbuffer.errors import OptionError

MAX_SECONDS = threading.TIMEOUT_MAX
"""Longest time that a thread can wait. Options for unbounded waits take None instead."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
"""Pattern of a URL's beginning. One slash is enough: a `Path` drops the second one."""

_BUCKETS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https", "memory")

T = TypeVar("T")

PositiveSeconds = Annotated[
    float,
    msgspec.Meta(gt=0, le=MAX_SECONDS, description=f"seconds above 0, at most {MAX_SECONDS:.0f}"),
]
Seconds = Annotated[
    float, msgspec.Meta(ge=0, le=MAX_SECONDS, description=f"seconds from 0 to {MAX_SECONDS:.0f}")
]


def types_of_fields(options: Any) -> None:
    """Convert the fields of a frozen dataclass to their annotated types. Refuse other values.

    ``Meta(description=...)`` describes the valid values of an ``Annotated`` type.
    """
    kind: Any = type(options)
    for name, annotation in _types_in(kind).items():
        object.__setattr__(options, name, _converted(name, getattr(options, name), annotation))


def _converted(name: str, value: Any, annotation: Any) -> Any:
    if isinstance(value, float):
        value = float(value)  # msgspec refuses subclasses, such as numpy's float64
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        refuse(name, value, _rule(annotation))


@functools.cache
def _types_in(kind: type) -> dict[str, Any]:
    msgspec.json.Decoder(kind)  # otherwise msgspec analyzes a type at its first use, in any thread
    return get_type_hints(kind, include_extras=True)


def _rule(annotation: Any) -> str:
    for meta in getattr(annotation, "__metadata__", ()):
        if meta.description is not None:
            return str(meta.description)
    if annotation is bool:
        return "True or False"
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    return " or ".join(_rule(kind) for kind in get_args(annotation) if kind is not type(None))


def positive_seconds(name: str, value: Any) -> float:
    return float(_converted(name, value, PositiveSeconds))


def seconds(name: str, value: Any) -> float:
    return float(_converted(name, value, Seconds))


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < at_least or (at_most is not None and value > at_most):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        refuse(name, value, f"a whole number {bounds}")
    return int(value)


def choice(name: str, value: Any, allowed: Iterable[T]) -> T:
    """Return ``value``, which must be in ``allowed`` with the same type: 1 is not True."""
    allowed = tuple(allowed)
    matches = [option for option in allowed if type(value) is type(option) and value == option]
    if not matches:
        *first, last = map(repr, allowed)
        refuse(name, value, f"{', '.join(first)} or {last}")
    return matches[0]


def flag(name: str, value: Any) -> bool:
    """Return True or False. Other values are refused: the text ``"false"`` would count as true."""
    return bool(_converted(name, value, bool))


def path(name: str, value: str | os.PathLike[str]) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        rule = "a path (if ~ at its start does not mean a home directory, write ./~)"
        refuse(name, os.fspath(value), rule)


def directory(name: str, value: Any) -> Path:
    """Return a directory's absolute path, which stays valid if the process changes its directory.

    An empty path is refused, because it often comes from an unset shell variable.
    """
    is_path = isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)
    if not is_path or not os.fspath(value) or "\0" in os.fspath(value):
        refuse(name, value, "the path of a directory, not empty and without NUL")
    if is_url(os.fspath(value)):
        parts = urlsplit(os.fspath(value))
        is_bucket = parts.scheme in _BUCKETS and parts.scheme != "https"
        between = "a directory: `dbuffer mirror` copies between a bucket and a directory"
        refuse(name, value, between if is_bucket else _no_url("a directory", parts))
    return path(name, value).absolute()


def directory_or_bucket(name: str, value: Any) -> Path | str:
    """Return a directory's absolute path, or the URL of a bucket without a slash at its end."""
    if not isinstance(value, str) or not is_url(value):
        return directory(name, value)
    parts, rule = urlsplit(value), "a directory, or a URL such as s3://bucket/policy"
    if parts.scheme not in _BUCKETS:
        refuse(name, value, _no_url(rule, parts))
    if parts.scheme == "memory":
        return value
    if not value.startswith(f"{parts.scheme}://") or not parts.netloc:
        refuse(name, value, rule)
    if set("?#") & set(value):  # a parser cuts them off: two stores would share a path
        rule = (
            "a URL without ? and # (write %3F and %23 in a name, and set options of the service by "
            "environment variables)"
        )
        refuse(name, value, rule)
    return value.rstrip("/")


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def _no_url(rule: str, url: SplitResult) -> str:
    if url.scheme in ("http", "https"):
        return f"{rule}; this is the address of a server (are two arguments swapped?)"
    return (
        f"{rule}; {url.scheme}: is not the scheme of an object storage (write ./{url.geturl()} for "
        "a directory)"
    )


def server_url(name: str, value: Any) -> str:
    """Return an http or https address without a slash at its end. Refuse other addresses."""
    rule = "an address with its scheme, as http://localhost:8000"
    try:
        parts = urlsplit(value) if isinstance(value, str) else urlsplit("")
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an incomplete address, or a port that is no number
        is_url = False
    if not is_url:
        refuse(name, value, rule)
    return str(value).rstrip("/")


def names(name: str, value: Any) -> int | frozenset[str]:
    """Return a whole number unchanged, and one name (a string) or several names as a set."""
    if isinstance(value, int):
        return whole_number(name, value, at_least=0)
    if isinstance(value, str):
        return frozenset([value])
    several: list[Any] = list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(text, str) for text in several):
        refuse(name, value, "a whole number, a name, or several names")
    return frozenset(several)


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise an `OptionError` for an option. ``rule`` describes the valid values."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    raise OptionError(f"invalid {name} {given!r:.200}: use {rule}")
