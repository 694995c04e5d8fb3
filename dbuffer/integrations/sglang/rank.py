"""`load_from_store`: ``custom_weight_loader`` through which SGLang's processes receive weights.

SGLang calls `load_from_store` on all ranks, between two steps. An error would end the engine, so
`load_from_store` raises none: it writes problems into the engine's record in the store, which the
follower reads.

The first call of `load_from_store` also wraps functions of SGLang, to detect calls that write or
discard weights without dbuffer. A scheduler calls its methods through a table that it fills at its
start, so wrapping those methods later has no effect. dbuffer wraps functions that the methods call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsMoEScheme
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_exec, get_model, get_parallel

from dbuffer.engine.contract import (
    WEIGHTS,
    EngineRank,
    RankAnswer,
)
from dbuffer.engine.endpoint import (
    RankEndpoint,
    capture_answer,
    falling_asleep,
    loading,
    waking_up,
    watch,
)
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.meta_model import MetaModel, built_without_data
from dbuffer.engine.plan.live_model import forms_of, require_same
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.shape_check import ShapeCheck, is_multi_token_prediction
from dbuffer.errors import DBufferError, EngineBrokenError, OptionError, UnsupportedError
from dbuffer.format.manifest import ReceiverRecord
from dbuffer.integrations.sglang.sglang_engine import LOADER, from_tensors
from dbuffer.runtime.trouble import log_once
from dbuffer.store.records import RecordFile
from dbuffer.weights.checkpoint import read_checkpoint
from dbuffer.weights.sources import fetch

logger = logging.getLogger(__name__)

_LOADS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


def load_from_store(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Execute a follower's request: follow a store, switch to a version, or stop following.

    ``named_tensors`` encodes the request: SGLang passes only tensors.
    """
    try:
        request = from_tensors(named_tensors)
    except OptionError:
        logger.exception("cannot decode a follower's request")
        return
    if request is None:
        return
    endpoint = RankEndpoint.of(model)

    def answer_request() -> RankAnswer:
        watch_scheduler()
        return endpoint.do(request, lambda: SchedulerRank(model))

    answer = capture_answer(answer_request)
    if isinstance(answer, ReceiverRecord):
        endpoint.following().acknowledge()  # the follower reads the outcome from the store
    if not isinstance(answer, DBufferError):
        return
    logger.error("%s: %s", request.call, answer)
    if endpoint.receiver is not None:
        endpoint.receiver.record_problem(str(answer))
    elif (options := request.options) and get_parallel().tp_group.rank_in_group == 0:
        # This rank follows no store, so no receiver writes the engine's record. The first rank
        # writes the problem into the record, where the follower reads it.
        record = RecordFile(Path(options.read_store), options.engine_id or "")
        record.write(token=options.record_token, problem=str(answer))
        record.close()


def watch_scheduler() -> None:
    """Wrap SGLang's functions that write or discard weights, so that dbuffer notices each call.

    If the functions are wrapped already, do nothing.
    """
    functions: list[tuple[Any, str, Callable[..., AbstractContextManager[None]]]] = [
        *((WeightUpdater, name, functools.partial(_loading, name)) for name in _LOADS),
        # SGLang calls the first function before it releases the memory of weights, and the second
        # after it has restored this memory.
        (scheduler, "_export_static_state", _releasing),
        (scheduler, "_import_static_state", _resuming),
    ]
    for owner, name, around in functions:
        if not watch(owner, name, around):
            message = (
                "this SGLang has no function %s: if it has another one for the same purpose, "
                "dbuffer does not notice when other code loads or releases weights by that function"
            )
            log_once(logger, message, name)


def _loading(name: str, updater: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    is_ours = LOADER in (*args, kwargs.get("load_format"))
    return nullcontext() if is_ours else loading(updater.get_model, name)


def _releasing(model: Any, *_: Any) -> AbstractContextManager[None]:
    is_lost = not get_exec().features.enable_weights_cpu_backup
    return falling_asleep(model, (WEIGHTS,), is_lost=is_lost)


def _resuming(model: Any, *_: Any) -> AbstractContextManager[None]:
    return waking_up(lambda: model, (WEIGHTS,))


class SchedulerRank(EngineRank):
    """One rank of an SGLang engine."""

    reports_sleep = False  # dbuffer does not notice when SGLang releases a cache's memory

    def __init__(self, model: Any) -> None:
        self.module = model
        self.device = next(model.parameters()).device
        self.ranks = RankChannel.of(get_parallel().tp_group)
        self._forms = forms_of(model, form_and_loader)

    def engine_id(self, options: EngineOptions) -> str:
        return options.engine_id or ""  # the follower chose the id

    def make_check(self) -> ShapeCheck:
        """Return a check of whether published weights fit this model.

        The check loads tensors without data, of the same names and shapes, into a model copy.
        Call this method in the scheduler's thread.
        """
        model = self.module

        def make() -> Any:
            with set_default_torch_dtype(dtype_of(model)):
                quantization = getattr(model, "quant_config", None)
                return type(model)(config=model.config, quant_config=quantization)

        copy = built_without_data(make, type(model).__name__)
        require_as_loaded(copy, model)
        meta = MetaModel(
            copy,
            embedding=VocabParallelEmbedding,
            default_loader=default_weight_loader,
            tp_size=self.ranks.size,
            serving=model,
        )
        return ShapeCheck(meta, is_spare=lambda name: is_multi_token_prediction(name, model.config))

    def load(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        partial: bool,  # noqa: ARG002 - SGLang accepts loads with missing tensors
    ) -> None:
        with set_default_torch_dtype(dtype_of(self.module)):
            # SGLang makes these two calls when it reloads a checkpoint. Quantized layers need both
            # calls.
            DefaultModelLoader.restore_weights_before_loading(self.module, self.device)
            DefaultModelLoader.load_weights_and_postprocess(self.module, tensors, self.device)

    def require_reloadable(self) -> None:
        require_same(self._forms, forms_of(self.module, form_and_loader))

    def read_checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        path = Path(get_model().model_path)
        if not path.is_dir():
            raise UnsupportedError(
                f"the engine's checkpoint {path} is not a directory on this host, so its weights "
                "cannot be loaded again"
            )
        tensors, _ = read_checkpoint(path)
        return ((name, fetch(tensor)) for name, tensor in tensors.items())

    def refuse_to_serve(self, reason: str) -> None:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        # Replacing forward() is enough, although a captured CUDA graph does not call it: the caches
        # were flushed, so SGLang must first recompute each request's prompt, which calls forward().
        self.module.forward = refuse

    def serve_again(self) -> None:
        self.module.__dict__.pop("forward", None)


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter. The model must have one."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def require_as_loaded(copy: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Refuse a model that SGLang cannot load again, because its parameters changed their form.

    SGLang quantizes, transposes or packs some layers after it has loaded them. It restores only a
    few kinds of these layers before another load. Loading into the other kinds would fail halfway
    or produce wrong weights.
    """
    served = dict(serving.named_parameters())
    for path, layer in copy.named_modules():
        method = getattr(layer, "quant_method", None)
        if _is_undone(getattr(layer, "scheme", None) or method):
            continue
        for name, loaded in layer.named_parameters(path, recurse=False):
            if name not in served or form_and_loader(served[name]) != form_and_loader(loaded):
                raise UnsupportedError(
                    f"{name} was loaded as {loaded.dtype} {tuple(loaded.shape)}, and SGLang then "
                    f"changed its form ({type(method).__name__}) and cannot load another version "
                    "into it: an engine with this quantization or packing cannot follow a store"
                )


def form_and_loader(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return a parameter's shape and dtype, and whether the parameter has its own weight loader."""
    return parameter.shape, parameter.dtype, hasattr(parameter, "weight_loader")


def _is_undone(method: Any) -> bool:
    """Whether a quantization method can restore the parameters that it packed, to load again."""
    undo = getattr(type(method), "restore_weights_before_loading", None)
    without = (QuantizeMethodBase, CompressedTensorsMoEScheme)
    return undo not in (None, *(base.restore_weights_before_loading for base in without))
