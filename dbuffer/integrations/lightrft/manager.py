"""`BroadcastManager`: replaces LightRFT's class of the same name, and sends through a store."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from dbuffer.engine.follower import Follower
from dbuffer.errors import DBufferError, OptionError, UnsupportedError
from dbuffer.integrations.default_store import default_store
from dbuffer.integrations.lightrft.configuration import (
    dtype_of,
    engine_type_of,
    names_of,
    weights_of,
)
from dbuffer.publish.publisher import SenderKeywords, SenderOptions
from dbuffer.publish.sharded import ShardedWeightSender
from dbuffer.ranks.agreement import Agreement
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing
from dbuffer.weights.sources import Weights

if TYPE_CHECKING:
    from dbuffer.integrations.vllm.follow_vllm import LaunchedFollower

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 600.0


class BroadcastManager(Closing):
    """Brings an actor's weights to its inference engines through a store.

    Every rank makes a manager, and all ranks make each call together. Each rank writes its part of
    a version. Weights are gathered only with ZeRO-3, one tensor at a time. In each engine, either
    all ranks switch to the version or none.

    Args:
        actor: LightRFT's actor. Its ``model`` is a module sharded by FSDP2's ``fully_shard``, or a
            DeepSpeed engine.
        strategy: LightRFT's strategy, with settings in ``args`` or ``config``.
        inference_engine: this rank's ``vllm.LLM``, LightRFT's wrapper of an ``sglang.Engine``, or
            None if this rank has no engine.
        store: the store's directory, the same on all ranks and engines. Default: a directory in
            this machine's shared memory, which outlives the job. If a job has several
            managers, pass a different ``store`` to each manager.
        timeout_s: how long a broadcast waits until an engine has read the version into its memory.
        rank_timeout_s: how long ranks wait for a rank that hangs.
        unused_tensors: see :class:`EngineOptions`.
        **sender: fields of :class:`dbuffer.SenderOptions`. By default, ``dtype`` and ``rename`` are
            as in LightRFT, which renames tensors only for SGLang without ``args.text_only``.

    Raises:
        UnsupportedError: (a ``NotImplementedError``) the engine or the trainer is not supported.
        OptionError: (a ``ValueError``) an option is invalid, no rank has an engine, or
            torch.distributed is not initialized.
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
        self._timeout_s = options.positive_seconds("timeout_s", timeout_s)
        options.positive_seconds("rank_timeout_s", rank_timeout_s)
        options.choice("unused_tensors", unused_tensors, ("refuse", "warn"))
        place = None if store is None else options.directory("store", store)
        SenderOptions.parse(sender)
        self._follower: Follower | LaunchedFollower | None = None
        self._opened = contextlib.ExitStack()
        engine_s = timeout_s + _LOAD_TIMEOUT_S
        self._agreement = Agreement(None, timeout_s=rank_timeout_s + engine_s)
        self._opened.callback(self._agreement.close)
        try:
            engine = engine_of_rank(inference_engine)
            if not any(self._agreement.share("look for its engine", engine is not None)):
                raise OptionError("no rank has an engine: pass inference_engine on some rank")
            self._weights_on_all_ranks()  # raises if the weights cannot be published
            with self._agreement.step("choose a store") as step:
                if self._agreement.rank == 0:
                    port = os.environ.get("MASTER_PORT", 0)
                    step.result = str(place or default_store("lightrft", port))
            self.store = Path(step.results[0])
            sender.setdefault("dtype", dtype_of(strategy))
            sender.setdefault("rename", names_of(strategy, actor))
            self._sender = ShardedWeightSender(self.store, rank_timeout_s=rank_timeout_s, **sender)
            self._opened.callback(self._sender.close)
            with self._agreement.step("let its engine follow"):
                if engine is not None:
                    self._follower = start_follower(
                        engine_type_of(strategy),
                        engine,
                        self.store,
                        timeout_s=timeout_s,
                        unused_tensors=unused_tensors,
                    )
                    self._opened.callback(_stop, self._follower)
        except BaseException:
            self.close()
            raise

    def broadcast_to_engine(self) -> None:
        """Publish the actor's weights, and return when every engine has switched to them.

        If publishing fails, all engines continue with their present weights. If an engine cannot
        switch, that engine continues with its present weights, but the other engines have the new
        version. All ranks raise the errors of :meth:`dbuffer.ShardedWeightSender.send` and
        :meth:`.Follower.sync`.
        """
        weights = self._weights_on_all_ranks()
        version = self._sender.send(weights).version
        with self._agreement.step("switch its engine"):
            if self._follower is not None:
                self._follower.sync(at_least=version, timeout_s=self._timeout_s)
        self.version = version

    def close(self) -> None:
        self._follower = None
        self._opened.close()

    def _weights_on_all_ranks(self) -> Weights:
        with self._agreement.step("read its configuration"):
            return weights_of(self.strategy, self.actor)


def _stop(follower: Follower | LaunchedFollower) -> None:
    with contextlib.suppress(DBufferError):  # an ended engine raises an error
        follower.stop_workers()
    follower.close()


def engine_of_rank(inference_engine: Any) -> Any:
    """Return this rank's engine, or None if this rank has no engine.

    If several ranks share an SGLang engine, LightRFT makes a wrapper on each of these ranks. Only
    the wrapper on the first rank contains the engine.
    """
    if not hasattr(inference_engine, "tp_group_cpu"):
        return inference_engine
    is_first = inference_engine._tp_rank == 0  # noqa: SLF001 - there is no public name
    return inference_engine._engine if is_first else None  # noqa: SLF001


def start_follower(
    engine_type: str, engine: Any, store: Path, **options: Any
) -> Follower | LaunchedFollower:
    """Start a follower that switches ``engine`` only when you call the follower's ``sync``."""
    if isinstance(engine, str):
        raise UnsupportedError(
            f"{engine!r} is not an engine in this process: a server follows the store by itself, "
            "with the middleware dbuffer.integrations.vllm.FollowStore"
        )
    follower: Follower | LaunchedFollower
    if engine_type == "sglang":
        from dbuffer.integrations import sglang

        follower = sglang.follow(engine, store, **options)
    else:
        from dbuffer.integrations import vllm

        follower = vllm.follow(engine, store, **options)
    return follower
