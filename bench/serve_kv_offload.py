"""Requests per second of a real vLLM whose KV cache is offloaded to the CPU, with kv-swap off and on in turn.

    python bench/serve_kv_offload.py --json bench/results/kv_offload.json

One engine serves all measurements; the fix is switched between passes (A B A B). Prompts share nothing; their KV blocks
fit the CPU cache and not the GPU cache, so that each pass loads every prompt's blocks from the CPU. The tokens of both
arms are compared. Weights are random, and wide enough that a wrong block gives other tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the switch is in this process
os.environ.setdefault("H2D_PATCH", "1")

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, default=2, help="2, 4 or 8: blocks of 8, 16 or 32 KiB")
    parser.add_argument("--json", required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=6, help="of each arm")
    parser.add_argument("--weights", type=float, default=0.05, help="random weights reach from minus to plus this")
    options = parser.parse_args()
    _widen_dummy_weights(options.weights)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=_model(options.kv_heads),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=options.tokens + 64,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=3 * options.tokens // 16,
        kv_offloading_size=8,
        kv_offloading_backend="native",
        enforce_eager=True,
        disable_log_stats=True,
    )
    from h2d_patch import process

    assert process.current is not None, "h2d_patch did not register: is its dist-info where Python finds it?"
    switch = process.current.switches["kv-swap"]
    patches = [patch for patch in process.current.patches if patch.fix.id == "kv-swap" and patch.undo is not None]
    assert patches, [patch.state() for patch in process.current.patches]
    numbers = random.Random(0)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(1000, 100_000) for _ in range(options.tokens)]}
        for _ in range(options.prompts)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def one_pass() -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    switch.turn(False)
    computed = one_pass()  # nothing cached: these tokens owe nothing to a copied block
    for warm in (False, True, False, True):
        switch.turn(warm)
        one_pass()
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    equal: dict[str, list[bool]] = {"off": [], "on": []}
    before = [patch.state() for patch in patches]
    for _ in range(options.passes):
        for arm in ("off", "on"):
            switch.turn(arm == "on")
            took, tokens = one_pass()
            seconds[arm].append(round(took, 4))
            equal[arm].append(tokens == computed[1])
            print(f"{arm:3s} {options.prompts / took:7.1f} requests/s, tokens equal: {equal[arm][-1]}", flush=True)
    rates = {arm: [round(options.prompts / took, 2) for took in times] for arm, times in seconds.items()}
    ratios = [round(on / off, 3) for off, on in zip(rates["off"], rates["on"], strict=True)]
    medians: dict[str, Any] = {arm: statistics.median(rate) for arm, rate in rates.items()}
    record.write(
        options.json,
        {
            "what": f"{options.prompts} prompts of {options.tokens} tokens, 2 new tokens, KV blocks loaded from the CPU",
            "kv_block_bytes": 16 * options.kv_heads * 128 * 2,
            "requests_per_s": rates,
            "median_requests_per_s": medians,
            "paired_ratios": ratios,
            "median_ratio": statistics.median(ratios),
            "tokens_equal_to_computed": equal,
            "patches_before": before,
            "patches_after": [patch.state() for patch in patches],
            "process": process.current.state(),
        },
    )
    print(medians, "ratio", statistics.median(ratios), flush=True)


def _model(kv_heads: int) -> str:
    """The configuration of a text model of Qwen3's form: 28 layers, KV blocks of 16 tokens × `kv_heads` × 128 bf16."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": 6144,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "vocab_size": 151936,
        "rope_theta": 1000000, "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "dtype": "bfloat16",
    }  # fmt: skip
    directory = tempfile.mkdtemp(prefix="kv-model-")
    (Path(directory) / "config.json").write_text(json.dumps(config))
    return directory


def _widen_dummy_weights(reach: float) -> None:
    """vLLM's dummy weights are ±0.001, with which a wrong copy changes no token."""
    from vllm.model_executor.model_loader import dummy_loader

    original = dummy_loader.initialize_dummy_weights

    def wide(model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        original(model, model_config, low=-reach, high=reach)

    dummy_loader.initialize_dummy_weights = wide


if __name__ == "__main__":
    main()
