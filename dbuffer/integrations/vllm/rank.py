"""`WorkerRank`: one rank of a vLLM engine, in its worker, with the methods that followers call.

A rank loads weights through vLLM's layerwise reload, which handles packed, quantized and plain
layers. Functions at the end of this module repair faults of vLLM's reload.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, NoReturn

import torch
from vllm.config import CompilationMode, CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.utils.torch_utils import set_default_torch_dtype

from dbuffer.engine.contract import (
    ENDPOINT_ATTR,
    EngineRank,
    RankAnswer,
    RankRequest,
    encode_answer,
)
from dbuffer.engine.endpoint import RankEndpoint, capture_answer
from dbuffer.engine.engine_options import EngineOptions
from dbuffer.engine.meta_model import DraftAlone, DraftedModel
from dbuffer.engine.plan.live_model import Places, forms_of, require_same
from dbuffer.engine.plan.load_trace import tables_of
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.shape_check import ShapeCheck
from dbuffer.errors import DBufferError, EngineBrokenError, UnsupportedError
from dbuffer.format.layout import DRAFT_PREFIX
from dbuffer.integrations.vllm import layers
from dbuffer.integrations.vllm.config import (
    default_engine_id,
    is_launched,
    replica_name,
    require_droppable,
)
from dbuffer.integrations.vllm.layers import (
    Draft,
    draft_of,
    has_cpu_experts,
    has_cpu_kernel,
    has_optional_scales,
    onednn_kernels_keep_scales,
    original_loader,
    vllm_shape_check,
)
from dbuffer.runtime.cores import use_cores_of_parent
from dbuffer.runtime.messages import listed

logger = logging.getLogger(__name__)


Weights = Iterable[tuple[str, torch.Tensor]]

LayerTensors = tuple[torch.nn.Module, list[dict[str, Any]]]


class WorkerRank(EngineRank):
    """One rank of a vLLM engine."""

    module: Any
    # Attributes that are not weights, besides dbuffer's own: KV caches, LoRA adapters, a duration.
    not_weights = ("kv_cache", ENDPOINT_ATTR, "lora_manager", "online_quantization_time")

    def __init__(
        self, vllm_config: Any, model: Any, device: Any, draft: Draft | None = None
    ) -> None:
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self._target = model
        self._draft = draft
        self.module = model
        if draft is not None:
            self.module = DraftedModel(model, draft.model, draft.is_in_target)
        self.device = device
        self.packing = layers
        if not self.on_device:
            use_cores_of_parent()
        self.ranks = RankChannel.of(worker_group(vllm_config.parallel_config))
        self.instance_id: str = vllm_config.instance_id
        self.is_pipeline_stage = vllm_config.parallel_config.pipeline_parallel_size > 1
        if is_launched(vllm_config.parallel_config):  # each process made its own id
            self.instance_id = self.ranks.gather(self.instance_id)[0]
        self._refusal: Any = None
        self._note_targets()

    def engine_id(self, options: EngineOptions) -> str:
        name = options.engine_id or default_engine_id(self.instance_id)
        parallel = self._vllm_config.parallel_config
        if is_launched(parallel) or parallel.data_parallel_size > 1:
            return name  # replicas that step together count as one engine
        return name + replica_name(parallel.data_parallel_index)

    def make_check(self) -> ShapeCheck:
        if self._draft is not None:
            try:
                return vllm_shape_check(self._vllm_config, self.module, self._draft)
            except UnsupportedError as error:
                logger.warning("the engine's draft keeps its weights: %s", str(error))
                self._draft, self.module = None, self._target
                self._note_targets()
        return vllm_shape_check(self._vllm_config, self.module)

    def load(self, tensors: Weights, *, partial: bool) -> None:
        """Load the weights of one version into the model; see :meth:`EngineRank.load`.

        If the version lacks scales of KV caches, the scales get vLLM's defaults, as at an engine's
        start.
        """
        before = tensors_of_layers(self.module)
        places = Places(self.module, self.module.parameters())
        config = self._vllm_config
        dtype = config.model_config.dtype
        # Set the config and dtype as vLLM's load at the start does: vLLM makes kernels for them.
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(dtype),
            onednn_kernels_keep_scales(dtype),
        ):
            try:
                loaded = self._reload(tensors, before, partial=partial)
            except BaseException:
                restore_tensors(before)
                raise
            restore_absent_names(before)
            repack_tied(self.module, loaded)
            repack_cpu_experts(loaded)
        filled = {id(p) for layer in loaded for p in layer.parameters(recurse=False)}
        stale = [
            name
            for name, layer in self._replacements()
            if any(id(p) not in filled for p in layer.parameters(recurse=False))
        ]
        if stale and not partial:
            raise EngineBrokenError(f"vLLM's reload has not filled {listed(stale)}")
        if moved := places.replaced():
            raise EngineBrokenError(f"vLLM's reload has moved {listed(moved)} to other addresses")

    def _reload(
        self, weights: Weights, before: list[LayerTensors], *, partial: bool
    ) -> list[torch.nn.Module]:
        parts = [(self._target, self._model_config)]
        if self._draft is not None:
            parts.append((self._draft.model, self._draft.model_config))
        for part, _ in parts:
            initialize_layerwise_reload(part)
        # Until a layer is complete, vLLM keeps views of its tensors. Views need no memory, so the
        # tensors can come in any order.
        with parameters_stay_in_place(before, weights) as settled:
            self.module.load_weights(settled)
        loaded = [module for module in self.module.modules() if has_loaded(module)]
        if not partial:
            finish_caches_without_scales(self._target)
        with without_warnings():
            for part, model_config in parts:
                finalize_layerwise_reload(part, model_config)
        return loaded

    def read_checkpoint(self) -> Weights:
        config = self._vllm_config
        weights = _read_again(config.load_config, config.model_config, self._target)
        if self._draft is None or self._draft.target_config is not None:
            return weights
        return itertools.chain(weights, self._weights_of_draft(self._draft))

    def draft_rank(self) -> EngineRank:
        draft = self._draft
        if draft is None:
            return super().draft_rank()
        if draft.target_config is not None:
            raise UnsupportedError(
                "an MTP draft is loaded with the target's weights, which contain the draft: follow "
                "without draft_store"
            )
        return DraftRank(self._vllm_config, self._target, self.device, draft)

    def read_draft_checkpoint(self) -> Weights:
        return () if self._draft is None else self._weights_of_draft(self._draft)

    def _weights_of_draft(self, draft: Draft) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the draft's weights from its checkpoint, by their names in a published version."""
        config = self._vllm_config
        of_draft = config.speculative_config.draft_load_config
        weights = _read_again(of_draft or config.load_config, draft.model_config, draft.model)
        for name, tensor in weights:
            if draft.is_in_target(name):
                yield name, tensor
            elif draft.target_config is None:
                yield f"{DRAFT_PREFIX}{name}", tensor

    def require_reloadable(self) -> None:
        require_same(self._targets, self._reload_targets())
        for name, layer in self._replacements():
            reload_as(layer, self._infos[name])

    def _replacements(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the names and objects of layers that other code replaced after `_note_targets`."""
        for name, layer in self.module.named_modules():
            if name in self._infos and get_layerwise_info(layer) is not self._infos[name]:
                yield name, layer

    def _note_targets(self) -> None:
        """Record the current layers and parameters, which vLLM's reload can fill."""
        self._targets = self._reload_targets()
        self._infos = {n: get_layerwise_info(layer) for n, layer in self.module.named_modules()}

    def _reload_targets(self) -> dict[str, object]:
        """Return properties of layers and parameters, by name. If one changes, reloads cannot work.

        For most layers, the property is the class: other code may replace such a layer by a new
        object of the same class. For some layers, the property is the object, because the engine
        would go on computing with the old object: vLLM looks up attention and experts in a table,
        and compiled code refers to objects.
        """
        config = self._vllm_config.compilation_config
        is_captured = config.cudagraph_mode != CUDAGraphMode.NONE
        is_eager = config.mode == CompilationMode.NONE and not is_captured
        kept = {*map(id, config.static_forward_context.values())} if is_eager else None
        targets: dict[str, object] = {}
        for name, layer in self.module.named_modules():
            is_kept = kept is None or id(layer) in kept or calls_another(layer)
            if next(layer.parameters(recurse=False), None) is not None or (kept and is_kept):
                targets[name] = weakref.ref(layer) if is_kept else type(layer)
        targets |= forms_of(self.module)
        if self.on_device and is_captured:  # a CUDA graph reads from fixed addresses
            for name, parameter in self.module.named_parameters():
                targets[name] = targets[name], parameter.data_ptr()
        return targets

    def refuse_to_serve(self, reason: str) -> None:
        self.serve_again()

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise EngineBrokenError(reason)

        self._refusal = self._target.register_forward_pre_hook(refuse)
        # A captured CUDA graph runs without a call of the model's forward(). So refuse also in
        # compute_logits(), which vLLM calls after the graph.
        if hasattr(self._target, "compute_logits"):
            self._target.compute_logits = refuse

    def serve_again(self) -> None:
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
            self._target.__dict__.pop("compute_logits", None)


class DraftRank(WorkerRank):
    """Draft model of one rank of a vLLM engine. The draft follows a store of its own.

    Loading the target also loads the layers that the draft shares with it. If any other layer of
    the draft contains a parameter of the target, the draft cannot follow a store of its own.
    """

    def __init__(self, vllm_config: Any, target: Any, device: Any, draft: Draft) -> None:
        super().__init__(vllm_config, DraftAlone(draft.model, target), device)
        self._of = draft
        self._model_config = draft.model_config
        of_target = set(map(id, target.parameters()))
        names = [n for n, tensor in self.module.named_parameters() if id(tensor) in of_target]
        if names:
            raise UnsupportedError(
                f"the draft shares {listed(names)} with its target: follow without draft_store"
            )

    def engine_id(self, options: EngineOptions) -> str:
        return f"{super().engine_id(options)}.draft"

    def make_check(self) -> ShapeCheck:
        return vllm_shape_check(self._vllm_config, self.module, self._of)

    def read_checkpoint(self) -> Weights:
        weights = self._weights_of_draft(self._of)
        return ((name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in weights)

    def refuse_to_serve(self, reason: str) -> None:
        """Log the reason, but keep serving: the target model corrects the draft's wrong tokens."""
        logger.error("the engine's draft proposes worse tokens: %s", reason)


def _read_again(load_config: Any, model_config: Any, model: Any) -> Weights:
    loader = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedError(
            f"an engine with load format {load_config.load_format!r} cannot follow a store: vLLM "
            "cannot read its checkpoint again after the start"
        )
    weights: Weights = loader.get_all_weights(model_config, model)
    return weights


@contextlib.contextmanager
def raising_once(vllm_config: Any) -> Iterator[None]:
    """Raise an error from the block only on the last rank of an engine. All ranks have logged it.

    vLLM's executor reads the replies of its ranks in order, and stops at the first error. The
    replies of later ranks would stay in their queues, and the executor would take them for replies
    to its next call. If each rank has its own front end (torchrun), all ranks raise the error.
    """
    parallel = vllm_config.parallel_config
    last = parallel.world_size - 1
    try:
        yield
    except DBufferError:
        if is_launched(parallel) or worker_group(parallel).rank_in_group % (last + 1) == last:
            raise


def worker_group(parallel: Any) -> Any:
    """Return vLLM's process group of all workers of an engine.

    The group includes all data-parallel replicas that step together. It is vLLM's world group,
    unless torchrun started several engines: that group then has the workers of all of them, and
    the tensor-parallel group has the workers of one.
    """
    world, tensor_parallel = get_world_group(), get_tp_group()
    if not is_launched(parallel) or world.world_size == parallel.world_size:
        return world
    if tensor_parallel.world_size == parallel.world_size:
        return tensor_parallel
    raise UnsupportedError(
        f"torchrun started {world.world_size} ranks for several engines of {parallel.world_size} "
        "ranks, and each engine has several tensor-parallel groups: set pipeline_parallel_size=1, "
        "or start only one engine with torchrun"
    )


class WorkerExtension:
    """Worker extension that shows a follower in another process that dbuffer is installed.

    Followers call a method that dbuffer's plugin adds to all workers, also without this class.
    """


def answer_follower(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Execute a request of a follower; see :class:`.RankRequest`.

    This function raises no errors. After an error, vLLM would leave the other ranks' answers
    unread, and take them for answers to its next call.
    """
    return encode_answer(capture_answer(lambda: _do(worker, RankRequest.parse(request))))


def _do(worker: Any, request: RankRequest) -> RankAnswer:
    if request.options is not None:
        require_droppable(worker.vllm_config, request.options)
    model = worker.get_model()
    answer = RankEndpoint.of(model).do(
        request,
        lambda: WorkerRank(worker.vllm_config, model, worker.device, draft_of(worker)),
    )
    if request.call == "update":
        worker.model_runner.reset_lora_state()
    return answer


def tensors_of_layers(model: torch.nn.Module) -> list[LayerTensors]:
    """Return each layer of a model with its current parameters and buffers."""
    return [(module, [dict(table) for table in tables_of(module)]) for module in model.modules()]


def restore_tensors(before: list[LayerTensors]) -> None:
    """Put the tensors from before a failed load back into their layers.

    Afterwards the model mixes two versions, but it can be loaded again. Without this function, some
    layers would stay on the meta device, or be half loaded at the start of the next load.
    """
    for module, tensors in before:
        get_layerwise_info(module).reset()
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            table.clear()
            table.update(table_before)


def calls_another(layer: torch.nn.Module) -> bool:
    """Whether a layer has a method that is bound to another layer, as a shallow copy can have."""
    methods = [value for value in vars(layer).values() if isinstance(value, MethodType)]
    owners = [method.__self__ for method in methods]
    return any(isinstance(owner, torch.nn.Module) and owner is not layer for owner in owners)


def reload_as(layer: torch.nn.Module, info: Any) -> None:
    """Let vLLM's reload fill a layer that other code put in the place of another layer.

    ``info``: vLLM's record of the replaced layer, whose form the layer gets.
    """

    def of_layer(tensor: Any) -> Any:
        copied = to_meta_tensor(tensor)
        for name, value in vars(copied).items():
            loader = original_loader(value)  # vLLM wrapped it to reload the replaced layer
            if isinstance(loader, MethodType) and type(loader.__self__) is type(layer):
                loader = MethodType(loader.__func__, layer)
            vars(copied)[name] = loader
        return copied

    ours = get_layerwise_info(layer)
    ours.restore_device = info.restore_device
    ours.restore_metadata = tuple(
        {name: of_layer(tensor) for name, tensor in table.items()}
        for table in info.restore_metadata
    )


@contextlib.contextmanager
def parameters_stay_in_place(before: list[LayerTensors], weights: Weights) -> Iterator[Weights]:
    """Yield the weights to load, and keep each parameter at its address.

    The ``load_weights`` method of some models replaces biases by new parameters, but kernels read
    the old addresses. After such a replacement, the new values are copied into the old parameter,
    and the old parameter is put back. A new parameter on the meta device has no values. In this
    case the published tensor is copied.
    """
    made: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def register(module: torch.nn.Module, parameters: Any, name: str, parameter: Any) -> None:
        torch.nn.Module.register_parameter(module, name, parameter)
        old = parameters.get(name) if name in SKIP_TENSORS else None
        if old is not None and parameter is not None and parameter is not old:
            made.append((module, name, old))

    def settling() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            for module, parameter_name, old in made:
                table, _ = tables_of(module)
                new = table[parameter_name]
                old.data.copy_(tensor.view(old.shape) if new.is_meta else new.data)
                table[parameter_name] = old
            made.clear()

    for module, (parameters, _) in before:
        if parameters.keys() & SKIP_TENSORS:
            module.__dict__["register_parameter"] = functools.partial(register, module, parameters)
    try:
        yield settling()
    finally:
        for module, _tensors in before:
            module.__dict__.pop("register_parameter", None)


def has_loaded(module: torch.nn.Module) -> bool:
    """Whether vLLM's running reload has loaded a tensor into a layer."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0  # the layer is finished, or has begun


def finish_caches_without_scales(model: torch.nn.Module) -> None:
    """Make vLLM's reload set missing scales of KV caches to their defaults, as at the start."""
    for module in model.modules():
        if has_optional_scales(module) and not has_loaded(module):
            # Pretend that an element was loaded: vLLM's reload finishes only layers with loaded
            # elements, and sets the defaults when it finishes a layer.
            get_layerwise_info(module).load_numel = 1


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress vLLM's warnings about layers that got no weights during a reload.

    Rotary embeddings and tied heads need no weights, and a partial load omits layers. dbuffer has
    checked before that the version has all required weights.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger = logging.getLogger(finalize_layerwise_reload.__module__)
    logger.addFilter(is_logged)
    try:
        yield
    finally:
        logger.removeFilter(is_logged)


def restore_absent_names(before: list[LayerTensors]) -> None:
    """Restore the names of parameters that are None, which vLLM's reload deletes.

    A parameter is None if a kernel has the weight instead. Reading a deleted name would fail.
    """
    for module, tensors in before:
        for table, table_before in zip(tables_of(module), tensors, strict=True):
            for name, tensor in table_before.items():
                if tensor is None:
                    table.setdefault(name, None)


def repack_tied(model: torch.nn.Module, loaded: list[torch.nn.Module]) -> None:
    """Pack layers that share the weight of another layer, such as a head tied to the embedding.

    vLLM's reload skips such layers, so a tied head would compute with its old packed copy. If vLLM
    has packed the embedding too, the head uses the embedding's packed copy.
    """
    owners = {id(weight): module for module in loaded for weight in module.parameters(False)}
    module: Any
    for module in model.modules():
        # Read the layer's own table: ``weight`` of a LoRA wrapper returns its inner layer's weight.
        owner = owners.get(id(tables_of(module)[0].get("weight")))
        if owner is None or owner is module or not has_cpu_kernel(module):
            continue
        if hasattr(owner, "cpu_linear") and getattr(module, "bias", None) is None:
            module.cpu_linear = owner.cpu_linear
        else:
            module.quant_method.process_weights_after_loading(module)


def repack_cpu_experts(loaded: list[torch.nn.Module]) -> None:
    """Pack newly loaded experts on a CPU, which vLLM's reload (0.28 to 0.33) does not do.

    vLLM packs experts only when it makes their kernel, at the engine's start.
    """
    module: Any
    for module in loaded:
        if has_cpu_experts(module):
            places = {name: getattr(module, name) for name in ("w13_weight", "w2_weight")}
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            for name, place in places.items():
                place.data.copy_(getattr(module, name))
                module.register_parameter(name, place)
