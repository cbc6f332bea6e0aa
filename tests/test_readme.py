"""The README says what the result files and the program say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from h2d_patch.cli import _parser
from h2d_patch.manifest import load
from h2d_patch.operate.ab_report import MEASURES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench/results" / name).read_text())
    return found


def figures(line_with: str) -> tuple[str, str]:
    (line,) = [line for line in README.splitlines() if line_with in line and line.startswith("|")]
    before, after = line.split("|")[2:4]
    numbers = [re.search(r"[\d.]+", cell) for cell in (before, after)]
    assert numbers[0] and numbers[1]
    return numbers[0].group(), numbers[1].group()


def test_the_figures_are_those_of_the_result_files() -> None:
    for kind, line in (("load", "loaded again (`kv-swap`"), ("store", "stored there (`kv-swap`")):
        offload = result("kv_offload.json")["passes"][kind]["median_requests_per_s"]
        assert figures(line) == (f"{offload['off']:.0f}", f"{offload['on']:.0f}")
    rows = {row["case"]: row["queued"]["20"] for row in result("copies.json")["rows"]}
    for line, case in (("4 MiB tensor", "pageable 4 MiB"), ("64 position", "cat 64 × 64 KiB")):
        medians = [rows[case][arm]["median_us"] / 1000 for arm in ("original", "ours")]
        assert figures(line) == (f"{medians[0]:.1f}", f"{medians[1]:.1f}")
    served = result("multimodal.json")["loads"]["1024x1024"]["arms"]
    assert figures("image requests") == tuple(f"{served[arm]['requests_per_s']:.1f}" for arm in ("off", "on"))


def test_the_table_of_copies_is_that_of_the_result_file() -> None:
    rows = {row["case"]: row["queued"] for row in result("copies.json")["rows"]}
    text = (ROOT / "docs/copies.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if " · " in line]
    table = [cells for cells in lines if cells[0] in rows]
    assert len(table) > 10
    for case, *cells in table:
        for ms, cell in zip(("0", "2", "20"), cells, strict=True):
            medians = (rows[case][ms][arm]["median_us"] for arm in ("original", "upstream", "ours"))
            assert cell == " · ".join(f"{us:,.0f}".replace(",", " ") for us in medians), (case, ms)


def test_the_tables_of_swaps_are_those_of_the_result_file() -> None:
    rows = {(row["gpu_to_cpu"], row["bytes"], row["blocks"]): row for row in result("swap.json")["rows"]}
    text = (ROOT / "docs/swap.md").read_text(encoding="utf-8")
    by_call = [(direction, number) for direction in (False, True) for number in (64, 1024, 4096)]
    kernels = ("bulk 1", "bulk 2", "bulk 4", "bulk 8", "triton 16", "triton 64")
    found = 0
    for line in text.splitlines():
        size, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"\d+ KiB", size):
            continue
        found += 1
        calls = len(cells) == len(by_call)
        for cell, (direction, number) in zip(cells, by_call if calls else ((False, 4096), (True, 4096)), strict=True):
            arms = rows[direction, int(size.split()[0]) << 10, number]["arms" if calls else "held"]
            names = ("driver batch", "upstream 12", "chosen") if calls else kernels
            assert cell == " · ".join(f"{arms[arm]['gbps']:.1f}" for arm in names if arm in arms), (line, cell)
    assert found == 12


def test_what_is_said_of_all_copies_is_so() -> None:
    rows = [row for row in result("copies.json")["rows"] if not row["asynchronous"]]
    left_alone = [row for row in result("copies.json")["rows"] if row["asynchronous"]]
    text = " ".join((ROOT / "docs/copies.md").read_text(encoding="utf-8").split())

    def us(row: dict[str, Any], ms: int, arm: str = "ours") -> float:
        return float(row["queued"][str(ms)][arm]["median_us"])

    def more(of: list[dict[str, Any]], ms: int) -> list[float]:
        return sorted(us(row, ms) - us(row, ms, "original") for row in of)

    small = [row for row in rows if row["bytes"] <= 1 << 20 and row["kind"] != "mrope"]
    for ms, words in ((0, "on an idle GPU {:.1f} µs more"), (20, "behind 20 ms of work {:.1f} and")):
        assert words.format(statistics.median(more(small, ms))) in text
        assert f"{max(more(small, ms)):.1f}" in text
        assert re.search(rf"about {statistics.median(more(small, 0)):.0f} µs on an idle\s+GPU", README)
    ratios = {row["case"]: us(row, 0) / us(row, 0, "original") for row in rows if row["bytes"] >= 4 << 20}
    many = max(ratio for case, ratio in ratios.items() if case.startswith("nested"))
    one = [ratio for case, ratio in ratios.items() if not re.match(r"nested (8|64)", case)]
    assert f"takes {min(one):.2f} to {max(one):.2f} of the original's time" in text and f"up to {many:.2f}." in text
    queued = [us(row, 20) / 1000 for row in rows if row["bytes"] > 2 << 20]
    assert f"takes {min(queued):.1f} to {max(queued):.1f} ms in place" in text
    assert f"cost {more(left_alone, 0)[0]:.1f} to {more(left_alone, 0)[-1]:.1f} µs" in text


def test_every_result_says_its_commit_machine_versions_and_repetitions() -> None:
    for path in (ROOT / "bench/results").glob("*.json"):
        if path.name == "targets.json":  # made from the others
            continue
        content = json.loads(path.read_text())
        assert {"commit", "machine", "versions", "time", "command"} <= set(content), path.name
        assert re.search(r"\[\s*[\d.]+,\s*[\d.]+", path.read_text()), f"{path.name} has no single repetitions"


def test_every_command_and_variable_is_described() -> None:
    for action in _parser()._actions:
        for command in getattr(action, "choices", None) or ():
            assert f"`h2d-patch {command}" in README or f"h2d-patch {command}" in README, command
    for name in (
        "H2D_PATCH_PINNED_MB",
        "H2D_PATCH_PROFILE",
        "H2D_PATCH_RUN_DIR",
        "H2D_PATCH_SERVER",
        "H2D_PATCH_MANIFEST",
        "H2D_PATCH_STRICT",
        "VLLM_PLUGINS",
    ):
        assert f"`{name}`" in README
    assert all(fix in README + (ROOT / "CHANGELOG.md").read_text() for fix in load().fixes)


def test_the_table_of_an_a_b_is_that_of_the_result_file() -> None:
    found = result("ab_kv_offload.json")
    text = (ROOT / "docs/ab.md").read_text(encoding="utf-8")
    for measure in MEASURES:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{measure.name}  ")]
        kept = [one for one in found["ab"]["measured"] if not one["left_out"]]
        means = [statistics.mean(one[measure.key] for one in kept if one["on"] is on) for on in (False, True)]
        ratio = found["ab"]["on_against_off"][measure.key]
        numbers = [float(number) for number in re.findall(r"[\d.]+", line.removeprefix(measure.name))]
        expected = [*(mean * measure.scale for mean in means), ratio["ratio"], ratio["low"], ratio["high"]]
        assert all(a == pytest.approx(b, rel=1e-3, abs=6e-4) for a, b in zip(numbers, expected, strict=True)), line
    by_hand = found["switched"]["on_against_off"]["median"]
    assert f"gives {by_hand:.1f} times the requests/s" in text
