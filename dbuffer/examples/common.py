"""How the examples begin, what they print, and how they end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dbuffer.tools.demo.policy import VOCAB_SIZE, climb


def run_example(about: str | None, run: Callable[..., bool], *flags: str) -> None:
    """Run an example in a temporary directory, and exit with 1 unless it worked.

    ``run`` takes the directory, and whether ``--broken-sync`` and each other flag were given.
    """
    parser = argparse.ArgumentParser(description=about)
    for flag in ("--broken-sync", *flags):
        parser.add_argument(flag, action="store_true")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        is_success = run(Path(directory), **arguments)
    say("success" if is_success else "failed")
    sys.exit(not is_success)


def say(text: str) -> None:
    """Print a line at once and in one piece: ranks share the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def has_climbed(rewards: Sequence[float], num_averaged: int) -> bool:
    """Whether the last rewards are above the first ones."""
    first, last, is_higher = climb(rewards, num_averaged)
    say(f"reward {first:.3f} to {last:.3f}: {'climbed' if is_higher else 'did not climb'}")
    return is_higher


def are_equal(some: object, others: object, what: str) -> bool:
    """Whether two engines gave the same answers."""
    say(f"{what} {'are equal' if some == others else 'differ'}")
    return some == others


def make_tokenizer() -> Any:
    """One that has a word for each token of the tiny model, where a trainer asks for one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"word-{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word-0"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "word-0", "eos_token": "word-1"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
