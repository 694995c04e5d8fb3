"""Tensors of modules, state dicts and TensorDicts, by names without parts that wrappers add."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy as has_no_shape
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dbuffer.errors import InvalidWeightsError
from dbuffer.format.layout import DRAFT_PREFIX, TensorSpec, is_of_draft
from dbuffer.io.tensors import DTYPE_NAMES, can_cast_to
from dbuffer.runtime.messages import listed
from dbuffer.weights.lazy_tensor import LazyTensor

if TYPE_CHECKING:  # importing tensordict takes as long as importing torch
    from tensordict import TensorDictBase

# The parts of names that torch.compile, FSDP and activation checkpointing insert.
_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

WRAPPER_PREFIX = "module."
"""Prefix that DDP, DataParallel and DeepSpeed add to the name of every tensor."""

_Value = TypeVar("_Value")


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the parts that torch.compile, FSDP, etc. insert."""
    return _WRAPPERS.sub("", name)


def clean_names(names: Iterable[str]) -> list[str]:
    """Return tensors' names without the parts that wrappers of modules add.

    If all names begin with ``module.``, this prefix is removed, too. `without_wrappers` removes the
    other parts.
    """
    names = [without_wrappers(name) for name in names]
    while names and all(name.startswith(WRAPPER_PREFIX) for name in names):
        names = [name.removeprefix(WRAPPER_PREFIX) for name in names]
    return names


def is_module(weights: object) -> TypeGuard[nn.Module]:
    """Whether weights are a module, but not a TensorDictParams, which counts as a TensorDict."""
    return isinstance(weights, nn.Module) and not is_tensordict(weights)


def is_tensordict(value: object) -> TypeGuard[TensorDictBase]:
    """Whether a value is a TensorDict. The result is False if tensordict was never imported."""
    if "tensordict" not in sys.modules:
        return False
    from tensordict import TensorDictBase

    return isinstance(value, TensorDictBase)


def may_have_model(module: object) -> bool:
    """Whether ``module`` may contain a transformers model. False if transformers isn't imported."""
    return "transformers.modeling_utils" in sys.modules and is_module(module)


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict, including extra state, with names cleaned by `clean_names`."""
    state = module.state_dict(keep_vars=True)
    # Drop an extra state of None: such a module has no extra state to save.
    kept = {n: v for n, v in state.items() if not (v is None and is_extra_state(n))}
    return by_name(clean_names(kept), kept.values())


def is_extra_state(name: str) -> bool:
    """Whether ``name`` is the name of a module's extra state in a state dict."""
    return name.rpartition(".")[2] == "_extra_state"


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers, by names cleaned by `clean_names`."""
    return only_tensors(module_state(module))


def only_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``state``, a module's state dict. Refuse values that are not tensors."""
    lost = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if lost:
        extra = listed([f"{name!r} ({type(state[name]).__name__})" for name in lost])
        raise InvalidWeightsError(
            f"the module's state has values that are not tensors and would be lost: {extra}; pass "
            "a dictionary of the tensors to publish, and the other values as metadata"
        )
    return dict(state)


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers. A tied tensor is yielded once."""
    yield from module.parameters()
    yield from module.buffers()


def tensordict_tensors(weights: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the tensors in a TensorDict. A nested key becomes a name with dots."""
    from tensordict import is_non_tensor

    _refuse_lazy_stack(weights, "the TensorDict")
    names, tensors = [], []
    for key, value in weights.items(include_nested=True):
        name = key if isinstance(key, str) else ".".join(key)
        if is_non_tensor(value):
            raise InvalidWeightsError(f"{name!r} is not a tensor; pass it as metadata")
        if isinstance(value, torch.Tensor):
            names.append(name)
            tensors.append(value)
        else:
            _refuse_lazy_stack(value, repr(name))
    return by_name(names, tensors)


def _refuse_lazy_stack(value: Any, where: str) -> None:
    # A lazy stack makes new tensors at each access, and hides tensors that some members lack.
    from tensordict import LazyStackedTensorDict

    if isinstance(value, LazyStackedTensorDict):
        raise InvalidWeightsError(
            f"{where} is a lazy stack: publish its members under different names, or publish "
            "the result of its contiguous()"
        )


def by_name(names: Collection[str], tensors: Iterable[_Value]) -> dict[str, _Value]:
    """Return tensors by name. Refuse the names that `check_names` refuses."""
    check_names(names)
    return dict(zip(names, tensors, strict=True))


def check_unique(names: Collection[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)[:5]
        raise InvalidWeightsError(
            f"several tensors would get the same name: {twice}; rename all but one (dbuffer "
            "removes the parts of names that wrappers add, then applies rename)"
        )


def check_names(names: Collection[str]) -> None:
    """Refuse a repeated name, a name that JSON cannot represent, or a name reserved for drafts."""
    check_unique(names)
    for name in names:
        if not name.isascii() and json.loads(json.dumps(name)) != name:
            raise InvalidWeightsError(
                f"the name {name!r:.80} contains a character that JSON cannot store"
            )
        if is_of_draft(name):
            raise InvalidWeightsError(
                f"the name {name!r:.80} begins with {DRAFT_PREFIX!r}, which is reserved for the "
                "tensors of a draft: pass the draft as send(weights, draft=draft)"
            )


def spec_of(
    name: str, tensor: torch.Tensor | LazyTensor, dtype: torch.dtype | None = None
) -> TensorSpec:
    """Return the spec to publish a tensor with. Its dtype is ``dtype`` if the tensor is cast."""
    if dtype is None or not can_cast_to(tensor.dtype):
        dtype = tensor.dtype
    try:
        return TensorSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))
    except KeyError:
        raise InvalidWeightsError(f"unsupported dtype {dtype} of tensor {name!r}") from None


def problem_of_memory(tensor: torch.Tensor) -> str:
    """Return why a tensor's bytes cannot be read, for a message, or "" if they can be read."""
    if has_no_shape(tensor):
        return "is in a lazy module and has no shape yet: run the module once first"
    if tensor.is_meta:
        return "is on the meta device and has no values: load the weights first"
    is_odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    if is_odd or is_made_of_others(tensor):
        return "is sparse, nested, quantized or composed of other tensors: use a plain tensor"
    if not lies_in_memory(tensor):
        return (
            "has no memory: it is a fake or functional tensor, is inside a transform of "
            "torch.func, or its memory was freed, as FSDP1 does"
        )
    return ""


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is empty or has an address. Meta tensors and fake tensors have none."""
    if hasattr(tensor, "fake_mode"):  # torch warns if a fake tensor's address is read
        return False
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is composed of other tensors, as torchao's quantized tensors are."""
    return type(tensor) not in (torch.Tensor, nn.Parameter) and is_traceable_wrapper_subclass(
        tensor
    )


def is_same_memory(a: Any, b: Any) -> bool:
    """Whether two tensors consist of the same elements in memory, in the same order."""
    return bool(
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


@dataclass(frozen=True, slots=True)
class WeightsSpec:
    """Names, shapes and dtypes of a mapping's tensors, to recognize a mapping with equal ones.

    A recognized mapping skips the checks of its names, which for 18,000 tensors would take as long
    as copying the tensors.
    """

    names: list[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> WeightsSpec:
        return cls(
            list(named),
            [tensor.shape for tensor in named.values()],
            [tensor.dtype for tensor in named.values()],
        )

    def addresses_of(self, named: Mapping[str, torch.Tensor]) -> list[int] | None:
        """Return the tensors' addresses, or None if a tensor does not fit, or is of a subclass."""
        tensors = named.values()
        with contextlib.suppress(RuntimeError):  # raised by tensors without shape or address
            # Shapes are compared one by one: a list of 18,000 shapes would start the garbage
            # collector, which takes longer than everything else here.
            if (
                list(named) == self.names
                and {type(tensor) for tensor in tensors} <= {torch.Tensor, nn.Parameter}
                and {tensor.layout for tensor in tensors} == {torch.strided}
                and all(map(operator.eq, map(operator.attrgetter("shape"), tensors), self.shapes))
                and all(map(operator.is_, map(operator.attrgetter("dtype"), tensors), self.dtypes))
            ):
                return list(map(torch.Tensor.data_ptr, tensors))
        return None
