"""`SchedulerRank`: the SGLang scheduler process that a receiver runs in, and its model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_model, get_parallel

from dbuffer.engine.contract import EngineRank, require_unchanged, tied_to
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import EngineBrokenError, UnsupportedError
from dbuffer.integrations.sglang.model import dtype_of, form_and_loader, sglang_shape_check
from dbuffer.weights.checkpoint import read_checkpoint
from dbuffer.weights.sources import fetch


class SchedulerRank(EngineRank):
    """One rank of an SGLang engine."""

    def __init__(self, model: Any) -> None:
        self.module = model
        self.device = next(model.parameters()).device
        self.ranks = RankChannel.of(get_parallel().tp_group)
        self._forms = self._forms_now()

    def engine_id(self, options: EngineOptions) -> str:
        """Return the engine's name among the store's receivers, which its follower has chosen."""
        return options.engine_id or ""

    def make_check(self) -> ShapeCheck:
        return sglang_shape_check(self.module, tp_size=self.ranks.size)

    def load(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        partial: bool = False,  # noqa: ARG002 - SGLang leaves out what does not come
    ) -> None:
        with set_default_torch_dtype(dtype_of(self.module)):
            # As SGLang loads a checkpoint into an engine that runs; quantized layers need both.
            DefaultModelLoader.restore_weights_before_loading(self.module, self.device)
            DefaultModelLoader.load_weights_and_postprocess(self.module, tensors, self.device)
        # The next step reads the copies, and staging may overwrite their sources.
        if self.on_device:
            torch.accelerator.synchronize(self.device)

    def require_reloadable(self) -> None:
        require_unchanged(self._forms, self._forms_now())

    def _forms_now(self) -> dict[str, object]:
        parameters = dict(self.module.named_parameters())
        ties = tied_to(parameters)
        return {name: (form_and_loader(tensor), ties[name]) for name, tensor in parameters.items()}

    def load_checkpoint(self) -> None:
        path = Path(get_model().model_path)
        if not path.is_dir():
            raise UnsupportedError(f"the weights of {path} cannot be read again from here")
        tensors, _ = read_checkpoint(path)
        self.load((name, fetch(tensor)) for name, tensor in tensors.items())

    def refuse_to_serve(self, reason: str) -> None:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        # A captured graph is replayed without it; but caches were flushed, so every request that
        # is left must compute its prompt first.
        self.module.forward = refuse

    def serve_again(self) -> None:
        self.module.__dict__.pop("forward", None)
