"""Requests per second of a real vLLM whose KV cache is offloaded to the CPU, with kv-swap off and on in turn.

    python bench/serve_kv_offload.py --json bench/results/kv_offload.json

One engine serves all measurements; the fix is switched between passes (A B A B). Prompts share nothing; their KV blocks
fit the CPU cache and not the GPU cache, so that each pass loads every prompt's blocks from the CPU. The tokens of both
arms are compared with those of a pass that computed every block. Weights are random, and wide enough that a wrong block
gives other tokens; but batches are put together otherwise when blocks arrive sooner, and a product in bfloat16 then
rounds otherwise, so of two tokens that are nearly equally likely either may come: each difference is recorded with the
gap in log probability between the two likeliest tokens of the pass that computed. A third arm, `on, in order`, waits
for all GPU work before each swap: what differs there too is no race.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the switch is in this process
os.environ.setdefault("H2D_PATCH", "1")

import record
import text_model
import torch

ARMS = ("off", "on", "on, in order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, default=2, help="2, 4 or 8: blocks of 8, 16 or 32 KiB")
    parser.add_argument("--json", required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--gpu-prompts", type=int, default=14, help="prompts whose KV blocks the GPU cache holds")
    parser.add_argument("--passes", type=int, default=6, help="of each arm")
    parser.add_argument("--weights", type=float, default=0.05, help="random weights reach from minus to plus this")
    options = parser.parse_args()
    text_model.widen_dummy_weights(options.weights)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=text_model.write(kv_heads=options.kv_heads),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=options.tokens + 64,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=options.gpu_prompts * (options.tokens // 16 + 2),
        kv_offloading_size=8,
        kv_offloading_backend="native",
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        },
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
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=2)

    def one_pass(parameters: Any = sampling) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - start, [output.outputs[0] for output in outputs]

    site = patches[0].site
    swap = site.swap_blocks

    def in_order(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        return swap(*args, **kwargs)

    def use(arm: str) -> None:
        switch.turn(arm != "off")
        site.bind("swap_blocks", in_order if arm == "on, in order" else swap)

    use("off")
    computed = [_tokens_and_gaps(output) for output in one_pass(with_logprobs)[1]]
    for arm in (*ARMS, *ARMS):
        use(arm)
        one_pass()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    differences: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    before = [patch.state() for patch in patches]
    for number in range(options.passes):
        for arm in ARMS:
            use(arm)
            took, outputs = one_pass()
            seconds[arm].append(round(took, 4))
            found = _differences(computed, outputs)
            differences[arm] += [{"pass": number, **difference} for difference in found]
            print(f"{arm:12s} {options.prompts / took:7.1f} requests/s, tokens that differ: {found}", flush=True)
    rates = {arm: [round(options.prompts / took, 2) for took in times] for arm, times in seconds.items()}
    ratios = [round(on / off, 3) for off, on in zip(rates["off"], rates["on"], strict=True)]
    gaps = sorted(gap for pairs in computed for _, gap in pairs)
    medians: dict[str, Any] = {arm: statistics.median(rate) for arm, rate in rates.items()}
    record.write(
        options.json,
        {
            "what": f"{options.prompts} prompts of {options.tokens} tokens, 2 new ones, KV blocks loaded from the CPU",
            "kv_block_bytes": 16 * options.kv_heads * 128 * 2,
            "requests_per_s": rates,
            "median_requests_per_s": medians,
            "paired_ratios": ratios,
            "median_ratio": statistics.median(ratios),
            "tokens_compared_of_each_arm": options.passes * options.prompts * 2,
            "tokens_that_differ_from_computed": differences,
            "patches_before": before,
            "patches_after": [patch.state() for patch in patches],
            "gaps_of_all_computed_tokens": gaps,
            "process": process.current.state(),
        },
    )
    print(medians, "ratio", statistics.median(ratios), flush=True)


def _tokens_and_gaps(output: Any) -> list[tuple[int, float]]:
    """Each token, and how much more likely it was than the next likeliest, in log probability."""
    pairs = []
    for token, likely in zip(output.token_ids, output.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
        pairs.append((token, round(best - second, 4)))
    return pairs


def _differences(computed: list[list[tuple[int, float]]], outputs: list[Any]) -> list[dict[str, Any]]:
    """The first token of each prompt that differs from the computed one; what follows it follows from it."""
    found = []
    for prompt, (expected, output) in enumerate(zip(computed, outputs, strict=True)):
        for position, ((token, gap), other) in enumerate(zip(expected, output.token_ids, strict=True)):
            if token != other:
                found.append({"prompt": prompt, "position": position, "gap_of_computed": gap})
                break
    return found


if __name__ == "__main__":
    main()
