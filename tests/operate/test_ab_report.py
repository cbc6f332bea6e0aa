"""What the report of an A/B says of slices that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2d_patch.operate.ab import Measured, Outcome, Plan
from h2d_patch.operate.ab_report import Report
from h2d_patch.operate.alternation import none_yet
from h2d_patch.operate.slices import Slices, is_on
from h2d_patch.operate.vllm_metrics import Histogram, Sample
from h2d_patch.patching.arms import BOUNDS_S


def outcome(rates: list[float], **more: Any) -> Outcome:
    """Slices of 30 s with so many requests a second; the fix's calls take 3 µs on, 100 ms off."""
    slices = Slices("kv-swap", 30.0, 0.0, 30.0 * len(rates), 6.0)
    made = Outcome(Plan("kv-swap", 30.0, 6.0), "web", "0.22.1", slices, restored=True, **more)
    for number, rate in enumerate(rates):
        on = is_on(number)
        buckets = [0] * (len(BOUNDS_S) + 1)
        buckets[2 if on else -1] = 10
        figures = {"count": 10, "seconds": 3e-5 if on else 1.0, "buckets": buckets, "fallbacks": int(on)}
        ttft = Histogram(8, 8 / rate, {0.1: 4, 0.5: 8})
        sample = Sample(24.0, 24 * rate, 240 * rate, ttft, Histogram())
        made.measured.append(Measured(number, on, 30.0 * number, "", sample, figures))
    return made


def rates(factor: float, number: int = 8) -> list[float]:
    """A drift and a wobble, and `factor` times as many with the fix on."""
    return [(10 + n + 0.1 * (n * 7 % 3)) * (factor if is_on(n) else 1) for n in range(number)]


def test_a_ratio_is_that_of_the_arms_whatever_drifts() -> None:
    found = Report(outcome(rates(2.0))).as_json()["on_against_off"]
    assert found["requests_per_s"]["ratio"] == pytest.approx(2.0, rel=0.03) and found["requests_per_s"]["differs"]
    assert found["ttft_s"]["ratio"] == pytest.approx(0.5, rel=0.03)
    assert "itl_s" not in found  # nothing was counted of it


def test_where_the_interval_holds_one_no_difference_is_seen() -> None:
    report = Report(outcome(rates(1.0)))
    assert report.complete and not report.as_json()["on_against_off"]["requests_per_s"]["differs"]
    line = next(line for line in report.as_text().splitlines() if line.startswith("requests/s"))
    assert line.endswith("no difference seen")


def test_calls_fallbacks_and_host_times_are_of_each_arm() -> None:
    report = Report(outcome(rates(1.0)))
    arms = report.as_json()["arms"]
    assert {name: (arm["count"], arm["fallbacks"]) for name, arm in arms.items()} == {"off": (40, 0), "on": (40, 4)}
    assert arms["on"]["ttft_s"] == {"p50": 0.1, "p90": 0.5, "p99": 0.5}
    lines = [line.split() for line in report.as_text().splitlines()]
    assert ["on", "40", "4", *["4", "µs"] * 3] in lines and ["off", "40", "0"] in lines  # beyond the last bound
    assert ["4", "µs", "0.0%", "100.0%"] in lines and ["more", "100.0%", "0.0%"] in lines


def test_a_slice_that_is_left_out_takes_its_pair_with_it_and_is_named() -> None:
    made = outcome(rates(1.0))
    made.measured[3].left_out = "the clock was set"
    report = Report(made)
    assert report.as_json()["pairs"] == 3 and "slice 3 is left out: the clock was set" in report.as_text()
    assert report.as_json()["arms"]["off"]["slices"] == 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"why": "interrupted"}, "It ended early: interrupted."),
        ({"exit_status": 3}, "exited with 3."),
        ({"exit_status": -9}, "exited with -9."),
    ],
)
def test_what_did_not_go_well_is_said(more: dict[str, Any], says: str) -> None:
    made = outcome(rates(1.0), **more)
    made.plan = Plan("kv-swap", 30.0, 6.0, command=("load",))
    assert not Report(made).complete and says in Report(made).as_text()


def test_an_a_b_that_was_not_taken_back_everywhere_is_not_well() -> None:
    made = outcome(rates(1.0))
    made.restored = False
    assert not Report(made).complete and "Not every process has said" in Report(made).as_text()


def test_too_few_pairs_are_no_answer() -> None:
    report = Report(outcome(rates(2.0, 4)))
    assert not report.complete and "fewer than 3 pairs" in report.as_text()
    assert Report(outcome([])).as_json()["pairs"] == 0
    assert "0 slices" in Report(outcome([])).as_text()


def test_why_there_is_no_answer_is_said_with_what_would_give_one() -> None:
    short = Report(outcome(rates(2.0, 5)))
    assert short.no_answer.startswith("No answer: too few pairs of slices, 2 of 3. COMMAND must last 6 slices, 182 s,")
    assert short.no_answer in short.as_text()
    made = outcome(rates(2.0, 6))
    assert Report(made).no_answer == "" and "No answer" not in Report(made).as_text()
    made.measured[0].left_out = "the clock was set"
    assert "2 of 3, since slices are left out. More slices" in Report(made).as_text()
    made.why = "interrupted"
    assert "2 of 3.\n" in Report(made).as_text() and "More slices" not in Report(made).as_text()


def test_where_nothing_was_called_that_is_said() -> None:
    made = outcome(rates(2.0))
    for one in made.measured:
        one.figures = none_yet()
    assert Report(made).complete and "kv-swap was called in no slice" in Report(made).as_text()
    for one in made.measured:
        one.sample = None
    assert not Report(made).complete
    assert "No answer: kv-swap was called in no slice, and nothing else was measured." in Report(made).as_text()


def test_load_in_too_few_slices_is_no_answer() -> None:
    made = outcome(rates(2.0))
    for one in made.measured:
        one.figures = none_yet()
        one.sample = one.sample if one.number < 3 else None
    assert "No answer: fewer than 3 pairs have anything to compare" in Report(made).as_text()


def test_everything_can_be_written_as_json() -> None:
    text = json.dumps(Report(outcome(rates(1.5))).as_json(), allow_nan=False)
    assert len(json.loads(text)["measured"]) == 8


def test_the_slices_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from h2d_patch.operate.ab_plot import draw

    made = outcome(rates(1.5))
    made.measured[1].left_out = "the clock was set"
    draw(Report(made), tmp_path / "ab.png")
    assert (tmp_path / "ab.png").read_bytes().startswith(b"\x89PNG")
