"""`follow`: keep an SGLang engine on a store's newest version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from dbuffer.errors import OptionError
from dbuffer.integrations.sglang.engines import PAUSE_MODES, OfflineEngine, engine_of
from dbuffer.integrations.vllm.follower import BackgroundFollower, Follower
from dbuffer.integrations.vllm.options import EngineOptions
from dbuffer.names import NameMap

PauseMode = Literal["keep", "abort"]
"""What becomes of requests in flight: they are kept and go on with the new weights, their caches
computed anew; or aborted."""


def follow(
    engine: Any,
    store: str | os.PathLike[str],
    *,
    pause: PauseMode = "keep",
    rename: NameMap | str | os.PathLike[str] | None = None,
    api_key: str | None = None,
    **options: Any,
) -> Follower | BackgroundFollower:
    """Keep an engine on a store's newest version.

    Args:
        engine: an ``sglang.Engine``: call ``sync()`` of what is returned between generations. The
            URL of a server: it is followed in the background, until ``close()``. Either was started
            with ``custom_weight_loader=["dbuffer.integrations.sglang.load_from_store"]``.
        store: the store's directory, as the engine's processes and this one see it.
        pause: what becomes of requests in flight during a switch: ``"keep"`` (SGLang's
            ``retract``) or ``"abort"``. An ``Engine`` has none.
        rename: from the store's names to those in the engine's checkpoint: a map, or a mapping
            file.
        api_key: for a server.
        **options: more of :class:`EngineOptions`.

    Raises:
        OptionError: (a ``ValueError``) an option is not what it may be.
        EngineUnsupportedError: the engine was not started in a way that lets it follow.
        EngineUnreachableError: (a server) it does not answer.
    """
    if pause not in PAUSE_MODES:
        raise OptionError(f"pause is {pause!r}, and may be {', '.join(PAUSE_MODES)}")
    if rename is not None and not isinstance(rename, NameMap):
        if not isinstance(rename, str | os.PathLike):
            raise OptionError(
                f"rename is a {type(rename).__name__}; it goes to the engine's processes as rules: "
                "give a dbuffer.NameMap, or a mapping file"
            )
        rename = NameMap.read(rename)
    chosen = EngineOptions.parse({"store": os.fspath(Path(store).absolute()), **options})
    found = engine_of(engine, rename, api_key=api_key)
    follower = Follower(found, chosen, pause=pause)
    if not isinstance(found, OfflineEngine):
        return BackgroundFollower(follower)
    follower.start()
    return follower
