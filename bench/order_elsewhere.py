"""Pooling models and pipeline parallelism: are outputs right when the H2D fixes take the waits out of a step?

    python bench/order_elsewhere.py --json bench/results/order_pooling.json --only pooling    (pipeline needs two GPUs)

vLLM rewrites pinned buffers (token ids, positions, block tables) at each step and copies them asynchronously.
Something must keep the next step from rewriting them too early: vLLM's event, which exists under asynchronous
scheduling only; the read of the sampled tokens, which pooling models and all but the last pipeline rank do not make;
or, by accident, a pageable copy that waits. The fixes remove the last. Here 30 ms of work are queued ahead of each
step's copies, so that a missing guard shows for certain. Each configuration (pooling, or generation on two pipeline
ranks; asynchronous scheduling off and on) runs one engine in which the fixes are switched:

    off | on                no queued work
    off | on, N ms          N ms queued ahead of each step
    off | on, in order      the GPU is waited for before each step: what differs here is rounding, and no race
    spoiled BUFFER          the same, that buffer backwards in each step: shows that a wrong one gives wrong outputs

The reference is the engine with the fixes off, one request at a time, in order. For each arm: the outputs that are
wrong, how often the fixed copies ran, how many steps began to rewrite buffers before the last step's copies were over,
and how many steps waited for the GPU. A process that the race kills is recorded and started again for the other arms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child_process

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent), str(BENCH.parent / "tools")]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "pooling, async off": {"pooling": True, "ranks": 1, "async": False},
    "pooling, async on": {"pooling": True, "ranks": 1, "async": True},
    "pipeline of 2, async off": {"pooling": False, "ranks": 2, "async": False},
    "pipeline of 2, async on": {"pooling": False, "ranks": 2, "async": True},
    "pooling, pipeline of 2, async off": {"pooling": True, "ranks": 2, "async": False},
}
KINDS = {
    "pooling": [name for name, found in CONFIGURATIONS.items() if found["pooling"] and found["ranks"] == 1],
    "pipeline": [name for name, found in CONFIGURATIONS.items() if found["ranks"] == 2],
}
DTYPES = (("float32", "TRITON_ATTN"), ("bfloat16", None))  # float32 leaves no near ties; FlashAttention has none
CHUNK = 96  # tokens of one request in a step
STEP = 4 * CHUNK
LAYERS = 8  # Qwen3-VL takes all vision features (3 levels) in on the first pipeline rank
SIDE = 512  # pixels: 1 024 patches of 1 536 numbers, 3 or 6 MiB an image; copies up to 2 MiB do not wait
WORDS = ["describe", "the", "picture", "in", "detail", "please", "quick", "brown", "fox"]
FLOOR = 1e-5  # 1 − cosine below which no embedding is called wrong
STARTED = time.monotonic()


def say(*parts: Any) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s]", *parts, flush=True)


def arms(sleep_ms: float, passes: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for on in (False, True):
        found[f"{'on' if on else 'off'}, in order"] = {"on": on, "sleep_ms": 0.0, "in_order": True}
    for buffer in ("input_ids", "mrope_positions"):
        found[f"spoiled {buffer}"] = {"on": False, "sleep_ms": 0.0, "in_order": True, "spoil": buffer}
    for sleep in (0.0, sleep_ms):
        for number in range(passes):  # A B A B
            for on in (False, True):
                name = f"{'on' if on else 'off'}{f', {sleep:g} ms' if sleep else ''} #{number + 1}"
                found[name] = {"on": on, "sleep_ms": sleep, "in_order": False}
    return found


# -- the process with the engine --------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    """One engine, one configuration: a JSON line for each thing done."""
    chosen = CONFIGURATIONS[options.child]
    tell = child_process.teller(options.events)
    start = time.perf_counter()
    llm = engine(options, chosen)
    tell("engine", seconds=round(time.perf_counter() - start, 1), workers=llm.collective_rpc("probe_install"))
    prompts = requests(options.requests)

    def run(arm: dict[str, Any], one_at_a_time: bool = False) -> tuple[list[Any], list[dict[str, Any]], float]:
        llm.collective_rpc("probe_use", args=(arm["on"], arm["sleep_ms"], arm["in_order"], arm.get("spoil", "")))
        start = time.perf_counter()
        batches = [[prompt] for prompt in prompts] if one_at_a_time else [prompts]
        outputs = [output for batch in batches for output in ask(llm, chosen, batch, one_at_a_time)]
        return outputs, llm.collective_rpc("probe_read"), time.perf_counter() - start

    unfixed = {"on": False, "sleep_ms": 0.0, "in_order": True}
    ask(llm, chosen, prompts, False)  # what is compiled or allocated at first use
    reference, workers, seconds = run(unfixed, one_at_a_time=True)
    lengths = [output["prompt_tokens"] for output in reference]
    tell("reference", seconds=round(seconds, 2), prompt_tokens=lengths, workers=workers)
    for name, arm in arms(options.sleep_ms, options.passes).items():
        if name in options.skip:
            continue
        tell("begin", arm=name)
        outputs, workers, seconds = run(arm)
        tell("arm", arm=name, seconds=round(seconds, 2), workers=workers, **compare(reference, outputs))
    tell("done")


def engine(options: argparse.Namespace, chosen: dict[str, Any]) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": 2560,
        "max_num_seqs": 8,
        "max_num_batched_tokens": STEP,
        "long_prefill_token_threshold": CHUNK,
        "enable_chunked_prefill": True,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 3, "video": 0},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,  # with neither cache every pass runs the vision encoder again
        "async_scheduling": chosen["async"],
        "pipeline_parallel_size": chosen["ranks"],
        "worker_extension_cls": "step_probe.StepProbe",
        "disable_log_stats": True,
    }
    if options.on_gpu:
        arguments |= {"gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 4096}
        if options.backend:
            arguments["attention_backend"] = options.backend
            arguments["mm_encoder_attn_backend"] = options.backend  # torch's own waits for the GPU itself
    if chosen["ranks"] > 1:
        arguments["distributed_executor_backend"] = "mp"
    if chosen["pooling"]:
        arguments |= {"runner": "pooling", "convert": "embed"}
    return LLM(**arguments)


def requests(number: int) -> list[dict[str, Any]]:
    """Long prompts with an image at the start, in the middle or late, so that copies of images fall in many steps."""
    from PIL import Image

    numbers = random.Random(5)

    def text(tokens: int) -> str:
        return " ".join(numbers.choice(WORDS) for _ in range(tokens))

    def picture(shade: int) -> Any:
        width, height = SIDE - 32 * (shade % 3), SIDE
        image = Image.new("RGB", (width, height))
        pixels = [
            ((x * 7 + shade) % 256, (y * 5 + shade) % 256, (x * y) % 256) for y in range(height) for x in range(width)
        ]
        image.putdata(pixels)
        return image

    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    found: list[dict[str, Any]] = []
    for index in range(number):
        before = numbers.randrange(0, 400)
        parts, images = [text(before), slot, text(numbers.randrange(100, 400))], [picture(3 * index)]
        if index % 3 == 0:
            parts += [slot, text(numbers.randrange(50, 300))]
            images.append(picture(3 * index + 1))
        if index % 5 == 4:
            found.append({"prompt": text(numbers.randrange(500, 900))})
        else:
            found.append({"prompt": " ".join(parts), "multi_modal_data": {"image": images}})
    return found


def ask(llm: Any, chosen: dict[str, Any], prompts: list[Any], with_gaps: bool) -> list[dict[str, Any]]:
    if chosen["pooling"]:
        outputs = llm.embed(prompts, use_tqdm=False)
        return [{"prompt_tokens": len(o.prompt_token_ids), "embedding": o.outputs.embedding} for o in outputs]
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2 if with_gaps else None)
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        completion = output.outputs[0]
        gaps = []
        for likely in completion.logprobs or ():
            best, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
            gaps.append(round(best - second, 4))
        tokens = list(completion.token_ids)
        found.append({"prompt_tokens": len(output.prompt_token_ids), "tokens": tokens, "gaps": gaps})
    return found


def compare(reference: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of each embedding, or the first token of each request that differs and how near a tie it was."""
    import torch

    if "embedding" in reference[0]:
        errors = []
        for expected, found in zip(reference, outputs, strict=True):
            a = torch.tensor(expected["embedding"], dtype=torch.float64)
            b = torch.tensor(found["embedding"], dtype=torch.float64)
            cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
            errors.append({"one_minus_cosine": 1 - cosine, "max_abs": (a - b).abs().max().item()})
        return {"errors": errors}
    differences: list[dict[str, Any]] = []
    for request, (expected, found) in enumerate(zip(reference, outputs, strict=True)):
        pairs = enumerate(zip(expected["tokens"], found["tokens"], strict=True))
        position = next((position for position, (a, b) in pairs if a != b), None)
        if position is not None:
            gap = expected["gaps"][position]
            differences.append({"request": request, "position": position, "gap_of_reference": gap})
    return {"differences": differences, "requests": len(reference)}


# -- the process that starts the others -------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace, model: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs one configuration, again after a crash; yields what is known after each arm."""
    found: dict[str, Any] = {"configuration": CONFIGURATIONS[name], "launches": [], "arms": {}}
    wanted = arms(options.sleep_ms, options.passes)
    kinds = list(DTYPES) if options.dtype is None else [kind for kind in DTYPES if kind[0] == options.dtype]
    for _ in range(options.launches + len(kinds) - 1):
        missing = [arm for arm in wanted if arm not in found["arms"]]
        if not missing or not kinds or time.monotonic() - STARTED > options.total - 60:
            break
        dtype, backend = kinds[0]
        command = [sys.executable, __file__, "--json", "", "--child", name, "--model", model]
        command += ["--dtype", dtype, "--backend", backend or "", "--sleep-ms", str(options.sleep_ms)]
        command += ["--passes", str(options.passes), "--requests", str(options.requests), "--skip", *found["arms"]]
        run: dict[str, Any] = {"dtype": dtype, "attention_backend": backend if on_gpu() else "the CPU's"}
        found["launches"].append(run)
        begun: str | None = None
        for event in child_process.events(command, environment(folder), folder, options.timeout):
            kind = event.pop("event")
            if kind == "begin":
                begun = event["arm"]
                continue
            label = kind
            if kind == "arm":
                label, begun = event.pop("arm"), None
                found["arms"][label] = event
            else:
                run[kind] = event
            say(name, "|", label, "|", summary(kind, event))
            yield found
        if run["exit"]["status"] == 0:
            continue
        if "engine" not in run:
            kinds.pop(0)  # this type does not start here
        elif begun is not None:
            found["arms"][begun] = {"crashed": run["exit"]["last_lines"]}
        yield found


def environment(folder: Path) -> dict[str, str]:
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        **loopback,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH")])),
        "H2D_PATCH": "1",
        "H2D_PATCH_RUN_DIR": str(folder / "run"),
        "H2D_BENCH_KEEP_ON": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 is another matter: it builds its positions on the GPU
    }


def summary(kind: str, event: dict[str, Any]) -> str:
    if kind == "engine":
        guards = [worker["guarded_by_event"] for worker in event["workers"]]
        return f"{event['seconds']} s, guarded by an event: {guards}"
    if kind == "reference":
        return f"{event['seconds']} s, {sum(event['prompt_tokens'])} tokens"
    if kind == "exit":
        return f"{event['status']} {event['errors'][:3]}"
    if kind != "arm":
        return ""
    worst = max((error["one_minus_cosine"] for error in event.get("errors", ())), default=None)
    what = f"1 − cosine up to {worst:.2e}" if worst is not None else f"tokens that differ: {event['differences']}"
    keys = ("steps", "steps_begun_before_the_last_one's_copies", "steps_that_waited_for_the_gpu", "host_ms_of_a_step")
    counts = [[worker[key] for key in keys] + [sum(worker["calls"].values())] for worker in event["workers"]]
    return f"{what}; steps, begun early, waited, host ms, calls of each rank: {counts}"


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """For each arm: wrong of total, worst error, calls, and the two counts that explain them."""
    controls = [arm for name, arm in found["arms"].items() if name == "off, in order" and "crashed" not in arm]
    errors = [error["one_minus_cosine"] for arm in controls for error in arm.get("errors", ())]
    tolerance = max(FLOOR, 20 * max(errors, default=0.0))
    rows: dict[str, Any] = {}
    for name, arm in found["arms"].items():
        if "crashed" in arm:
            rows[name] = {"wrong": "the process died"}
            continue
        row: dict[str, Any] = {}
        if "errors" in arm:
            row["wrong"] = sum(error["one_minus_cosine"] > tolerance for error in arm["errors"])
            row["of"] = len(arm["errors"])
            row["max_one_minus_cosine"] = max(error["one_minus_cosine"] for error in arm["errors"])
            row["max_abs"] = max(error["max_abs"] for error in arm["errors"])
        else:
            gaps = [difference["gap_of_reference"] for difference in arm["differences"]]
            row |= {"wrong": len(gaps), "of": arm["requests"], "max_gap_of_a_wrong_token": max(gaps, default=0.0)}
        for worker in arm["workers"]:
            row[f"rank {worker['rank']}"] = {
                "calls": sum(worker["calls"].values()),
                "steps": worker["steps"],
                "begun_early": worker["steps_begun_before_the_last_one's_copies"],
                "waited": worker["steps_that_waited_for_the_gpu"],
            }
        rows[name] = row
    guards = [
        worker["guarded_by_event"]
        for run in found["launches"]
        if "engine" in run
        for worker in run["engine"]["workers"]
    ]
    return {
        "guarded_by_event": guards,
        "called_wrong_above_one_minus_cosine": tolerance if errors else None,
        "arms": rows,
    }


def write_model(folder: Path) -> None:
    """tools/tiny_model.py's Qwen3-VL with more layers and larger images."""
    import tiny_model

    ids = tiny_model.write_tokenizer(folder)
    tiny_model.write_processors(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        content = json.loads((folder / name).read_text())
        content["size"]["longest_edge"] = SIDE * SIDE
        tiny_model.write_json(folder / name, content)
    small = tiny_model.configuration(ids)
    text = {**small.text_config.to_dict(), "num_hidden_layers": LAYERS, "layer_types": None}
    vision = {**small.vision_config.to_dict(), "num_heads": 2}  # Triton's attention wants heads of 32 or more
    whole = {**small.to_dict(), "text_config": text, "vision_config": vision}
    tiny_model.write_weights(folder, type(small)(**whole))
    content = json.loads((folder / "config.json").read_text())
    # What the check for pipeline parallelism asks the language model for.
    content["text_config"]["architectures"] = ["Qwen3ForCausalLM"]
    tiny_model.write_json(folder / "config.json", content)


def on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", choices=[*KINDS, *CONFIGURATIONS], nargs="+", default=list(KINDS))
    parser.add_argument("--sleep-ms", type=float, default=30.0, help="work queued ahead of each step")
    parser.add_argument("--passes", type=int, default=2, help="of each arm that is no control")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one engine")
    parser.add_argument("--total", type=float, default=540.0, help="seconds after which no engine is started")
    parser.add_argument("--launches", type=int, default=3, help="of one configuration, if its process dies")
    parser.add_argument("--dtype", choices=[dtype for dtype, _ in DTYPES], help="float32, then bfloat16, if left out")
    for name in ("--child", "--model", "--events", "--backend"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.on_gpu = on_gpu()
        child(options)
        return
    import record
    import torch

    gpus = torch.cuda.device_count()
    result: dict[str, Any] = {"sleep_ms": options.sleep_ms, "judged": {}, "configurations": {}, "skipped": {}}
    with tempfile.TemporaryDirectory(prefix="order-") as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        (Path(scratch) / "logs").mkdir()
        write_model(model)
        say("model written;", gpus, "GPUs")
        for name in [name for only in options.only for name in KINDS.get(only, [only])]:
            ranks = CONFIGURATIONS[name]["ranks"]
            if gpus and gpus < ranks:
                result["skipped"][name] = f"needs {ranks} GPUs, this machine has {gpus}"
            elif time.monotonic() - STARTED > options.total - 60:
                result["skipped"][name] = "no time left"
            else:
                try:
                    for found in measure(name, options, str(model), Path(scratch) / "logs"):
                        result["configurations"][name] = found
                        result["judged"][name] = judged(found)
                        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
                        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
                except Exception as error:
                    result["skipped"][name] = f"an error here: {error!r}"
            if name in result["skipped"]:
                say(name, "|", result["skipped"][name])
            record.write(options.json, result)
    for name, found in result["judged"].items():
        print(name, "guarded by an event:", found["guarded_by_event"])
        for arm, row in found["arms"].items():
            print(f"  {arm:18s}", json.dumps(row))


if __name__ == "__main__":
    main()
