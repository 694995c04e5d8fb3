"""`over_store`: make a trainer of TRL's, with its weights going to vLLM through a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

import torch

from dbuffer.errors import OptionError
from dbuffer.integrations.trl.syncing import WeightSync, WeightSyncOptions

P = ParamSpec("P")
TrainerT = TypeVar("TrainerT")


def over_store(
    trainer_class: Callable[P, TrainerT],
    store: str | os.PathLike[str],
    *,
    receivers: int | str | Collection[str] = 1,
    timeout_s: float = 600.0,
    delta: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[P, TrainerT]:
    """Let a trainer's weights go to vLLM through a store.

    What is returned is called as the class is, and returns its trainer, which is as always but for
    its weights. Each time before TRL generates with newer ones, they are published, and it goes on
    when vLLM has them: a server that follows the store, or the engine in the trainer's process.
    The trainer has one attribute more, ``weight_sync``: a :class:`WeightSync`.

    Args:
        trainer_class: ``trl.GRPOTrainer``, or another that makes TRL's ``VLLMGeneration``:
            ``args.use_vllm`` must be set.
        store: the store's directory, the same on all ranks, and as the servers see it.
        receivers: (server mode) how many engines must have a version before TRL generates with
            it; or their ids (``engine_id``), so that one that cannot apply it is learned at once.
        timeout_s: for how long they are waited for; in colocate mode, how long an engine may take
            to have a version ready.
        delta: publish what changed, as for `WeightSender`.
        dtype: publish floating-point tensors in this dtype. Default: each in its own.

    Raises:
        OptionError: (a ``ValueError``) an option is not what it may be. From what is returned:
            the trainer does not generate with vLLM.
        WriterActiveError, StoreInsecureError, StoreAccessError: from what is returned, as
            `WeightSender` raises them.
    """
    options = WeightSyncOptions.checked(
        store, receivers=receivers, timeout_s=timeout_s, delta=delta, dtype=dtype
    )

    def make(*args: P.args, **kwargs: P.kwargs) -> TrainerT:
        from dbuffer.integrations.trl.clients import without_group  # imports vLLM

        with without_group():
            trainer: Any = trainer_class(*args, **kwargs)
        generation = getattr(trainer, "vllm_generation", None)
        if generation is None:
            raise OptionError(
                f"this {type(trainer).__name__} does not generate with vLLM, so there is nothing "
                "to bring its weights to: set use_vllm=True in its args"
            )
        trainer.weight_sync = WeightSync(trainer, options)
        # TRL has no seam for this: all its trainers call this method of their own generation.
        generation.sync_weights = trainer.weight_sync.sync_weights
        return trainer  # type: ignore[no-any-return]

    return make
