"""`Configuration`: what ``checkpoint_engine.engine_kwargs.dbuffer`` says, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from dbuffer.format.delta import require_compression
from dbuffer.io.tensors import DTYPES
from dbuffer.runtime import options

_WHERE = "engine_kwargs.dbuffer"
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Configuration:
    """As `StoreCheckpointEngine` describes it."""

    store: Path
    local_store: Path | None
    delta: bool
    dtype: torch.dtype | None
    timeout_s: float

    @classmethod
    def checked(
        cls, *, store: Any, local_store: Any, delta: Any, dtype: Any, timeout_s: Any
    ) -> Self:
        """Options of which each may be what it is; from YAML, so of any type.

        Raises:
            OptionError: (a ``ValueError``) one may not.
        """
        place = options.directory(f"{_WHERE}.store", store)
        local = None
        if local_store is not None:
            local = options.directory(f"{_WHERE}.local_store", local_store)
        if options.flag(f"{_WHERE}.delta", delta):
            require_compression()
        options.choice(f"{_WHERE}.dtype", dtype, (None, *_FLOATS))
        return cls(
            store=place,
            local_store=local,
            delta=delta,
            dtype=None if dtype is None else DTYPES[dtype],
            timeout_s=options.positive_seconds(f"{_WHERE}.timeout_s", timeout_s),
        )
