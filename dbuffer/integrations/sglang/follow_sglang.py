"""`follow`: keep an SGLang engine on a store's newest version."""

from __future__ import annotations

import os
from typing import Any, Literal, overload

from dbuffer.engine.background import BackgroundFollower
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.integrations.sglang.sglang_engine import OfflineEngine, sglang_engine_of

SglangPause = Literal["keep", "abort"]


@overload
def follow(
    engine: str,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> BackgroundFollower: ...


@overload
def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower: ...


def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: SglangPause = "keep",
    api_key: str | None = None,
    **options: Any,
) -> Follower | BackgroundFollower:
    """Keep an SGLang engine on a store's newest version.

    Args:
        engine: an ``sglang.Engine`` or the URL of a server, which must have been started with
            ``custom_weight_loader=["dbuffer.integrations.sglang.load_from_store"]``. For an
            ``Engine``, call the follower's ``sync()`` between generations. A server is switched in
            the background, until ``close()``.
        store: the store's directory, as this process and the engine's processes see it.
        pause: treatment of requests in flight during a switch of a server. ``"keep"``: they
            continue with the new weights, after SGLang has recomputed their caches (SGLang's
            ``retract``). ``"abort"``: they are aborted.
        api_key: API key of a server.
        **options: fields of :class:`EngineOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid.
        VersionError: the ``version`` to serve is no longer in the store.
        UnsupportedError: the engine, as it was started, cannot follow.
    """
    chosen = EngineOptions.parse({"store": store, **options})
    driven = sglang_engine_of(engine, api_key=api_key)
    follower = Follower(driven, chosen, pause=pause)
    if not isinstance(driven, OfflineEngine):
        return BackgroundFollower(follower)
    follower.start()
    return follower
