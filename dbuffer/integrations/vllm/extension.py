"""`WorkerExtension`: the same for engines that were started without a weight transfer backend."""

from __future__ import annotations

from typing import Any

from dbuffer.errors import EngineUnsupportedError, WeightsMismatchError
from dbuffer.integrations.engine.options import EngineOptions, UpdateRequest
from dbuffer.integrations.engine.rank_receiver import start_on_all_ranks
from dbuffer.integrations.vllm.model import ShapeCheck
from dbuffer.integrations.vllm.rank import WorkerRank
from dbuffer.integrations.vllm.ranks import WorkerRanks, raising_once
from dbuffer.layout import TensorSpec

_LAST = "_dbuffer_last_receiver"


class WorkerExtension:
    """Methods for ``collective_rpc``, on all ranks; vLLM adds them to its worker.

    Start the engine with ``worker_extension_cls="dbuffer.integrations.vllm.WorkerExtension"``.
    """

    def dbuffer_init(self: Any, init_info: dict[str, Any]) -> None:
        """Begin to follow a store.

        Args:
            init_info: see :class:`EngineOptions`.

        Raises:
            OptionError: (a ``ValueError``) it is not what it may be.
        """
        with raising_once(WorkerRanks(self.vllm_config).may_raise):
            options = EngineOptions.parse(init_info)
            # One that was shut down still knows what the model has.
            before = getattr(self, "_dbuffer_receiver", None) or getattr(self, _LAST, None)
            self._dbuffer_receiver = None
            rank = WorkerRank(self.vllm_config, self.get_model(), self.device)
            self._dbuffer_receiver = start_on_all_ranks(rank, options, before)

    def dbuffer_update(self: Any, update_info: dict[str, Any] | None = None) -> None:
        """Switch to a version. Nothing may be generating.

        Args:
            update_info: see :class:`UpdateRequest`. None: the newest.

        Raises:
            EngineUpdateError, EngineBrokenError: see :meth:`RankReceiver.update`.
        """
        with raising_once(WorkerRanks(self.vllm_config).may_raise):
            receiver = getattr(self, "_dbuffer_receiver", None)
            if receiver is None:
                raise EngineUnsupportedError("this engine follows no store yet: call dbuffer_init")
            receiver.update(UpdateRequest.parse_or_error(update_info or {}))
            self.model_runner.reset_lora_state()

    def dbuffer_check(self: Any, tensors: list[tuple[str, str, list[int]]]) -> str | None:
        """What speaks against loading such tensors; None if they fit. Nothing is touched.

        Args:
            tensors: name, dtype (``"bfloat16"``) and shape of each.
        """
        try:
            specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
            ShapeCheck(self.vllm_config)(specs)
        # Returned, not raised: every rank finds the same, and only one may raise.
        except WeightsMismatchError as error:
            return str(error)
        return None

    def dbuffer_shutdown(self: Any) -> None:
        """Stop following. The model keeps its weights; to follow again, call dbuffer_init."""
        receiver = getattr(self, "_dbuffer_receiver", None)
        if receiver is not None:
            receiver.close()
            setattr(self, _LAST, receiver)
            self._dbuffer_receiver = None
