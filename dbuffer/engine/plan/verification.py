"""`Verifier`: verifies that a switch by copies gives the same result as the engine's reload.

First, the engine's reload loads stand-ins: tensors with other values than the version's. Then a
second reload loads the version, so everything that derives from a loaded value changes. Now every
parameter must equal, to the byte, the tensor that the switch would copy into it, and every packed
layer its image. Everything else that can be reached from the model must be as it was after the
first reload, because a switch by copies would not write it.

A reload can change an attribute, another layer, a closure, or a kernel's object. So a
`ModelFingerprint` walks all objects that can be reached from the model, and two fingerprints show
the changes between them. A fingerprint keeps a digest of a tensor's bytes, the value of a number or
text, and the identity of any other object. An object that Python cannot look into counts as
changed.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
import xxhash

from dbuffer.engine.plan.copy_plan import Tensors, address_of
from dbuffer.engine.plan.load_trace import as_integers, unwrapped
from dbuffer.engine.plan.prepared_switch import PreparedSwitch, digest_of
from dbuffer.io.copier import Copier
from dbuffer.runtime.messages import described, listed

_VALUES = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NOT_LOOKED_INTO = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.GetSetDescriptorType,
    types.MethodWrapperType,
    types.GenericAlias,
    types.UnionType,
    weakref.ReferenceType,
    logging.Logger,
    re.Pattern,
    type(threading.Lock()),
    type(threading.RLock()),
    torch.Generator,
    torch.distributed.ProcessGroup,
    type(torch.ops.aten.copy_),
    type(torch.ops.aten.copy_.default),
)
"""Types whose objects hold no weights: code, and objects that the whole process shares."""

_COMPILED = ("torch._dynamo.", "torch._inductor.", "torch._functorch.")
"""Python modules of compiled code, which reads parameters at fixed addresses, and which no reload
replaces."""

_GROUPS = ("sglang.srt.distributed.", "vllm.distributed.")
"""Python modules of communication between ranks. A fingerprint leaves out their objects: messages
change the buffers of these objects, and a reload does not."""

_CACHING = type(functools.lru_cache(len))

_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)

_BLOCK_BYTES = 64 << 20


Mismatch = Mapping[str, str]
"""Descriptions of changes that a reload makes and a switch does not, keyed by the layer's name."""

_NOT_READ = frozenset({"weight_loader", "_weight_loader", "load_weights", "_is_in_target"})
"""Attributes that only loading uses, and no computation reads."""

_RANGE = (0.25, 0.75)
"""Range of the numbers that a verification loads first, in place of a version's. Engines may take
roots or inverses of weights, and all of these numbers have both."""

_MODULES = re.compile(r"(?:\._modules\['[^']*'\])*")


class ModelFingerprint:
    """Everything that can be reached from a model at one moment.

    A fingerprint leaves out attributes and bytes that serving or a switch changes:

    * ``without``: names of attributes to skip in all objects, such as caches that serving fills;
    * ``replaced``: attributes to skip in one object, as pairs of the object's identity and a name;
    * ``undigested``: addresses of storages whose bytes are not compared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        without: Collection[str] = (),
        undigested: Collection[int] = (),
        replaced: Collection[tuple[int, str]] = (),
    ) -> None:
        self._without = frozenset(without)
        self._undigested = frozenset(undigested)
        self._replaced = frozenset(replaced)
        self._digests: dict[int, str] = {}
        self._seen: dict[str, Any] = {}
        # Keep the objects alive, so that no later object gets the identity of one of them.
        self._kept: dict[int, Any] = {}
        # Walk in a fixed order: an object is named by the place where it is met first.
        pending: collections.deque[tuple[str, Any]] = collections.deque([("", model)])
        while pending:
            name, thing = pending.popleft()
            if isinstance(thing, (*_VALUES, *_TORCH_VALUES)):
                self._seen[name] = repr(thing)
            elif id(thing) not in self._kept and not _is_code(thing):
                self._kept[id(thing)] = thing
                self._seen[name] = self._describe(thing)
                pending.extend((f"{name}{step}", part) for step, part in self._parts(thing))

    def changes_to(self, later: ModelFingerprint) -> list[str]:
        """Return the names of the tensors and attributes that a later fingerprint has otherwise."""
        before, after = self._seen, later._seen
        return [name for name in before | after if before.get(name) != after.get(name)]

    def _describe(self, thing: Any) -> Any:
        """Return a value that stands for an object in comparisons. Its parts are compared apart."""
        if isinstance(thing, torch.Tensor) and (thing.layout is not torch.strided or thing.is_meta):
            return str(thing.layout), tuple(thing.shape), id(thing)
        if isinstance(thing, torch.Tensor):
            place = thing.storage_offset(), tuple(thing.shape), thing.stride(), thing.dtype
            # Do not compare the tensor's identity: a new tensor with the same bytes is no change.
            return self._digest(thing.untyped_storage()), place
        if isinstance(thing, types.FunctionType):
            # A new function with the same code is no change, unless its parts changed.
            return id(thing.__code__)
        if isinstance(thing, (*_CONTAINERS, *_MAPPINGS, types.MethodType, functools.partial)):
            return type(thing).__name__
        has_parts = hasattr(thing, "__dict__") or any(_slots_of(thing))
        if not has_parts or isinstance(thing, _CACHING):
            return object()  # equal to no other value, because the content may change in place
        return type(thing).__name__, id(thing)

    def _digest(self, storage: torch.UntypedStorage) -> str | int:
        address = storage.data_ptr()
        if address in self._undigested:
            return address
        if address not in self._digests:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            hasher = xxhash.xxh3_64()
            for block in torch.split(content, _BLOCK_BYTES):
                hasher.update(block.cpu().numpy().data)
            self._digests[address] = hasher.hexdigest()
        return self._digests[address]

    def _parts(self, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, _MAPPINGS):
            # Sort by name: the order of entries does not matter.
            items = [(f"[{key!r:.80}]", value) for key, value in thing.items()]
            yield from sorted(items, key=lambda item: item[0])
        elif isinstance(thing, _CONTAINERS):
            yield from ((f"[{index}]", value) for index, value in enumerate(thing))
        elif isinstance(thing, types.FunctionType):
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # the cell has no value yet
                    yield f"({name})", cell.cell_contents
            yield ".__defaults__", thing.__defaults__
            yield ".__kwdefaults__", thing.__kwdefaults__
        elif isinstance(thing, types.MethodType):
            yield ".__self__", thing.__self__
            yield ".__func__", thing.__func__
        elif isinstance(thing, functools.partial):
            yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
        attributes = dict(getattr(thing, "__dict__", {}))
        attributes |= {name: getattr(thing, name) for name in _slots_of(thing)}
        for name in sorted(attributes):
            if name not in self._without and (id(thing), name) not in self._replaced:
                yield f".{name}", attributes[name]


def _is_code(thing: Any) -> bool:
    return isinstance(thing, _NOT_LOOKED_INTO) or type(thing).__module__.startswith(
        (*_COMPILED, *_GROUPS)
    )


def _slots_of(thing: Any) -> Iterator[str]:
    """Yield the names of an object's slots that have a value."""
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if not name.startswith("__") and hasattr(thing, name))


class UnverifiableError(Exception):
    """Copies cannot be compared with the engine's reload now, but perhaps at a later version."""

    def __init__(self, reason: str, error: Exception) -> None:
        super().__init__(f"{reason}: {described(error)}")


@dataclass(frozen=True, slots=True)
class Verifier:
    """Compares a model after the engine's reload with the result of a switch by copies."""

    model: torch.nn.Module
    reload: Callable[[Iterable[tuple[str, torch.Tensor]]], None]
    reload_part: Callable[[PreparedSwitch], None]
    """Function that runs the engine's reload of the layers that a switch does not copy."""
    copier: Copier
    not_weights: Collection[str]
    random: np.random.Generator

    def verify(self, switch: PreparedSwitch, tensors: Tensors) -> Mismatch:
        """Load a version by the engine's reload; return how the result differs from a switch's.

        If there are no differences, the plan is verified.

        Raises:
            UnverifiableError: reload and switch cannot be compared, but the version is loaded.
            Exception: the reload failed.
        """
        plan = switch.plan
        plan.verified_for = None

        def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                number = float(self.random.uniform(*_RANGE))
                is_reloaded = name in plan.reloaded_sources
                yield name, _stand_in(tensor, number, is_reloaded=is_reloaded)

        # A model may contain anything. A switch must not fail because a part cannot be inspected.
        try:
            self.reload(stand_ins())
            # The switch leaves some layers to the engine's reload. Load the version into these
            # layers, so that they do not differ between the two fingerprints.
            self.reload_part(switch)
            before = self._fingerprint(switch)
        except Exception as error:
            self.reload(tensors.items())
            reason = "the engine cannot load other values than a version's, to compare with"
            raise UnverifiableError(reason, error) from error
        # This reload replaces the stand-ins by the version, so it changes everything that derives
        # from a loaded value.
        self.reload(tensors.items())
        try:
            mismatch = self._mismatch(switch, before)
            if not mismatch and switch.reloaded:
                mismatch = self._mismatch_of_part(switch, tensors)
        except Exception as error:
            raise UnverifiableError(
                "the results of a reload and of copies cannot be compared", error
            ) from error
        if not mismatch:
            plan.verified_for = {
                name: digest_of(tensors[name])
                for name, stand_in in stand_ins()
                if not _is_varied(tensors[name], stand_in)
            }
        return mismatch

    def _fingerprint(self, switch: PreparedSwitch) -> ModelFingerprint:
        return ModelFingerprint(
            self.model,
            without=_NOT_READ.union(self.not_weights),
            undigested={address_of(tensor) for tensor in switch.plan.written},
            replaced={attribute for image in switch.images for attribute in image.replaced},
        )

    def _mismatch(self, switch: PreparedSwitch, before: ModelFingerprint) -> Mismatch:
        """Return where a model that was just reloaded differs from the result of a switch.

        ``before``: fingerprint of the model before this reload. At that time, the layers that the
        switch copies had other values than the version's. So if the reload does not write one of
        these layers, the layer differs from the switch's result. The layers that the switch leaves
        to a reload had the version's values already.
        """
        mismatch: dict[str, str] = {}
        for place in before.changes_to(self._fingerprint(switch)):
            for layer in _layers_at(place, switch.plan.all_layers):
                mismatch.setdefault(layer, f"it changes {place or 'the model'} too")
        for name, layer in switch.mismatches(self.copier).items():
            mismatch.setdefault(layer, f"{name} is not as published")
        return mismatch

    def _mismatch_of_part(self, switch: PreparedSwitch, tensors: Tensors) -> Mismatch:
        """Reload only the layers that the switch leaves to a reload, and check the other layers.

        If this reload changes another layer, so would a switch, and its result would differ from a
        full reload's: return a mismatch for each reloaded layer. Otherwise return no mismatch.
        """
        try:
            self.reload_part(switch)
            changed = switch.mismatches(self.copier)
        except Exception:
            self.reload(tensors.items())
            raise
        if not changed:
            return {}
        self.reload(tensors.items())
        reason = f"reloading a part changes {listed(list(changed))} too"
        return dict.fromkeys(switch.plan.reloaded, reason)


def _layers_at(place: str, layers: Collection[str]) -> Collection[str]:
    """Return the layers nearest to ``place``, where two fingerprints of a model differ.

    Find the innermost module around ``place`` that contains some of ``layers``, and return those
    layers. If no module does, return all ``layers``.
    """
    matched = _MODULES.match(place)
    path = re.findall(r"\['([^']+)'\]", matched[0]) if matched else []  # a target has no name
    for length in range(len(path), 0, -1):
        above = unwrapped(".".join(path[:length]))
        if near := [layer for layer in layers if f"{layer}.".startswith(f"{above}.")]:
            return near
    return layers


def _stand_in(tensor: torch.Tensor, number: float, *, is_reloaded: bool) -> torch.Tensor:
    """Return a tensor like ``tensor`` with other elements, or ``tensor`` if no others are safe.

    * Floating-point numbers: all elements are ``number``, or twice ``number`` if the first element
      is ``number`` already.
    * Other tensors may have indices or codes, so they only get elements that they have:

      * If each switch reloads the tensor (``is_reloaded``), all elements are its last element.
      * A matrix is reversed, and the first half of the result gets the same element.
      * A vector is returned unchanged.
    """
    if not tensor.numel():
        return tensor
    if _has_numbers(tensor):
        value = torch.tensor(number).to(tensor.dtype)
        if tensor[(0,) * tensor.dim()].float() == value.float():
            value = (2 * value.float()).to(tensor.dtype)
        return value.expand(tensor.shape)
    if is_reloaded:
        return tensor[(-1,) * tensor.dim()].expand(tensor.shape)
    if tensor.dim() < 2:
        return tensor
    codes = as_integers(tensor).flatten().flip(0)
    codes[: len(codes) // 2] = codes[0]
    return codes.view(tensor.shape).view(tensor.dtype)


def _is_varied(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    """Whether most elements of a tensor differ from its stand-in's."""
    if stand_in is tensor or _has_numbers(tensor):
        return stand_in is not tensor
    return 2 * int((as_integers(tensor) == as_integers(stand_in)).sum()) <= tensor.numel()


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether each element is one floating-point number, and does not pack several numbers."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2
