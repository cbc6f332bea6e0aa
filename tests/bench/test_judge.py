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
    return {
        "copies.json": {**ABOUT, "rows": rows, "in_a_row": in_a_row, "other_stream_busy": other},
        "soak.json": {**ABOUT, "runs": [run, copy.deepcopy(run)]},
        "multimodal.json": {**ABOUT, "loads": {"one size": load, "several": copy.deepcopy(load)}},
    }


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


ROW = "copies.json/in_a_row/rounds/ours/1"
SERVED = "multimodal.json/loads/several"
MROPE = "M-RoPE, n ≤ 2048, idle, snapshot kept"
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


def test_missing_files_meet_nothing_and_other_issues_stay(tmp_path: Path) -> None:
    other = {"issue": "swap", "what": "something", "target": "1", "value": "2", "met": True, "result": "x.json"}
    old = {**other, "issue": "copies"}
    (tmp_path / "targets.json").write_text(json.dumps([old, other]))
    entries = _judged(tmp_path, {})
    assert entries[0] == other and len(entries) == 1 + len(judge.TARGETS)
    assert all(
        (entry["value"], entry["met"], entry["reason"]) == (None, False, "there is no such result")
        for entry in entries[1:]
    )
