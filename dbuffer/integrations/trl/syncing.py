"""`over_store`: makes a TRL trainer whose weights go to vLLM servers through a store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from dbuffer.errors import OptionError, WaitTimeoutError
from dbuffer.publish.publisher import SenderKeywords, SenderOptions
from dbuffer.publish.sender import WeightSender
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
    """Return a function that makes a trainer whose weights go to vLLM servers through a store.

    Call the function with the arguments of ``trainer_class``: ``trl.GRPOTrainer``, or another class
    that uses TRL's ``VLLMGeneration``. Its ``args`` must have ``use_vllm=True`` and
    ``vllm_mode="server"``.

    Before the trainer generates, it publishes its weights if they have changed, and waits up to
    ``timeout_s`` until the servers, which follow the store, have applied them. The trainer has an
    additional attribute, ``weight_sync``: a :class:`WeightSync`.

    ``receivers`` is the number of engines in the servers, or the engines' ids (``engine_id``). With
    ids, an engine that cannot apply a version causes an error at once. ``sender`` has fields of
    :class:`dbuffer.SenderOptions`. If a mirror copies the store into a bucket, pass
    ``checksum=True``, so that the mirror copies only changed bytes.

    Raises:
        OptionError: (a ``ValueError``) an option is invalid. The returned function also raises this
            error if the trainer does not generate with a vLLM server.
        DBufferError: (raised by the returned function) the errors of :class:`dbuffer.WeightSender`.
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
                f"this {type(trainer).__name__} does not generate with a vLLM server, which would "
                'receive its weights: set use_vllm=True, vllm_mode="server" in its args'
            )
        trainer.weight_sync = WeightSync(
            trainer, place, receivers=receivers, timeout_s=timeout_s, **sender
        )
        # TRL has no hook for sending weights. So replace the method that all its trainers call.
        generation.sync_weights = trainer.weight_sync.sync_weights
        return trainer  # type: ignore[no-any-return]

    return make


@contextlib.contextmanager
def _without_group() -> Iterator[None]:
    """Prevent TRL's server clients from joining a process group for weights.

    A trainer's constructor makes a client, which would join an NCCL process group at once. A store
    needs no group, and NCCL requires CUDA.
    """
    from trl.generation.vllm_client import VLLMClient

    join = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda *_, **__: None
    try:
        yield
    finally:
        VLLMClient.init_communicator = join


class WeightSync:
    """Publishes a trainer's weights and waits until the servers have applied them.

    `over_store` makes a ``WeightSync`` on every rank, and all ranks must make each call. Each rank
    writes its part of a sharded model. A peft model is published as its merged model.
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
        self.sender: WeightSender | ShardedWeightSender
        if self._generation.accelerator.distributed_type == DistributedType.NO:
            self.sender = WeightSender(store, **sender)
        else:
            # Add `timeout_s`, because the other ranks wait while rank 0 waits for the engines.
            rank_timeout_s = DEFAULT_RANK_TIMEOUT_S + timeout_s
            self.sender = ShardedWeightSender(store, rank_timeout_s=rank_timeout_s, **sender)

    def sync_weights(self) -> None:
        """Publish the trainer's weights, and wait until the servers generate with them.

        If TRL has trained since the last call, it calls this method before it generates. After the
        last training step, call the method yourself, so that the servers get the final weights.

        Raises:
            WaitTimeoutError: too few engines applied the version in time.
            ReceiverFailedError: an engine named in ``receivers`` cannot apply the version, or has
                ended.
            DBufferError: the errors of :meth:`.ShardedWeightSender.send`.
        """
        metadata = {"step": self._trainer.state.global_step}
        version = self.sender.send(self._weights(), metadata=metadata).version
        try:
            self.sender.wait_applied(version, receivers=self._receivers, timeout_s=self._timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error}; TRL generates only after its servers have applied the weights: make "
                f"each server follow {self.sender.store} (--middleware "
                "dbuffer.integrations.vllm.FollowStore), and look at the server's log"
            ) from error
        self.version = version

    def close(self) -> None:
        self.sender.close()

    def _weights(self) -> Weights:
        from accelerate.utils import is_peft_model

        # Don't use `trainer.model`, which may have been wrapped when training began.
        accelerator = self._generation.accelerator
        model = accelerator.unwrap_model(self._generation.model, keep_torch_compile=False)
        if not is_peft_model(model):
            return model
        from dbuffer.integrations.peft import merged_weights

        return merged_weights(model)
