"""A real vLLM server under image requests, with the host-to-device fixes off and on in turn while the load runs.

    python bench/serve_multimodal.py --model DIR --json bench/results/multimodal.json

DIR is a Qwen3-VL: configuration, tokenizer and processors; its weights are vLLM's dummies. One server with the plugin
is measured throughout. The load is vLLM's own `vllm bench serve` with its `random-mm` data set, several of them at
once, which make their images while the server starts and begin when told to. It is a closed loop: a client sends its
next request when one of its requests is answered. Two loads: images of one size, and of several.

The fixes are switched in the worker, through vLLM's own /collective_rpc (multimodal_worker.py), in slices of time in
the order off, on, on, off, off, …; the first seconds of each slice are left out. `vllm bench serve --save-detailed`
stores each request's start on the clock that the worker reads when it switches (perf_counter, one clock for all
processes on Linux), so every token has its slice. A token counts where it came: part of a first token's wait may lie
before the switch, which makes the two arms look more alike than they are, never less.
Prefix caching and the processor's cache are off; vLLM then names images by request, so that none is taken for another.

A timer around each function with a fix gives the host's time in it: all of the function, in both arms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path[:0] = [str(BENCH), str(ROOT / "tools")]

import record  # noqa: E402  (needs the path above)
from live_server import ENVIRONMENT as CPU_ENVIRONMENT  # noqa: E402
from live_server import stop, tail  # noqa: E402

FIXES = ("multimodal-h2d", "vision-rope", "vision-h2d", "mrope-positions")
ARMS = ("off", "on")
LIMIT_IMAGES = '{"image": 1, "video": 0}'
PIXELS_PER_TOKEN = 32 * 32  # Qwen3-VL: patches of 16 by 16, two by two merged
# What `vllm bench serve` runs, without what the command line's front end imports besides. Where it would look whether
# the server is up it first waits for a file: a client that finds one API server up before the others keeps all of its
# connections there.
CLIENT = """
import asyncio, os, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
gate, wait_for_endpoint = sys.argv.pop(1), serve.wait_for_endpoint
async def when_told(*args, **kwargs):
    print("told to wait", flush=True)
    while not os.path.exists(gate):
        await asyncio.sleep(0.05)
    return await wait_for_endpoint(*args, **kwargs)
serve.wait_for_endpoint = when_told
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
HAS_IMAGES, HAS_BEGUN = "told to wait", "Starting main benchmark run"
SERVER_IS_UP = "Application startup complete"  # each API server says so

Size = tuple[int, int]  # height, width
clock = time.perf_counter
STARTED = clock()


class OutOfTime(Exception):
    """The time for the whole run is spent; what has been measured until then is written."""


@dataclass(frozen=True)
class Load:
    name: str
    sizes: tuple[Size, ...]
    seconds: float

    @property
    def image_tokens(self) -> float:
        return statistics.mean(height * width for height, width in self.sizes) / PIXELS_PER_TOKEN


@dataclass
class Slice:
    """A stretch of time in one arm; what lies before `settled` is left out."""

    arm: str
    start: float
    settled: float
    end: float
    patches: list[dict[str, Any]]
    left_out: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.settled

    def holds(self, moment: float) -> bool:
        return self.settled <= moment < self.end


@dataclass
class Requests:
    """What the clients of one load saw."""

    sent: list[float] = field(default_factory=list)
    completed: list[float] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)  # when it came, seconds it took
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when the token came, seconds since the one before
    tokens: list[tuple[float, float]] = field(default_factory=list)  # when they came, how many
    errors: list[str] = field(default_factory=list)
    whole_load: tuple[float, float] | None = None  # every client had its full number of requests in flight


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the server ends, too
    if options.smoke:
        loads = [
            Load("160x160", ((160, 160),), options.seconds),
            Load("mixed", ((64, 64), (96, 160), (160, 160), (192, 128)), options.seconds / 2),
        ]
    else:
        loads = [
            Load("1024x1024", ((1024, 1024),), options.seconds),
            Load("mixed", ((256, 256), (512, 768), (1024, 1024), (1536, 1024)), options.seconds / 2),
        ]
    with tempfile.TemporaryDirectory(prefix="multimodal-") as scratch:
        log = Path(options.log or Path(scratch) / "server.log").absolute()
        try:
            complete = _run(options, loads, Path(scratch), log)
        except OutOfTime as error:
            _say(f"out of time: {error}")
            sys.exit(1)
        except BaseException:
            if log.exists():
                print(tail(log), flush=True)
            raise
    _say("ended")
    sys.exit(0 if complete else 1)


def _run(options: argparse.Namespace, loads: list[Load], work: Path, log: Path) -> bool:
    """Whether every load was measured from start to end; what was measured is written in any case."""
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as ending:
        server = ending.enter_context(_serving(options, work, log))
        gpu = ending.enter_context(_gpu_use())
        rate = options.rate
        for number, load in enumerate(loads):
            seconds = load.seconds
            if number:  # as many requests as the first load's rate says, in what is left of the time
                seconds = min(seconds, _left(options) - options.warm_up - (10 if options.smoke else 60))
                text = options.input_tokens + options.output_tokens
                rate = rate * (loads[0].image_tokens + text) / (load.image_tokens + text)
                if seconds < 4 * options.slice:
                    _say(f"no time for the load {load.name}")
                    break
            prompts = math.ceil(rate * (seconds + options.warm_up) / options.clients)
            with _clients(options, load, number, prompts, server.port, work) as clients:
                if not number:
                    _say(f"{options.clients} clients make {prompts} requests each; the server's output is in {log}")
                    server.wait_until_up(options)
                    version = server.get("/version")["version"]
                    workers = server.rpc("h2d_bench_time", FIXES)
                    _say(f"vLLM {version} is up; functions with a fix: {_verdicts(workers)}")
                measured = _measure(options, load, clients, server, gpu, work)
            results[load.name] = {"sizes": load.sizes, "requests_of_each_client": prompts, **measured}
            _write(options, results, version=version, workers=[workers], complete=False)
            _summary(load.name, measured)
            rate = measured["arms"]["off"]["requests_per_s"] or rate
        ended = server.rpc("h2d_bench_stop", FIXES)
        complete = len(results) == len(loads) and not any(one["note"] for one in results.values())
        _write(options, results, version=version, workers=[workers, ended], complete=complete)
        _say("done; the server ends")
    return complete


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Qwen3-VL")
    parser.add_argument("--json", required=True)
    parser.add_argument("--log", help="file for the server's output; a temporary one by default")
    parser.add_argument("--smoke", action="store_true", help="vLLM for the CPU, a tiny model, small images")
    parser.add_argument("--seconds", type=float, help="of the first load; the second gets half (150, smoke 24)")
    parser.add_argument("--limit", type=float, help="seconds for everything (510, smoke 300)")
    parser.add_argument("--rate", type=float, help="requests/s expected, for the number of requests (17, smoke 30)")
    parser.add_argument("--slice", type=float, help="seconds of a slice (10, smoke 3)")
    parser.add_argument("--settle", type=float, help="seconds left out at the start of each (2, smoke 0.5)")
    parser.add_argument("--warm-up", type=float, help="seconds of load before the first slice (8, smoke 2)")
    parser.add_argument("--concurrency", type=int, help="requests in flight, of all clients together (64, smoke 4)")
    parser.add_argument("--clients", type=int, help="(4, smoke 2)")
    parser.add_argument("--api-servers", type=int, help="(6, smoke 1)")
    parser.add_argument("--input-tokens", type=int, help="of text, on average (128, smoke 16)")
    parser.add_argument("--output-tokens", type=int, help="on average (64, smoke 8)")
    parser.add_argument("server", nargs="*", help="further arguments for the server, after --")
    options = parser.parse_args()
    options.model = os.path.abspath(options.model)
    full = {
        "seconds": 150, "limit": 510, "rate": 17, "slice": 10, "settle": 2, "warm_up": 8, "concurrency": 64,
        "clients": 4, "api_servers": 6, "input_tokens": 128, "output_tokens": 64,
    }  # fmt: skip
    smoke = {
        "seconds": 24, "limit": 300, "rate": 30, "slice": 3, "settle": 0.5, "warm_up": 2, "concurrency": 4,
        "clients": 2, "api_servers": 1, "input_tokens": 16, "output_tokens": 8,
    }  # fmt: skip
    for name, value in (smoke if options.smoke else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.smoke and options.api_servers > 1:
        parser.error("--smoke serves through one API server: vLLM for the CPU lacks the command that starts several")
    return options


# --- server ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    port: int
    log: Path
    process: subprocess.Popen[bytes]
    opener: urllib.request.OpenerDirector

    def get(self, path: str, body: Any = None, timeout: float = 60) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with self.opener.open(request, timeout=timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
            ) from error
        return json.loads(text) if text else None

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answer of each worker."""
        answer: list[dict[str, Any]] = self.get("/collective_rpc", {"method": method, "args": args})["results"]
        return answer

    def wait_until_up(self, options: argparse.Namespace) -> None:
        told = clock()
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited {self.process.returncode} before it was up")
            up = self.log.read_text(errors="replace").count(SERVER_IS_UP)
            if up >= options.api_servers:
                with contextlib.suppress(OSError):  # not answered yet
                    self.get("/health", timeout=5)
                    return
            if _left(options) < 0:
                raise OutOfTime("the server is not up")
            if clock() - told > 10:
                told = clock()
                _say(f"starting: {(self.log.read_text(errors='replace').splitlines() or ['…'])[-1][:150]}")
            time.sleep(0.25)


@contextlib.contextmanager
def _serving(options: argparse.Namespace, work: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **_environment(options),
        "H2D_PATCH": "1",
        "H2D_PATCH_RUN_DIR": str(work / "run"),
        "VLLM_SERVER_DEV_MODE": "1",  # without it there is no /collective_rpc
    }
    arguments = [
        *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"),
        *("--worker-extension-cls", "multimodal_worker.Extension"),
        *("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0", "--limit-mm-per-prompt", LIMIT_IMAGES),
        "--disable-uvicorn-access-log",
    ]
    if options.smoke:
        command = ["vllm.entrypoints.openai.api_server", "--model", options.model]
        arguments += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4"]
    else:
        command = ["vllm.entrypoints.cli.main", "serve", options.model, "--api-server-count", str(options.api_servers)]
        arguments += ["--max-model-len", "20480", "--max-num-seqs", "128", "--max-num-batched-tokens", "8192"]
        arguments += ["--gpu-memory-utilization", "0.85"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = _start([sys.executable, "-m", *command, *arguments, *options.server], environ, output, work)
    try:
        yield Server(port, log, process, urllib.request.build_opener(urllib.request.ProxyHandler({})))
    finally:
        stop(process)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Of the server and the clients. vLLM's settings that are in ours stay, and are in the result."""
    quiet = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*", "VLLM_NO_USAGE_STATS": "1"}
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = {"PYTHONPATH": os.pathsep.join([str(BENCH), str(ROOT), *inherited]), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, **found, **(CPU_ENVIRONMENT if options.smoke else {})}


def _start(command: Sequence[str], environ: dict[str, str], output: Any, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


# --- load ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    process: subprocess.Popen[bytes]
    log: Path
    result: Path

    def says(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


@contextlib.contextmanager
def _clients(
    options: argparse.Namespace, load: Load, number: int, prompts: int, port: int, work: Path
) -> Iterator[list[Client]]:
    """`vllm bench serve`, several at once: each makes its requests, waits for the server, sends them."""
    buckets = {f"({height}, {width}, 1)": 1 / len(load.sizes) for height, width in load.sizes}
    arguments = [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", f"http://127.0.0.1:{port}", "--model", options.model, "--ignore-eos"),
        *("--dataset-name", "random-mm", "--num-prompts", str(prompts)),
        *("--random-input-len", str(options.input_tokens), "--random-output-len", str(options.output_tokens)),
        *("--random-range-ratio", "0.5", "--temperature", "0"),  # equal lengths would come and go in waves
        *("--random-mm-base-items-per-request", "1", "--random-mm-num-mm-items-range-ratio", "0"),
        *("--random-mm-limit-mm-per-prompt", LIMIT_IMAGES),
        *("--random-mm-bucket-config", "{" + ", ".join(f"{key}: {share}" for key, share in buckets.items()) + "}"),
        *("--max-concurrency", str(math.ceil(options.concurrency / options.clients))),
        *("--ready-check-timeout-sec", str(int(options.limit)), "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(work)),
    ]
    clients: list[Client] = []
    try:
        for index in range(options.clients):
            name = f"{load.name}-{index}"
            seed = ["--seed", str(1000 * number + index), "--result-filename", f"{name}.json"]
            log = work / f"{name}.log"
            with open(log, "wb") as output:
                command = [sys.executable, "-c", CLIENT, str(_gate(work, load)), *arguments, *seed]
                process = _start(command, {**_environment(options), "H2D_PATCH": "0"}, output, work)
            clients.append(Client(process, log, work / f"{name}.json"))
        yield clients
    finally:
        for client in clients:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.process.pid, signal.SIGKILL)
            client.process.wait()


def _measure(
    options: argparse.Namespace,
    load: Load,
    clients: list[Client],
    server: Server,
    gpu: list[tuple[float, float]],
    work: Path,
) -> dict[str, Any]:
    def over() -> bool:
        return any(client.process.poll() is not None for client in clients)

    def until_all_say(text: str, step: str) -> None:
        while not all(client.says(text) for client in clients):
            if over():
                raise RuntimeError("a client ended early:\n" + "\n".join(tail(client.log) for client in clients))
            if _left(options) < 0:
                raise OutOfTime(f"the clients of {load.name} have not {step}")
            time.sleep(0.1)
        _say(f"load {load.name}: the clients have {step}")

    until_all_say(HAS_IMAGES, "made their images")
    _gate(work, load).touch()
    until_all_say(HAS_BEGUN, f"begun, {options.concurrency} requests in flight")
    _sleep(options.warm_up, over)
    server.rpc("h2d_bench_times")  # what the warm-up took is no part of it
    processes = _cpu_seconds()
    slices = _slices(options, load, server, over)
    used = _cores(processes, _cpu_seconds(), slices[-1].end - slices[0].start if slices else 1.0)
    times = server.rpc("h2d_bench_times")
    out_of_time = ""
    while any(client.process.poll() is None for client in clients):
        if _left(options) < 20:
            out_of_time = "the time was spent before the clients had all answers: no results of theirs"
            _say(out_of_time)
            break
        time.sleep(0.1)
    requests = Requests() if out_of_time else _read(clients)
    for one in slices:
        begin, end = requests.whole_load or (one.settled, one.end)
        if one.settled < begin or one.end > end:
            one.left_out = "not all clients had all their requests in flight"
    _say(f"load {load.name}: {len(requests.completed)} requests, {len(requests.errors)} errors")
    return {**_analysed(slices, requests, times, gpu), "cores_used": used, "note": out_of_time or None}


def _gate(work: Path, load: Load) -> Path:
    return work / f"{load.name}.begin"


def _slices(options: argparse.Namespace, load: Load, server: Server, over: Callable[[], bool]) -> list[Slice]:
    """Switches until the load is over."""
    slices: list[Slice] = []
    before: list[dict[str, Any]] | None = None
    start = 0.0
    arm = ARMS[0]
    while True:
        following = ARMS[(len(slices) + (before is not None) + 1) // 2 % 2]  # off, on, on, off, off, on, on, …
        answers = server.rpc("h2d_bench_switch", FIXES, following == "on")
        now = max(answer["at"] for answer in answers)
        states = [patch for answer in answers for patch in answer["patches"]]
        if before is not None:
            slices.append(Slice(arm, start, min(start + options.settle, now), now, _counted(before, states)))
            _say(f"load {load.name}: slice {len(slices)}, {arm}, {now - start:.1f} s")
        if over() or _left(options) < 20:
            return slices
        before, start, arm = states, now, following
        _sleep(options.slice, over)


def _counted(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and fallbacks of each target between two states, over all workers."""
    sums: dict[tuple[str, str], list[int]] = {}
    for sign, states in ((-1, before), (1, after)):
        for state in states:
            counts = sums.setdefault((state["fix"], state["function"]), [0, 0])
            counts[0] += sign * state["calls"]
            counts[1] += sign * state["fallbacks"]
    return [
        {"fix": fix, "function": function, "calls": calls, "fallbacks": fallbacks}
        for (fix, function), (calls, fallbacks) in sums.items()
    ]


def _read(clients: list[Client]) -> Requests:
    """The results of all clients. Times are of perf_counter."""
    requests = Requests()
    begun, ending = [], []
    for client in clients:
        if client.process.returncode != 0:
            requests.errors.append(f"a client exited {client.process.returncode}: {tail(client.log)}")
            continue
        found = json.loads(client.result.read_text())
        starts = sorted(found["start_times"])
        begun.append(starts[0])
        ending.append(starts[-1])  # from then on it has fewer in flight
        for start, first, gaps, number, error in zip(
            found["start_times"], found["ttfts"], found["itls"], found["output_lens"], found["errors"], strict=True
        ):
            requests.sent.append(start)
            if error or not number:
                requests.errors.append(error.strip().splitlines()[-1][:300] if error else "an answer without tokens")
                continue
            if len(gaps) >= number:  # the first chunk of a chat only names the role, and comes with the first token
                first, gaps = first + gaps[0], gaps[1:]
            moment = start + first
            requests.first.append((moment, first))
            each = number / (1 + len(gaps))  # a chunk may hold several tokens
            requests.tokens.append((moment, each))
            for gap in gaps:
                moment += gap
                requests.gaps.append((moment, gap))
                requests.tokens.append((moment, each))
            requests.completed.append(moment)
    if begun:
        requests.whole_load = (max(begun), min(ending))
    return requests


# --- what came of it -------------------------------------------------------------------------------------------------


def _analysed(
    slices: list[Slice], requests: Requests, times: list[dict[str, Any]], gpu: list[tuple[float, float]]
) -> dict[str, Any]:
    valid = [one for one in slices if one.left_out is None]
    each = [
        {
            "arm": one.arm,
            "start_s": round(one.start - slices[0].start, 2),
            "seconds": round(one.seconds, 2),
            "left_out": one.left_out,
            **_served([one], requests),
            "patches": [patch for patch in one.patches if patch["calls"] or patch["fallbacks"]],
            "host_times": _host_times([one], times),
            "gpu_use_percent": _distribution([use for moment, use in gpu if one.holds(moment)], 1),
        }
        for one in slices
    ]
    pairs = [
        (first, second) if one.arm == "off" else (second, first)
        for one, following, first, second in zip(slices[::2], slices[1::2], each[::2], each[1::2], strict=False)
        if one.left_out is None and following.left_out is None
    ]
    called = {patch["function"] for one in slices for patch in one.patches if patch["calls"] or patch["fallbacks"]}
    arms = {}
    for arm in ARMS:
        chosen = [one for one in valid if one.arm == arm]
        arms[arm] = {
            "slices": len(chosen),
            "seconds": round(sum(one.seconds for one in chosen), 2),
            **_served(chosen, requests),
            "patches": [patch for patch in _sum_of_counts(chosen) if patch["function"] in called],
            "host_times": _host_times(chosen, times),
            "gpu_use_percent": _distribution([use for moment, use in gpu if any(s.holds(moment) for s in chosen)], 1),
        }
    return {
        "requests": len(requests.completed),
        "errors": len(requests.errors),
        "first_errors": requests.errors[:5],
        "arms": arms,
        "on_against_off": {
            "requests_per_s": _ratios(pairs, lambda one: one["requests_per_s"]),
            "first_tokens_per_s": _ratios(pairs, lambda one: one["first_tokens_per_s"]),
            "output_tokens_per_s": _ratios(pairs, lambda one: one["output_tokens_per_s"]),
            "median_ms_to_first_token": _ratios(pairs, lambda one: one["ms_to_first_token"].get("median")),
            "p99_ms_between_tokens": _ratios(pairs, lambda one: one["ms_between_tokens"].get("p99")),
        },
        "slices": each,
    }


def _served(slices: list[Slice], requests: Requests) -> dict[str, Any]:
    """What came in these slices. No request is cut: each event counts where it lies."""
    seconds = sum(one.seconds for one in slices)

    def inside(events: list[tuple[float, float]]) -> list[float]:
        return [value for moment, value in events if any(one.holds(moment) for one in slices)]

    first = inside(requests.first)
    completed = sum(any(one.holds(moment) for one in slices) for moment in requests.completed)
    if requests.whole_load is None:  # the clients' results are lost: that is no rate of 0
        seconds = 0
    return {
        "completed": completed,
        "requests_per_s": round(completed / seconds, 3) if seconds else None,
        "first_tokens_per_s": round(len(first) / seconds, 3) if seconds else None,
        "output_tokens_per_s": round(sum(inside(requests.tokens)) / seconds, 1) if seconds else None,
        "ms_to_first_token": _distribution(first, 1000),
        "ms_between_tokens": _distribution(inside(requests.gaps), 1000),
    }


def _host_times(slices: list[Slice], times: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each timed function that was called in these slices, over all workers."""
    seconds = sum(one.seconds for one in slices)
    found: dict[str, Any] = {}
    for function in sorted({name for worker in times for name in worker}):
        taken = [
            took
            for worker in times
            for start, took in worker.get(function, {}).get("samples", ())
            if any(one.holds(start) for one in slices)
        ]
        if taken:
            share = round(1000 * sum(taken) / seconds, 3) if seconds else None
            found[function] = {**_distribution(taken, 1e6, digits=1), "unit": "µs", "ms_in_each_s": share}
    return found


def _sum_of_counts(slices: list[Slice]) -> list[dict[str, Any]]:
    """Of whole slices, with the seconds that are left out elsewhere."""
    sums: dict[tuple[str, str], list[int]] = {}
    for one in slices:
        for patch in one.patches:
            counts = sums.setdefault((patch["fix"], patch["function"]), [0, 0])
            counts[0] += patch["calls"]
            counts[1] += patch["fallbacks"]
    return [
        {"fix": fix, "function": function, "calls": calls, "fallbacks": fallbacks}
        for (fix, function), (calls, fallbacks) in sums.items()
    ]


def _distribution(values: Sequence[float], factor: float, digits: int = 2) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(factor * ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)

    return {
        "count": len(ordered),
        "mean": round(factor * statistics.fmean(ordered), digits),
        "median": round(factor * statistics.median(ordered), digits),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": at(1),
    }


def _ratios(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], value: Callable[[dict[str, Any]], float | None]
) -> dict[str, Any]:
    """On against off in neighbouring slices."""
    return record.paired_ratios([(value(off), value(on)) for off, on in pairs])


def _write(
    options: argparse.Namespace,
    results: dict[str, Any],
    *,
    version: str,
    workers: list[Any],
    complete: bool,
) -> None:
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "json", "log")}
    record.write(
        options.json,
        {
            "what": "a vLLM server under image requests, the host-to-device fixes off and on in turn",
            "vllm": version,
            "fixes": FIXES,
            "settings": settings,
            "environment": {
                key: os.environ[key] for key in sorted(os.environ) if key.startswith(("VLLM_", "H2D_PATCH_"))
            },
            "model": json.loads((Path(options.model) / "config.json").read_text()),
            "complete": complete,
            "loads": results,
            "workers_before": workers[0],
            "workers_after": workers[1] if len(workers) > 1 else None,
        },
    )


def _verdicts(workers: list[dict[str, Any]]) -> str:
    found = sorted({(patch["fix"], patch["verdict"]) for worker in workers for patch in worker["patches"]})
    return ", ".join(f"{fix} {verdict}" for fix, verdict in found) or "none"


def _summary(name: str, measured: dict[str, Any]) -> None:
    for arm, one in measured["arms"].items():
        first, between = one["ms_to_first_token"], one["ms_between_tokens"]
        print(
            f"  {name} {arm:3s} {one['slices']} slices: {one['requests_per_s']} requests/s,"
            f" {one['output_tokens_per_s']} tokens/s,"
            f" first token median {first.get('median')} p99 {first.get('p99')} ms,"
            f" between tokens median {between.get('median')} p99 {between.get('p99')} ms,"
            f" GPU {one['gpu_use_percent'].get('mean')} %"
        )
        for function, host in one["host_times"].items():
            print(f"      {function}: {host['count']} calls, median {host['median']} p99 {host['p99']} µs")
        for patch in one["patches"]:
            print(f"      {patch['fix']}: {patch['calls']} copies, {patch['fallbacks']} fell back")
    for what, ratios in measured["on_against_off"].items():
        print(f"  {name} on/off {what}: {ratios.get('median')}, 95 % in {ratios.get('interval_95')}")
    sys.stdout.flush()


# --- machine ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _gpu_use() -> Iterator[list[tuple[float, float]]]:
    """When, and percent of the last second in which some kernel ran; filled once a second."""
    samples: list[tuple[float, float]] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    query = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read() -> None:
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):
                samples.append((clock(), float(line)))

    threading.Thread(target=read, daemon=True).start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()


def _cpu_seconds() -> dict[int, tuple[str, float]]:
    """CPU time so far of every process that descends from this one, with its name."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[str, float]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            values = rest.split()
            pid = int(stat.parent.name)
            parents[pid] = int(values[1])
            found[pid] = (name, (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK"))

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid: value for pid, value in found.items() if is_ours(pid)}


def _cores(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]], seconds: float
) -> list[dict[str, Any]]:
    """CPU cores that each process kept busy, those that did next to nothing left out."""
    used = [(name, (total - before[pid][1]) / seconds) for pid, (name, total) in after.items() if pid in before]
    ordered = sorted(used, key=lambda pair: -pair[1])
    return [{"process": name, "cores": round(cores, 2)} for name, cores in ordered if cores > 0.02]


def _sleep(seconds: float, until: Callable[[], bool]) -> None:
    end = clock() + seconds
    while (left := end - clock()) > 0 and not until():
        time.sleep(min(left, 0.1))


def _left(options: argparse.Namespace) -> float:
    return float(options.limit - (clock() - STARTED))


def _say(text: str) -> None:
    print(f"[{clock() - STARTED:6.1f} s, {time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    main()
