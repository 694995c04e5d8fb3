"""A platform of verl's that is the CPU, by verl's own registry: ``VERL_USE_EXTERNAL_MODULES``.

verl knows three platforms, all with accelerators, and asks theirs for what a CPU has no need of.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None:
    """What a CPU does where an accelerator would synchronise, or free a cache."""


class _Device(SimpleNamespace):
    """``torch.cpu``, with what ``torch.cuda`` has besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_DEVICE = _Device(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    is_available=lambda: True,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    get_device_name=lambda *_: "cpu",
    set_device=_nothing,
    synchronize=_nothing,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "none"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_TEST_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"  # as many as the test tells Ray; nothing looks for them

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    set_device = synchronize = manual_seed = manual_seed_all = empty_cache = _nothing
    set_allocator_settings = profiler_start = profiler_stop = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def cudart(self) -> None:
        return None
