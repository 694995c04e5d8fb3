"""`Admission`: the weights that a request to a server takes, from its headers.

A request says so in ``X-Weight-…`` headers, which any client can add. The server waits for such
weights as long as the request allows. vLLM's engine core, where requests and switches meet in one
queue, has the last word: see :mod:`.core_labels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from dbuffer.engine.weight_label import WeightLabel
from dbuffer.errors import OptionError
from dbuffer.format.manifest import MAX_INTEGER, is_run
from dbuffer.runtime import options as checks

PREFIX = "x-weight-"
SPANS_HEADER = "X-Weight-Versions"
"""Header of a request that asks for the versions of each token."""
_FIELDS = {
    "X-Weight-Min-Version": "min_version",
    "X-Weight-Exact-Version": "exact_version",
    "X-Weight-Min-Step": "min_step",
    "X-Weight-Run": "run",
    "X-Weight-Wait-S": "wait_s",
}
MAX_WAIT_S = 3600.0


class Refusal(NamedTuple):
    """Reason why a request is not admitted."""

    reason: str
    is_final: bool
    """Whether waiting cannot help: the engine is past these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Requirements of a request. Made from text, so every value is checked.

    Raises:
        OptionError: (a ``ValueError``) a value is invalid; the message names its header.
    """

    min_version: int | None = None
    """Least number of the version."""
    exact_version: int | None = None
    min_step: float | None = None
    """Least number ``step`` of the metadata that the version was published with."""
    run: str | None = None
    """Run of the version, within which numbers and steps are compared. Default: the newest that the
    engine's follower has seen."""
    wait_s: float = 0.0
    """Seconds that the server waits for such weights before it refuses."""

    @classmethod
    def parse(cls, headers: Mapping[str, str], source: Mapping[str, str] = _FIELDS) -> Self | None:
        """Read the requirements of a request; None: it has none.

        Args:
            headers: names in lower case, and values.
            source: fields by the names that they have in ``headers``.
        """
        names = {name.lower(): name for name in source}
        given = {names[name]: text for name, text in headers.items() if name in names}
        values = {source[name]: _PARSERS[source[name]](name, text) for name, text in given.items()}
        if not values:
            return None
        if values.keys() == {"wait_s"}:
            [name] = given
            raise OptionError(f"{name} without weights to wait for: add {_LISTED}")
        return cls(**values)

    @classmethod
    def parse_query(cls, query: Mapping[str, str]) -> Self | None:
        """Read them from the query of an address, where each has the name of its field.

        Raises:
            OptionError: a value is invalid, or a name is none of these.
        """
        fields = {field: field for field in _FIELDS.values()}
        if unknown := query.keys() - fields:
            raise OptionError(f"unknown {', '.join(sorted(unknown))}: use {', '.join(fields)}")
        return cls.parse(query, fields)

    @classmethod
    def of_json(cls, values: object) -> Self | None:
        """Read what :meth:`as_json` made, or any client; None: no requirement.

        Raises:
            OptionError: it is something else.
        """
        if not isinstance(values, Mapping):
            raise OptionError(f"{values!r:.200} is no requirement: use {_LISTED}")
        return cls.parse_query({f"{k}": f"{v}" for k, v in values.items() if v is not None})

    def refusal(self, label: WeightLabel) -> Refusal | None:
        """Return why an engine with this label is not to serve the request; None: it may."""
        if self.run is None and self._is_any:
            return None
        run = self.run or label.newest_run
        if run not in (None, label.run):
            has = "weights of no run" if label.run is None else f"run {label.run}"
            return Refusal(f"{has}, and not run {run}", is_final=False)
        number, step = label.number, label.step
        if self.exact_version not in (None, number):
            is_past = number is not None and number > self.exact_version
            return Refusal(f"version {label.version}, and not {self.exact_version}", is_past)
        if self.min_version is not None and (number is None or number < self.min_version):
            return Refusal(f"version {label.version}, and not yet {self.min_version}", False)
        if self.min_step is not None and (step is None or step < self.min_step):
            has = "no step" if step is None else f"step {step:g}"
            return Refusal(f"{has}, and not yet step {self.min_step:g}", False)
        return None

    @property
    def _is_any(self) -> bool:
        """Whether any version and step will do."""
        return (self.min_version, self.exact_version, self.min_step) == (None, None, None)

    def refusal_by(self, labels: Iterable[WeightLabel]) -> Refusal | None:
        """Return why some replica, to which a request may come, is not to serve it."""
        refusals = filter(None, map(self.refusal, labels))
        return max(refusals, key=lambda refusal: refusal.is_final, default=None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def weight_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers ``X-Weight-…`` of a request.

    Raises:
        OptionError: one is none of them (misspelt, it would be ignored), or is given twice.
    """
    known = {name.lower() for name in (*_FIELDS, SPANS_HEADER)}
    given = given_once([pair for pair in headers if pair[0].startswith(PREFIX)])
    for name in given.keys() - known:
        raise OptionError(f"unknown header {name}: use {', '.join((*_FIELDS, SPANS_HEADER))}")
    return given


def given_once(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return values by name.

    Raises:
        OptionError: a name is given twice, and either value may be meant.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        for name in values:
            if len(each := [value for key, value in pairs if key == name]) > 1:
                raise OptionError(f"{name} is given {len(each)} times: {', '.join(each):.200}")
    return values


def flag_of(name: str, text: str | None) -> bool:
    """Read a header that is ``true`` or ``false``, or absent."""
    if text not in (None, "true", "false"):
        checks.refuse(name, text, "true or false")
    return text == "true"


def _version(name: str, text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_INTEGER))
    return checks.whole_number(name, int(text) if is_number else text, at_most=MAX_INTEGER)


def _number(name: str, text: str) -> float:
    try:
        number = math.nan if "_" in text else float(text)  # float() reads 1_0 as 10
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        checks.refuse(name, text, "a number")
    return number


def _wait_s(name: str, text: str) -> float:
    seconds = _number(name, text)
    if not 0 <= seconds <= MAX_WAIT_S:
        checks.refuse(name, text, f"seconds from 0 to {MAX_WAIT_S:.0f}")
    return seconds


def _run(name: str, text: str) -> str:
    if not is_run(text):
        checks.refuse(name, text, "16 hexadecimal digits, as responses have them")
    return text


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "min_version": _version,
    "exact_version": _version,
    "min_step": _number,
    "run": _run,
    "wait_s": _wait_s,
}
_LISTED = "a version, a step or a run"
