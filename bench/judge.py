"""The result files against the targets of [copies], into bench/results/targets.json.

    python bench/judge.py

Each entry says what was asked, what was found in the worst case, and whether that meets it. Entries of other issues
stay. A result that is missing, was interrupted, is quick, or was made without a GPU meets nothing. Medians are
compared; sizes are the bytes that travel, 64 KiB counting as small and 8 MiB as large. Exit status 1 if a target is
not met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from h2d_patch.bench.provenance import as_json

RESULTS = Path(__file__).resolve().parent / "results"
ISSUE = "copies"
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
)


def judged(directory: Path, targets: Iterable[Target] = TARGETS) -> list[dict[str, Any]]:
    """One entry for each target, from the result files in `directory`."""
    entries = []
    for target in targets:
        entry: dict[str, Any] = {"issue": ISSUE, "what": target.what, "target": target.target}
        try:
            entry |= asdict(target.judge(_load(directory / target.result)))
        except Unknown as error:
            entry |= {"value": None, "met": False, "reason": str(error)}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            entry |= {"value": None, "met": False, "reason": f"cannot be read: {type(error).__name__}: {error}"}
        entries.append({**entry, "result": f"bench/results/{target.result}"})
    return entries


def _load(path: Path) -> dict[str, Any]:
    """Raises Unknown for what is no whole measurement."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unknown("there is no such result") from None
    if not result["complete"] and "loads" not in result:  # each load is a measurement of its own
        wrong = [text for run in result.get("runs", ()) for text in (*run["wrong"], *run["errors"])]
        raise Unknown(_worst("the measurement did not end as it should", wrong))
    if result.get("quick"):
        raise Unknown("a quick measurement, with few cases")
    if not result["machine"]["gpu"]:
        raise Unknown("made without a GPU")
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they lie")
    directory = parser.parse_args(arguments).results
    written = directory / "targets.json"
    others = json.loads(written.read_text(encoding="utf-8")) if written.exists() else []
    entries = judged(directory)
    kept = [entry for entry in others if entry["issue"] != ISSUE]
    written.write_text(as_json(kept + entries), encoding="utf-8")
    for entry in entries:
        found = entry["value"] if entry["value"] is not None else f"unknown: {entry['reason']}"
        print(f"{'met' if entry['met'] else 'NOT MET':8s} {entry['what']}: {entry['target']}; found {found}")
    print(f"wrote {written}")
    return 0 if all(entry["met"] for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
