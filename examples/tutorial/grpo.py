"""GRPO with TRL's own trainer; vLLM servers follow it through a store. See docs/tutorial.md.

    python examples/tutorial/grpo.py MODEL STORE http://localhost:8000

The reward is the share of an answer's words whose number is below 128, of 512 words in all.
"""

import argparse
import sys
import warnings

warnings.simplefilter("ignore")  # TRL warns of a vLLM that it does not know

from typing import Any

import torch
import transformers
from datasets import Dataset
from prometheus_client import start_http_server
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from dbuffer.integrations import metrics
from dbuffer.integrations.trl import over_store

PROMPTS = [" ".join(f"word-{(7 * i + j) % 512}" for j in range(4 + i)) for i in range(8)]
GROUP_SIZE = 8


def main(args: argparse.Namespace) -> None:
    """Train."""
    if args.metrics_port:  # before a store is made: another program may have the port
        try:
            start_http_server(args.metrics_port, "127.0.0.1")
        except OSError as error:
            sys.exit(f"--metrics-port {args.metrics_port}: {error.strerror}; use another port")
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        values = [sum(token < 128 for token in answer) / len(answer) for answer in completion_ids]
        rewards.append(sum(values) / len(values))
        version = trainer.weight_sync.version
        print(f"step {len(rewards):2}: version {version}, reward {rewards[-1]:.3f}", flush=True)
        return values

    config = GRPOConfig(
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=args.server,
        per_device_train_batch_size=GROUP_SIZE * len(PROMPTS),
        num_generations=GROUP_SIZE,
        max_completion_length=16,
        generation_kwargs={"ignore_eos": True},
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        output_dir=f"{args.store}-trainer",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer_class: Any = over_store(
        GRPOTrainer, args.store, dtype=torch.bfloat16, receivers=args.receivers, delta=args.delta
    )
    trainer = trainer_class(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.remove_callback(PrinterCallback)  # prints one line of forty figures
    sender = trainer.weight_sync.sender
    if args.metrics_port:
        metrics.register(sender)
    trainer.train()
    print("{versions:.0f} versions, {bytes:,.0f} bytes".format(**sender.stats))
    if args.delta:
        print("{deltas:.0f} of them as deltas, {delta_bytes:,.0f} bytes".format(**sender.stats))
    trainer.weight_sync.close()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="GRPO over a store.")
    parser.add_argument("model", help="checkpoint to start from")
    parser.add_argument("store", help="store that the servers follow")
    parser.add_argument("server", help="URL of the server that answers")
    parser.add_argument("--receivers", type=int, default=1, help="servers to wait for at each step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--delta", action="store_true", help="publish deltas")
    parser.add_argument("--metrics-port", type=int, help="serve the sender's metrics here")
    return parser.parse_args()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(parse())
