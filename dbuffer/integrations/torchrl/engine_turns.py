"""`EngineTurns`: turns of the generating thread and the following thread at an ``LLM``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from dbuffer.errors import EngineBusyError


class EngineTurns:
    """Client of an ``LLM``'s engine core that lets a second thread switch the engine.

    An ``LLM`` serves one thread. With this client, which calls the engine's own one, a generation
    that is under way ends first, and one that would begin waits for the switch. Every other call of
    the engine waits for the switch, too, and a switch for it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._client = engine.engine_core
        self._turn = threading.Condition(threading.RLock())
        self.is_switch_due = False
        """Whether a switch waits for a generation to end."""
        add_request = engine.add_request

        @functools.wraps(add_request)
        def add_in_turn(*args: Any, **kwargs: Any) -> Any:
            with self._turn:
                # The requests of one generation are added one by one.
                self._turn.wait_for(
                    lambda: not self.is_switch_due or engine.has_unfinished_requests()
                )
                return add_request(*args, **kwargs)

        engine.add_request = add_in_turn
        engine.engine_core = self

    @classmethod
    def of(cls, engine: Any) -> EngineTurns:
        """Return the turns of an ``LLMEngine``, which keeps them for as long as it lives."""
        client = engine.engine_core
        return client if isinstance(client, cls) else cls(engine)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the engine for one switch.

        Raises:
            EngineBusyError: it is generating. The next generation waits until this has succeeded,
                or :meth:`give_up` is called.
        """
        with self._turn:
            if self._engine.has_unfinished_requests():
                self.is_switch_due = True
                raise EngineBusyError("the engine is generating: wait for its requests, then sync")
            try:
                yield
            finally:
                self.give_up()

    def give_up(self) -> None:
        """Let generations begin again."""
        with self._turn:
            self.is_switch_due = False
            self._turn.notify_all()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's own client; its calls exclude each other."""
        value = getattr(self._client, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._turn:
                return value(*args, **kwargs)

        return call
