"""Requests to a vLLM server that follows a store, and the minimum versions that they require.

An engine's version number never decreases, except after a new run (start of a sender) has begun.
So the server checks a request's minimum version only once, before it passes the request to vLLM.
The minimum version is a number of the store's newest run, even if the engine still serves an older
run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from starlette.responses import JSONResponse

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.contract import WeightLabel
from dbuffer.errors import EngineEndedError, OptionError
from dbuffer.format.lineage import Positive
from dbuffer.integrations.vllm.config import cores_of
from dbuffer.integrations.vllm.core import LABEL
from dbuffer.integrations.vllm.vllm_engine import ask_core
from dbuffer.runtime import options as checks
from dbuffer.runtime.timing import TIMING

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.adapters import FollowedAdapter

MIN_VERSION, WAIT_S = "x-weight-min-version", "x-weight-wait-s"
SPANS = "x-weight-versions"
HEADERS = (MIN_VERSION, WAIT_S, SPANS)
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
_VERSION, _SECONDS = "a version's number", "seconds from 0 to 3600"
RETRY_AFTER_S = 1
_LOOK_S = 0.02
_OK, _CONFLICT, _UNAVAILABLE = 200, 409, 503


Requirement: TypeAlias = tuple[int | None, float]
"""Minimum version that a request requires (or None), and seconds to wait for this version."""


def unmet_by(label: WeightLabel, min_version: int) -> str | None:
    """Return why an engine with this label must refuse a request, or None if it can serve."""
    newest_run = label.newest_run or label.run
    if label.run != newest_run:
        return f"run {label.run}, and not the newest run, {newest_run}"
    if label.number is None or label.number < min_version:
        return f"version {label.version}, and not yet version {min_version}"
    return None


def values_by_name(
    pairs: Iterable[tuple[str, str]], names: tuple[str, ...], prefix: str = ""
) -> dict[str, str]:
    """Return the headers or query parameters in ``names``, as a dictionary.

    Ignore all that do not begin with ``prefix``. Refuse a name with the prefix that is not in
    ``names``, or that is given twice.
    """
    values: dict[str, str] = {}
    for name, value in pairs:
        if not name.startswith(prefix):
            continue
        if name not in names:
            raise OptionError(f"unknown {name}: use {', '.join(names)}")
        if name in values:
            raise OptionError(f"{name} is given twice: {values[name]:.100}, {value:.100}")
        values[name] = value
    return values


def requirement_in(
    values: Mapping[str, str], min_version: str = MIN_VERSION, wait_s: str = WAIT_S
) -> Requirement:
    """Return the minimum version and the wait time in a request's headers or query parameters."""
    if (text := values.get(min_version)) is not None:
        if not text.isdecimal():  # msgspec would accept "7.0" and "1e3"
            checks.refuse(min_version, text, _VERSION)
        version = _number(Positive, min_version, text, _VERSION)
        return version, _number(_Seconds, wait_s, values.get(wait_s, "0"), _SECONDS)
    if wait_s in values:
        raise OptionError(f"{wait_s} needs a version to wait for: add {min_version}")
    return None, 0.0


def _number(kind: Any, name: str, text: str, rule: str) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        checks.refuse(name, text, rule)


class Outlook:
    """Reads labels of weights, for requests that wait for a version.

    The labels come from an engine's cores. If ``adapter`` is given, it reads the label of
    this LoRA adapter, which follows its own store. ``follower`` is None if another API server of
    the same engine follows the store.
    """

    def __init__(
        self,
        engine: Any,
        follower: BackgroundFollower | None = None,
        *,
        adapter: FollowedAdapter | None = None,
    ) -> None:
        self._engine = engine
        self._follower = follower
        self._adapter = adapter
        self._lock = asyncio.Lock()
        self._labels: list[WeightLabel] = []
        self._looked_at = 0.0
        self.adapters: dict[str, Outlook] = {}
        """Outlooks of LoRA adapters that follow their own stores, by name of the adapter."""

    def of(self, model: str | None) -> Outlook:
        """Return the outlook of LoRA adapter ``model``, or self if ``model`` is no adapter."""
        return self.adapters.get(model or "", self)

    async def refusal(
        self, min_version: int | None, wait_s: float = 0.0
    ) -> tuple[str | None, list[WeightLabel]]:
        """Wait up to ``wait_s`` seconds until all replicas serve at least version ``min_version``.

        vLLM can choose any replica for the request.

        Returns:
            The reason to refuse the request, or None if all replicas have the version; and the
            label of each replica. If the engine has ended, there is a reason, and no label.
        """
        # Read the labels again: earlier labels could lack a switch that the client knows about.
        not_before = time.monotonic()
        deadline = not_before + wait_s
        while True:
            try:
                labels = await self._labels_since(not_before)
            except EngineEndedError as error:
                return str(error), []
            reasons = (unmet_by(label, min_version) for label in labels if min_version is not None)
            reason = next(filter(None, reasons), None)
            left_s = deadline - time.monotonic()
            if reason is None or left_s <= 0:
                return reason, labels
            await asyncio.sleep(min(_LOOK_S, left_s))
            # Waiting requests share labels that are up to _LOOK_S old. At its deadline, a request
            # reads new labels.
            now_s = time.monotonic()
            not_before = now_s if now_s >= deadline else now_s - _LOOK_S

    async def _labels_since(self, not_before: float) -> list[WeightLabel]:
        async with self._lock:
            if self._looked_at < not_before:
                looked_at = time.monotonic()
                self._labels = await self._read_labels()
                self._looked_at = looked_at
            return self._labels

    async def _read_labels(self) -> list[WeightLabel]:
        self._require_alive()
        if self._adapter is not None:
            return [self._adapter.label]
        cores = cores_of(self._engine.vllm_config)
        answers = asyncio.gather(*(ask_core(self._engine, core, LABEL) for core in cores))
        try:
            while not (await asyncio.wait([answers], timeout=TIMING.alive_check_s))[0]:
                self._require_alive()
        finally:
            answers.cancel()
        return [WeightLabel.decode(text) for text in answers.result()]

    def done(self) -> int | None:
        """Let the engine switch again, if the option ``until_done`` made it keep its version.

        Return the engine's version, or None if it has none. Also return None if another API server
        of this engine has the follower.
        """
        if self._follower is None:
            return None
        version = self._follower.applied
        self._follower.done()
        return version

    def _require_alive(self) -> None:
        if self._engine.errored:
            raise EngineEndedError("the engine has ended")


async def readiness(outlook: Outlook, requirement: Requirement) -> JSONResponse:
    """Answer ``/ready`` with each replica's version, and status 503 unless all meet a condition."""
    reason, labels = await outlook.refusal(*requirement)
    replicas = [label.as_json() for label in labels]
    body = {"ready": reason is None, "reason": reason, "replicas": replicas}
    return JSONResponse(body, _OK if reason is None else _UNAVAILABLE)


async def refused(outlook: Outlook, requirement: Requirement) -> JSONResponse | None:
    """Wait for the version that a request requires.

    Return None if vLLM can serve the request then, or an error response if not.
    """
    reason, labels = await outlook.refusal(*requirement)
    if reason is None:
        return None
    if not labels:
        return error_answer(_UNAVAILABLE, "EngineEndedError", reason)
    oldest = min(labels, key=lambda label: label.number or 0)
    headers = {"retry-after": str(RETRY_AFTER_S)} | headers_of(oldest)
    message = f"this engine has {reason}"
    return error_answer(_CONFLICT, "WeightVersionError", message, headers, weights=oldest.as_json())


def error_answer(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None, **fields: Any
) -> JSONResponse:
    """Return an error response in the format of OpenAI's API."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error, **fields}, status, headers)


def headers_of(label: WeightLabel) -> dict[str, str]:
    """Return the response headers that name the weight version of a label."""
    values = {"x-weight-version": label.version, "x-weight-run": label.run}
    if label.number is not None:
        values["x-weight-verified"] = "false" if label.attested_at is None else "true"
    if label.metadata:  # of at most 1 KiB: see `metadata_for_record`
        values["x-weight-metadata"] = json.dumps(label.metadata)
    return {name: value for name, value in values.items() if value}
