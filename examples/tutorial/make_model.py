"""Make a tiny random model with a tokenizer, without a network.

    python examples/tutorial/make_model.py DIRECTORY

A Qwen3 of 0.2 million parameters, in bfloat16. Its tokenizer has one word for each token.
"""

import sys

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512


def main(directory: str) -> None:
    """Write the checkpoint."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    words = {f"word-{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word-0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="word-0", eos_token="word-1"
    ).save_pretrained(directory)
    print(f"a Qwen3 with {model.num_parameters():,} random parameters, and {VOCABULARY} words")


if __name__ == "__main__":
    main(sys.argv[1])
