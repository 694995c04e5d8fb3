"""`EngineOptions` and `UpdateRequest`: where an engine's store is, and which version to load.

An integration's ``follow`` takes the options. vLLM also accepts them as ``init_info`` of its weight
transfer, and as ``additional_config["dbuffer"]``, which makes its workers follow as they start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from dbuffer.errors import OptionError, VersionRegressedError
from dbuffer.format.layout import digest
from dbuffer.format.lineage import (
    MAX_NUMBER,
    Lineage,
    Positive,
    Relation,
    Token,
    VersionId,
    describe_fork,
    number_of,
    relation,
)
from dbuffer.format.manifest import Manifest, ReceiverId, is_multiple
from dbuffer.mirror.mirror import Mirror, start_mirror
from dbuffer.receive.follow_loop import Forked
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options as checks
from dbuffer.store import kept
from dbuffer.store.buffer import DoubleBuffer

NO_STORE_YET = (
    "this engine follows no store yet: name one first (vLLM's own call for that: "
    "init_weight_transfer_engine, with init_info={'store': directory})"
)


_CANARY_RULE = (
    'prompts and a number, as {"prompts": ["1 + 1 = 2"], "min_mean_logprob": -2.5}, where the '
    "prompts are all texts, or all lists of token ids; or, as an argument of `follow`, a function "
    "that judges an engine"
)
_RUN_RULE = (
    "16 hexadecimal digits, as dbuffer status shows them, given together with version or at_least"
)
_WHEN_RULE = (
    f'an object such as {{"step": 100}}: keys of the metadata, with numbers from 1 to {MAX_NUMBER}'
)

Number = Annotated[Positive, Meta(description=f"a whole number from 1 to {MAX_NUMBER}")]
_ENGINE_ID_RULE = "1 to 100 letters, digits, '.', '_' or '-'"
_EngineId = Annotated[ReceiverId, Meta(max_length=118, description=_ENGINE_ID_RULE)]
"""Type of an engine's id: a receiver's id, with room for the suffix of :func:`rank_id`. An id from
a user also leaves room for the suffixes of a replica and of a draft."""


def rank_id(engine_id: str, rank: int) -> str:
    """Return the id of an engine's rank among a store's receivers."""
    return f"{engine_id}.rank-{rank}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine's workers, as docs/integrations/vllm.md explains them.

    The values can come from JSON, so their types are checked.
    """

    store: str
    """The store's directory, as the workers see it: a text or a ``Path``."""
    local_store: str | None = None
    """Directory in shared memory, into which a store on a network mount is mirrored. All ranks must
    be on the same host."""
    draft_store: str | None = None
    """Directory of a store with the weights of the engine's draft model alone (speculative
    decoding), which the draft follows. The directory must not be ``store``."""
    version: Number | None = None
    """Version to serve and stay on. Default: always the newest version."""
    every: Number = 1
    """Switch only to versions whose number is a multiple of this value."""
    when: Annotated[Mapping[str, Positive], Meta(min_length=1, description=_WHEN_RULE)] | None = (
        None
    )
    """Switch only to versions whose metadata has, under each of these keys, a multiple of the given
    number. With ``{"step": 100}``, these are the versions of steps 100, 200, and so on."""
    until_done: bool = False
    """Keep each version until the program calls the follower's ``done()``."""
    engine_id: _EngineId | None = None
    """The engine's name among the store's receivers. Default: its own name or address."""
    staging: Literal["auto", "map", "copy", "device"] = "auto"
    """Place of a version that is ready to load: its mapped file, or a copy of it in main memory or
    on the device.

    ``"auto"`` without a GPU: on a network mount, copy; on a local mount, map the file. With a GPU:
    the same at first. Once dbuffer has verified that direct copies can replace the engine's reload,
    copy as much into the GPU's memory as is free beside the engine, and the rest into main memory.
    """
    verify: bool | Literal["auto"] = "auto"
    """Check every tensor against its published checksum. ``"auto"``: on network mounts."""
    poll_interval_s: checks.PositiveSeconds = 0.5
    """Seconds between two reads of the store's version pointer, if no file events arrive."""
    timeout_s: checks.PositiveSeconds = 60.0
    """Seconds that a switch waits until a rank has the version ready to load."""
    num_threads: Number | None = None
    """Number of threads that copy and verify tensors."""
    allow_shared_store: bool = False
    """Accept a store directory that another user owns or can write to."""
    allow_stale_kv: bool = False
    """Accept an engine with a KV connector (an external KV cache) that a switch cannot empty."""
    unused_tensors: Literal["refuse", "warn"] = "refuse"
    """Treatment of versions with tensors that the engine's model has no place for."""
    forked: Forked = "follow"
    """Reaction if another run (start of a sender) continues from a version before the engine's."""
    plan: bool = True
    """Switch by direct copies, once verified. If False, switch by the engine's own reload."""
    images: bool = True
    """Pack or quantize a version's layers while the engine serves, if they need it. If False, the
    engine reloads these layers in its pause."""
    attest: bool | Literal["auto"] = "auto"
    """Compare the engine's weights with the published version after each switch. ``"auto"``: if the
    weights are on a GPU."""
    canary: Annotated[Mapping[str, Any] | bool | None, Meta(description=_CANARY_RULE)] = None
    """Acknowledge a version only after a test of the engine, its canary, accepts the version.

    With ``{"prompts": [...], "min_mean_logprob": -2.5}``, the canary compares the mean
    log-probability of the prompts' tokens with this minimum. With True, the program that calls
    ``follow`` passes the canary as a function."""
    instance_id: Annotated[str, Meta(min_length=1, description="a text, not empty")] | None = None
    """Id of this start of the engine, set by the follower. Default: vLLM's id of the engine, as the
    worker knows it. vLLM changes its id in some processes after the start."""

    def __post_init__(self) -> None:
        for name in ("store", "local_store", "draft_store"):
            if (place := getattr(self, name)) is not None or name == "store":
                path = checks.directory(name, place)
                # The directory need not exist. On a failed mount, os.path.isfile() is False, but
                # Path.is_file() may raise an error.
                is_file = os.path.isfile(path)  # noqa: PTH113
                _require(self, name, not is_file, "the path of a directory")
                # A `Path` becomes a text: options are sent to other processes as JSON.
                object.__setattr__(self, name, str(path))
        checks.types_of_fields(self)
        is_other = self.draft_store != self.store
        _require(self, "draft_store", is_other, "another directory than the store's")
        is_judged = self.canary is None or self.canary is True or _is_prompt_canary(self.canary)
        _require(self, "canary", is_judged, _CANARY_RULE)
        if self.version is not None:
            rule = "set without local_store: a local store has only the newest version"
            _require(self, "version", self.local_store is None, rule)
            defaults = {"every": 1, "when": None, "until_done": False, "canary": None}
            for name, default in defaults.items():
                rule = f"{default} if version is set, because the engine stays on that version"
                _require(self, name, getattr(self, name) == default, rule)

    @property
    def record_token(self) -> str:
        """Token that marks the records which the engine writes after one start.

        Replicas, and later starts, can have the same engine id, but have other tokens.
        """
        return digest((self.instance_id or "").encode())

    @property
    def read_store(self) -> str:
        """Store that the ranks read: ``local_store`` if it is set, else ``store``."""
        return self.local_store or self.store

    @property
    def skips(self) -> bool:
        """Whether the options make the engine skip some versions."""
        return self.every > 1 or self.when is not None

    def choose(self, newest: Lineage, store: DoubleBuffer) -> Lineage | None:
        """Return the newest version that the engine takes from a store, or None if it takes none.

        The engine takes a version if the options select it, and no canary refused it. ``newest`` is
        the store's newest version.
        """
        if not self.skips and self.refusal(newest.id) is None:
            return newest

        def takes(manifest: Manifest) -> bool:
            is_due = is_multiple(manifest.version, manifest.metadata, self.every, self.when or {})
            return is_due and self.refusal(manifest.id) is None

        return kept.newest_taken(store, takes)

    def has(self, served: Lineage, goal: int | VersionId) -> bool:
        """Whether an engine that serves ``served`` has ``goal`` or a later version.

        With the option ``version``, a later version does not count.
        """
        if self.version is not None and served.id.number != number_of(goal):
            return False
        return served.reaches(goal) if isinstance(goal, VersionId) else served.id.number >= goal

    def refusal(self, version: VersionId) -> str | None:
        """Return the reason why a canary refused a version, with the canary's name, or None."""
        return self.buffer_of(self.store).refusal(version)

    def buffer_of(self, store: str) -> DoubleBuffer:
        return DoubleBuffer(store, allow_shared_store=self.allow_shared_store)

    def of_other(self, store: str) -> Self:
        """Return these options for another store.

        Options about this store and its versions get their defaults, so the engine takes each
        newest version of the other store.
        """
        return replace(
            self,
            store=store,
            draft_store=None,
            local_store=None,
            version=None,
            every=1,
            when=None,
            until_done=False,
            canary=None,
        )

    def attests(self, *, on_device: bool) -> bool:
        return on_device if self.attest == "auto" else self.attest

    def start_mirror(self) -> Mirror | None:
        """Start a mirror of the store into the local store; return None if no mirror is needed."""
        return start_mirror(
            self.store,
            self.local_store,
            poll_interval_s=self.poll_interval_s,
            num_threads=self.num_threads,
            allow_shared_store=self.allow_shared_store,
        )

    def make_receiver(self, receiver_id: str | None = None) -> WeightReceiver:
        """Return a receiver of the store that the ranks read."""
        return WeightReceiver(
            self.read_store,
            receiver_id=receiver_id,
            poll_interval_s=self.poll_interval_s,
            verify=self.verify,
            num_threads=self.num_threads,
            allow_shared_store=self.allow_shared_store,
        )

    def admit(self, request: UpdateRequest) -> UpdateRequest:
        """Return the request or, with the option ``version``, a request for exactly that version.

        Raise :class:`OptionError` if the request asks for another version than the option.
        """
        if self.version is None:
            return request
        if request.version in (None, self.version) and (request.at_least or 0) <= self.version:
            return replace(request, version=self.version, at_least=None)
        raise OptionError(
            f"this engine stays on version {self.version} of {self.store}, and was asked to load "
            f"version {request.version or request.at_least}: to load that, follow again without "
            "the option version"
        )

    def has_forked(self, served: Lineage, newest: Lineage) -> bool:
        """Whether the store has forked: neither ``served`` nor ``newest`` descends from the other.

        If the option ``forked`` is ``"refuse"``, raise :class:`VersionRegressedError` instead of
        returning True.
        """
        if relation(served, newest) is not Relation.FORKED:
            return False
        if self.forked == "refuse":
            raise VersionRegressedError(
                f"{describe_fork(self.store, served.id, newest.id)}: the engine keeps version "
                f"{served.id.number}. To switch it to the newest, follow again with "
                "forked='follow'",
                is_forked=True,
            )
        return True

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "init_info") -> Self:
        """Make options from a dictionary. ``source`` names the dictionary in error messages."""
        options = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping) or not {"store"} <= values.keys() <= {*options}:
            raise OptionError(
                f"{source} is {values!r:.500}, and must be an object with 'store' and, optionally, "
                f"{', '.join(name for name in options if name != 'store')}"
            )
        made = cls(**values)
        _require(made, "engine_id", len(made.engine_id or "") <= 100, _ENGINE_ID_RULE)
        return made


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Request to switch to a version. Without a number: to the store's newest version."""

    version: Number | None = None
    at_least: Number | None = None
    """Number of the oldest version to switch to. If all ranks have a later version ready, the
    engine switches to the later version."""
    run: Annotated[Token, Meta(description=_RUN_RULE)] | None = None
    """Run (start of a sender) of the version. Default: of all runs with a version of this number,
    the run that led to the store's newest version."""
    update_kind: Literal["dense", "sparse_flat"] = "dense"
    """Kind of the update in vLLM's terms. The value has no effect."""
    attempt: Annotated[Token, Meta(description="16 hexadecimal digits")] | None = None
    """Id of a follower's attempt, which the engine's record then names."""

    def __post_init__(self) -> None:
        checks.types_of_fields(self)
        is_number_alone = None in (self.version, self.at_least)
        _require(self, "at_least", is_number_alone, "either version or at_least, not both")
        _require(self, "run", self.run is None or self.goal is not None, _RUN_RULE)

    @property
    def goal(self) -> int | VersionId | None:
        """Version to switch to: an id if a run is given, else a number, or None for the newest."""
        number = self.version or self.at_least
        return VersionId(self.run, number) if self.run is not None and number else number

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Make a request from a dictionary, such as vLLM's ``update_info``."""
        options = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping) or not values.keys() <= {*options}:
            raise OptionError(
                f"update_info is {values!r:.500}, and must be an object with nothing but "
                f"{', '.join(options)}"
            )
        return cls(**values)


def _is_prompt_canary(canary: Any) -> bool:
    match canary:
        case {"prompts": [_, *_] as prompts, "min_mean_logprob": int() | float() as minimum}:
            is_text = all(isinstance(prompt, str) and prompt for prompt in prompts)
            is_right = is_text or all(map(_is_token_ids, prompts))
            return is_right and len(canary) == 2 and type(minimum) is not bool and isfinite(minimum)
    return False


def _is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids, at least two: engines do not score the first."""
    is_list = isinstance(prompt, list) and len(prompt) > 1
    return is_list and all(type(token) is int and token >= 0 for token in prompt)


def _require(options: Any, name: str, is_right: bool, rule: str) -> None:
    if not is_right:
        checks.refuse(name, getattr(options, name), rule)
