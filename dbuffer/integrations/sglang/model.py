"""`SglangModel`: one rank's model; loading weights, and refusing to serve when that failed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_model

from dbuffer.errors import EngineBrokenError, UnsupportedError
from dbuffer.weights.checkpoint import read_checkpoint
from dbuffer.weights.names import NameMap, renamed
from dbuffer.weights.sources import fetch

Pairs = Iterable[tuple[str, torch.Tensor]]


class SglangModel:
    """The model of one rank, as it serves.

    All methods are for the scheduler's own thread, between two steps of the engine.
    """

    def __init__(self, model: Any, names: NameMap | None) -> None:
        self._model = model
        self._names = names
        self._device = next(model.parameters()).device

    def load(self, tensors: Pairs, *, partial: bool) -> None:  # noqa: ARG002 - never, see the check
        self._load((renamed(name, self._names), tensor) for name, tensor in tensors)

    def load_checkpoint(self) -> None:
        path = Path(get_model().model_path)
        if not path.is_dir():
            raise UnsupportedError(f"the weights of {path} cannot be read again from here")
        self._load(
            (name, fetch(tensor)) for name, tensor in zip(*read_checkpoint(path), strict=True)
        )

    def refuse_to_serve(self, reason: str) -> None:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        # A captured graph is replayed without it; but caches were flushed, so every request that
        # is left must compute its prompt first.
        self._model.forward = refuse

    def serve_again(self) -> None:
        self._model.__dict__.pop("forward", None)

    def _load(self, weights: Pairs) -> None:
        with set_default_torch_dtype(dtype_of(self._model)):
            # As SGLang loads a checkpoint into an engine that runs; quantised layers need both.
            DefaultModelLoader.restore_weights_before_loading(self._model, self._device)
            DefaultModelLoader.load_weights_and_postprocess(self._model, weights, self._device)
        # The next step reads what was copied, and staging may write anew where it was copied from.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype that a model was built with."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
