"""`BridgeConfig`: settings of the weight bridge, with Atropos' names and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from dbuffer.errors import OptionError, UnsupportedError
from dbuffer.runtime import options as checks


@dataclass
class BridgeConfig:
    """Settings of a weight bridge: the trainer's processes and the inference servers.

    Raises:
        UnsupportedError: (a ``NotImplementedError``) ``use_cuda_ipc`` is set.
        OptionError: (a ``ValueError``) a value is invalid.
    """

    trainer_rank: int = 0
    world_size: int = 1
    """Number of the trainer's processes. Each makes a bridge, and all make the same calls."""
    init_method: str = "env://"
    num_inference_nodes: int = 0
    """Number of nodes with an inference engine in the SLURM job. The value 0 means local mode: a
    single server on this machine."""
    model_name: str = ""
    """Hugging Face name or directory of the model that `get_trainable_model` returns."""
    device: str = "cuda"
    timeout_seconds: float = 300.0
    log_dir: str | None = None
    """Directory that trainer and servers share. Default: the environment variable ``LOGDIR``."""
    vllm_api_url: str = "http://localhost:9001"
    use_cuda_ipc: bool = False
    num_gpus_per_node: int = field(default_factory=torch.cuda.device_count)

    def __post_init__(self) -> None:
        if self.use_cuda_ipc:
            raise UnsupportedError(
                "use_cuda_ipc is not supported, because dbuffer shares files, not GPU memory. Turn "
                "use_cuda_ipc off: the server then loads weights from a store in shared memory. To "
                "share one copy on one GPU, use Atropos' own bridge in single_copy mode"
            )
        checks.whole_number("world_size", self.world_size)
        checks.whole_number("trainer_rank", self.trainer_rank, at_least=0)
        checks.whole_number("num_inference_nodes", self.num_inference_nodes, at_least=0)
        checks.positive_seconds("timeout_seconds", self.timeout_seconds)
        if self.is_local_mode:
            checks.server_url("vllm_api_url", self.vllm_api_url)
        if self.trainer_rank >= self.world_size:
            raise OptionError(
                f"invalid trainer_rank {self.trainer_rank}: use a rank below world_size "
                f"({self.world_size})"
            )

    @property
    def is_local_mode(self) -> bool:
        return self.num_inference_nodes == 0

    @property
    def directory(self) -> str | None:
        """Atropos' log directory, or None. There, its servers write ``vllm_bridge_config.json``."""
        return self.log_dir or os.environ.get("LOGDIR") or None

    @classmethod
    def from_training_config(cls, config: Any) -> Self:
        """Make a configuration from Atropos' ``TrainingConfig``, or an object with its attributes.

        As in Atropos, `log_dir` comes from the environment variable ``LOGDIR``.
        """
        names = ("trainer_rank", "world_size", "init_method", "num_inference_nodes")
        return cls(
            **{name: getattr(config, name) for name in names if hasattr(config, name)},
            model_name=config.model_name,
            device=config.device,
            log_dir=os.environ.get("LOGDIR") or None,
            vllm_api_url=f"http://localhost:{getattr(config, 'vllm_port', 9001)}",
            use_cuda_ipc=getattr(config, "use_cuda_ipc", False)
            or getattr(config, "single_copy", False),
        )
