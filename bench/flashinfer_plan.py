"""Host time of FlashInfer's plans in a real vLLM, with flashinfer-plan off and on in turn, GPU work queued or not.

    python bench/flashinfer_plan.py --json bench/results/flashinfer_plan.json [--runner v1 | --runner v2]

One engine for each model runner (V2 is the default for the model used here); in it:

    plan    `FlashInferMetadataBuilder.build` of a builder of the engine's own class and configuration, for decode,
            prefill and mixed batches of 8 to 256 requests with contexts of 1 to 32 Ki tokens: alone, or behind other
            pageable copies (60 of 64 KiB; as many as the driver takes without waiting), 0, 2 or 20 ms of work queued;
            and 64 builds in a row behind 40 ms
    right   the attention of each batch after such a build behind 20 ms, its sources overwritten at once, bit by bit
            the same as after a build with the fix off and nothing queued
    serve   requests/s of the engine, host time of its own builds, and its tokens, by arm

FlashInfer compiles its kernels first, which is timed apart; `--prebuilt DIR` uses what was compiled before
(DIR/NAME/NAME.so, as in FlashInfer's own cache, `cached_ops`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child_process
import text_model

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH.parent))

ARMS = (False, True)
PARTS = ("plan", "right", "serve")
HEADS, KV_HEADS, HEAD_SIZE, PAGE = 16, 2, 128, 16
LONGEST = 32768
PAGES = 4096  # of the cache that the attention of `right` reads
REPETITIONS = {0: 60, 2: 40, 20: 25}
STARTED = time.monotonic()


def say(*parts: Any) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s]", *parts, flush=True)


# -- the process with the engine --------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    tell = child_process.teller(options.events)
    import flashinfer.prefill
    import torch
    from vllm.config import set_current_vllm_config

    if options.prefill != "auto":  # its kernels did not compile
        flashinfer.prefill.determine_attention_backend = lambda *args, **kwargs: options.prefill
    start = time.perf_counter()
    llm = engine(options)
    from h2d_patch import process

    assert process.current is not None, "h2d_patch did not register: is its dist-info where Python finds it?"
    patches = [patch for patch in process.current.patches if patch.fix.id == "flashinfer-plan"]
    found: list[Any] = []
    llm.collective_rpc(lambda wrapper: found.append(getattr(wrapper, "worker", wrapper)))
    runner = found[0].model_runner
    own = runner.attn_groups[0][0].get_metadata_builder(0)
    tell(
        "engine",
        seconds=round(time.perf_counter() - start, 1),
        runner=f"{type(runner).__module__}.{type(runner).__qualname__}",
        builder=f"{type(own).__module__}.{type(own).__qualname__}",
        buffers_pinned=own.pin_memory,
        async_scheduling=bool(runner.use_async_scheduling),
        patches=[patch.state() for patch in patches],
    )
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "plan": lambda: plan_rows(plans(found[0], own)),
        "right": lambda: right_rows(plans(found[0], own)),
        "serve": lambda: serve_rows(llm, own, options),
    }
    for part in options.parts:
        try:
            # The engine's first build was made in such a context: the builder asks it for the layout of the cache.
            with contextlib.nullcontext() if part == "serve" else set_current_vllm_config(own.vllm_config):
                for row in parts[part]():
                    tell(part, **row)
        except Exception as error:
            tell("failed", part=part, error=f"{type(error).__name__}: {error}")
            torch.cuda.synchronize()
    tell("patches", patches=[patch.state() for patch in patches])


def turn(on: bool) -> None:
    from h2d_patch import process

    assert process.current is not None
    process.current.switches["flashinfer-plan"].turn(on)


def counts() -> tuple[int, int]:
    """Calls and fallbacks of the fix so far."""
    from h2d_patch import process

    assert process.current is not None
    sites = [patch.site for patch in process.current.patches if patch.fix.id == "flashinfer-plan"]
    return sum(site.calls for site in sites), sum(site.fallbacks for site in sites)


def engine(options: argparse.Namespace) -> Any:
    text_model.widen_dummy_weights(0.05)
    from vllm import LLM

    return LLM(
        model=text_model.write(options.layers, HEADS, KV_HEADS, HEAD_SIZE),
        skip_tokenizer_init=True,
        load_format="dummy",
        attention_backend="FLASHINFER",
        max_model_len=LONGEST + 256,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=8192,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 8, 64, 256],
        },
        disable_log_stats=True,
    )


class Batch:
    """One step's requests as vLLM describes them to a builder: decodes first, then prefills."""

    def __init__(self, name: str, decodes: int, prefills: int, new_tokens: int, graph: bool, plans: Plans) -> None:
        import torch

        self.name = name
        self.graph = graph
        self.plans = plans
        numbers = random.Random(decodes * 1000 + prefills)
        query = [1] * decodes + [new_tokens] * prefills
        lengths = [max(numbers.randrange(1024, LONGEST + 1), tokens) for tokens in query]
        lengths[0] = LONGEST
        self.requests, self.tokens, self.decode_tokens = len(query), sum(query), decodes
        self.max_query, self.max_length = max(query), max(lengths)
        starts = [0]
        for tokens in query:
            starts.append(starts[-1] + tokens)
        pinned = plans.builder.pin_memory
        self.query_start = torch.tensor(starts, dtype=torch.int32)
        self.query_start_cpu = self.query_start.clone().pin_memory() if pinned else self.query_start.clone()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.lengths_cpu = self.lengths.clone().pin_memory() if pinned else self.lengths.clone()
        device = plans.builder.device
        generator = torch.Generator().manual_seed(3)
        self.query_start_gpu = self.query_start.to(device)
        self.lengths_gpu = self.lengths.to(device)
        shape = (self.requests, LONGEST // PAGE + 16)
        self.block_table = torch.randint(0, PAGES, shape, dtype=torch.int32, generator=generator).to(device)
        self.slots = torch.zeros(self.tokens, dtype=torch.int64, device=device)

    def build(self) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.plans.builder.enable_cuda_graph = self.graph
        step = CommonAttentionMetadata(
            query_start_loc=self.query_start_gpu,
            query_start_loc_cpu=self.query_start_cpu,
            seq_lens=self.lengths_gpu,
            num_reqs=self.requests,
            num_actual_tokens=self.tokens,
            max_query_len=self.max_query,
            max_seq_len=self.max_length,
            block_table_tensor=self.block_table,
            slot_mapping=self.slots,
            # Model Runner V2 gives none, and the builder fetches it from the GPU: a wait of vLLM's own.
            _seq_lens_cpu=None if self.plans.v2 else self.lengths_cpu,
        )
        return self.plans.builder.build(0, step)

    def overwrite(self) -> None:
        """Whatever the original plan has copied by the time it returns: the sources it took a snapshot of."""
        import torch

        self.query_start_cpu.fill_(7)
        self.lengths_cpu.fill_(7)
        if not self.plans.builder.pin_memory:
            for name in ("paged_kv_indptr", "paged_kv_last_page_len"):
                getattr(self.plans.builder, name).cpu.fill_(7)
            self.plans.builder.paged_kv_indptr_cpu_buffer.fill_(7)
        self.rubbish = [torch.full((size,), 7, dtype=torch.int32) for size in (self.requests, self.requests + 1) * 8]

    def restore(self) -> None:
        self.query_start_cpu.copy_(self.query_start)
        self.lengths_cpu.copy_(self.lengths)


class Plans:
    """A builder like the engine's, and what is put before its plans."""

    def __init__(self, builder: Any, v2: bool, cycles_per_ms: float) -> None:
        import torch

        self.builder = builder
        self.v2 = v2
        self.cycles_per_ms = cycles_per_ms
        device = builder.device
        self.sources = {size: torch.zeros(size, dtype=torch.uint8) for size in (65536, 4096, 512)}
        self.targets = {size: torch.zeros(size, dtype=torch.uint8, device=device) for size in self.sources}
        self.companies: dict[str, list[tuple[int, int]]] = {"alone": [], "60 copies of 64 KiB": [(60, 65536)]}

    def queue(self, ms: float) -> None:
        import torch

        torch.cuda.synchronize()
        if ms:
            torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def accompany(self, company: list[tuple[int, int]]) -> None:
        for number, size in company:
            for _ in range(number):
                self.targets[size].copy_(self.sources[size], non_blocking=True)

    def find_brink(self) -> list[tuple[int, int]]:
        """As many pageable copies as the driver takes behind queued work before one waits: of 64 KiB, then smaller."""
        company: list[tuple[int, int]] = []
        for size in self.sources:
            self.queue(100)
            self.accompany(company)
            passed = 0
            while passed < 300:
                start = time.perf_counter()
                self.targets[size].copy_(self.sources[size], non_blocking=True)
                if time.perf_counter() - start > 0.01:
                    break
                passed += 1
            if passed:
                company.append((passed, size))
        return company

    def batches(self) -> list[Batch]:
        found = [
            Batch(f"decode {number}{', CUDA graph' if graph else ''}", number, 0, 1, graph, self)
            for graph in (True, False)
            for number in (8, 64, 256)
        ]
        found.append(Batch("prefill 8 of 1024 tokens", 0, 8, 1024, True, self))
        found.append(Batch("mixed 56 + 8 of 512 tokens", 56, 8, 512, True, self))
        found.append(Batch("mixed 240 + 16 of 512 tokens", 240, 16, 512, True, self))
        return found


def plans(worker: Any, own: Any) -> Plans:
    import torch
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(own.vllm_config):
        builder = type(own)(own.kv_cache_spec, own.layer_names, own.vllm_config, own.device)
    builder.set_workspace_buffer(own._get_workspace_buffer())
    cycles = 100_000_000
    for _ in range(2):  # the first one raises the clock
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        took_ms = (time.perf_counter() - start) * 1e3
    return Plans(builder, bool(getattr(worker, "use_v2_model_runner", False)), cycles / took_ms)


def spread(us: list[float]) -> dict[str, Any]:
    ordered = sorted(us)
    return {
        "n": len(ordered),
        "median_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
        "max_us": round(ordered[-1], 1),
        "us": [round(each, 1) for each in us],
    }


def plan_rows(plans: Plans) -> Iterator[dict[str, Any]]:
    """Host time of each batch's build under each condition and arm."""
    batches = plans.batches()
    for batch in batches:  # warm: wrappers, kernels, FlashInfer's first calls
        for on in ARMS:
            turn(on)
            for _ in range(3):
                batch.build()
    plans.find_brink()
    brink = plans.find_brink()
    plans.companies["as many as the driver takes"] = brink
    yield {"brink": [{"copies": number, "bytes": size} for number, size in brink], "v2": plans.v2}
    for batch in batches:
        for queued_ms, repetitions in REPETITIONS.items():
            for name, company in plans.companies.items():
                if company and not queued_ms:
                    continue
                took: dict[bool, list[float]] = {on: [] for on in ARMS}
                ran = {on: [0, 0] for on in ARMS}
                for _ in range(repetitions):
                    for on in ARMS:  # A B A B
                        turn(on)
                        before = counts()
                        plans.queue(queued_ms)
                        plans.accompany(company)
                        start = time.perf_counter()
                        batch.build()
                        took[on].append((time.perf_counter() - start) * 1e6)
                        ran[on] = [was + after - at for was, after, at in zip(ran[on], counts(), before, strict=True)]
                yield {
                    "batch": batch.name,
                    "queued_ms": queued_ms,
                    "company": name,
                    **{arm(on): {**spread(took[on]), "calls": ran[on][0], "fallbacks": ran[on][1]} for on in ARMS},
                }
    for batch in (batches[2], batches[5], batches[-1]):
        rows: dict[bool, list[dict[str, Any]]] = {on: [] for on in ARMS}
        for _ in range(6):
            for on in ARMS:
                turn(on)
                plans.queue(40)
                us = []
                for _ in range(64):
                    start = time.perf_counter()
                    batch.build()
                    us.append((time.perf_counter() - start) * 1e6)
                waited = next((number for number, each in enumerate(us) if each > 5000), None)
                rows[on].append({"total_ms": round(sum(us) / 1e3, 2), "first_that_took_5_ms": waited})
        yield {"batch": batch.name, "queued_ms": 40, "in_a_row": 64, **{arm(on): rows[on] for on in ARMS}}


def arm(on: bool) -> str:
    return "on" if on else "off"


def right_rows(plans: Plans) -> Iterator[dict[str, Any]]:
    """Whether attention after a build behind queued work, its sources overwritten, is what it should be."""
    import torch
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    device = plans.builder.device
    torch.manual_seed(1)
    inner = (PAGE, KV_HEADS) if get_kv_cache_layout() == "NHD" else (KV_HEADS, PAGE)
    cache = torch.randn(PAGES, 2, *inner, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    for batch in plans.batches():
        query = torch.randn(batch.tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)

        def attention(step: Any, batch: Batch = batch, query: Any = query) -> Any:
            output = torch.zeros_like(query)
            split = batch.decode_tokens
            if step.prefill is not None:
                step.prefill.wrapper.run(query[split:], cache, k_scale=1.0, v_scale=1.0, out=output[split:])
            if step.decode is not None:
                step.decode.wrapper.run(query[:split], cache, k_scale=1.0, v_scale=1.0, out=output[:split])
            return output

        turn(False)
        for _ in range(2):
            torch.cuda.synchronize()
            step = batch.build()
            torch.cuda.synchronize()
            expected = attention(step)
        torch.cuda.synchronize()
        row: dict[str, Any] = {"batch": batch.name, "mean_abs": expected.abs().float().mean().item()}
        for on in ARMS:
            turn(on)
            worst, same, overtaken = 0.0, 0, 0
            for _ in range(3):
                plans.queue(20)
                behind = torch.cuda.Event()
                behind.record()
                step = batch.build()
                overtaken += not behind.query()
                batch.overwrite()
                found = attention(step)
                torch.cuda.synchronize()
                batch.restore()
                same += bool(torch.equal(found, expected))
                worst = max(worst, (found - expected).abs().max().item())
            row[arm(on)] = {"equal": same, "of": 3, "max_abs": worst, "returned_before_the_queued_work": overtaken}
        # That the comparison sees a wrong plan: lengths half as long.
        batch.lengths_cpu.copy_(torch.clamp(batch.lengths // 2, min=batch.max_query))
        turn(False)
        lengths, batch.lengths_gpu = batch.lengths_gpu, batch.lengths_cpu.to(device)
        step = batch.build()
        row["a_wrong_plan_is_equal"] = bool(torch.equal(attention(step), expected))
        torch.cuda.synchronize()
        batch.lengths_gpu = lengths
        batch.restore()
        backend = {name: getattr(getattr(step, name), "wrapper", None) for name in ("prefill", "decode")}
        row["kernels"] = {name: wrapper._backend for name, wrapper in backend.items() if wrapper is not None}
        yield row


def serve_rows(llm: Any, own: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Requests/s, host time of the engine's own builds, and tokens, by arm."""
    from vllm import SamplingParams

    numbers = random.Random(0)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(1000, 100_000) for _ in range(numbers.randrange(512, 1536))]}
        for _ in range(options.prompts)
    ]
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "detokenize": False}
    build = own.build
    us: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = build(*args, **kwargs)
        us.append((time.perf_counter() - start) * 1e6)
        return result

    def one_pass(on: bool, **more: Any) -> tuple[float, list[Any]]:
        turn(on)
        us.clear()
        start = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(**common, **more), use_tqdm=False)
        return time.perf_counter() - start, [output.outputs[0] for output in outputs]

    own.build = timed
    try:
        _, computed = one_pass(False, logprobs=2)
        gaps = [[gap(likely) for likely in output.logprobs] for output in computed]
        for on in ARMS:
            one_pass(on)
        for number in range(options.passes):
            for on in ARMS:
                before = counts()
                seconds, outputs = one_pass(on)
                differences = []
                for request, (expected, output) in enumerate(zip(computed, outputs, strict=True)):
                    pairs = zip(expected.token_ids, output.token_ids, strict=True)
                    position = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
                    if position is not None:
                        differences.append([request, position, gaps[request][position]])
                builds = spread(us)
                del builds["us"]
                yield {
                    "arm": arm(on),
                    "pass": number,
                    "requests_per_s": round(len(prompts) / seconds, 2),
                    "builds": builds,
                    "calls": counts()[0] - before[0],
                    "fallbacks": counts()[1] - before[1],
                    "request_position_gap_of_tokens_that_differ": differences,
                }
    finally:
        del own.build


def gap(likely: dict[int, Any]) -> float:
    best, second = sorted((float(entry.logprob) for entry in likely.values()), reverse=True)[:2]
    return round(best - second, 4)


# -- compiling --------------------------------------------------------------------------------------------------------


def compile_kernels(kind: str) -> None:
    """In a process of its own: the module that vLLM's plan of this kind asks for, compiled where it is not yet."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module

    half = torch.bfloat16
    spec = gen_batch_prefill_module(kind, half, half, half, torch.int32, HEAD_SIZE, HEAD_SIZE, 0, False, False, False)
    spec.build_and_load()
    print("from before" if spec.is_aot else "compiled", spec.name, flush=True)


def environment(folder: Path, prebuilt: str | None) -> dict[str, str]:
    """Where FlashInfer compiles, and the CUDA headers and libraries that the wheels beside torch have."""
    import torch

    wheels = Path(torch.__file__).resolve().parent.parent / "nvidia"
    links = folder / "lib"
    links.mkdir(exist_ok=True)
    libraries = [*wheels.glob("cu1*/lib/libcudart.so.1*"), *wheels.glob("cuda_runtime/lib/libcudart.so.1*")]
    if libraries and not (links / "libcudart.so").exists():
        (links / "libcudart.so").symlink_to(libraries[0])
    if not (links / "libcuda.so").exists():  # the driver's own is loaded at run time by its name
        (links / "empty.c").write_text("int empty;\n")
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", links / "libcuda.so", links / "empty.c"]
        with contextlib.suppress(OSError):
            subprocess.run([str(part) for part in command], check=False)
    headers = [str(path) for path in (*wheels.glob("cu1*/include"), *wheels.glob("curand/include"))]
    paths = [str(BENCH), str(BENCH.parent)]
    if prebuilt:
        package = folder / "prebuilt" / "flashinfer_jit_cache"
        package.mkdir(parents=True, exist_ok=True)
        text = f'__version__ = "any"\n\n\ndef get_jit_cache_dir():\n    return {str(Path(prebuilt).resolve())!r}\n'
        (package / "__init__.py").write_text(text)
        paths.append(str(package.parent))

    def before(name: str, *values: str) -> str:
        return os.pathsep.join([*values, *filter(None, [os.environ.get(name)])])

    return {
        **os.environ,
        "CPATH": before("CPATH", *headers),
        "LIBRARY_PATH": before("LIBRARY_PATH", str(links)),
        "PYTHONPATH": before("PYTHONPATH", *paths),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "H2D_PATCH": "flashinfer-plan",
        "H2D_PATCH_RUN_DIR": str(folder / "run"),
        "HF_HUB_OFFLINE": "1",
        "MAX_JOBS": str(max(2, (os.cpu_count() or 4) // 2)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the switch and the builder are in this process
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # or it is compiled too
    }


def compile_all(env: dict[str, str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Both kinds at once; what became of each."""
    begun = time.monotonic()
    found: dict[str, Any] = {}
    running = {}
    for kind in ("fa2", "fa3"):
        with open(folder / f"compile-{kind}.log", "w") as output:
            running[kind] = subprocess.Popen(
                [sys.executable, __file__, "--json", "", "--compile", kind],
                env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    while running and time.monotonic() - begun < timeout_s:
        for kind, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[kind]
            lines = (folder / f"compile-{kind}.log").read_text(errors="replace").splitlines()
            seconds = round(time.monotonic() - begun, 1)
            found[kind] = {
                "status": process.returncode,
                "seconds": seconds,
                "last_lines": [s[-300:] for s in lines[-6:]],
            }
            say("compiled" if process.returncode == 0 else "FAILED to compile", kind, found[kind]["last_lines"][-1:])
        time.sleep(0.5)
    for kind, process in running.items():
        child_process.end(process, 0)
        found[kind] = {"status": f"not compiled in {timeout_s:g} s"}
        say("gave up compiling", kind)
    return found


# -- the process that starts the others -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--runner", choices=("v1", "v2"), nargs="+", default=["v1", "v2"])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--prebuilt", help="a directory of compiled FlashInfer modules, NAME/NAME.so")
    parser.add_argument("--compiled", help="keep what is compiled in this directory, in that form")
    parser.add_argument("--compile-timeout", type=float, default=280.0, help="seconds for both kinds of kernels")
    parser.add_argument("--timeout", type=float, default=230.0, help="seconds for one engine")
    parser.add_argument("--total", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--passes", type=int, default=5, help="of each arm")
    for name in ("--child", "--events", "--compile", "--prefill"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_kernels(options.compile)
        return
    if options.child:
        child(options)
        return
    import record

    result: dict[str, Any] = {"unit": "µs of host time until build() returns", "runners": {}}

    def write() -> None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        folder = Path(scratch)
        (folder / "logs").mkdir()
        env = environment(folder, options.prebuilt)
        result["compiled"] = compile_all(env, folder, options.compile_timeout)
        write()
        if options.compiled:
            for path in (folder / "flashinfer").rglob("cached_ops/*/*.so"):
                kept = Path(options.compiled) / path.stem / path.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept)
        works = [kind for kind, found in result["compiled"].items() if found["status"] == 0]
        if "fa2" not in works:
            say("without fa2 there is nothing to measure")
            options.runner = []
        for runner in options.runner:
            left = options.total - (time.monotonic() - STARTED)
            rows: dict[str, Any] = {part: [] for part in options.parts}
            result["runners"][runner] = rows
            if left < 60:
                rows["skipped"] = "no time left"
                continue
            command = [sys.executable, __file__, "--json", "", "--child", runner, "--layers", str(options.layers)]
            command += ["--prompts", str(options.prompts), "--passes", str(options.passes), "--parts", *options.parts]
            command += ["--prefill", "auto" if "fa3" in works else "fa2"]
            chosen = {**env, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
            for event in child_process.events(command, chosen, folder / "logs", min(options.timeout, left)):
                kind = event.pop("event")
                if kind in PARTS:
                    rows[kind].append(event)
                else:
                    rows.setdefault(kind, []).append(event)
                say(runner, kind, summary(kind, event))
                write()
    record.write(options.json, result)


def summary(kind: str, event: dict[str, Any]) -> str:
    if kind == "plan" and "company" in event:
        figures = [
            f"{name} {event[name]['median_us']:.0f} (p99 {event[name]['p99_us']:.0f}) µs" for name in ("off", "on")
        ]
        on = event["on"]
        where = f"{event['batch']}, {event['queued_ms']} ms queued, {event['company']}:"
        return f"{where} {', '.join(figures)}; calls {on['calls']}, fallbacks {on['fallbacks']}"
    if kind == "serve":
        wrong = len(event["request_position_gap_of_tokens_that_differ"])
        figures = [f"{event['requests_per_s']} requests/s", f"build {event['builds']['median_us']:.0f} µs"]
        return f"{event['arm']}: {', '.join(figures)}, calls {event['calls']}, {wrong} requests with other tokens"
    if kind == "exit":
        return f"{event['status']} {event['errors'][:3]}"
    return json.dumps({name: value for name, value in event.items() if name != "patches"})[:400]


if __name__ == "__main__":
    main()
