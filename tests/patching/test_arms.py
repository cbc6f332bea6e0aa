"""Times land in the bucket whose bounds hold them."""

from __future__ import annotations

import pytest

from h2d_patch.patching import arms
from h2d_patch.patching.arms import BOUNDS_S, Arm


@pytest.mark.parametrize("ns", [1, 999, 1000, 1001, 1999, 2000, 2001, 65_536_000, 65_536_001, 10**12])
def test_a_bound_is_inclusive_and_the_last_bucket_has_none(ns: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(arms, "perf_counter_ns", lambda: 5 + ns)
    arm = Arm()
    assert arm.ended(5, "made") == "made"
    expected = next((i for i, bound in enumerate(BOUNDS_S) if ns <= round(bound * 1e9)), len(BOUNDS_S))
    buckets = [int(i == expected) for i in range(len(BOUNDS_S) + 1)]
    assert arm.state() == {"count": 1, "seconds": round(ns * 1e-9, 9), "buckets": buckets}


def test_bounds_are_powers_of_two_from_a_microsecond_to_65_milliseconds() -> None:
    assert BOUNDS_S[0] == 1e-6 and BOUNDS_S[-1] == pytest.approx(0.065536) and len(BOUNDS_S) == 17
