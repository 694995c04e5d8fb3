"""Policy gradient in a plain loop; a vLLM server follows it through a store. See docs/tutorial.md.

    python examples/tutorial/own_loop.py MODEL STORE http://localhost:8000

The reward is the share of an answer's words whose number is below 128, of 512 words in all.
"""

import argparse

import httpx
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import dbuffer

PROMPTS = [[(7 * i + j) % 512 for j in range(4 + i)] for i in range(8)]
GROUP_SIZE, ANSWER_TOKENS = 8, 16


def main(args: argparse.Namespace) -> None:
    """Train."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    client = httpx.Client(base_url=args.server, timeout=60)
    with dbuffer.WeightSender(args.store, dtype=torch.bfloat16) as sender:
        for step in range(1, args.steps + 1):
            version = sender.send(model, metadata={"step": step}).version
            sender.wait_applied(version, receivers=args.receivers, timeout_s=60)
            answers, served = generate(client, args.model)
            print(
                f"step {step:2}: version {served}, reward {update(model, optimizer, answers):.3f}"
            )


def generate(client: httpx.Client, model: str) -> tuple[torch.Tensor, str]:
    """Return answers, shaped (prompts * GROUP_SIZE, ANSWER_TOKENS), and their weight version."""
    question = {
        "model": model,
        "prompt": PROMPTS,
        "n": GROUP_SIZE,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=question).raise_for_status()
    answers = [choice["token_ids"] for choice in response.json()["choices"]]
    return torch.tensor(answers), response.headers["X-Weight-Version"]


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, answers: torch.Tensor
) -> float:
    """Take a step of REINFORCE; return the mean reward."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS for _ in range(GROUP_SIZE)]
    rewards = (answers < 128).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    rows = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    # Attention is causal: padding at the end needs no mask.
    log_probs = model(pad_sequence(rows, batch_first=True)).logits.log_softmax(-1)
    starts = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    places = starts + torch.arange(ANSWER_TOKENS)
    chosen = log_probs[torch.arange(len(rows))[:, None], places, answers]
    optimizer.zero_grad()
    (-(advantages[:, None] * chosen).mean()).backward()
    optimizer.step()
    return rewards.mean().item()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Policy gradient over a store.")
    parser.add_argument("model", help="checkpoint to start from")
    parser.add_argument("store", help="store that the servers follow")
    parser.add_argument("server", help="URL of the server that answers")
    parser.add_argument(
        "--receivers",
        nargs="+",
        default=["server-1"],
        metavar="ID",
        help="servers to wait for at each step",
    )
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main(parse())
