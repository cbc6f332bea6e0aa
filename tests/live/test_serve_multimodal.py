"""bench/serve_multimodal.py without a server: what lies in which slice, and the timers of its worker extension.

A whole run takes two minutes: `python bench/serve_multimodal.py --smoke --model DIR --json FILE`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import multimodal_worker
import serve_multimodal as bench


def a_slice(arm: str, start: float, calls: int = 0) -> bench.Slice:
    """Ten seconds, the first two left out."""
    counts = {"fix": "vision-rope", "function": "m:f", "calls": calls, "fallbacks": 0}
    return bench.Slice(arm, start, start + 2, start + 10, [counts])


def client(folder: Path, name: str, **found: object) -> bench.Client:
    """One that ended well and saved `found`."""
    (folder / f"{name}.json").write_text(json.dumps(found))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return bench.Client(process, folder / f"{name}.log", folder / f"{name}.json")


def test_each_token_is_placed_by_start_first_token_and_gaps(tmp_path: Path) -> None:
    one = client(
        tmp_path,
        "one",
        start_times=[100.0, 101.0, 104.0],
        ttfts=[1.0, 2.0, 0.0],
        itls=[[0.0, 0.5, 0.5], [4.0], []],
        output_lens=[3, 4, 0],
        errors=["", "", "Traceback\nTimeoutError: late"],
    )
    two = client(tmp_path, "two", start_times=[102.0], ttfts=[1.0], itls=[[]], output_lens=[1], errors=[""])
    requests = bench._read([one, two])
    assert requests.first == [(101.0, 1.0), (103.0, 2.0), (103.0, 1.0)]
    assert requests.completed == [102.0, 107.0, 103.0]
    # The role's chunk is no token; two chunks of four tokens are two tokens each.
    assert requests.tokens == [(101.0, 1.0), (101.5, 1.0), (102.0, 1.0), (103.0, 2.0), (107.0, 2.0), (103.0, 1.0)]
    assert requests.gaps == [(101.5, 0.5), (102.0, 0.5), (107.0, 4.0)]
    assert requests.errors == ["TimeoutError: late"]
    assert requests.whole_load == (102.0, 102.0)


def test_neighbouring_slices_are_compared_and_what_is_left_out_is_not() -> None:
    slices = [a_slice("off", 0), a_slice("on", 10, 5), a_slice("on", 20, 6), a_slice("off", 30), a_slice("off", 40)]
    slices[4].left_out = "over"
    requests = bench.Requests(sent=[0.0], whole_load=(0.0, 50.0))
    for start, number in ((0, 16), (10, 24), (20, 32), (30, 16), (40, 8)):
        requests.completed += [start + 1.0] * 100 + [start + 5.0] * number  # in the first two seconds: left out
    timed = [{"m:f": {"calls": 2, "samples": [[5.0, 4e-3], [15.0, 1e-3], [1.0, 9.0]]}}]
    found = bench._analysed(slices, requests, timed, [(5.0, 98.0), (11.0, 50.0)])
    assert found["on_against_off"]["requests_per_s"]["ratios"] == [1.5, 2.0]
    assert found["on_against_off"]["requests_per_s"]["median"] == 1.75
    assert found["arms"]["off"]["requests_per_s"] == 2.0
    assert found["arms"]["on"]["requests_per_s"] == 3.5
    assert found["arms"]["off"]["host_times"]["m:f"]["max"] == 4000.0
    assert found["arms"]["on"]["host_times"]["m:f"]["max"] == 1000.0
    assert [found["arms"][arm]["patches"][0]["calls"] for arm in ("off", "on")] == [0, 11]
    assert found["arms"]["off"]["gpu_use_percent"]["count"] == 1


def test_results_that_are_lost_are_no_rate_of_nothing() -> None:
    found = bench._analysed([a_slice("off", 0), a_slice("on", 10)], bench.Requests(), [], [])
    assert found["arms"]["on"]["requests_per_s"] is None
    assert found["on_against_off"]["requests_per_s"] == {"ratios": []}


def test_a_timer_is_in_every_place_and_comes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    source, user = types.ModuleType("source"), types.ModuleType("user")
    exec("def copy(x):\n    return x + 1", vars(source))
    original = user.copy = source.copy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "source", source)
    monkeypatch.setitem(sys.modules, "user", user)
    timer = multimodal_worker.Timed(source, "copy")
    assert source.copy(1) == user.copy(1) == 2
    assert timer.calls == len(timer.samples) == 2
    timer.take_off()
    assert source.copy is user.copy is original
