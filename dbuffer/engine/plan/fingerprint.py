"""`ModelFingerprint`: everything that a model can read when it computes, at one moment.

A reload can change an attribute, another layer, a closure, or a kernel's object. So a fingerprint
walks all objects that can be reached from the model, and two fingerprints show the changes between
them. A fingerprint keeps a digest of a tensor's bytes, the value of a number or text, and the
identity of any other object. An object that Python cannot look into counts as changed.
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
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed
import xxhash

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
"""Python modules of communication between ranks. Messages change their buffers, and a reload does
not."""

_CACHING = type(functools.lru_cache(len))

_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)

_BLOCK_BYTES = 64 << 20


class ModelFingerprint:
    """Everything that can be reached from a model at one moment.

    Attributes whose name is in ``without``, such as caches that serving fills, are skipped in all
    objects. ``replaced`` has pairs of an object's identity and an attribute's name; these
    attributes are skipped in these objects only. The bytes of storages at ``undigested`` addresses
    are not compared.
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
        """Return the names of the places where this fingerprint and a later one differ."""
        before, after = self._seen, later._seen
        return [name for name in before | after if before.get(name) != after.get(name)]

    def _describe(self, thing: Any) -> Any:
        """Return a value to compare in place of an object, without the object's parts."""
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
