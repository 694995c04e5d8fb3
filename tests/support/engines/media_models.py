"""Models that are given images or sounds beside a text, as small as ``families`` has them.

Each comes with its processor. (Those whose processors need torchvision cannot be run: it has no
build for the CPU build's torch.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.engines.tiny_models import SHAPE, SPECIAL_TOKENS, make_tokenizer, vary_vectors

MEDIA: dict[str, tuple[str, str]] = {
    "blip-2": ("image", "word5 word7 word9"),
    "qwen2_audio": ("audio", "word5 <|audio_bos|> <|AUDIO|> <|audio_eos|> word7"),
    "whisper": ("audio", "word5 word9 word7"),
}
"""What each model is given, and with which text."""

_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_EAR = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "num_mel_bins": 80,
}
_SAMPLES_PER_S = 16_000
_NUM_INPUTS = 4


def save_media_model(model_type: str, directory: Path, seed: int) -> Path:
    """A checkpoint of random weights below the directory, with its processor."""
    torch.manual_seed(seed)
    make: dict[str, Callable[[], tuple[Any, Any]]] = {
        "blip-2": _make_blip2,
        "qwen2_audio": _make_qwen2_audio,
        "whisper": _make_whisper,
    }
    model, processor = make[model_type]()
    vary_vectors(model)
    path = directory / f"{model_type}-{seed}"
    model.save_pretrained(path)
    processor.save_pretrained(path)
    if model_type == "qwen2_audio":
        _rename(path / "model.safetensors", "language_model.model.model.", "language_model.model.")
    return path


def media_prompts(model_type: str) -> list[dict[str, Any]]:
    """One text with images or sounds that differ, as an ``LLM`` is given them."""
    from PIL import Image

    kind, text = MEDIA[model_type]
    prompts = []
    for seed in range(_NUM_INPUTS):
        noise = np.random.default_rng(seed)
        if kind == "image":
            item: Any = Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8))
        else:
            item = noise.standard_normal(_SAMPLES_PER_S).astype(np.float32), _SAMPLES_PER_S
        prompts.append({"prompt": text, "multi_modal_data": {kind: item}})
    return prompts


def _make_blip2() -> tuple[Any, Any]:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(image_size=32, patch_size=8, **_VISION),
        qformer_config=Blip2QFormerConfig(vocab_size=500, encoder_hidden_size=64, **_VISION),
        text_config=OPTConfig(
            vocab_size=500,
            ffn_dim=128,
            word_embed_proj_dim=64,
            max_position_embeddings=256,
            init_std=0.2,
            **sizes,
            **SPECIAL_TOKENS,
        ),
        num_query_tokens=4,
        image_token_index=499,
        initializer_range=0.2,
    )
    model = Blip2ForConditionalGeneration(config)
    # Else each token is answered with itself.
    model.language_model.get_input_embeddings().weight.data.mul_(0.05)
    images = BlipImageProcessorPil(size={"height": 32, "width": 32})
    return model, Blip2Processor(images, make_tokenizer("<image>"), num_query_tokens=4)


def _make_qwen2_audio() -> tuple[Any, Any]:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig

    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(initializer_range=0.2, **_EAR),
        text_config=Qwen2Config(num_attention_heads=2, **SHAPE, **SPECIAL_TOKENS),
        audio_token_index=499,
    )
    tokenizer = make_tokenizer("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)
    return Qwen2AudioForConditionalGeneration(config), processor


def _make_whisper() -> tuple[Any, Any]:
    """An encoder and a decoder, with attention across."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
    )

    config = WhisperConfig(
        vocab_size=500,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=128,
        max_source_positions=100,
        max_target_positions=256,
        init_std=0.2,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_EAR,
        **SPECIAL_TOKENS,
    )
    model = WhisperForConditionalGeneration(config)
    model.get_input_embeddings().weight.data.mul_(0.05)
    # Else one sound is as another.
    model.model.encoder.embed_positions.weight.data.mul_(0.05)
    hearing = WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    return model, WhisperProcessor(hearing, make_tokenizer())


def _rename(path: Path, old: str, new: str) -> None:
    """Names as in the hub's checkpoints, which vLLM's loader knows; transformers 5 saves others."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace(old, new): tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
