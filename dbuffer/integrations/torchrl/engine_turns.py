"""`EngineTurns`: turns of the generating thread and the following thread at an ``LLM``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from dbuffer.errors import EngineBusyError

_KEPT_AS = "_dbuffer_turns"


class EngineTurns:
    """Lets a second thread switch an ``LLM``, which serves one thread.

    A generation that is under way ends first; one that would begin waits for the switch. Every
    other call of the engine waits for the switch, too, and a switch for it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._turn = threading.Condition(threading.RLock())
        self.is_wanted = False
        """Whether a switch waits for a generation to end."""
        add_request = engine.add_request

        @functools.wraps(add_request)
        def add_in_turn(*args: Any, **kwargs: Any) -> Any:
            with self._turn:
                # The requests of one generation are added one by one.
                self._turn.wait_for(lambda: not self.is_wanted or engine.has_unfinished_requests())
                return add_request(*args, **kwargs)

        engine.add_request = add_in_turn
        engine.engine_core = _OneAtATime(engine.engine_core, self._turn)

    @classmethod
    def of(cls, engine: Any) -> EngineTurns:
        """Return the turns of an ``LLMEngine``, which keeps them for as long as it lives."""
        turns = getattr(engine, _KEPT_AS, None)
        if turns is None:
            turns = cls(engine)
            setattr(engine, _KEPT_AS, turns)
        return turns

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the engine for one switch.

        Raises:
            EngineBusyError: it is generating. The next generation waits until this has succeeded,
                or :meth:`give_up` is called.
        """
        with self._turn:
            if self._engine.has_unfinished_requests():
                self.is_wanted = True
                raise EngineBusyError("the engine is generating: wait for its requests, then sync")
            try:
                yield
            finally:
                self.give_up()

    def give_up(self) -> None:
        """Let generations begin again."""
        with self._turn:
            self.is_wanted = False
            self._turn.notify_all()


class _OneAtATime:
    """The client of an engine's core, whose calls exclude each other."""

    def __init__(self, client: Any, turn: threading.Condition) -> None:
        self._client = client
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._turn:
                return value(*args, **kwargs)

        return call
