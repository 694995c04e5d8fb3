"""LightRFT's loop on two ranks: a sharded actor, and vLLM engines that follow through a store.

    python -m torch.distributed.run --standalone --nproc-per-node=2 examples/lightrft_ranks.py

The actor is a tiny random Qwen3 under FSDP2. Each rank has an engine in its process, samples
answers with it, and trains; then all ranks call ``broadcast_to_engine()``. A namespace with the
four values that dbuffer reads replaces LightRFT's strategy. At the end each engine and a fresh one
on the final checkpoint must give the same greedy answers. Needs transformers and vLLM; takes a
minute on two cores.
"""

import os

# One core for each rank, an engine in each rank's process, and no logs.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from dbuffer.integrations.lightrft import BroadcastManager

VOCABULARY, ANSWER_TOKENS, NUM_STEPS = 512, 16, 6

_generator = torch.Generator().manual_seed(0)
PROMPTS = torch.randint(VOCABULARY, (8, 12), generator=_generator)
QUESTIONS = PROMPTS.repeat(8, 1)
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0


def main(directory: Path) -> bool:
    """Train; return whether this rank's engine followed."""
    torch.set_num_threads(1)
    rank, model = distributed.get_rank(), make_model()
    engine = start_engine(model, directory / "initial")
    # As in LightRFT, the actor's `model` is trained, sharded over all ranks.
    actor = SimpleNamespace(model=shard(model))
    optimizer = torch.optim.Adam(actor.model.parameters(), 3e-3)
    arguments = SimpleNamespace(fsdp=True, zero_stage=3, bf16=True)
    strategy = SimpleNamespace(engine_type="vllm", args=arguments)
    # The same line as with LightRFT's class of this name.
    manager = BroadcastManager(actor, strategy, engine)
    manager.broadcast_to_engine()
    for step in range(1, NUM_STEPS + 1):
        answers = generate(engine, QUESTIONS, temperature=1.0)
        reward = IS_REWARDED[answers].mean(dim=1)
        update(actor.model, optimizer, answers, reward)
        manager.broadcast_to_engine()
        say(f"rank {rank}, step {step}: reward {reward.mean():.3f}, version {manager.version}")
    final = generate(engine, PROMPTS, temperature=0.0)
    manager.close()

    whole = make_model().bfloat16()
    whole.load_state_dict({name: p.full_tensor() for name, p in actor.model.named_parameters()})
    fresh = start_engine(whole, directory / "final")
    is_equal = torch.equal(final, generate(fresh, PROMPTS, temperature=0.0))
    outcome = "equal" if is_equal else "differ"
    say(f"rank {rank}: greedy answers of its engine and of a fresh one: {outcome}")
    distributed.barrier()  # torchrun ends all ranks when the first one fails
    return is_equal


def say(text: str) -> None:
    """Print a line in one piece: the ranks share a terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def shard(model: Any) -> Any:
    """Shard a model with FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def start_engine(model: Any, checkpoint: Path) -> LLM:
    """Start a vLLM engine for this rank, as LightRFT does."""
    if distributed.get_rank() == 0:
        model.save_pretrained(checkpoint)
    distributed.barrier()
    return LLM(
        str(checkpoint),
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        seed=distributed.get_rank(),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
    )


def generate(engine: LLM, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one answer for each prompt."""
    sampling = SamplingParams(
        temperature=temperature, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    return torch.tensor([output.outputs[0].token_ids for output in outputs])


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, answers: torch.Tensor, reward: torch.Tensor
) -> None:
    """Take a step of REINFORCE, with the batch's mean as baseline."""
    advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(torch.cat([QUESTIONS, answers], dim=1)).logits
    chosen = logits[:, QUESTIONS.shape[1] - 1 : -1].log_softmax(-1).gather(-1, answers[:, :, None])
    optimizer.zero_grad()
    (-(advantages[:, None] * chosen[:, :, 0]).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as own:
        # All ranks, which are on one host, use the first rank's directory.
        place = [own]
        distributed.broadcast_object_list(place)
        has_followed = main(Path(place[0]))
    sys.exit(None if has_followed else "the engine did not follow its trainer")
