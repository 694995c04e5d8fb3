"""Notice where an engine writes or discards weights without dbuffer.

An engine's package says which of its functions do that, and which of these contexts each call runs
in. They tell the rank's :class:`RankEndpoint`, which then knows no version of its weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from dbuffer.integrations.engine.endpoint import RankEndpoint

_IS_WATCHED = "is_watched_by_dbuffer"


def watch(
    owner: Any,
    name: str,
    around: Callable[..., AbstractContextManager[None]],
    function: Callable[..., Any] | None = None,
) -> bool:
    """Let each call of a function run in a context; again does nothing.

    Args:
        owner: class or module that has the function.
        name: its name there.
        around: makes the context from the call's arguments.
        function: what is called. Default: the owner's own.

    Returns:
        False: the owner has no such function.
    """
    current = getattr(owner, name, None)
    called = function or current
    if called is None or hasattr(current, _IS_WATCHED):
        return called is not None

    @functools.wraps(called)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return called(*args, **kwargs)

    setattr(watched, _IS_WATCHED, True)
    setattr(owner, name, watched)
    return True


@contextlib.contextmanager
def loading(model_of: Callable[[], Any], what: str, is_ours: Callable[[], bool]) -> Iterator[None]:
    """Treat a model's weights as unknown after ``what``, unless that was dbuffer's own load."""
    try:
        yield
    finally:
        if not is_ours():
            RankEndpoint.of(model_of()).note_foreign_load(what)


@contextlib.contextmanager
def falling_asleep(model: Any, *, is_lost: bool) -> Iterator[None]:
    """Leave a model's weights alone from now on; ``is_lost``: they will not come back."""
    endpoint = RankEndpoint.of(model)
    endpoint.note_asleep(is_lost=is_lost)
    try:
        yield
    except BaseException:
        endpoint.note_awake()
        raise


@contextlib.contextmanager
def waking_up(model_of: Callable[[], Any]) -> Iterator[None]:
    """Read and write a model's weights again, once they were woken."""
    yield
    RankEndpoint.of(model_of()).note_awake()
