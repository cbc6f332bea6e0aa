"""The result files against the targets of [copies], [kv-swap] and [operate], into bench/results/targets.json.

    python bench/judge.py

Each entry says what was asked, what was found in the worst case, and whether that meets it. Entries of other issues
stay. A result that is missing, was interrupted, is quick, or was made without a GPU meets nothing, but for what needs
no GPU. Medians are compared; sizes are the bytes that travel, 64 KiB counting as small and 8 MiB as large. GB/s are
those of the slowest cell that a target names, of the GPU alone, whatever the call took on the host. Exit status 1 if a
target is not met.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from h2d_patch.bench.provenance import as_json
from h2d_patch.bench.swap_results import CHOSEN, DRIVER_BATCH, name_of
from h2d_patch.copies.profile import DIRECTIONS, DRIVER, TRITON, Choice
from h2d_patch.copies.profile_file import parse_choice

RESULTS = Path(__file__).resolve().parent / "results"
COPIES, KV_SWAP, OPERATE = "copies", "kv-swap", "operate"
# What the original copies with a wait.
WAITING = ("pageable", "gapped", "transposed", "transposed gapped", "converted", "nested", "cat")
SMALL, LARGE = 64 << 10, 8 << 20
GPU_BOUND_PERCENT = 90  # mean use of the GPU, with the fixes off


class Unknown(Exception):
    """The result does not say; the text says why."""


@dataclass(frozen=True)
class Found:
    value: str
    met: bool


@dataclass(frozen=True)
class Target:
    what: str
    target: str
    result: str
    judge: Callable[[dict[str, Any]], Found]
    issue: str = COPIES
    needs_gpu: bool = True


# --- copies.json ---


def _rows(result: dict[str, Any], keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    rows = [row for row in result["rows"] if keep(row)]
    if not rows:
        raise Unknown("no such case in the result")
    return rows


def _median(row: dict[str, Any], arm: str, queued: int = 0) -> float:
    """Of one copy, where a call makes several."""
    return round(float(row["queued"][str(queued)][arm]["median_us"]) / row.get("copies", 1), 1)


def _size(row: dict[str, Any]) -> int:
    """Bytes of one copy."""
    return int(row["bytes"]) // int(row.get("copies", 1))


def _waits(row: dict[str, Any]) -> bool:
    return row["kind"] in WAITING


def _columns(row: dict[str, Any]) -> int:
    return int(row["bytes"]) // 24 if row["kind"] == "mrope" else 0


def _against_original(row: dict[str, Any]) -> str:
    return f"{_median(row, 'ours')} µs, original {_median(row, 'original')} µs: {row['case']}"


def never_waits(result: dict[str, Any]) -> Found:
    rows = _rows(result, lambda row: not row["asynchronous"])

    def beyond(row: dict[str, Any]) -> float:
        return _median(row, "ours", 20) - (2 * _median(row, "ours") + 50)

    worst = max(rows, key=beyond)
    value = f"{_median(worst, 'ours', 20)} µs queued, {_median(worst, 'ours')} µs idle: {worst['case']}"
    return Found(value, beyond(worst) <= 0)


def idle_small(result: dict[str, Any]) -> Found:
    rows = _rows(result, lambda row: _waits(row) and _size(row) <= SMALL)
    worst = max(rows, key=lambda row: _median(row, "ours") - _median(row, "original"))
    more = _median(worst, "ours") - _median(worst, "original")
    return Found(f"{more:+.1f} µs ({_against_original(worst)})", more <= 8)


def _idle_ratio(most: float, keep: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], Found]:
    def judge(result: dict[str, Any]) -> Found:
        rows = _rows(result, keep)
        worst = max(rows, key=lambda row: _median(row, "ours") / _median(row, "original"))
        ratio = _median(worst, "ours") / _median(worst, "original")
        return Found(f"{ratio:.2f} × ({_against_original(worst)})", ratio <= most)

    return judge


def mrope_small(result: dict[str, Any]) -> Found:
    rows = _rows(result, lambda row: 0 < _columns(row) <= 2048)
    worst = max(rows, key=lambda row: _median(row, "ours"))
    kept = all(arms["ours"]["snapshot_kept"] for row in rows for arms in row["queued"].values())
    value = f"{_median(worst, 'ours')} µs: {worst['case']}{'' if kept else '; a snapshot was lost'}"
    return Found(value, kept and _median(worst, "ours") <= 25)


def _mrope(columns: int) -> Callable[[dict[str, Any]], Found]:
    return _idle_ratio(1, lambda row: _columns(row) == columns)


def in_a_row(result: dict[str, Any]) -> Found:
    found = result["in_a_row"]
    rounds = found["rounds"]["ours"]
    if (found["copies"], found["bytes"], found["queued_ms"]) != (200, 256 << 10, 40) or not rounds:
        raise Unknown("other copies than these were measured")
    slow, longest = max(one["over_1_ms"] for one in rounds), max(one["max_us"] for one in rounds)
    if not slow and not all(one["work_still_queued_at_the_end"] for one in rounds):
        raise Unknown("the queued work had ended before the last copy")
    return Found(f"{slow} over 1 ms, the longest {longest} µs", slow == 0)


def snapshot(result: dict[str, Any]) -> Found:
    measured = {
        f"{row['case']}, {ms} ms queued": arms["ours"]
        for row in _rows(result, lambda row: not row["asynchronous"])
        for ms, arms in row["queued"].items()
    }
    measured |= {f"in a row, round {n}": one for n, one in enumerate(result["in_a_row"]["rounds"]["ours"])}
    measured |= {f"{r['case']}, another stream busy": r["arms"]["ours"] for r in result["other_stream_busy"]["rows"]}
    lost = [where for where, ours in measured.items() if not ours["snapshot_kept"]]
    return Found(
        f"lost in {len(lost)} of {len(measured)} cases{': ' if lost else ''}{lost[0] if lost else ''}", not lost
    )


def _worst(text: str, found: list[str]) -> str:
    return f"{text}: {found[0]}" if found else text


# --- soak.json ---


def soak_right(result: dict[str, Any]) -> Found:
    wrong = [text for run in result["runs"] for text in run["wrong"]]
    number = sum(run["copies"] for run in result["runs"])
    return Found(_worst(f"{len(wrong)} wrong of {number} copies", wrong), not wrong)


def soak_allocations(result: dict[str, Any]) -> Found:
    counts = [run[key] for run in result["runs"] for key in ("torch_pinned_allocations", "pinned_allocations_of_ours")]
    if not counts or None in counts:
        raise Unknown("torch, or this package, does not say how often pinned memory was allocated")
    return Found(str(max(counts)), max(counts) == 0)


def soak_bytes(result: dict[str, Any]) -> Found:
    if not result["runs"] or any(run["torch_pinned_bytes_added"] is None for run in result["runs"]):
        raise Unknown("torch does not say how much memory is pinned")

    def share(run: dict[str, Any]) -> float:
        return float((run["ring_bytes"] + max(0, run["torch_pinned_bytes_added"])) / run["bound_bytes"])

    worst = max(result["runs"], key=share)
    held = worst["ring_bytes"] + max(0, worst["torch_pinned_bytes_added"])
    return Found(f"{held} of {worst['bound_bytes']} bytes", share(worst) <= 1)


# --- multimodal.json ---


def _gpu_bound(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    whole = {name: load for name, load in result["loads"].items() if not load["note"] and not load["errors"]}
    use = {name: load["arms"]["off"]["gpu_use_percent"].get("mean", 0) for name, load in whole.items()}
    found = {name: load for name, load in whole.items() if use[name] >= GPU_BOUND_PERCENT}
    if not found:
        raise Unknown(f"no load was GPU-bound: mean use of the GPU in percent, fixes off: {use}")
    return found


def requests_per_s(result: dict[str, Any]) -> Found:
    found = {name: load["on_against_off"]["requests_per_s"] for name, load in _gpu_bound(result).items()}
    name, worst = min(found.items(), key=lambda item: item[1]["median"])
    low, high = worst["interval_95"]
    value = f"{worst['median']} × ({len(worst['ratios'])} pairs, 95 % in {low} to {high}): {name}"
    return Found(value, worst["median"] >= 1.05)


def first_token(result: dict[str, Any]) -> Found:
    found = {
        name: [load["arms"][arm]["ms_to_first_token"]["p99"] for arm in ("off", "on")]
        for name, load in _gpu_bound(result).items()
    }
    name, (off, on) = max(found.items(), key=lambda item: item[1][1] / item[1][0])
    return Found(f"{on} ms, original {off} ms: {name}", on <= off)


# --- counting.json ---


def _cost(*names: str) -> Callable[[dict[str, Any]], Found]:
    def judge(result: dict[str, Any]) -> Found:
        ns, name = max((float(result["cost_ns"][name]), name) for name in names)
        return Found(f"{ns / 1000:.2f} µs: {name}", ns <= 1000)

    return judge


# --- ab_live.json, ab_kv_offload.json ---


def ab_cost(result: dict[str, Any]) -> Found:
    more, found = float(result["idle"]["more_cpu_s_per_s"]), _requests_with_ab(result["loaded"])
    length = result["settings"]["idle_slice"]
    value = f"{more:.2%} of one processor's time with slices of {length:g} s; under load requests/s {_ratio(found)}"
    value += f", on processors that the server saturates {_ratio(_requests_with_ab(result['saturated']))}"
    return Found(value, more <= 0.01 and found["median"] >= 0.99)


def _requests_with_ab(loaded: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = loaded["with_against_without"]["requests_per_s"]
    return found


def _ratio(found: dict[str, Any]) -> str:
    low, high = found["interval_95"]
    return f"{found['median']} × ({len(found['ratios'])} pairs, 95 % in {low} to {high})"


def ab_same(result: dict[str, Any]) -> Found:
    same = result["same"]
    if not same["slices"]["same"] or len(same["measured"]) < 20 or len(same["on_against_off"]) < 5:
        raise Unknown("not 20 slices of both arms the original, or not every measure")
    found = {name: ratio for name, ratio in same["on_against_off"].items() if ratio is not None}
    seen = [name for name, ratio in found.items() if ratio["differs"]]
    rate = found["requests_per_s"]
    value = f"requests/s {rate['ratio']:.3f} × ({rate['low']:.3f} to {rate['high']:.3f}, {rate['pairs']} pairs)"
    return Found(_worst(f"a difference in {len(seen)} of {len(found)} measures; {value}", seen), not seen)


def ab_gain(result: dict[str, Any]) -> Found:
    found, by_hand = result["ab"]["on_against_off"]["requests_per_s"], result["switched"]["on_against_off"]["median"]
    value = f"requests/s {found['ratio']:.2f} × ({found['low']:.2f} to {found['high']:.2f}), by hand {by_hand:.2f} ×"
    return Found(value, found["low"] <= by_hand <= found["high"] and found["low"] > 1)


# --- switch_time.json ---


def switch_time(result: dict[str, Any]) -> Found:
    s, name = _slowest(result["processor_free"], "from_command")
    file_s = _slowest(result["processor_free"], "from_file")[0]
    busy = " and ".join(f"{_slowest(result['saturated'], what)[0]:.2f} s" for what in ("from_command", "from_file"))
    value = f"{s:.2f} s from the start of the command, {file_s:.2f} s from its file: {name}"
    value += f", the slowest of {result['switches']} switches; on processors that the server saturates {busy}"
    return Found(value, s <= 2)


def _slowest(processes: dict[str, Any], what: str) -> tuple[float, str]:
    if missing := {"api-server", "engine-core", "worker"} - set(processes):
        raise Unknown(f"not measured: {min(missing)}")
    return max((float(seconds[what]["max_s"]), name) for name, seconds in processes.items())


# --- swap.json ---

KIB = 1 << 10
MANY = 4096
MOST_SMS = 8


def _choices(row: dict[str, Any]) -> dict[Choice, float]:
    """GB/s of each path asked for through swap_arrays; of many blocks, the driver's batch called at once will do."""
    found = {choice: float(arm["gbps"]) for name, arm in row["arms"].items() if (choice := parse_choice(name))}
    return {Choice(DRIVER): float(row["arms"][DRIVER_BATCH]["gbps"]), **found}


def _kernels(row: dict[str, Any], path: str | None = None, most_sms: int = 1024) -> dict[Choice, float]:
    found = {
        choice: gbps
        for choice, gbps in _choices(row).items()
        if choice.path != DRIVER and path in (None, choice.path) and choice.programs <= most_sms
    }
    if not found:
        raise Unknown(f"no such path was measured: {name_of(row)}")
    return found


def _swaps(
    result: dict[str, Any], gpu_to_cpu: bool | None, sizes: tuple[int, ...] | None, counts: Callable[[int], bool]
) -> list[dict[str, Any]]:
    """Rows of these `sizes`, or of 8 KiB and more. Each size must be there."""

    def keep(row: dict[str, Any]) -> bool:
        right_size = row["bytes"] in sizes if sizes else row["bytes"] >= 8 * KIB
        return gpu_to_cpu in (None, row["gpu_to_cpu"]) and right_size and counts(row["blocks"])

    rows = _rows(result, keep)
    wanted = {(d, n) for d in ((False, True) if gpu_to_cpu is None else (gpu_to_cpu,)) for n in sizes or ()}
    if missing := wanted - {(row["gpu_to_cpu"], row["bytes"]) for row in rows}:
        direction, nbytes = min(missing)
        raise Unknown(f"not measured: {DIRECTIONS[direction]}, {nbytes} bytes")
    return rows


def _held(row: dict[str, Any]) -> dict[str, Any]:
    """With the times of the GPU alone, which reads the descriptors; the host's time is a target of its own."""
    if not row["held"]:
        raise Unknown(f"not measured with the GPU held: {name_of(row)}")
    return {**row, "arms": row["held"]}


def _many(blocks: int) -> bool:
    return blocks >= MANY


def _1024(blocks: int) -> bool:
    return blocks == 1024


def _speed(
    least: float,
    gpu_to_cpu: bool,
    sizes: tuple[int, ...] | None,
    counts: Callable[[int], bool] = _many,
    path: str | None = None,
    most_sms: int = MOST_SMS,
    of_one_copy: bool = False,
) -> Callable[[dict[str, Any]], Found]:
    def judge(result: dict[str, Any]) -> Found:
        one_copy = result["one_copy"][DIRECTIONS[gpu_to_cpu]]
        limit = round(one_copy["bytes"] / min(one_copy["us"]) / 1e3, 2)  # the fastest: what disturbs one is no limit
        best = []
        for row in _swaps(result, gpu_to_cpu, sizes, counts):
            kernels = _kernels(_held(row), path, most_sms)
            choice = max(kernels, key=lambda choice: kernels[choice])
            from_call = row["arms"][str(choice)]["gbps"]
            best.append((kernels[choice], f"{name_of(row)} by {choice} (from the call {from_call:.1f} GB/s)"))
        gbps, where = min(best)
        if of_one_copy:
            return Found(f"the GPU alone {gbps / limit:.3f} of {limit} GB/s: {where}", gbps / limit >= least)
        return Found(f"the GPU alone {gbps:.1f} GB/s: {where}", gbps >= least)

    return judge


def small_blocks(result: dict[str, Any]) -> Found:
    found = []
    for row in map(_held, _swaps(result, None, (KIB, 2 * KIB), _many)):
        ours, driver = max(_kernels(row).values()), float(row["arms"][DRIVER_BATCH]["gbps"])
        found.append((ours / driver, f"{ours:.1f} and {driver:.2f} GB/s of the GPU alone: {name_of(row)}"))
    ratio, where = min(found)
    return Found(f"{ratio:.1f} × ({where})", ratio >= 15)


def chosen(result: dict[str, Any]) -> Found:
    """Against the best path, each asked for through swap_arrays; also said: against the driver's batch at once."""
    rows = _rows(result, lambda row: True)

    def shares(best: Callable[[dict[str, Any]], float]) -> tuple[float, float, str]:
        of_best = [(row["arms"][CHOSEN]["gbps"] / best(row), name_of(row)) for row in rows]
        worst, where = min(of_best)
        return sum(share >= 0.95 for share, _ in of_best) / len(rows), worst, where

    good, worst, where = shares(lambda row: max(_choices(row).values()))
    good_alone, worst_alone, where_alone = shares(
        lambda row: max(*_choices(row).values(), row["arms"][DRIVER_BATCH]["gbps"])
    )
    alone = f"beside a driver batch that nobody asks about {good_alone:.1%}, {worst_alone:.2f}: {where_alone}"
    asked = [_choices(row)[parse_choice(row["chosen"]) or Choice(DRIVER)] / max(_choices(row).values()) for row in rows]
    unasked = f"the path itself without asking the profile: {sum(share >= 0.95 for share in asked) / len(rows):.1%}"
    value = f"0.95 in {good:.1%} of {len(rows)} cells, the worst {worst:.2f}: {where} ({unasked}; {alone})"
    return Found(value, good >= 0.95 and worst >= 0.85)


def beside_multiplications(result: dict[str, Any]) -> Found:
    found = []
    for row in _matmul_rows(result):
        driver, ours = row["arms"][DRIVER_BATCH], row["arms"][CHOSEN]
        for one in (driver, ours):
            if any(swapped > took for swapped, took in zip(one["swapped_after_ms"], one["ms"], strict=True)):
                raise Unknown(f"{DIRECTIONS[row['gpu_to_cpu']]}: the multiplications ended before the swaps did")
        found.append((ours["median_ms"] / driver["median_ms"], DIRECTIONS[row["gpu_to_cpu"]]))
    ratio, where = max(found)
    return Found(f"{ratio:.3f} × the time beside the driver's batch: {where}", ratio <= 1.1)


def _matmul_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result["matmul"]["rows"]
    if {row["gpu_to_cpu"] for row in rows} != {False, True}:
        raise Unknown("not measured beside multiplications in both directions")
    return rows


def host_time(result: dict[str, Any]) -> Found:
    rows = [row for row in result["host_time"] if row["blocks"] == MANY and row["chosen"] != DRIVER]
    if {row["gpu_to_cpu"] for row in rows} != {False, True}:
        raise Unknown(f"no host time of {MANY} blocks by a kernel in both directions")
    worst = max(rows, key=lambda row: row["arms"]["call"]["median_us"])
    us = worst["arms"]["call"]["median_us"]
    form = "two sizes" if worst["mixed"] else "one size"
    quick = statistics.quantiles(worst["arms"]["call"]["us"], n=10)[0]
    where = f"{DIRECTIONS[worst['gpu_to_cpu']]}, {form}, {worst['chosen']}"
    return Found(f"{us} µs: {where} (a tenth of the calls within {quick:.0f} µs)", us <= 60)


# --- kv_offload.json, kv_offload_0.26.0.json ---


def _served(passes: str, least: float) -> Callable[[dict[str, Any]], Found]:
    """`passes`: "load" or "store", those in which every block is loaded or stored and none the other way."""

    def judge(result: dict[str, Any]) -> Found:
        if passes not in result.get("passes", {}):
            raise Unknown("not measured")
        if result["kv_block_bytes"] != list(_EIGHT):
            raise Unknown(f"measured with blocks of {result['kv_block_bytes']} bytes")
        found = result["passes"][passes]["on_against_off"]["requests_per_s"]
        low, high = found["interval_95"]
        value = f"{found['median']} × ({len(found['ratios'])} pairs, 95 % in {low} to {high})"
        return Found(value, found["median"] >= least)

    return judge


_8_TO_24 = tuple(size * KIB for size in (8, 12, 16, 24))
_TO_GPU, _TO_CPU = False, True
_FOUR, _EIGHT = (4 * KIB,), (8 * KIB,)
SWAP_TARGETS = [
    Target(what, target, "swap.json", judge, KV_SWAP)
    for what, target, judge in (
        (
            "CPU to GPU, 8 to 24 KiB, n ≥ 4096, at most 8 SMs, descriptors included",
            "50 GB/s",
            _speed(50, _TO_GPU, _8_TO_24),
        ),
        (
            "CPU to GPU, 8 to 24 KiB, n ≥ 4096, at most 8 SMs, against one large copy",
            "0.91",
            _speed(0.91, _TO_GPU, _8_TO_24, of_one_copy=True),
        ),
        ("CPU to GPU, 4 KiB, n ≥ 4096, at most 8 SMs", "47 GB/s", _speed(47, _TO_GPU, _FOUR)),
        ("CPU to GPU, 4 KiB, n = 1024, at most 8 SMs", "42 GB/s", _speed(42, _TO_GPU, _FOUR, _1024)),
        ("CPU to GPU, 8 KiB, n = 1024, at most 8 SMs", "45 GB/s", _speed(45, _TO_GPU, _EIGHT, _1024)),
        ("GPU to CPU, 8 KiB and more, n ≥ 4096, at most 8 SMs", "51 GB/s", _speed(51, _TO_CPU, None)),
        ("GPU to CPU, 4 KiB, n ≥ 4096, at most 8 SMs", "48 GB/s", _speed(48, _TO_CPU, _FOUR)),
        ("1 and 2 KiB, n ≥ 4096, either direction", "15 × the driver's batch", small_blocks),
        (
            "Triton's kernel, CPU to GPU, 8 KiB, n ≥ 4096",
            "47 GB/s",
            _speed(47, _TO_GPU, _EIGHT, path=TRITON, most_sms=1024),
        ),
        ("the choice against the best path of each cell", "0.95 in 95 % of cells, never under 0.85", chosen),
        (
            "multiplications beside a saturating swap, at equal bytes",
            "at most 1.1 × the time beside the driver's batch",
            beside_multiplications,
        ),
        ("descriptors and host time, n = 4096", "at most 60 µs from call to return", host_time),
    )
]
SERVED_TARGETS = [
    Target(
        f"KV offload, vLLM {release}, 8 KiB blocks, only {words}",
        f"{least} × requests/s",
        name,
        _served(passes, least),
        KV_SWAP,
    )
    for release, name, passes, words, least in (
        ("0.22.1", "kv_offload.json", "load", "loading", 8),
        ("0.22.1", "kv_offload.json", "store", "storing", 3),
        ("0.26.0", "kv_offload_0.26.0.json", "load", "loading", 1.35),
        ("0.26.0", "kv_offload_0.26.0.json", "store", "storing", 3),
    )
]
OPERATE_TARGETS = [
    Target(what, target, name, judge, OPERATE, needs_gpu=False)
    for what, target, name, judge in (
        (
            "a switched-off fix, a call",
            "at most 1 µs",
            "counting.json",
            _cost("switched off: expression", "switched off: statements", "switched off: replaced function"),
        ),
        (
            "calls, bytes, path and host time counted, a call",
            "at most 1 µs",
            "counting.json",
            _cost("counting: expression", "counting: statements"),
        ),
        ("a switch, until every process of a server has taken it", "at most 2 s", "switch_time.json", switch_time),
        ("an A/B's overhead on throughput", "within 1 %", "ab_live.json", ab_cost),
        ("an A/B of 20 slices, both arms the original", "no difference in any measure", "ab_live.json", ab_same),
    )
]
OPERATE_TARGETS.append(
    Target(
        "an A/B of kv-swap, vLLM 0.22.1, KV offload, only loading",
        "the gain by hand in its interval",
        "ab_kv_offload.json",
        ab_gain,
        OPERATE,
    )
)

TARGETS = (
    Target("any fixed call, 20 ms queued", "at most 2 × idle + 50 µs, at every size", "copies.json", never_waits),
    Target("idle, up to 64 KiB", "original + 8 µs at most", "copies.json", idle_small),
    Target(
        "idle, 64 KiB to 8 MiB",
        "at most the original",
        "copies.json",
        _idle_ratio(1, lambda row: _waits(row) and SMALL < _size(row) < LARGE),
    ),
    Target(
        "idle, 8 MiB and more",
        "at most 0.6 × the original",
        "copies.json",
        _idle_ratio(0.6, lambda row: _waits(row) and _size(row) >= LARGE),
    ),
    Target("M-RoPE, n ≤ 2048, idle, snapshot kept", "at most 25 µs", "copies.json", mrope_small),
    Target("M-RoPE, n = 8192, idle", "at most the original", "copies.json", _mrope(8192)),
    Target("M-RoPE, n = 32768, idle", "at most the original", "copies.json", _mrope(32768)),
    Target("200 copies of 256 KiB in a row under 40 ms queued", "none over 1 ms", "copies.json", in_a_row),
    Target("pinned allocations, warm, in the soak", "0", "soak.json", soak_allocations),
    Target("pinned bytes in the soak", "never above the bound", "soak.json", soak_bytes),
    Target("snapshot kept, all cases and queue depths", "always", "copies.json", snapshot),
    Target("snapshot kept, in the soak", "always", "soak.json", soak_right),
    Target("multimodal serving, paired, GPU-bound", "1.05 × requests/s or more", "multimodal.json", requests_per_s),
    Target(
        "multimodal serving, paired, GPU-bound: time to first token",
        "no worse at the 99th percentile",
        "multimodal.json",
        first_token,
    ),
    *SWAP_TARGETS,
    *SERVED_TARGETS,
    *OPERATE_TARGETS,
)


def judged(directory: Path, targets: Iterable[Target] = TARGETS) -> list[dict[str, Any]]:
    """One entry for each target, from the result files in `directory`."""
    entries = []
    for target in targets:
        entry: dict[str, Any] = {"issue": target.issue, "what": target.what, "target": target.target}
        try:
            entry |= asdict(target.judge(_load(directory / target.result, target.needs_gpu)))
        except Unknown as error:
            entry |= {"value": None, "met": False, "reason": str(error)}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            entry |= {"value": None, "met": False, "reason": f"cannot be read: {type(error).__name__}: {error}"}
        entries.append({**entry, "result": f"bench/results/{target.result}"})
    return entries


def _load(path: Path, needs_gpu: bool) -> dict[str, Any]:
    """Raises Unknown for what is no whole measurement."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unknown("there is no such result") from None
    if "complete" not in result:
        raise Unknown("not measured in this form")
    if not result["complete"] and "loads" not in result:  # each load is a measurement of its own
        wrong = [text for run in result.get("runs", ()) for text in (*run["wrong"], *run["errors"])]
        raise Unknown(_worst("the measurement did not end as it should", wrong))
    if result.get("quick"):
        raise Unknown("a quick measurement, with few cases")
    if needs_gpu and not result["machine"]["gpu"]:
        raise Unknown("made without a GPU")
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they lie")
    directory = parser.parse_args(arguments).results
    written = directory / "targets.json"
    others = json.loads(written.read_text(encoding="utf-8")) if written.exists() else []
    entries = judged(directory)
    kept = [entry for entry in others if entry["issue"] not in (COPIES, KV_SWAP, OPERATE)]
    written.write_text(as_json(kept + entries), encoding="utf-8")
    for entry in entries:
        found = entry["value"] if entry["value"] is not None else f"unknown: {entry['reason']}"
        print(f"{'met' if entry['met'] else 'NOT MET':8s} {entry['what']}: {entry['target']}; found {found}")
    print(f"wrote {written}")
    return 0 if all(entry["met"] for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
