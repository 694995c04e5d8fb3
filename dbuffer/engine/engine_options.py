"""`EngineOptions` and `UpdateRequest`: where an engine's store is, and which version to load.

The options come from ``follow`` of the integration. vLLM also takes them as ``init_info`` of its
weight transfer, or as ``additional_config["dbuffer"]``; with these its workers begin to follow, on
the newest weights, before the engine is ready.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from dbuffer.errors import OptionError, VersionRegressedError
from dbuffer.format.layout import digest
from dbuffer.format.lineage import Lineage, Relation, VersionId, describe_fork, relation
from dbuffer.format.manifest import ATTEMPT, MAX_INTEGER, is_receiver_id, is_run
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.receive.follow_loop import FORKED, Forked
from dbuffer.runtime import options as checks

NO_STORE_YET = (
    "this engine follows no store yet: name one first (vLLM's own call for that: "
    "init_weight_transfer_engine, with init_info={'store': directory})"
)


def rank_id(engine_id: str, rank: int) -> str:
    """Return the id of an engine's rank among a store's receivers."""
    return f"{engine_id}.rank-{rank}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the workers of an engine. Made from JSON, so every type is checked.

    Raises:
        OptionError: (a ``ValueError``) a value is invalid.
    """

    store: str
    """The store's directory, as the workers see it: a text or a ``Path``."""
    local_store: str | None = None
    """Directory in shared memory (a text or a ``Path``). One process of the node copies each
    version there once, and all ranks map it. For a store on a network mount; all ranks must be on
    one node."""
    version: int | None = None
    """Version to serve and stay on, whatever is published later: in a buffer, kept, or not yet
    published. A ``local_store`` excludes it. Default: the newest, each time."""
    every: int = 1
    """Least distance between the numbers of two versions that the engine serves: with 10, an engine
    that serves version 20 takes the first version from 30 on."""
    until_done: bool = False
    """Keep each version until its follower's ``done()``: an evaluation runs on one version."""
    engine_id: str | None = None
    """The engine's name among the store's receivers. Default: one from what
    the engine calls itself, or from its address."""
    staging: Literal["auto", "map", "copy", "device"] = "auto"
    """Hold a version mapped, or copied into memory (pinned, with a GPU), or as much of it as there
    is room for in the device's own memory, and the rest as with ``"copy"``; only what this rank
    needs of it, where that is known. ``"auto"``: map without a GPU on a local mount, copy else, and
    with a GPU on a local mount only when it is known whether less than all will do."""
    verify: bool | Literal["auto"] = "auto"
    """Check every tensor against its checksum. ``"auto"``: on network mounts."""
    poll_interval_s: float = 0.5
    """Seconds between two looks at the store when no event came."""
    timeout_s: float = 60.0
    """Seconds that an update waits for its version to be staged."""
    num_threads: int | None = None
    """Threads that copy and verify."""
    allow_shared_store: bool = False
    """Accept a directory that belongs to someone else, or that others can write to."""
    allow_stale_kv: bool = False
    """Accept an engine that loads KV through a connector whose contents a switch cannot drop:
    answers may then continue from what older weights computed."""
    unused_tensors: Literal["refuse", "warn"] = "refuse"
    """Treatment of a version with tensors that the engine's model has no place for: ``"refuse"`` it
    by their names, or leave them out with one warning (``"warn"``). Buffers that
    the model computes itself, a head equal to the embedding that it is tied to, and layers of a
    draft (MTP) are left out in any case."""
    forked: Forked = "follow"
    """Policy if the store forks from the engine's version, because another run publishes there:
    ``"follow"`` the fork, with a warning; or ``"refuse"`` it, and serve on, until the engine
    follows again with ``"follow"``."""
    plan: bool = True
    """Switch by direct copies, once a switch through the engine's own reload has verified that
    copies give the same result. Off: every switch is such a reload."""
    images: bool = True
    """Process layers that pack or quantize their weights while the engine serves, and switch to the
    result. Takes the memory of those layers once more. Off: a model that has them is reloaded."""
    attest: bool | Literal["auto"] = "auto"
    """After each switch, while the engine serves, compare its weights with the published ones; if
    some differ, load the version again, whole. ``"auto"``: if they are on a GPU."""
    instance_id: str | None = None
    """Id of this start of the engine, which its follower sets. Default: the id that the worker
    knows, which vLLM changes in some processes once the engine is started."""

    def __post_init__(self) -> None:
        for name in ("store", "local_store"):
            if (place := getattr(self, name)) is not None or name == "store":
                path = checks.directory(name, place)
                # It need not exist yet. Not Path.is_file(), which raises errors of a mount.
                is_file = os.path.isfile(path)  # noqa: PTH113
                _require(self, name, not is_file, "the path of a directory")
                # As text, also of a `Path`: options go to other processes as JSON.
                object.__setattr__(self, name, str(path))
        if self.version is not None:
            checks.whole_number("version", self.version, at_most=MAX_INTEGER)
            rule = "it without local_store, which gets the newest only: follow the store itself"
            _require(self, "version", self.local_store is None, rule)
        checks.whole_number("every", self.every, at_most=MAX_INTEGER)
        checks.flag("until_done", self.until_done)
        is_newest, stays = self.version is None, "with version, on which the engine stays"
        _require(self, "every", is_newest or self.every == 1, f"1 {stays}")
        _require(self, "until_done", is_newest or not self.until_done, f"false {stays}")
        if self.engine_id is not None:
            is_name = isinstance(self.engine_id, str) and is_receiver_id(
                rank_id(self.engine_id, 1000)
            )
            rule = "1 to 118 letters, digits, '.', '_' or '-'"
            _require(self, "engine_id", is_name, rule)
        checks.choice("staging", self.staging, ("auto", "map", "copy", "device"))
        checks.choice("verify", self.verify, (True, False, "auto"))
        checks.positive_seconds("poll_interval_s", self.poll_interval_s)
        checks.positive_seconds("timeout_s", self.timeout_s)
        if self.num_threads is not None:
            checks.whole_number("num_threads", self.num_threads)
        checks.flag("allow_shared_store", self.allow_shared_store)
        checks.flag("allow_stale_kv", self.allow_stale_kv)
        checks.choice("unused_tensors", self.unused_tensors, ("refuse", "warn"))
        checks.choice("forked", self.forked, FORKED)
        checks.flag("plan", self.plan)
        checks.flag("images", self.images)
        checks.choice("attest", self.attest, (True, False, "auto"))
        is_text = isinstance(self.instance_id, str | None) and self.instance_id != ""
        _require(self, "instance_id", is_text, "a text, not empty")

    @property
    def record_token(self) -> str:
        """Token of the records of an engine and its ranks, once ``instance_id`` is known.

        Replicas from one command line share their ids: the token tells this start of an engine
        from all others.
        """
        return digest((self.instance_id or "").encode())

    @property
    def read_store(self) -> str:
        """The store that is read: the local one, where there is one."""
        return self.local_store or self.store

    def attests(self, *, on_device: bool) -> bool:
        """Whether a rank compares its weights, which are on a device or in main memory."""
        return on_device if self.attest == "auto" else self.attest

    def start_mirror(self) -> Mirror | None:
        """Keep the local store, if any, up to date, or stand by for the process that does."""
        return start_mirror(
            self.store,
            self.local_store,
            poll_interval_s=self.poll_interval_s,
            num_threads=self.num_threads,
            allow_shared_store=self.allow_shared_store,
        )

    def admit(self, request: UpdateRequest) -> UpdateRequest:
        """Return a request, for the version that the engine stays on, if there is one.

        Raises:
            OptionError: the engine stays on another version.
        """
        if self.version is None:
            return request
        if request.version in (None, self.version) and (request.at_least or 0) <= self.version:
            return replace(request, version=self.version, at_least=None)
        raise OptionError(
            f"this engine stays on version {self.version} of {self.store}, and was asked to load "
            f"version {request.version or request.at_least}: let it follow again without version"
        )

    def has_forked(self, served: Lineage, newest: Lineage) -> bool:
        """Whether the engine's version does not lead to the store's newest, which is followed.

        Raises:
            VersionRegressedError: it does not, and that is refused.
        """
        if relation(served, newest) is not Relation.FORKED:
            return False
        if self.forked == "refuse":
            raise VersionRegressedError(
                f"{describe_fork(self.store, served.id, newest.id)}: the engine serves on with the "
                "former. For the latter, let it follow the store again with forked='follow'",
                is_forked=True,
            )
        return True

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "init_info") -> Self:
        """Make them from a dictionary, as ``init_info`` is one; ``source`` is for the message."""
        options = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping) or not {"store"} <= values.keys() <= {*options}:
            raise OptionError(
                f"{source} is {values!r:.500}, and must be an object with 'store' and maybe "
                f"{', '.join(name for name in options if name != 'store')}"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Request to switch to a version: to the store's newest, unless it says more.

    Raises:
        OptionError: (a ``ValueError``) a value is invalid.
    """

    version: int | None = None
    """Exactly this version."""
    at_least: int | None = None
    """This version, or a later version that is ready on all ranks."""
    run: str | None = None
    """Run of the version. Default: the number alone names it, among the versions that lead to the
    newest."""
    update_kind: Literal["dense", "sparse_flat"] = "dense"
    """Kind of the update, in vLLM's words: whole tensors, or patches. Either way the store holds
    the version whole, and the engine switches to it in the same way."""
    attempt: str | None = None
    """Id of a follower's attempt. The engine's record names it once the attempt has succeeded or
    failed, so that the follower knows which weights the engine has."""

    def __post_init__(self) -> None:
        for name in ("version", "at_least"):
            if (value := getattr(self, name)) is not None:
                checks.whole_number(name, value, at_most=MAX_INTEGER)
        is_number_alone = None in (self.version, self.at_least)
        _require(self, "at_least", is_number_alone, "either version or at_least, not both")
        if self.run is not None:
            has_number = self.version is not None or self.at_least is not None
            rule = "16 hexadecimal digits, as dbuffer status shows them, with version or at_least"
            _require(self, "run", is_run(self.run) and has_number, rule)
        if self.attempt is not None:
            is_attempt = isinstance(self.attempt, str) and ATTEMPT.fullmatch(self.attempt)
            _require(self, "attempt", bool(is_attempt), "16 hexadecimal digits")
        checks.choice("update_kind", self.update_kind, ("dense", "sparse_flat"))

    @property
    def goal(self) -> int | VersionId | None:
        """The version, by its id if its run is known; None for the newest."""
        number = self.version or self.at_least
        return VersionId(self.run, number) if self.run is not None and number else number

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make one from a dictionary, as ``update_info`` is one."""
        options = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping) or not values.keys() <= {*options}:
            raise OptionError(
                f"update_info is {values!r:.500}, and must be an object with nothing but "
                f"{', '.join(options)}"
            )
        return cls(**values)


def _require(options: Any, name: str, is_right: bool, rule: str) -> None:
    if not is_right:
        checks.refuse(name, getattr(options, name), rule)
