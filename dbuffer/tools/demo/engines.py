"""The engine's side: what samples, and how it takes new weights from the store.

An engine is made in a process of its own (``process.py``), from a checkpoint's directory.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from dbuffer.receive.receiver import WeightReceiver
from dbuffer.tools.demo.policy import COMPLETION_TOKENS, Tokens

if TYPE_CHECKING:
    import vllm

    from dbuffer.integrations.vllm import Follower


class Refreshed(NamedTuple):
    """A version was taken from the store."""

    version: int
    stage_ms: float
    """Making it ready, while the engine may generate."""
    pause_ms: float
    """Swapping the weights, with nothing generating."""


class VLLMEngine:
    """A real vLLM engine that follows as any vLLM engine does."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        # It has a process of its own already.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        # Two threads for so small a model wait for each other whenever the trainer has a core:
        # the median pause was 62 ms with them and 18 ms without, on two cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import vllm
        from vllm.config import WeightTransferConfig

        backend = WeightTransferConfig(backend="dbuffer")
        self._llm = start_llm(checkpoint, seed=seed, weight_transfer_config=backend)
        device = "GPU" if torch.cuda.is_available() else "CPU"
        self.description = f"vLLM {vllm.__version__}, {engine_dtype()} on {device}"

    def sample(self, prompts: Tokens, *, greedy: bool) -> Tokens:
        """One completion per prompt, at temperature 1 or greedy."""
        return generate(self._llm, prompts, greedy=greedy)

    def follow(self, store: Path) -> Follower:
        from dbuffer.integrations.vllm import follow

        follower: Follower = follow(self._llm, store)
        self._follower = follower
        return follower

    def refresh(self) -> Refreshed | None:
        """Take the newest version, if there is a newer one."""
        switch = self._follower.sync()
        if switch is None:
            return None
        return Refreshed(switch.version, 1e3 * switch.stage_s, 1e3 * switch.pause_s)


def start_llm(checkpoint: Path, **options: Any) -> vllm.LLM:
    """A vLLM engine for the tiny model."""
    import vllm

    return vllm.LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        dtype=engine_dtype(),
        max_model_len=256,
        max_num_seqs=64,
        block_size=32,  # some prompts are longer: a stale prefix cache would show in those
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


def engine_dtype() -> str:
    """bfloat16 on a GPU, because vLLM's fastest attention kernels take no float32."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def generate(llm: vllm.LLM, prompts: Tokens, *, greedy: bool) -> Tokens:
    """One completion per prompt, at temperature 1 or greedy."""
    import vllm

    parameters = vllm.SamplingParams(
        temperature=0.0 if greedy else 1.0,
        max_tokens=COMPLETION_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    questions = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(questions, parameters, use_tqdm=False)
    return tuple(tuple(output.outputs[0].token_ids) for output in outputs)


class TorchEngine:
    """A plain transformers model in place of an engine, where there is no vLLM."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        import transformers

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._model: Any = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint).eval()
        self.description = f"plain torch {torch.__version__} policy, no vLLM"

    @torch.inference_mode()
    def sample(self, prompts: Tokens, *, greedy: bool) -> Tokens:
        completions: dict[int, list[int]] = {}
        # Rows of one length need no padding.
        for length in {len(prompt) for prompt in prompts}:
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            batch = torch.tensor([prompts[row] for row in rows])
            output = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=COMPLETION_TOKENS,
                **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
            )
            completions |= zip(rows, output[:, length:].tolist(), strict=True)
        return tuple(tuple(completions[row]) for row in range(len(prompts)))

    def follow(self, store: Path) -> AbstractContextManager[Any]:
        self._receiver = WeightReceiver(store)
        return self._receiver

    def refresh(self) -> Refreshed | None:
        started = time.perf_counter()
        version = self._receiver.load_into(self._model)
        if version is None:
            return None
        return Refreshed(version, 0.0, 1e3 * (time.perf_counter() - started))


AnyEngine: TypeAlias = VLLMEngine | TorchEngine

ENGINES: dict[str, type[AnyEngine]] = {"vllm": VLLMEngine, "torch": TorchEngine}
