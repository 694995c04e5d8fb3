"""`ask_server`: whether a server serves a store's version, and has compared its weights with it."""

from __future__ import annotations

from typing import Any

from dbuffer.errors import EngineUnreachableError, UnsupportedError, WaitTimeoutError
from dbuffer.format.lineage import Lineage, VersionId
from dbuffer.runtime import options
from dbuffer.runtime.extras import needed_for
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.contents import Contents

_ANSWER_S = 30.0


def ask_server(store: DoubleBuffer, url: str, version: int | VersionId | None) -> dict[str, Any]:
    """Describe the weights of a server's replicas, as `dbuffer verify --engine --json` prints it.

    The server must answer `GET /ready` as :class:`~dbuffer.integrations.vllm.FollowStore` does. By
    default, ``version`` is the store's newest version. If a newer version is published while the
    server answers, both versions are right.
    """
    before = _newest(store)
    answers = _ask(options.server_url("--engine", url))
    newest = _newest(store)
    expected = [newest.id, before.id]
    if version is not None:
        if (version_id := Contents(store).id_of(version)) is None:
            raise kept.missing(store, version)
        expected = [version_id]
    replicas = [_compare(answer, expected, newest) for answer in answers]
    is_verified = all(replica["problem"] is None for replica in replicas)
    return {"id": expected[0], "engine": url, "is_verified": is_verified, "replicas": replicas}


def _newest(store: DoubleBuffer) -> Lineage:
    store.check()
    if (newest := Contents(store).newest) is None:
        raise WaitTimeoutError(f"nothing was published in {store.root} yet")
    return newest


def _ask(url: str) -> list[dict[str, Any]]:
    with needed_for("--engine"):
        import httpx
    try:
        response = httpx.get(f"{url}/ready", timeout=_ANSWER_S)
        answer = response.json()
        replicas, reason = list(map(dict, answer["replicas"])), answer["reason"]
    except httpx.HTTPError as error:
        raise EngineUnreachableError(
            f"{url} does not answer: {type(error).__name__} {error}"
        ) from error
    except (LookupError, TypeError, ValueError):
        raise UnsupportedError(
            f"{url} does not tell its weights (GET /ready: {response.status_code}): give the "
            "address, without /v1, of a vLLM server with FollowStore"
        ) from None
    if not replicas:
        raise EngineUnreachableError(f"{url} has no weights: {reason}")
    return replicas


def _compare(answer: dict[str, Any], expected: list[VersionId], newest: Lineage) -> dict[str, Any]:
    number, run = str(answer.get("version")), answer.get("run")
    served = VersionId(str(run), int(number)) if number.isdecimal() else None
    is_of_store = served is not None and newest.reaches(served)
    is_attested = answer.get("attested") is True
    problem = None
    if not is_of_store:
        problem = "its weights are not a version that leads to the store's newest"
    elif served not in expected:
        problem = f"it does not serve version {expected[0].number}"
    elif not is_attested:
        problem = "it has not compared its weights with the version (its option `attest`)"
    return {
        "version": number,
        "run": run,
        "is_of_store": is_of_store,
        "is_attested": is_attested,
        "problem": problem,
    }
