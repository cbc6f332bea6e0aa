"""Host time of the copies that the fixes exchange, the original and the fixed form in turn, GPU work queued or not.

    python bench/host_time.py --json bench/results/host_time.json

Each row is one copy: the microseconds until the call returns (all repetitions, and their median) with 0 and 20 ms of
GPU work queued, and whether the destination then held the source's values at the moment of the call, the source having
been overwritten right after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch

from h2d_patch import copies

QUEUED_MS = (0, 20)
CYCLES_PER_MS = 1_900_000


def cases(device: torch.device) -> dict[str, tuple[torch.Tensor, Callable[[], Any], Callable[[], Any]]]:
    """Name → source, original call, fixed call."""
    found: dict[str, tuple[torch.Tensor, Callable[[], Any], Callable[[], Any]]] = {}

    def to(name: str, source: torch.Tensor, *args: Any) -> None:
        found[name] = (
            source,
            lambda: source.to(device, *args, non_blocking=True),
            lambda: copies.to_device(source, device, *args),
        )

    for kib in (16, 256, 1024, 4096, 16384, 65536):
        to(f"pageable {kib} KiB", torch.zeros(kib * 256))
    to("pageable 4096 KiB to bfloat16", torch.zeros(1 << 20), torch.bfloat16)
    to("pinned with gaps 4096 KiB", torch.zeros(1024, 2048).pin_memory()[:, :1024])
    for columns in (256, 2048, 8192, 32768):
        host = torch.zeros(3, 65537, dtype=torch.int64).pin_memory()[:, :columns]
        on_device = torch.zeros(3, 65537, dtype=torch.int64, device=device)[:, :columns]

        def original(host: torch.Tensor = host, on_device: torch.Tensor = on_device) -> torch.Tensor:
            return on_device.copy_(host, non_blocking=True)

        def fixed(host: torch.Tensor = host, on_device: torch.Tensor = on_device) -> torch.Tensor:
            result: torch.Tensor = copies.copy_h2d(on_device, host)
            return result

        found[f"M-RoPE positions [3, :{columns}]"] = (host, original, fixed)
    parts = [torch.zeros(4096, 2, dtype=torch.int64) for _ in range(64)]
    whole = torch.zeros(1)
    found["cat of 64 parts, 4096 KiB"] = (
        whole,
        lambda: torch.cat(parts, dim=0).to(device, non_blocking=True),
        lambda: copies.cat_to_device(parts, device, dim=0),
    )
    return found


def measure(source: torch.Tensor, call: Callable[[], Any], queued_ms: int) -> tuple[float, bool]:
    """Microseconds of one call, and whether it took a snapshot."""
    source.fill_(7)
    torch.cuda.synchronize()
    if queued_ms:
        torch.cuda._sleep(queued_ms * CYCLES_PER_MS)
    start = time.perf_counter()
    result = call()
    took = (time.perf_counter() - start) * 1e6
    source.fill_(9)
    torch.cuda.synchronize()
    kept = source.numel() == 1 or bool((result == 7).all())
    return took, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as vLLM's workers do
    device = torch.device("cuda", torch.cuda.current_device())
    report = copies.start(device, 256 << 20)
    print("start-up:", report, flush=True)
    rows = []
    for name, (source, original, fixed) in cases(device).items():
        arms = {"original": original, "fixed": fixed}
        for arm in arms.values():  # warm
            for _ in range(3):
                measure(source, arm, 0)
        row: dict[str, Any] = {"case": name}
        for queued_ms in QUEUED_MS:
            took: dict[str, list[float]] = {arm: [] for arm in arms}
            kept: dict[str, list[bool]] = {arm: [] for arm in arms}
            for _ in range(options.repetitions):  # A B A B
                for arm, call in arms.items():
                    us, snapshot = measure(source, call, queued_ms)
                    took[arm].append(round(us, 1))
                    kept[arm].append(snapshot)
            for arm in arms:
                row[f"{arm}, {queued_ms} ms queued"] = {
                    "median_us": round(statistics.median(took[arm]), 1),
                    "snapshot_kept": all(kept[arm]),
                    "us": took[arm],
                }
        rows.append(row)
        medians = {key: value["median_us"] for key, value in row.items() if key != "case"}
        print(f"{name:36s}", "  ".join(f"{key} {value:9.1f}" for key, value in medians.items()), flush=True)
    record.write(options.json, {"unit": "µs of host time until the call returns", "rows": rows})


if __name__ == "__main__":
    main()
