"""A store's adapter, for an engine that was started with ``enable_lora=True``."""

from __future__ import annotations

import os
from typing import Any

from vllm.lora.request import LoRARequest

from dbuffer.integrations.peft.saved import hold, save_adapter
from dbuffer.receive.receiver import WeightReceiver


class _HeldRequest(LoRARequest, array_like=True, omit_defaults=True, dict=True):  # type: ignore[call-arg,misc]
    """Request whose adapter stays on disk for as long as this object lives.

    vLLM reads the files again whenever the adapter has left its slots.
    """


def adapter_request(
    receiver: WeightReceiver, directory: str | os.PathLike[str], **options: Any
) -> LoRARequest:
    """Return the newest version of an adapter, as ``lora_request`` of a generation.

    Its number and its name are those of no other version: vLLM keeps adapters by the one, and its
    cache of prefixes by the other, so neither can answer with an old one. Requests under way go on
    with the version that they began with, whose files stay until the last of them has ended.

    Args:
        receiver: of a store that `send_adapter` publishes into.
        directory: where versions are saved, for the engine's processes to read.
        **options: of :func:`dbuffer.integrations.peft.save_adapter`, which says what it raises.
    """
    held = None
    while held is None:  # another process may have removed it meanwhile, for two newer ones
        saved = save_adapter(receiver, directory, **options)
        held = hold(saved.path)
    request = _HeldRequest(saved.path.name, saved.number, str(saved.path))
    request.__dict__["hold"] = held  # not a field, which vLLM would send to its processes
    return request
