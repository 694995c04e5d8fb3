"""What an engine is told: where its store is, and which version to switch to.

The same options reach it through ``follow`` of the integration; and a vLLM also as ``init_info`` of
its weight transfer, or as ``additional_config["dbuffer"]``, from which its workers begin to follow,
on the newest weights, before the engine is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from dbuffer.errors import OptionError
from dbuffer.manifest import MAX_INTEGER, is_receiver_id
from dbuffer.mirror import Mirror, start_mirror

HALF_LOADED = "half-loaded weights"
"""In the message of an engine that refuses to serve, by which it is known in other processes."""

SERVES_ON = "the engine serves on with version"
"""In the message of an engine that could not switch, and has what it had."""

PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the workers of an engine receive. Made from JSON, so every type is checked.

    Raises:
        OptionError: (a ``ValueError``) a value is not what it may be.
    """

    store: str
    """The store's directory, as the workers see it."""
    local_store: str | None = None
    """A directory in shared memory, to which one process of the node copies each version once, and
    from which all ranks map it. For a store on a network mount; all ranks must be on one node."""
    engine_id: str | None = None
    """The engine's name among the store's receivers. Default: one from vLLM's own instance id."""
    staging: Literal["auto", "map", "copy"] = "auto"
    """Hold a version mapped, or copied into memory (pinned, with a GPU). ``"auto"``: map without
    a GPU on a local mount, copy else."""
    verify: bool | Literal["auto"] = "auto"
    """Check every tensor against its checksum. ``"auto"``: on network mounts."""
    poll_interval_s: float = 1.0
    """How often to look at the store when no event came."""
    timeout_s: float = 60.0
    """How long an update waits for its version to be staged."""
    num_threads: int | None = None
    """Threads that copy and verify."""
    allow_shared_store: bool = False
    """Accept a directory that belongs to someone else, or that others can write to."""
    partial: bool = False
    """Accept versions that hold a part of the model, layer by layer: other layers keep what they
    have. A version that lacks what an earlier one has brought is refused."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(self, "store", isinstance(self.store, str) and self.store != "")
        local = self.local_store
        _require(self, "local_store", local is None or (isinstance(local, str) and local != ""))
        is_name = isinstance(self.engine_id, str) and is_receiver_id(self.engine_id + ".rank-0000")
        _require(self, "engine_id", self.engine_id is None or is_name)
        _require(self, "staging", self.staging in ("auto", "map", "copy"))
        _require(self, "verify", isinstance(self.verify, bool) or self.verify == "auto")
        _require(self, "poll_interval_s", _is_positive(self.poll_interval_s))
        _require(self, "timeout_s", _is_positive(self.timeout_s))
        threads = self.num_threads
        _require(self, "num_threads", threads is None or (type(threads) is int and threads > 0))
        _require(self, "allow_shared_store", isinstance(self.allow_shared_store, bool))
        _require(self, "partial", isinstance(self.partial, bool))

    @property
    def read_store(self) -> str:
        """The store that is read: the local one, where there is one."""
        return self.local_store or self.store

    def start_mirror(self) -> Mirror | None:
        """Keep the local store up to date, or stand by while another process does.

        Raises:
            StoreMismatchError: the local store holds another store's versions, and is in use.
        """
        return start_mirror(
            self.store,
            self.local_store,
            poll_interval_s=self.poll_interval_s,
            num_threads=self.num_threads,
            allow_shared_store=self.allow_shared_store,
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "init_info") -> Self:
        """Make them from a dictionary, as ``init_info`` is one; ``source`` is for the message.

        Raises:
            OptionError: (a ``ValueError``) a key is missing or unknown, or a value wrong.
        """
        known = [item.name for item in fields(cls)]
        if (
            not isinstance(values, Mapping)
            or not set(values) <= set(known)
            or "store" not in values
        ):
            raise OptionError(
                f"{source} is {values!r:.500}, and must be an object with 'store' and maybe "
                f"{', '.join(name for name in known if name != 'store')}"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Which version to switch to: the store's newest, unless it says more.

    Raises:
        OptionError: (a ``ValueError``) a value is not what it may be.
    """

    version: int | None = None
    """Exactly this one."""
    at_least: int | None = None
    """This one, or a later one that is ready on all ranks."""
    kind: Literal["dense", "sparse"] = "dense"
    """Whole tensors, or patches to them."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("version", "at_least"):
            value = getattr(self, name)
            _require(self, name, value is None or (type(value) is int and 0 < value <= MAX_INTEGER))
        _require(self, "at_least", None in (self.version, self.at_least))
        _require(self, "kind", self.kind in ("dense", "sparse"))
        if self.kind == "sparse":
            raise OptionError("kind is 'sparse': a store holds whole tensors so far; use 'dense'")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make one from ``update_info``.

        Raises:
            OptionError: (a ``ValueError``) a key is unknown, or a value wrong.
        """
        known = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(known):
            raise OptionError(
                f"update_info is {values!r:.500}, and must be an object with nothing but "
                f"{', '.join(known)}"
            )
        return cls(**values)

    @classmethod
    def parse_or_error(cls, values: Mapping[str, Any]) -> Self | OptionError:
        """The same, with what is wrong returned: all ranks must know before one of them raises."""
        try:
            return cls.parse(values)
        except OptionError as error:
            return error


def _require(options: Any, name: str, is_right: bool) -> None:
    if not is_right:
        raise OptionError(f"{name} is {getattr(options, name)!r:.200}: {_RULES[name]}")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= threading.TIMEOUT_MAX


_RULES = {
    "store": "the store's directory, not empty",
    "local_store": "a directory, not empty",
    "engine_id": "1 to 118 letters, digits, '.', '_' or '-'",
    "staging": "'auto', 'map' or 'copy'",
    "verify": "True, False or 'auto'",
    "poll_interval_s": "seconds, above 0 and no more than a thread can wait",
    "timeout_s": "seconds, above 0 and no more than a thread can wait",
    "num_threads": "a whole number, at least 1",
    "allow_shared_store": "True or False",
    "partial": "True or False",
    "version": "a whole number, at least 1",
    "at_least": "a whole number, at least 1, and not together with version",
    "kind": "'dense' or 'sparse'",
}
