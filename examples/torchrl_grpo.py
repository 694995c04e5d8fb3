"""GRPO with TorchRL's loss and wrappers: a vLLM engine samples, and follows through a store.

    python examples/torchrl_grpo.py

Trains a tiny random Qwen3; the reward is the share of an answer's tokens that are in a secret set.
At the end the engine and a fresh one on the final checkpoint must give the same greedy answers.
Needs torchrl, transformers and vLLM; takes a minute on two cores.
"""

import os

# One core for each process, and no logs; torch and vLLM read this when they are imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import functools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from dbuffer.integrations.torchrl import VLLMDoubleBufferSyncScheme

VOCABULARY, ANSWER_TOKENS, GROUP_SIZE, NUM_STEPS = 512, 16, 8, 12

_generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=_generator).tolist()
    for length in (4, 7, 12, 20, 31, 33, 48, 70)  # some longer than vLLM's cache block
]
IS_REWARDED = torch.zeros(VOCABULARY)
IS_REWARDED[torch.randperm(VOCABULARY, generator=_generator)[: VOCABULARY // 4]] = 1.0
QUESTIONS = [(number, prompt) for number, prompt in enumerate(PROMPTS) for _ in range(GROUP_SIZE)]


def main(directory: Path) -> bool:
    """Train; return whether the engine followed."""
    model = make_model()
    words = {f"word-{token}": token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="word-0")), pad_token="word-0"
    )
    engine = start_engine(model, directory / "initial")
    sampler = wrap(engine, tokenizer)
    learner = Learner(model, tokenizer)

    # The same lines as with TorchRL's class of this name.
    scheme = VLLMDoubleBufferSyncScheme(str(directory / "store"))
    sender = scheme.create_sender()
    sender.register_model(model)
    receiver = scheme.create_receiver(engine)

    rewards = []
    for step in range(1, NUM_STEPS + 1):
        answers: Any = sampler(
            lazy_stack(
                [
                    TensorDict({"query": str(number), "tokens": {"prompt": torch.tensor(prompt)}})
                    for number, prompt in QUESTIONS
                ]
            )
        )
        tokens = torch.stack(answers.get(("tokens", "response"), as_list=True))
        reward = IS_REWARDED[tokens].mean(dim=1)
        sample_size = learner.update(answers, reward)
        sender.update_weights()
        receiver.poll_and_apply(60.0)
        rewards.append(reward.mean().item())
        print(
            f"step {step:2}: reward {rewards[-1]:.3f}, effective sample size {sample_size:.0%}",
            flush=True,
        )
    final = generate(engine)
    receiver.shutdown()
    sender.shutdown()
    engine.llm_engine.engine_core.shutdown()

    fresh = start_engine(model, directory / "final")
    is_equal = generate(fresh) == final
    fresh.llm_engine.engine_core.shutdown()
    print(f"greedy answers of the engine and of a fresh one: {'equal' if is_equal else 'differ'}")
    return is_equal and statistics.fmean(rewards[-4:]) > statistics.fmean(rewards[:4]) + 0.1


class Learner:
    """TorchRL's advantages within groups of answers and its clipped loss, with Adam."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        self._loss = GRPOLoss(actor, entropy_bonus=False)
        self._optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        self._buffer = ReplayBuffer(
            storage=LazyStackStorage(len(QUESTIONS)),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(GROUP_SIZE),
            batch_size=len(QUESTIONS),
        )

    def update(self, answers: TensorDictBase, rewards: torch.Tensor) -> float:
        """Train on one batch.

        Returns:
            The effective sample size, as a share of the batch: 1 if the answers were sampled with
            the weights that are trained, and less if the engine lags behind.
        """
        answers["next", "reward"] = rewards[:, None, None]
        answers["next", "done"] = torch.ones(len(rewards), 1, dtype=torch.bool)
        self._buffer.empty()
        self._buffer.extend(answers)
        loss = self._loss(self._buffer.sample())
        self._optimizer.zero_grad()
        loss.loss_objective.backward()
        nn.utils.clip_grad_norm_(self._loss.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.ESS)


def make_model() -> Any:
    """Return a Qwen3 with 0.2 million random parameters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
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
    return Qwen3ForCausalLM(config).eval()


def start_engine(model: Any, checkpoint: Path) -> Any:
    """Start a vLLM engine from a checkpoint of the model."""
    model.save_pretrained(checkpoint)
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enforce_eager=True,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=256,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    )


def wrap(engine: Any, tokenizer: PreTrainedTokenizerFast) -> vLLMWrapper:
    """Return a wrapper that samples for TorchRL, with the log-probability of each token."""
    # The wrapper has no option for the progress bar.
    engine.generate = functools.partial(engine.generate, use_tqdm=False)
    options = {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True, "detokenize": False}
    return vLLMWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode="tokens",
        return_log_probs=True,
        generate_kwargs={"temperature": 1.0, **options},
    )


def generate(engine: Any) -> list[list[int]]:
    """Return the engine's greedy answers to the prompts."""
    greedy = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        has_followed = main(Path(directory))
    sys.exit(None if has_followed else "the engine did not follow its trainer")
