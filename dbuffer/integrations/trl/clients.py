"""TRL's clients of vLLM servers, without the process group that TRL sends weights in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient


class ClientWithoutGroup(VLLMClient):  # type: ignore[misc]  # trl is not typed
    """TRL's client of a server, which asks for tokens and does not join the server's workers."""

    def init_communicator(self, device: object = 0) -> None:
        """Do nothing: TRL's would open a group over NCCL, and refuse every device but CUDA."""


@contextlib.contextmanager
def without_group() -> Iterator[None]:
    """Let TRL make its clients so in a ``with`` block.

    There is no seam for that: in its constructor a trainer makes a client by this name, and lets
    it join at once. The name is as it was as soon as the trainer is made.
    """
    own = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = ClientWithoutGroup
    try:
        yield
    finally:
        vllm_generation.VLLMClient = own
