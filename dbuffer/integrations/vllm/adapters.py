"""LoRA adapters from a store, for an engine that was started with ``enable_lora=True``."""

from __future__ import annotations

import os
from typing import Any

from vllm.lora.request import LoRARequest

from dbuffer.integrations.peft.saved import hold, save_adapter
from dbuffer.receive.receiver import WeightReceiver


class _KeptRequest(LoRARequest, array_like=True, omit_defaults=True, dict=True):  # type: ignore[call-arg,misc]
    """LoRA request that keeps its adapter's files on disk for as long as it lives.

    vLLM reads these files again after it has evicted the adapter from its slots.
    """


def adapter_request(
    receiver: WeightReceiver, directory: str | os.PathLike[str], **options: Any
) -> LoRARequest:
    """Return the newest version of an adapter, to be passed as ``lora_request``.

    Each version has its own number and name: vLLM identifies adapters by number, and tags its
    prefix cache with the name. A request in flight continues with the version that it began with.
    The files of that version stay until its last request has ended.

    Args:
        receiver: receiver of a store that `send_adapter` publishes into.
        directory: directory to save versions in. The engine's processes must see it.
        **options: options of :func:`dbuffer.integrations.peft.save_adapter`. Its errors are raised
            here too.
    """
    lock = None
    while lock is None:  # after two newer versions, another process may remove the files
        saved = save_adapter(receiver, directory, **options)
        lock = hold(saved.path)
    request = _KeptRequest(saved.path.name, saved.number, str(saved.path))
    request.__dict__["lock"] = lock  # vLLM sends fields to its processes
    return request
