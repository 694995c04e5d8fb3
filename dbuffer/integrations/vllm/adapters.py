"""A store's adapter, for an engine that was started with ``enable_lora=True``."""

from __future__ import annotations

import os
from typing import Any

from vllm.lora.request import LoRARequest

from dbuffer.integrations.peft.saved import save_adapter
from dbuffer.receive.receiver import WeightReceiver


def adapter_request(
    receiver: WeightReceiver, directory: str | os.PathLike[str], **options: Any
) -> LoRARequest:
    """Return the newest version of an adapter, as ``lora_request`` of a generation.

    Its number and its name are those of no other version: vLLM keeps adapters by the one, and its
    cache of prefixes by the other, so neither can answer with an old one. Requests under way go on
    with the version that they began with.

    Args:
        receiver: of a store that `send_adapter` publishes into.
        directory: where versions are saved, for the engine's processes to read.
        **options: of :func:`dbuffer.integrations.peft.save_adapter`, which says what it raises.
    """
    saved = save_adapter(receiver, directory, **options)
    return LoRARequest(saved.path.name, saved.number, str(saved.path))
