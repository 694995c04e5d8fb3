"""A store's adapter, for an engine that was started with ``enable_lora=True``."""

from __future__ import annotations

import os
from typing import Any

from vllm.lora.request import LoRARequest

from dbuffer.integrations.peft.saved import hold, save_adapter
from dbuffer.receive.receiver import WeightReceiver


class _KeptRequest(LoRARequest, array_like=True, omit_defaults=True, dict=True):  # type: ignore[call-arg,misc]
    """Request whose adapter stays on disk for as long as this object lives.

    vLLM reads the files again whenever the adapter has left its slots.
    """


def adapter_request(
    receiver: WeightReceiver, directory: str | os.PathLike[str], **options: Any
) -> LoRARequest:
    """Return the newest version of an adapter, as ``lora_request`` of a generation.

    vLLM keeps adapters by number, and its cache of prefixes by name; no two versions share either.
    Requests in flight continue with the version that they began with, whose files stay until the
    last of them has ended.

    Args:
        receiver: of a store that `send_adapter` publishes into.
        directory: where versions are saved, for the engine's processes to read.
        **options: of :func:`dbuffer.integrations.peft.save_adapter`, which lists the errors.
    """
    lock = None
    while lock is None:  # another process may have removed it meanwhile, for two newer ones
        saved = save_adapter(receiver, directory, **options)
        lock = hold(saved.path)
    request = _KeptRequest(saved.path.name, saved.number, str(saved.path))
    request.__dict__["lock"] = lock  # not a field, which vLLM would send to its processes
    return request
