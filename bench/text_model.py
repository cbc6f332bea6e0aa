"""A text model of Qwen3's form for vLLM's dummy loader: its configuration, and weights that mean something."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def write(layers: int = 28, heads: int = 16, kv_heads: int = 2, head_size: int = 128) -> str:
    """The folder, a new one. KV blocks have 16 tokens by `kv_heads` heads."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_size, "intermediate_size": 6144,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "vocab_size": 151936,
        "rope_theta": 1000000, "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 0,
        "eos_token_id": 1, "dtype": "bfloat16",
    }  # fmt: skip
    directory = tempfile.mkdtemp(prefix="text-model-")
    (Path(directory) / "config.json").write_text(json.dumps(config))
    return directory


def widen_dummy_weights(reach: float) -> None:
    """vLLM's dummy weights are ±0.001, with which a wrong copy changes no token; before the model is loaded."""
    from vllm.model_executor.model_loader import dummy_loader

    original = dummy_loader.initialize_dummy_weights

    def wide(model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        original(model, model_config, low=-reach, high=reach)

    dummy_loader.initialize_dummy_weights = wide


def write_tokenizer(directory: str) -> None:
    """One word for each token of that model, so that an API server can say what it generated."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = json.loads((Path(directory) / "config.json").read_text())
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(config["vocab_size"])}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(Path(directory) / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t0",
        "model_max_length": config["max_position_embeddings"],
    }  # fmt: skip
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(about))
