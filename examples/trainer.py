"""The trainer of the recipes for clusters: it trains a checkpoint, and publishes each step.

    python examples/trainer.py CHECKPOINT STORE --steps 20 --receivers 1

Replace this program by your trainer, which uses a sender in the same way. After each step it waits
until `--receivers` engines have loaded the version, so a run shows that they follow. It trains on
one batch of random tokens, on a GPU if there is one. Needs transformers.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from dbuffer import WeightSender


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description="Train a checkpoint, and publish each step.")
    options.add_argument("checkpoint", help="directory of a checkpoint")
    options.add_argument("store", help="directory of the store")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--receivers", type=int, default=0, help="engines to wait for, each step")
    options.add_argument("--timeout-s", type=float, default=1800, help="limit of this wait")
    return options


def main() -> None:
    """Train, publish, and wait for the engines, step by step."""
    options = parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype="auto").to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tokens = torch.randint(model.config.vocab_size, (4, 64), device=device)
    with WeightSender(options.store) as sender:
        for step in range(1, options.steps + 1):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version = sender.send(model, metadata={"step": step}).version
            if options.receivers:
                if step == 1:
                    print(f"waiting for {options.receivers} engine(s)", flush=True)
                sender.wait_applied(
                    version, receivers=options.receivers, timeout_s=options.timeout_s
                )
            print(f"step {step}: loss {loss.item():.3f}, version {version}", flush=True)


if __name__ == "__main__":
    main()
