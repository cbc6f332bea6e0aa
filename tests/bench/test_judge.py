"""bench/judge.py on made-up result files."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import judge

ABOUT = {"machine": {"gpu": "a GPU"}, "complete": True}
SIZES = {"pageable": (1 << 10, 64 << 10, 128 << 10, 4 << 20, 8 << 20, 64 << 20), "gapped": (1 << 20,)}


def _row(kind: str, nbytes: int, original: float, ours: float, queued: float, asynchronous: bool = False) -> Any:
    def arms(first: float, second: float) -> dict[str, Any]:
        return {
            "original": {"median_us": first, "snapshot_kept": True},
            "ours": {"median_us": second, "snapshot_kept": not asynchronous},
        }

    return {
        "case": f"{kind} {nbytes}",
        "kind": kind,
        "bytes": nbytes,
        "asynchronous": asynchronous,
        "queued": {"0": arms(original, ours), "2": arms(original, ours), "20": arms(20_000, queued)},
    }


def _good() -> dict[str, Any]:
    rows = [
        _row(kind, size, *((10, 18) if size <= 64 << 10 else (100, 100) if size < 8 << 20 else (100, 60)), 80)
        for kind, sizes in SIZES.items()
        for size in sizes
    ]
    rows += [_row("mrope", 24 * n, *((30, 25) if n <= 2048 else (50, 50)), 70) for n in (16, 2048, 8192, 32768)]
    rows.append(_row("pinned", 4 << 20, 10, 90, 500, asynchronous=True))  # left alone: judged nowhere
    once = {"over_1_ms": 0, "max_us": 90.0, "work_still_queued_at_the_end": True, "snapshot_kept": True}
    in_a_row = {"copies": 200, "bytes": 256 << 10, "queued_ms": 40, "rounds": {"ours": [once, dict(once)]}}
    other = {"rows": [{"case": "pageable 1 MiB", "arms": {"ours": {"snapshot_kept": True}}}]}
    run = {
        "bound_bytes": 16, "ring_bytes": 16, "copies": 1000, "torch_pinned_allocations": 0,
        "torch_pinned_bytes_added": 0, "pinned_allocations_of_ours": 0, "wrong": [], "errors": [],
    }  # fmt: skip
    load = {
        "note": None,
        "errors": 0,
        "arms": {arm: {"gpu_use_percent": {"mean": 97}, "ms_to_first_token": {"p99": 900}} for arm in ("off", "on")},
        "on_against_off": {"requests_per_s": {"median": 1.05, "interval_95": [1.04, 1.07], "ratios": [1.05, 1.06]}},
    }
    served = {
        passes: {"on_against_off": {"requests_per_s": {"median": 8.0, "interval_95": [7.9, 8.1], "ratios": [8, 8]}}}
        for passes in ("load", "store")
    }
    return {
        "swap.json": _good_swap(),
        "kv_offload.json": {**ABOUT, "kv_block_bytes": [8192], "passes": served},
        "kv_offload_0.26.0.json": {**ABOUT, "kv_block_bytes": [8192], "passes": copy.deepcopy(served)},
        "copies.json": {**ABOUT, "rows": rows, "in_a_row": in_a_row, "other_stream_busy": other},
        "soak.json": {**ABOUT, "runs": [run, copy.deepcopy(run)]},
        "multimodal.json": {**ABOUT, "loads": {"one size": load, "several": copy.deepcopy(load)}},
        "ab_live.json": _good_ab(),
        "ab_kv_offload.json": _good_gain(),
        "switch_time.json": {"machine": {"gpu": None}, "complete": True, "switches": 40, **_good_switches()},
        "counting.json": {"machine": {"gpu": None}, "complete": True, "cost_ns": dict.fromkeys(COSTS, 1000)},
    }


def _good_ab() -> dict[str, Any]:
    ratio = {"ratio": 1.0, "low": 0.97, "high": 1.03, "pairs": 10, "differs": False}
    measures = ("requests_per_s", "tokens_per_s", "ttft_s", "itl_s", "host_time_s")
    requests = {"median": 0.995, "interval_95": [0.98, 0.99], "ratios": [0.99, 1.0]}
    return {
        "machine": {"gpu": None},
        "complete": True,
        "settings": {"idle_slice": 10.0},
        "idle": {"more_cpu_s_per_s": 0.01},
        "loaded": {"with_against_without": {"requests_per_s": dict(requests)}},
        "saturated": {"with_against_without": {"requests_per_s": {**requests, "median": 0.95}}},
        "same": {
            "slices": {"same": True},
            "measured": [{"number": number} for number in range(20)],
            "on_against_off": {name: dict(ratio) for name in measures},
        },
    }


def _good_gain() -> dict[str, Any]:
    ratio = {"ratio": 8.5, "low": 8.0, "high": 9.0, "pairs": 5, "differs": True}
    return {
        **ABOUT,
        "ab": {"on_against_off": {"requests_per_s": ratio}},
        "switched": {"on_against_off": {"median": 9.0}},
    }


def _good_switches() -> dict[str, Any]:
    seconds = {"from_command": {"max_s": 2.0}, "from_file": {"max_s": 0.5}}
    free = {name: copy.deepcopy(seconds) for name in ("api-server", "engine-core", "worker")}
    return {"processor_free": free, "saturated": copy.deepcopy(free)}


COSTS = (
    "switched off: expression", "switched off: statements", "switched off: replaced function", "counting: expression",
    "counting: statements",
)  # fmt: skip


SWAP_SIZES = (1024, 2048, 4096, 8192, 12288, 16384, 24576, 1 << 20)


def _good_swap() -> dict[str, Any]:
    def row(gpu_to_cpu: bool, nbytes: int, blocks: int) -> dict[str, Any]:
        rates = {"driver batch": 3.0, "bulk 8": 51.0 if gpu_to_cpu else 50.0, "triton 64": 47.0, "chosen": 50.0}
        rates |= {"driver": 2.0} if blocks <= 64 else {}
        arms = {arm: {"gbps": gbps, "us": [1.0]} for arm, gbps in rates.items()}
        return {
            "gpu_to_cpu": gpu_to_cpu,
            "bytes": nbytes,
            "blocks": blocks,
            "chosen": "bulk 8",
            "arms": arms,
            "held": copy.deepcopy(arms) if blocks >= 1024 else {},
        }

    def multiplied(gpu_to_cpu: bool) -> dict[str, Any]:
        times = {"alone": 90.0, "driver batch": 100.0, "bulk 8": 120.0, "chosen": 110.0}
        arms = {arm: {"median_ms": ms, "ms": [ms], "swapped_after_ms": [80.0]} for arm, ms in times.items()}
        return {"gpu_to_cpu": gpu_to_cpu, "multiplications": 60, "arms": arms}

    both = (False, True)
    call = {"median_us": 60.0, "us": [50.0, 60.0, 70.0]}
    return {
        **ABOUT,
        "one_copy": {
            "CPU to GPU": {"bytes": 54_900_000, "us": [1100.0, 1000.0]},
            "GPU to CPU": {"bytes": 55_000_000, "us": [1000.0]},
        },
        "rows": [row(d, n, b) for d in both for n in SWAP_SIZES for b in (64, 1024, 4096)],
        "matmul": {"rows": [multiplied(d) for d in both]},
        "host_time": [
            {"gpu_to_cpu": d, "blocks": 4096, "mixed": m, "chosen": "bulk 8", "arms": {"call": copy.deepcopy(call)}}
            for d in both
            for m in both
        ],
    }


def _gbps(gpu_to_cpu: bool, nbytes: int, blocks: int, arm: str, gbps: float) -> Any:
    def change(results: dict[str, Any]) -> None:
        at = (gpu_to_cpu, nbytes, blocks)
        rows = results["swap.json"]["rows"]
        (row,) = [row for row in rows if (row["gpu_to_cpu"], row["bytes"], row["blocks"]) == at]
        for rates in filter(None, (row["arms"], row["held"])):
            rates[arm]["gbps"] = gbps

    return change


def _set(path: str, value: Any) -> Any:
    """Change the made-up results at `file/key/…`."""

    def change(results: dict[str, Any]) -> None:
        at: Any = results
        *keys, last = path.split("/")
        for key in keys:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = value

    return change


def _median(case: str, queued: int, us: float) -> Any:
    def change(results: dict[str, Any]) -> None:
        (row,) = [row for row in results["copies.json"]["rows"] if row["case"] == case]
        row["queued"][str(queued)]["ours"]["median_us"] = us

    return change


def _without(name: str, kind: str) -> Any:
    def change(results: dict[str, Any]) -> None:
        results[name]["rows"] = [row for row in results[name]["rows"] if row["kind"] != kind]

    return change


def _judged(tmp_path: Path, results: dict[str, Any]) -> list[dict[str, Any]]:
    for name, content in results.items():
        (tmp_path / name).write_text(json.dumps(content))
    judge.main(["--results", str(tmp_path)])
    found: list[dict[str, Any]] = json.loads((tmp_path / "targets.json").read_text())
    return found


def test_results_at_the_limits_meet_every_target(tmp_path: Path) -> None:
    entries = _judged(tmp_path, _good())
    assert [entry["what"] for entry in entries if not entry["met"]] == []
    assert len(entries) == len(judge.TARGETS)
    assert all(set(entry) == {"issue", "what", "target", "value", "met", "result"} for entry in entries)
    assert judge.main(["--results", str(tmp_path)]) == 0


TO_GPU_8 = "CPU to GPU, 8 to 24 KiB, n ≥ 4096, at most 8 SMs, descriptors included"
TO_GPU_OF_LIMIT = "CPU to GPU, 8 to 24 KiB, n ≥ 4096, at most 8 SMs, against one large copy"
TO_CPU_8 = "GPU to CPU, 8 KiB and more, n ≥ 4096, at most 8 SMs"
SMALL = "1 and 2 KiB, n ≥ 4096, either direction"
CHOICE = "the choice against the best path of each cell"
BESIDE = "multiplications beside a saturating swap, at equal bytes"
HOST_TIME = "descriptors and host time, n = 4096"
ROW = "copies.json/in_a_row/rounds/ours/1"
SERVED = "multimodal.json/loads/several"
MROPE = "M-RoPE, n ≤ 2048, idle, snapshot kept"
AB_COST = "an A/B's overhead on throughput"
AB_SAME = "an A/B of 20 slices, both arms the original"
AB_GAIN = "an A/B of kv-swap, vLLM 0.22.1, KV offload, only loading"
SWITCH = "a switch, until every process of a server has taken it"
SNAPSHOT = "snapshot kept, all cases and queue depths"


@pytest.mark.parametrize(
    ("change", "missed", "names"),
    [
        (_median("pageable 67108864", 20, 171), ["any fixed call, 20 ms queued"], "pageable 67108864"),
        (_median("mrope 384", 20, 101), ["any fixed call, 20 ms queued"], "mrope 384"),
        (_median("pageable 65536", 0, 18.1), ["idle, up to 64 KiB"], "pageable 65536"),
        (_median("gapped 1048576", 0, 100.1), ["idle, 64 KiB to 8 MiB"], "gapped 1048576"),
        (_median("pageable 131072", 0, 101), ["idle, 64 KiB to 8 MiB"], "pageable 131072"),
        (_median("pageable 8388608", 0, 60.1), ["idle, 8 MiB and more"], "pageable 8388608"),
        (_median("mrope 49152", 0, 25.1), [MROPE], "mrope 49152"),
        (
            _set("counting.json/cost_ns/switched off: statements", 1001),
            ["a switched-off fix, a call"],
            "switched off: statements",
        ),
        (
            _set("counting.json/cost_ns/counting: expression", 1001),
            ["calls, bytes, path and host time counted, a call"],
            "counting: expression",
        ),
        (_set("ab_live.json/idle/more_cpu_s_per_s", 0.0101), [AB_COST], "1.01% of one processor's time"),
        (
            _set("ab_live.json/loaded/with_against_without/requests_per_s/median", 0.989),
            [AB_COST],
            "0.989 ×",
        ),
        (_set("ab_live.json/same/on_against_off/ttft_s/differs", True), [AB_SAME], "ttft_s"),
        (_set("ab_kv_offload.json/switched/on_against_off/median", 9.01), [AB_GAIN], "by hand 9.01"),
        (_set("ab_kv_offload.json/ab/on_against_off/requests_per_s/low", 0.99), [AB_GAIN], "0.99 to 9.00"),
        (
            _set("switch_time.json/processor_free/engine-core/from_command/max_s", 2.01),
            [SWITCH],
            "2.01 s from the start",
        ),
        (_set("copies.json/rows/7/queued/2/ours/snapshot_kept", False), [MROPE, SNAPSHOT], "lost"),
        (_median(f"mrope {24 * 8192}", 0, 51), ["M-RoPE, n = 8192, idle"], "mrope"),
        (_median(f"mrope {24 * 32768}", 0, 51), ["M-RoPE, n = 32768, idle"], "mrope"),
        (_set(f"{ROW}/over_1_ms", 1), ["200 copies of 256 KiB in a row under 40 ms queued"], "1 over"),
        (_set(f"{ROW}/snapshot_kept", False), [SNAPSHOT], "in a row, round 1"),
        (_set("copies.json/rows/0/queued/20/ours/snapshot_kept", False), [SNAPSHOT], "pageable 1024, 20 ms"),
        (
            _set("copies.json/other_stream_busy/rows/0/arms/ours/snapshot_kept", False),
            [SNAPSHOT],
            "another stream busy",
        ),
        (_set("soak.json/runs/1/torch_pinned_allocations", 2), ["pinned allocations, warm, in the soak"], "2"),
        (_set("soak.json/runs/0/pinned_allocations_of_ours", 1), ["pinned allocations, warm, in the soak"], "1"),
        (_set("soak.json/runs/0/ring_bytes", 17), ["pinned bytes in the soak"], "17 of 16"),
        (_set("soak.json/runs/0/torch_pinned_bytes_added", 4), ["pinned bytes in the soak"], "20 of 16"),
        (_set("soak.json/runs/0/wrong", ["seed 0"]), ["snapshot kept, in the soak"], "seed 0"),
        (
            _set(f"{SERVED}/on_against_off/requests_per_s/median", 1.049),
            ["multimodal serving, paired, GPU-bound"],
            "several",
        ),
        (
            _set(f"{SERVED}/arms/on/ms_to_first_token/p99", 901),
            ["multimodal serving, paired, GPU-bound: time to first token"],
            "several",
        ),
        (_gbps(False, 12288, 4096, "bulk 8", 49.97), [TO_GPU_8], "12 KiB x 4096 by bulk 8 (from the call 50.0 GB/s)"),
        (_set("swap.json/one_copy/CPU to GPU/bytes", 55_000_000), [TO_GPU_OF_LIMIT], "0.909 of 55.0"),
        (_gbps(False, 4096, 4096, "bulk 8", 46.9), ["CPU to GPU, 4 KiB, n ≥ 4096, at most 8 SMs"], "46.9 GB/s"),
        (_gbps(False, 4096, 1024, "bulk 8", 41.9), ["CPU to GPU, 4 KiB, n = 1024, at most 8 SMs"], "x 1024"),
        (_gbps(False, 8192, 1024, "bulk 8", 44.9), ["CPU to GPU, 8 KiB, n = 1024, at most 8 SMs"], "x 1024"),
        (_gbps(True, 1 << 20, 4096, "bulk 8", 50.9), [TO_CPU_8], "1 MiB x 4096"),
        (_gbps(True, 4096, 4096, "bulk 8", 47.9), ["GPU to CPU, 4 KiB, n ≥ 4096, at most 8 SMs"], "4 KiB x 4096"),
        (_gbps(True, 2048, 4096, "driver batch", 3.5), [SMALL], "GPU to CPU 2 KiB x 4096"),
        (_gbps(False, 8192, 4096, "triton 64", 46.9), ["Triton's kernel, CPU to GPU, 8 KiB, n ≥ 4096"], "by triton 64"),
        (_gbps(False, 8192, 64, "chosen", 42.0), [CHOICE], "0.84: CPU to GPU 8 KiB x 64"),
        (
            _set("swap.json/matmul/rows/1/arms/chosen/median_ms", 110.2),
            [BESIDE],
            "1.102 × the time beside the driver's batch: GPU to CPU",
        ),
        (_set("swap.json/host_time/3/arms/call/median_us", 60.1), [HOST_TIME], "GPU to CPU, two sizes"),
        (
            _set("kv_offload.json/passes/load/on_against_off/requests_per_s/median", 7.9),
            ["KV offload, vLLM 0.22.1, 8 KiB blocks, only loading"],
            "7.9 ×",
        ),
        (
            _set("kv_offload_0.26.0.json/passes/store/on_against_off/requests_per_s/median", 2.9),
            ["KV offload, vLLM 0.26.0, 8 KiB blocks, only storing"],
            "2.9 ×",
        ),
    ],
)
def test_a_target_just_missed_is_not_met_and_the_case_is_named(
    tmp_path: Path, change: Any, missed: list[str], names: str
) -> None:
    results = _good()
    change(results)
    entries = _judged(tmp_path, results)
    assert [entry["what"] for entry in entries if not entry["met"]] == missed
    assert all(names in entry["value"] for entry in entries if entry["what"] == missed[-1])
    assert judge.main(["--results", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("copies.json/complete", False), "did not end"),
        (_set("copies.json/quick", True), "quick"),
        (_set("copies.json/machine", {"gpu": None}), "without a GPU"),
        (_set("copies.json/rows", []), "no such case"),
        (_set("copies.json/rows", None), "cannot be read"),
        (_without("copies.json", "mrope"), "no such case"),
        (_set(f"{ROW}/work_still_queued_at_the_end", False), "ended before the last copy"),
        (_set("copies.json/in_a_row/copies", 20), "other copies"),
        (_set("soak.json/runs/0/torch_pinned_allocations", None), "does not say"),
        (_set("soak.json/runs", []), "does not say"),
        (_set("multimodal.json/loads", {}), "no load was GPU-bound"),
        (_set("soak.json/complete", False), "did not end"),
        (_set("swap.json/rows", []), "no such case"),
        (lambda r: [row["held"].pop("bulk 8", None) for row in r["swap.json"]["rows"]], "no such path"),
        (lambda r: r["swap.json"]["rows"].pop(17), "not measured"),
        (lambda r: r["swap.json"]["matmul"]["rows"].pop(), "in both directions"),
        (_set("swap.json/matmul/rows/0/arms/driver batch/swapped_after_ms", [100.1]), "ended before the swaps did"),
        (lambda r: [row.update(chosen="driver") for row in r["swap.json"]["host_time"][:2]], "by a kernel"),
        (_set("kv_offload.json/passes", {}), "not measured"),
        (_set("kv_offload_0.26.0.json/kv_block_bytes", [16384]), "with blocks of [16384] bytes"),
        (lambda r: r["kv_offload.json"].pop("complete"), "not measured in this form"),
        (lambda r: r["switch_time.json"]["saturated"].pop("worker"), "not measured: worker"),
        (lambda r: r["ab_live.json"]["same"]["measured"].pop(), "not 20 slices"),
        (_set("ab_live.json/same/slices/same", False), "not 20 slices of both arms the original"),
    ],
)
def test_what_a_result_does_not_show_is_not_met_and_has_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    results = _good()
    change(results)
    unknown = [entry for entry in _judged(tmp_path, results) if entry["value"] is None]
    assert unknown and not any(entry["met"] for entry in unknown)
    assert any(reason in entry["reason"] for entry in unknown)


def test_a_call_of_many_copies_is_judged_by_one_of_them(tmp_path: Path) -> None:
    results = _good()
    many = copy.deepcopy(next(row for row in results["copies.json"]["rows"] if row["kind"] == "pageable"))
    small = many["queued"]
    for arms in small.values():
        for arm in arms.values():
            arm["median_us"] = 640.0
    small["0"]["ours"]["median_us"] = 640.0 + 64 * 8
    results["copies.json"]["rows"].append(many | {"case": "many", "kind": "nested", "bytes": 64 << 16, "copies": 64})
    assert all(entry["met"] for entry in _judged(tmp_path, results))
    small["0"]["ours"]["median_us"] += 64
    (missed,) = [entry for entry in _judged(tmp_path, results) if not entry["met"]]
    assert missed["what"] == "idle, up to 64 KiB" and "many" in missed["value"]


def test_a_load_that_is_not_gpu_bound_is_not_judged(tmp_path: Path) -> None:
    results = _good()
    results["multimodal.json"]["loads"]["several"]["on_against_off"]["requests_per_s"]["median"] = 1.0
    results["multimodal.json"]["loads"]["several"]["arms"]["off"]["gpu_use_percent"]["mean"] = 60
    assert all(entry["met"] for entry in _judged(tmp_path, results))


@pytest.mark.parametrize(("key", "value"), [("note", "the clients ended early"), ("errors", 3)])
def test_a_load_that_did_not_end_well_is_not_judged_and_the_others_are(tmp_path: Path, key: str, value: Any) -> None:
    results = _good()
    results["multimodal.json"]["complete"] = False
    broken = results["multimodal.json"]["loads"]["several"]
    broken["on_against_off"]["requests_per_s"]["median"] = 1.0
    broken[key] = value
    assert all(entry["met"] for entry in _judged(tmp_path, results))
    results["multimodal.json"]["loads"]["one size"][key] = value
    assert sum(not entry["met"] for entry in _judged(tmp_path, results)) == 2


def test_one_choice_in_twenty_may_be_a_little_worse(tmp_path: Path) -> None:
    results = _good()
    rows = results["swap.json"]["rows"]
    for row in rows[: len(rows) // 20]:
        row["arms"]["chosen"]["gbps"] = 43.0
    assert all(entry["met"] for entry in _judged(tmp_path, results))
    rows[-1]["arms"]["chosen"]["gbps"] = 43.4
    (missed,) = [entry for entry in _judged(tmp_path, results) if not entry["met"]]
    assert missed["what"] == CHOICE and "0.95 in 93.8% of 48 cells" in missed["value"]


def test_gbps_are_those_of_the_gpu_alone_and_those_from_the_call_are_said(tmp_path: Path) -> None:
    results = _good()
    for row in results["swap.json"]["rows"]:
        row["arms"] |= {arm: {"gbps": 40.0, "us": [1.0]} for arm in ("bulk 8", "triton 64", "chosen")}
    judged = _judged(tmp_path, results)
    assert all(entry["met"] for entry in judged)
    (found,) = [entry["value"] for entry in judged if entry["what"] == TO_GPU_8]
    assert found.startswith("the GPU alone 50.0 GB/s") and found.endswith("(from the call 40.0 GB/s)")


def test_missing_files_meet_nothing_and_other_issues_stay(tmp_path: Path) -> None:
    other = {"issue": "swap", "what": "something", "target": "1", "value": "2", "met": True, "result": "x.json"}
    old = {**other, "issue": "kv-swap"}
    (tmp_path / "targets.json").write_text(json.dumps([old, other]))
    entries = _judged(tmp_path, {})
    assert entries[0] == other and len(entries) == 1 + len(judge.TARGETS)
    assert all(
        (entry["value"], entry["met"], entry["reason"]) == (None, False, "there is no such result")
        for entry in entries[1:]
    )
