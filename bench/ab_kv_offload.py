"""`h2d-patch ab kv-swap` on a real server whose KV cache is offloaded to the CPU, against the gain measured without it.

    python bench/ab_kv_offload.py --json bench/results/ab_kv_offload.json

One API server of vLLM's with the plugin serves everything; the load (prefix_load.py) asks for prompts whose blocks lie
in the CPU's cache and not in the GPU's, so that every request loads them, as in serve_kv_offload.py, whose model it is.
First the A/B, with its own load and the server's metrics. Then the fix is switched off and on with `h2d-patch switch`
for some seconds each, and the answers are counted where they arrive, on the client: the gain that the A/B's interval
should hold.

Takes 90 s and the server's start. With --rehearse: a small model without offloading, both arms the original; numbers
mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path[:0] = [str(BENCH), str(ROOT / "tools")]

import record  # noqa: E402  (needs the path above)
import text_model  # noqa: E402
from live_server import ENVIRONMENT as CPU_ENVIRONMENT  # noqa: E402
from live_server import stop, tail  # noqa: E402

FIX = "kv-swap"
MODEL = "offloaded"
STARTED = time.monotonic()


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the server ends, too
    with tempfile.TemporaryDirectory(prefix="ab-kv-offload-") as folder:
        bench = Bench(options, Path(folder))
        with bench.server():
            bench.fill()
            found = {"ab": bench.ab(), "switched": bench.switched()}
    ratio = (found["ab"]["on_against_off"] or {}).get("requests_per_s") or {}
    gain = found["switched"]["on_against_off"].get("median")
    within = bool(ratio) and gain is not None and ratio["low"] <= gain <= ratio["high"]
    print(f"ab {FIX}: requests/s on/off {ratio.get('ratio')} ({ratio.get('low')} to {ratio.get('high')})")
    print(f"switched by hand: {gain} {found['switched']['on_against_off'].get('interval_95')}")
    print("the gain lies in the interval of the A/B" if within else "THE GAIN LIES OUTSIDE THE INTERVAL OF THE A/B")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    complete = found["ab"]["complete"] and not options.rehearse
    record.write(
        options.json,
        {
            "what": "an A/B on a live server against the same fix switched by hand, KV blocks only loaded",
            "settings": settings,
            **found,
            "gain_within_interval": within,
            "seconds": round(time.monotonic() - STARTED),
            "complete": complete,
        },
    )
    return 0 if within or options.rehearse else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--slice", type=float, default=5.0, help="seconds")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds; a request takes 1.5 with the fix off")
    parser.add_argument("--windows", type=int, default=6, help="of the fix switched by hand, half of them on")
    parser.add_argument("--window", type=float, default=3.0, help="seconds that count, behind --settle")
    parser.add_argument("--kv-heads", type=int, default=2, help="1 to 16: so many times 4 KiB for each K or V block")
    parser.add_argument("--layers", type=int, default=80, help="80: the KV cache of a 70B model on one GPU of several")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--gpu-prompts", type=int, default=10, help="prompts whose KV blocks the GPU cache holds")
    parser.add_argument("--start-limit", type=float, default=120.0, help="seconds for the server to start")
    parser.add_argument("--server", action="append", default=[], metavar="ARGUMENT", help="one more of the server's")
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    options = parser.parse_args()
    if options.rehearse:
        options.prompts, options.tokens, options.layers = 3, 64, 2
    return options


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        self._environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited]),
            "H2D_PATCH": FIX,
            "H2D_PATCH_RUN_DIR": str(folder / "run"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(CPU_ENVIRONMENT if options.rehearse else {}),
        }

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        """From its start until it answers, then the block, then its end."""
        log = self._folder / "server.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                self._command(), env=self._environ, cwd=self._folder, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + self._options.start_limit
            while not self._answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start\n{tail(log, 60)}")
                time.sleep(0.25)
            _say("the server is up")
            yield
        except BaseException:
            print(tail(log, 40), file=sys.stderr)
            raise
        finally:
            stop(process)

    def fill(self) -> None:
        """Every prompt computed once, which stores its blocks, and loaded once, with the fix off and on."""
        for word in ("off", "on"):
            self._turn(word)
            self._run(*self._load(f"fill-{word}", "--rounds", "1"))
        _say("the CPU's cache is filled")

    def ab(self) -> dict[str, Any]:
        options, report = self._options, self._folder / "ab.json"
        self._run(
            *(sys.executable, "-m", "h2d_patch.cli", "ab", FIX, "--slices", str(options.slices)),
            *("--slice", f"{options.slice:g}s", "--settle", f"{options.settle:g}s", "--url", self._url),
            *("--json", str(report), *(["--same"] if options.rehearse else []), "--", *self._load("ab")),
            allowed=(0, 1),
        )
        found: dict[str, Any] = json.loads(report.read_text())
        found["command"] = record.without_folders(found["command"])
        answered = self._answered("ab")
        for one in found["measured"]:
            begin = one["begin"] + options.settle
            rate = _count(answered, begin, one["begin"] + options.slice) / (options.slice - options.settle)
            one["requests_per_s_seen_by_clients"] = round(rate, 2)
        _say("the A/B is over")
        return found

    def switched(self) -> dict[str, Any]:
        """Answers a second, as they arrive, with the fix off and on by hand: off, on, on, off, …"""
        options = self._options
        windows: list[tuple[str, float]] = []
        load = subprocess.Popen(self._load("switched"), env=self._environ)
        try:
            time.sleep(1.0)
            for number in range(options.windows):
                word = ("off", "on", "on", "off")[number % 4]
                self._turn(word)
                time.sleep(options.settle)
                windows.append((word, time.time()))
                time.sleep(options.window)
        finally:
            load.terminate()
            status = load.wait(60)
        if status:
            sys.exit(f"the load ended with {status}")
        answered = self._answered("switched")
        rates: dict[str, list[float]] = {"off": [], "on": []}
        for word, start in windows:
            rates[word].append(round(_count(answered, start, start + options.window) / options.window, 2))
        return {
            "requests_per_s": rates,
            "median_requests_per_s": {word: statistics.median(rate) for word, rate in rates.items()},
            "on_against_off": record.paired_ratios(zip(rates["off"], rates["on"], strict=True)),
        }

    def _command(self) -> list[str]:
        options = self._options
        model = text_model.write(layers=options.layers, kv_heads=options.kv_heads)
        text_model.write_tokenizer(model)
        bytes_a_token = options.layers * 2 * options.kv_heads * 128 * 2
        gib = -(-3 * bytes_a_token * options.tokens * options.prompts // (2 << 30))  # room for half as many again
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL",  # also of the last tokens of a prompt whose blocks are there
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        }
        offloaded = [
            *("--num-gpu-blocks-override", str(options.gpu_prompts * (options.tokens // 16 + 2))),
            *("--kv-offloading-size", str(gib), "--kv-offloading-backend", "native"),
            *("--compilation-config", json.dumps(graphs)),
        ]
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", MODEL, "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]),
            *("--max-model-len", str(options.tokens + 64), "--max-num-batched-tokens", "8192"),
            *("--disable-uvicorn-access-log", *(["--enforce-eager"] if options.rehearse else offloaded)),
            *options.server,
        ]  # fmt: skip

    def _load(self, name: str, *more: str) -> list[str]:
        options = self._options
        return [
            *(sys.executable, str(BENCH / "prefix_load.py"), "--url", self._url, "--model", MODEL),
            *("--prompts", str(options.prompts), "--tokens", str(options.tokens)),
            *("--times", str(self._times(name)), *more),
        ]

    def _times(self, name: str) -> Path:
        return self._folder / f"{name}.times"

    def _answered(self, name: str) -> list[float]:
        return [float(line) for line in self._times(name).read_text().split()]

    def _turn(self, word: str) -> None:
        self._run(sys.executable, "-m", "h2d_patch.cli", "switch", FIX, word, quietly=True)

    def _run(self, *command: str, allowed: tuple[int, ...] = (0,), quietly: bool = False) -> None:
        done = subprocess.run(
            command, env=self._environ, check=False, text=True, stdout=subprocess.PIPE if quietly else None
        )
        if done.returncode not in allowed:
            sys.exit(f"{' '.join(command[1:5])} … exited with {done.returncode}\n{done.stdout or ''}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                return True
        except OSError:
            return False


def _count(moments: list[float], begin: float, end: float) -> int:
    """Of `moments`, in order, those in [begin, end)."""
    return bisect(moments, end) - bisect(moments, begin)


def _say(what: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
