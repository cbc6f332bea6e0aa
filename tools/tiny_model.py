"""Write a tiny Qwen3-VL that vLLM serves: configuration, tokenizer, processors, and weights.

    python tools/tiny_model.py DIR

Run it with the Python of an environment that has torch and transformers (tools/live_env.py makes one). The weights are
random and the same every time. They are uniform in ±0.25, not the ±0.001 of vLLM's dummy loader, with which every
prompt gives the same tokens: here the tokens depend on the pixels and on every position, so equal tokens mean that
equal bytes were copied.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

SEED = 20
WEIGHT_RANGE = 0.25
VOCABULARY = 320  # 297 byte pairs, 8 special ones, rounded up to what vLLM pads to
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level BPE tokenizer; returns the ids of the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["describe the picture in detail please the quick brown fox"] * 3, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 4096,
            "extra_special_tokens": {},
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return {token: tokenizer.token_to_id(token) for token in SPECIAL}


def write_processors(folder: Path) -> None:
    """Images and videos of at most 192 by 192 pixels: larger ones only make vLLM's start-up profiling longer."""
    common = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 192 * 192},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    write_json(folder / "preprocessor_config.json", {**common, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(folder / "video_preprocessor_config.json", {**common, "video_processor_type": "Qwen3VLVideoProcessor"})


def configuration(ids: dict[str, int]) -> Qwen3VLConfig:
    """Two of everything that tensor parallelism divides; heads of 64, since vLLM's CPU attention wants 32 or more."""
    hidden = 64
    return Qwen3VLConfig(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        text_config={
            "hidden_size": hidden,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "rope_theta": 5000000,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "deepstack_visual_indexes": [0, 1, 2],
            "out_hidden_size": hidden,
            "num_position_embeddings": 2304,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    )


def write_weights(folder: Path, config: Qwen3VLConfig) -> None:
    """config.json and model.safetensors."""
    torch.manual_seed(SEED)
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # those stay 1: small ones flatten attention and logits alike
                parameter.uniform_(-WEIGHT_RANGE, WEIGHT_RANGE)
    model.generation_config.eos_token_id = None  # a random model would stop anywhere
    model.save_pretrained(folder)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_model(folder: Path) -> None:
    """The whole model directory, put in place at once."""
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        half = Path(scratch) / "model"
        half.mkdir()
        ids = write_tokenizer(half)
        write_processors(half)
        write_weights(half, configuration(ids))
        half.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_model(Path(sys.argv[1]).absolute())
