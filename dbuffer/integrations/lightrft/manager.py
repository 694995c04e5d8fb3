"""`BroadcastManager`: LightRFT's class of this name, over a store instead of tensor by tensor."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.follower import Follower
from dbuffer.errors import DBufferError, OptionError, UnsupportedError
from dbuffer.integrations.default_store import default_store
from dbuffer.integrations.lightrft.configuration import (
    dtype_of,
    engine_type_of,
    names_of,
    weights_of,
)
from dbuffer.publish.sender_options import SenderKeywords, SenderOptions
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing
from dbuffer.weights.sources import Weights

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.launched import LaunchedFollower

EngineFollower: TypeAlias = "Follower | LaunchedFollower"

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 600.0
"""Seconds that ranks wait for an engine to load a version that is ready: a server's time-out."""


class BroadcastManager(Closing):
    """Brings an actor's weights to its inference engines. Every rank makes one, and every call.

    All ranks publish a version together, each rank its part of it; only ZeRO-3 gathers, tensor by
    tensor. After that every engine switches to the version, all its ranks or none.

    Args:
        actor: LightRFT's: its ``model`` is a module sharded by FSDP2's ``fully_shard``, or an
            engine of DeepSpeed's.
        strategy: LightRFT's; ``engine_type`` and ``args`` (``fsdp``, ``zero_stage``, ``bf16``,
            ``text_only``) are read. What ``args`` lacks is as in ``config``, or LightRFT's default.
        inference_engine: this rank's ``vllm.LLM``, or LightRFT's wrapper of an ``sglang.Engine``;
            or None if it has none.
        store: the store's directory, the same on all ranks, and as the engines see it. Default: one
            in this machine's shared memory, by user, SLURM job and ``MASTER_PORT``, which outlives
            the job. A second manager in a job needs a store of its own.
        timeout_s: how long an engine may take to have a version ready, while it serves.
        rank_timeout_s: how long ranks wait for a rank that hangs; a death is detected at once.
        unused_tensors: treatment of tensors that an engine's model has no place for: ``"refuse"``
            the version, or ``"warn"`` once, and leave them out.
        **sender: fields of :class:`dbuffer.SenderOptions`. ``dtype`` and ``rename`` are LightRFT's
            by default: its map of names is for SGLang without ``args.text_only``.

    Raises:
        UnsupportedError: (a ``NotImplementedError``) this engine, or this trainer, is not
            supported.
        OptionError: (a ``ValueError``) an option is invalid, no rank has an engine, or
            torch.distributed is not initialised.
        RankFailedError: a rank was lost.
    """

    def __init__(
        self,
        actor: Any,
        strategy: Any,
        inference_engine: Any,
        *,
        store: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
        rank_timeout_s: float = 600.0,
        unused_tensors: Literal["refuse", "warn"] = "refuse",
        **sender: Unpack[SenderKeywords],
    ) -> None:
        self.actor = actor
        self.strategy = strategy
        self.inference_engine = inference_engine
        self.version: int | None = None
        """Newest version that all engines have switched to."""
        self._timeout_s = options.positive_seconds("timeout_s", timeout_s)
        options.positive_seconds("rank_timeout_s", rank_timeout_s)
        options.choice("unused_tensors", unused_tensors, ("refuse", "warn"))
        place = None if store is None else options.directory("store", store)
        SenderOptions.parse(sender)
        self._follower: EngineFollower | None = None
        self._opened = contextlib.ExitStack()
        engine_s = timeout_s + _LOAD_TIMEOUT_S
        self._agreement = Agreement(None, timeout_s=rank_timeout_s + engine_s)
        self._opened.callback(self._agreement.close)
        try:
            engine = engine_of_rank(inference_engine)
            if not any(self._agreement.share("look for its engine", engine is not None)):
                raise OptionError("no rank has an inference engine")
            self._weights_on_all_ranks()  # to refuse now what could not be published later
            with self._agreement.step("choose a store") as step:
                if self._agreement.rank == 0:
                    port = os.environ.get("MASTER_PORT", 0)
                    step.result = str(place or default_store("lightrft", port))
            self.store = Path(step.results[0])
            """The store's directory."""
            sender.setdefault("dtype", dtype_of(strategy))
            sender.setdefault("rename", names_of(strategy, actor))
            self._sender = ShardedWeightSender(self.store, rank_timeout_s=rank_timeout_s, **sender)
            self._opened.callback(self._sender.close)
            with self._agreement.step("let its engine follow"):
                if engine is not None:
                    engine_options = EngineOptions(
                        store=str(self.store), timeout_s=timeout_s, unused_tensors=unused_tensors
                    )
                    self._follower = start_follower(
                        engine_type_of(strategy), engine, engine_options
                    )
                    self._opened.callback(_stop, self._follower)
        except BaseException:
            self.close()
            raise

    def broadcast_to_engine(self) -> None:
        """Publish the actor's weights, and return when every engine has switched to them.

        If publishing fails, all engines serve on with their weights. If one engine cannot switch,
        so does it, and the others have the new version. It raises what
        :meth:`dbuffer.ShardedWeightSender.send` and :meth:`.Follower.sync` raise, on all ranks.
        """
        weights = self._weights_on_all_ranks()
        version = self._sender.send(weights).version
        with self._agreement.step("switch its engine"):
            if self._follower is not None:
                self._follower.sync(at_least=version, timeout_s=self._timeout_s)
        self.version = version

    def close(self) -> None:
        """Stop following. Engines keep their weights, and the store its last version."""
        self._follower = None
        self._opened.close()

    def _weights_on_all_ranks(self) -> Weights:
        """Return this rank's weights, after every rank has checked that it can publish its own."""
        with self._agreement.step("read its configuration"):
            return weights_of(self.strategy, self.actor)


def _stop(follower: EngineFollower) -> None:
    with contextlib.suppress(DBufferError):  # an engine that has ended follows no more
        follower.stop_workers()
    follower.close()


def engine_of_rank(inference_engine: Any) -> Any:
    """Return this rank's engine, or None; SGLang's is in LightRFT's wrapper, on one rank of it."""
    if not hasattr(inference_engine, "tp_group_cpu"):
        return inference_engine
    is_first = inference_engine._tp_rank == 0  # noqa: SLF001 - no other way to it
    return inference_engine._engine if is_first else None  # noqa: SLF001


def start_follower(engine_type: str, engine: Any, options: EngineOptions) -> EngineFollower:
    """Let an engine follow a store; it switches on demand, by ``sync``."""
    if isinstance(engine, str):
        raise UnsupportedError(
            f"{engine!r} is no engine of this rank: let a server follow the store by itself, with "
            "the middleware dbuffer.integrations.vllm.FollowStore"
        )
    # Not by the integrations' `follow`: that lets an engine switch in the background, at any time.
    follower: EngineFollower
    if engine_type == "sglang":
        from dbuffer.integrations.sglang.sglang_engine import sglang_engine_of

        follower = Follower(sglang_engine_of(engine), options)
    else:
        from dbuffer.integrations.vllm import launched, vllm_engine

        if vllm_engine.is_one_of_several(engine):
            follower = launched.LaunchedFollower(engine, options)
        else:
            follower = Follower(vllm_engine.vllm_engine_of(engine), options)
    follower.start()
    return follower
