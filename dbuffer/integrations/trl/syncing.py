"""`over_store`: make a trainer of TRL's, with its weights going to vLLM servers through a store.

It leaves a `WeightSync` in the trainer, whose generation calls that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.publish.sender import WeightSender
from dbuffer.publish.sender_options import SenderKeywords, SenderOptions
from dbuffer.publish.sharded import DEFAULT_RANK_TIMEOUT_S, ShardedWeightSender
from dbuffer.runtime import options
from dbuffer.weights.sources import Weights

P = ParamSpec("P")
TrainerT = TypeVar("TrainerT")


def over_store(
    trainer_class: Callable[P, TrainerT],
    store: str | os.PathLike[str],
    *,
    receivers: int | str | Collection[str] = 1,
    timeout_s: float = 600.0,
    **sender: Unpack[SenderKeywords],
) -> Callable[P, TrainerT]:
    """Let a trainer's weights go to vLLM servers through a store, which they follow.

    Call the result as you call the class: it returns the class's trainer. Whenever TRL is about to
    generate with newer weights, they are published, and TRL waits until servers have them. The
    trainer has one more attribute, ``weight_sync``: a :class:`WeightSync`.

    Args:
        trainer_class: ``trl.GRPOTrainer``, or another that makes TRL's ``VLLMGeneration``:
            ``args`` must have ``use_vllm=True, vllm_mode="server"``.
        store: the store's directory, the same on all ranks, and as the servers see it.
        receivers: how many engines must have a version before TRL generates with it; or their ids
            (``engine_id``), so that an engine which cannot apply it raises an error at once.
        timeout_s: for how long they are waited for.
        **sender: fields of :class:`dbuffer.SenderOptions`. Mirrors into a
            bucket need ``checksum=True`` to copy no more than what changed.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid. From the result's call: the trainer
            does not generate with a vLLM server.
        StoreBusyError: from the result's call: another sender has the store.
        StoreAccessError: from the result's call: the store cannot be used.
    """
    place = options.directory("store", store)
    options.names("receivers", receivers)
    options.positive_seconds("timeout_s", timeout_s)
    SenderOptions.parse(sender)

    def make(*args: P.args, **kwargs: P.kwargs) -> TrainerT:
        with _without_group():
            trainer: Any = trainer_class(*args, **kwargs)
        generation = getattr(trainer, "vllm_generation", None)
        if generation is None or generation.mode != "server":
            raise OptionError(
                f"this {type(trainer).__name__} does not generate with a vLLM server, so there is "
                'nothing to bring its weights to: set use_vllm=True, vllm_mode="server" in its args'
            )
        trainer.weight_sync = WeightSync(
            trainer, place, receivers=receivers, timeout_s=timeout_s, **sender
        )
        # TRL has no seam for this: all its trainers call this method of their own generation.
        generation.sync_weights = trainer.weight_sync.sync_weights
        return trainer  # type: ignore[no-any-return]

    return make


@contextlib.contextmanager
def _without_group() -> Iterator[None]:
    """Let TRL's clients of servers join no process group, which TRL sends weights in.

    There is no seam for that: a trainer makes a client in its constructor, and lets it join at
    once, over NCCL, which refuses every device but CUDA.
    """
    from trl.generation.vllm_client import VLLMClient

    join = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda *_, **__: None
    try:
        yield
    finally:
        VLLMClient.init_communicator = join


class WeightSync:
    """Publishes a trainer's weights, and waits until servers have them. Made by `over_store`.

    Every rank has one, and makes every call. Each rank writes its part of a sharded model, and
    nothing is gathered, except by ZeRO-3, one tensor at a time. A peft model is published as the
    model that it acts as, and is not changed.
    """

    def __init__(
        self,
        trainer: Any,
        store: Path,
        *,
        receivers: int | str | Collection[str],
        timeout_s: float,
        **sender: Unpack[SenderKeywords],
    ) -> None:
        from accelerate.utils import DistributedType

        self._trainer = trainer
        self._generation = trainer.vllm_generation
        self._receivers, self._timeout_s = receivers, timeout_s
        self.version: int | None = None
        """Newest version that the servers have."""
        self.sender: WeightSender | ShardedWeightSender
        """Sender that publishes the weights, for instance for `dbuffer.integrations.metrics`."""
        if self._generation.accelerator.distributed_type == DistributedType.NO:
            self.sender = WeightSender(store, **sender)
        else:
            # Ranks wait for a rank that waits for engines.
            rank_timeout_s = DEFAULT_RANK_TIMEOUT_S + timeout_s
            self.sender = ShardedWeightSender(store, rank_timeout_s=rank_timeout_s, **sender)

    def sync_weights(self) -> None:
        """Publish the trainer's weights, and return when servers generate with them.

        TRL calls it before it generates, if it has trained since. Call it yourself after the last
        step, for servers to get the final weights.

        Raises:
            InvalidWeightsError, UnsupportedError: the weights cannot be published: adapters
                of a sharded model, or a way to shard that is not known here.
            StoreFullError: there is no room for the version.
            StoreAccessError: the store cannot be written.
            WriterSupersededError: another sender has taken the store over.
            WaitTimeoutError: too few engines have the version in time.
            ReceiverFailedError: one of those named cannot apply it, or has ended.
            RankFailedError: a rank was lost.
        """
        metadata = {"step": self._trainer.state.global_step}
        version = self.sender.send(self._weights(), metadata=metadata).version
        try:
            self.sender.wait_applied(version, receivers=self._receivers, timeout_s=self._timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error}; TRL does not generate with older weights: let its server follow this "
                "directory (--middleware dbuffer.integrations.vllm.FollowStore), and look at the "
                "server's log"
            ) from error
        self.version = version

    def close(self) -> None:
        """Give the store up. The last version stays published, and servers keep their weights."""
        self.sender.close()

    def _weights(self) -> Weights:
        from accelerate.utils import is_peft_model

        # Not the trainer's own, which may be wrapped since training began.
        accelerator = self._generation.accelerator
        model = accelerator.unwrap_model(self._generation.model, keep_torch_compile=False)
        if not is_peft_model(model):
            return model
        from dbuffer.integrations.peft import merged_weights

        return merged_weights(model)
