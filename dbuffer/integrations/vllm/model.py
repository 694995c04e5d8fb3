"""`VllmModel`: one rank's model, which loads weights, and refuses to serve when that failed.

Weights go through vLLM's layerwise reload, which serves packed, quantized and plain layers alike;
what it leaves wrong is in `reload_fixes`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from dbuffer.engine.contract import require_unchanged, tied_to
from dbuffer.engine.plan.load_trace import form_of
from dbuffer.errors import EngineBrokenError, UnsupportedError
from dbuffer.integrations.vllm import reload_fixes as fixes


class VllmModel:
    """Model of one rank, as it serves.

    All methods are for the worker's main thread, between two steps of the engine.
    """

    def __init__(self, vllm_config: Any, model: Any, device: Any) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._model = model
        self._hook: Any = None
        # On a CPU there are no graphs.
        is_captured = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        self._reads_captured_addresses = device.type != "cpu" and is_captured
        self._targets = self._reload_targets()

    def load(self, weights: fixes.Weights, *, partial: bool = False) -> None:
        """Swap in the weights of one version. A failure leaves a mix, to be repaired at once.

        Args:
            weights: all of the model's; scales of its caches that are not among them are vLLM's
                defaults, as in an engine that is started on these weights.
            partial: layers that get nothing keep all that they have.
        """
        before = [(module, fixes.own_tensors(module)) for module in self._model.modules()]
        places = self._addresses()
        with self._loading():
            try:
                loaded = self._reload(weights, before, partial=partial)
            except BaseException:
                fixes.restore_tensors(before)
                raise
            fixes.restore_absent_names(before)
            fixes.repack_tied(self._model, loaded)
            fixes.repack_cpu_experts(loaded)
        # The next step reads what was copied, and staging may write anew where it was copied from.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if self._addresses() != places:
            raise EngineBrokenError("parameters were left at other places in memory")

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Set what is set when vLLM loads for the first time: kernels are made for it."""
        config = self._vllm_config
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            fixes.onednn_kernels_keep_scales(),
        ):
            yield

    def _reload(
        self, weights: fixes.Weights, before: list[fixes.LayerTensors], *, partial: bool
    ) -> list[torch.nn.Module]:
        """Run vLLM's layerwise reload; return the layers that got tensors."""
        initialize_layerwise_reload(self._model)
        # Tensors are handed over where they lie, in main memory; a layer's are kept as views until
        # it is whole, so their order costs no memory.
        with fixes.settled_registrations(before, weights) as settled:
            self._model.load_weights(settled)
        loaded = [module for module in self._model.modules() if fixes.has_loaded(module)]
        if not partial:
            fixes.finish_caches_without_scales(self._model)
        with fixes.without_warnings():
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        return loaded

    def load_checkpoint(self) -> None:
        config = self._vllm_config
        loader = get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise UnsupportedError(
                f"weights in load format {config.load_config.load_format!r} cannot be read again"
            )
        self.load(loader.get_all_weights(config.model_config, self._model))

    def require_reloadable(self) -> None:
        require_unchanged(self._targets, self._reload_targets())

    def _reload_targets(self) -> dict[str, object]:
        """Return the layers and parameters that a reload fills: vLLM empties a layer made later."""
        targets: dict[str, object] = {}
        for name, module in self._model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                targets[name] = weakref.ref(module)
        addresses = self._addresses() if self._reads_captured_addresses else {}
        parameters = dict(self._model.named_parameters())
        ties = tied_to(parameters)
        for name, tensor in parameters.items():
            targets[name] = form_of(tensor), ties[name], addresses.get(name)
        return targets

    def _addresses(self) -> dict[str, int]:
        """Return each parameter's address in memory: captured graphs read only there."""
        return {name: tensor.data_ptr() for name, tensor in self._model.named_parameters()}

    def refuse_to_serve(self, reason: str) -> None:
        self.serve_again()

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        self._hook = self._model.register_forward_pre_hook(refuse)
        # A captured graph is replayed without a call of the model; this comes after it.
        if hasattr(self._model, "compute_logits"):
            self._model.compute_logits = refuse

    def serve_again(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._model.__dict__.pop("compute_logits", None)
