"""Requests per second of a real vLLM whose KV cache is offloaded to the CPU, with kv-swap off and on in turn.

    python bench/serve_kv_offload.py --json bench/results/kv_offload.json

One engine serves all measurements; the fix is switched between passes (A B A B). It is timed from its first step, with
all requests queued: a server's front end, which prepares them, is a process of its own. Two kinds of passes:

load: prompts that share nothing; their KV blocks fit the CPU cache and not the GPU cache, so that each pass loads every
    prompt's blocks from the CPU, and stores none.
store: as many prompts as the GPU cache holds, whose blocks are there; the CPU cache has been told to forget everything,
    so that each pass stores every block and loads none. It ends when the last block has arrived.

The tokens of each arm are compared with those of a pass that computed every block; those of what was stored, after it
has been loaded again. Weights are random, and wide enough that a wrong block gives other tokens; but batches are put
together otherwise when blocks arrive sooner, and a product in bfloat16 then rounds otherwise, so of two tokens that are
nearly equally likely either may come: each difference is recorded with the gap in log probability between the two
likeliest tokens of the pass that computed. A third arm, `on, in order`, is not timed and waits for all GPU work before
each swap: what differs there too is no race.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the switch is in this process
os.environ.setdefault("H2D_PATCH", "1")

import record
import text_model
import torch

ARMS = ("off", "on")
IN_ORDER = "on, in order"
NEW_TOKENS = 2  # what the first step stores is under way when the second begins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, default=2, help="1 to 16: so many times 4 KiB for each K or V block")
    parser.add_argument("--layers", type=int, default=80, help="80: the KV cache of a 70B model on one GPU of several")
    parser.add_argument("--json", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--gpu-prompts", type=int, default=10, help="prompts whose KV blocks the GPU cache holds")
    parser.add_argument("--passes", type=int, default=8, help="of each kind and arm")
    parser.add_argument("--weights", type=float, default=0.05, help="random weights reach from minus to plus this")
    options = parser.parse_args()
    text_model.widen_dummy_weights(options.weights)
    from vllm import LLM, SamplingParams

    bytes_a_token = options.layers * 2 * options.kv_heads * 128 * 2
    llm = LLM(
        model=text_model.write(layers=options.layers, kv_heads=options.kv_heads),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=options.tokens + 64,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=options.gpu_prompts * (options.tokens // 16 + 2),
        # GiB: room for half as many again
        kv_offloading_size=-(-3 * bytes_a_token * options.tokens * options.prompts // (2 << 30)),
        kv_offloading_backend="native",
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL",  # also of the last tokens of a prompt whose blocks are there
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        },
        disable_log_stats=True,
    )
    bench = Bench(llm, options, SamplingParams)
    passes = {"load": bench.load(), "store": bench.store()}
    record.write(
        options.json,
        {
            "what": f"{options.prompts} prompts of {options.tokens} tokens, {NEW_TOKENS} new ones, "
            "KV blocks loaded or stored",
            "kv_block_bytes": bench.block_bytes(),
            "settings": {name: value for name, value in vars(options).items() if name != "json"},
            "passes": passes,
            "gaps_of_all_computed_tokens": bench.gaps(),
            "process": bench.state(),
            "complete": True,
        },
    )


class Bench:
    def __init__(self, llm: Any, options: argparse.Namespace, parameters: Callable[..., Any]) -> None:
        from h2d_patch import process

        assert process.current is not None, "h2d_patch did not register: is its dist-info where Python finds it?"
        self._current = process.current
        self._switch = process.current.switches["kv-swap"]
        self._patches = [p for p in process.current.patches if p.fix.id == "kv-swap" and p.undo is not None]
        assert self._patches, [patch.state() for patch in process.current.patches]
        self._swaps = {patch: patch.site.swap_blocks for patch in self._patches if hasattr(patch.site, "swap_blocks")}
        self._engine, self._passes = llm.llm_engine, options.passes
        self._numbers = itertools.count()
        numbers = random.Random(0)
        self._prompts = [
            {"prompt_token_ids": [numbers.randrange(1000, 100_000) for _ in range(options.tokens)]}
            for _ in range(options.prompts)
        ]
        self._in_gpu = options.gpu_prompts - 2
        common = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
        self._sampling, self._with_logprobs = parameters(**common), parameters(**common, logprobs=2)
        self._use("off")
        self._computed = [_tokens_and_gaps(output) for output in self._run(self._prompts, self._with_logprobs)[1]]

    def load(self) -> dict[str, Any]:
        def one_pass() -> tuple[float, list[Any]]:
            return self._run(self._prompts)

        return self._measure("load", one_pass, range(len(self._prompts)))

    def store(self) -> dict[str, Any]:
        """What was stored is loaded at the end, for each arm."""
        chosen = self._prompts[: self._in_gpu]
        self._run(chosen)

        def one_pass() -> tuple[float, list[Any]]:
            self._forget()
            return self._run(chosen)

        def stored_and_loaded() -> list[Any]:
            """Computed on the GPU, stored, driven out of the GPU cache by the others, and loaded."""
            self._run(chosen)
            one_pass()
            self._run(self._prompts[self._in_gpu :])
            return self._run(chosen)[1]

        found = self._measure("store", one_pass, range(self._in_gpu))
        found["tokens_after_loading_again"] = {}
        for arm in ARMS:
            self._use(arm)
            found["tokens_after_loading_again"][arm] = self._differences(range(self._in_gpu), stored_and_loaded())
        print("store: tokens that differ, loaded again:", found["tokens_after_loading_again"], flush=True)
        return found

    def block_bytes(self) -> list[int]:
        """The sizes that the release's function has been called with."""
        seen: set[int] = set()

        def seeing(swap: Callable[..., Any]) -> Callable[..., Any]:
            def see(original: Any, src: Any, dst: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
                seen.update(sizes.tolist())
                return swap(original, src, dst, sizes, *args, **kwargs)

            return see

        self._use("on")
        for patch, swap in self._swaps.items():
            patch.site.bind("swap_blocks", seeing(swap))
        self._run(self._prompts)
        return sorted(seen)

    def gaps(self) -> list[float]:
        return sorted(gap for pairs in self._computed for _, gap in pairs)

    def state(self) -> Any:
        return self._current.state()

    def _measure(self, kind: str, one_pass: Callable[[], tuple[float, list[Any]]], asked: range) -> dict[str, Any]:
        for arm in (*ARMS, *ARMS):
            self._use(arm)
            one_pass()
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        differences: dict[str, list[Any]] = {arm: [] for arm in (*ARMS, IN_ORDER)}
        before = [patch.state() for patch in self._patches]
        for number in range(self._passes):
            for arm in ARMS if number % 2 else ARMS[::-1]:
                self._use(arm)
                took, outputs = one_pass()
                rates[arm].append(round(len(asked) / took, 2))
                differences[arm] += [{"pass": number, **one} for one in self._differences(asked, outputs)]
        after = [patch.state() for patch in self._patches]
        self._use(IN_ORDER)
        differences[IN_ORDER] += self._differences(asked, one_pass()[1])
        found = {
            "prompts": len(asked),
            "requests_per_s": rates,
            "median_requests_per_s": {arm: statistics.median(rate) for arm, rate in rates.items()},
            "on_against_off": {
                "requests_per_s": record.paired_ratios(zip(rates["off"], rates["on"], strict=True)),
            },
            "tokens_compared_of_each_arm": self._passes * len(asked) * NEW_TOKENS,
            "tokens_that_differ_from_computed": differences,
            "patches_before": before,
            "patches_after": after,
        }
        ratios = found["on_against_off"]["requests_per_s"]
        print(kind, found["median_requests_per_s"], ratios["median"], ratios["interval_95"], flush=True)
        print(f"{kind}: tokens that differ:", {arm: len(each) for arm, each in differences.items()}, flush=True)
        return found

    def _use(self, arm: str) -> None:
        self._switch.turn(arm != "off")
        for patch, swap in self._swaps.items():
            patch.site.bind("swap_blocks", _in_order(swap) if arm == IN_ORDER else swap)

    def _run(self, prompts: list[Any], parameters: Any = None) -> tuple[float, list[Any]]:
        names = [str(next(self._numbers)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, prompt, parameters or self._sampling)
        finished = {}
        torch.cuda.synchronize()
        start = time.perf_counter()
        while self._engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in self._engine.step() if output.finished})
        torch.cuda.synchronize()  # what is stored has arrived
        return time.perf_counter() - start, [finished[name].outputs[0] for name in names]

    def _forget(self) -> None:
        """Have the CPU cache hold nothing; the GPU cache stays as it is."""
        self._run([{"prompt_token_ids": [1, 2, 3]}])  # in whose steps the engine hears of all that has arrived
        core = self._engine.engine_core.engine_core
        assert core.scheduler.connector.reset_cache() is not False

    def _differences(self, asked: range, outputs: list[Any]) -> list[dict[str, Any]]:
        """The first token of each prompt that differs from the computed one; what follows it follows from it."""
        found = []
        for prompt, output in zip(asked, outputs, strict=True):
            for position, ((token, gap), other) in enumerate(
                zip(self._computed[prompt], output.token_ids, strict=True)
            ):
                if token != other:
                    found.append({"prompt": prompt, "position": position, "gap_of_computed": gap})
                    break
        return found


def _in_order(swap: Callable[..., Any]) -> Callable[..., Any]:
    def in_order(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        return swap(*args, **kwargs)

    return in_order


def _tokens_and_gaps(output: Any) -> list[tuple[int, float]]:
    """Each token, and how much more likely it was than the next likeliest, in log probability."""
    pairs = []
    for token, likely in zip(output.token_ids, output.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
        pairs.append((token, round(best - second, 4)))
    return pairs


if __name__ == "__main__":
    main()
