"""Names of tensors without what torch.compile, FSDP and others put into them."""

from __future__ import annotations

import re
from collections.abc import Iterable

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that torch.compile, FSDP and activation checkpointing insert into names."""

_wrapper_parts = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPER_PARTS)})\.")

WRAPPER_PREFIX = "module."
"""The prefix that DDP, DataParallel and DeepSpeed add to every name."""


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the parts that wrappers insert."""
    return _wrapper_parts.sub("", name)


def clean_names(names: Iterable[str]) -> list[str]:
    """Return names without wrappers' parts, and without a ``module.`` that all of them have."""
    names = [without_wrappers(name) for name in names]
    while names and all(name.startswith(WRAPPER_PREFIX) for name in names):
        names = [name.removeprefix(WRAPPER_PREFIX) for name in names]
    return names
