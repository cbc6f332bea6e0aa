"""A ratio's interval holds what it should as often as it says."""

from __future__ import annotations

import math
import random

import pytest

from h2d_patch.operate.ratio import paired, quantile, shared_level


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.95, 4, 2.13185), (0.995, 9, 3.24984), (0.975, 1000, 1.96234)],
)
def test_quantiles_of_t_are_those_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pairs", [4, 10])
def test_the_true_ratio_lies_in_the_interval_as_often_as_asked_for(pairs: int) -> None:
    numbers = random.Random(pairs)
    runs, held = 600, 0
    for _ in range(runs):
        drift = [numbers.uniform(0.5, 2) for _ in range(pairs)]  # the same for both of a pair
        made = [(d, d * 1.3 * math.exp(numbers.gauss(0, 0.1))) for d in drift]
        ratio = paired(made, 0.9)
        assert ratio is not None and ratio.low < ratio.ratio < ratio.high
        held += ratio.low <= 1.3 <= ratio.high
    assert abs(held / runs - 0.9) < 0.045  # four standard errors and a bit


def test_a_difference_is_seen_where_the_interval_leaves_one_out() -> None:
    clear, unclear = (paired([(10, on) for on in values], 0.95) for values in ((12, 12.1, 12.2), (9, 10.5, 12)))
    assert clear is not None and clear.differs and clear.ratio == pytest.approx(1.21, abs=0.001)
    assert unclear is not None and not unclear.differs


def test_too_few_pairs_say_nothing() -> None:
    assert paired([(1.0, 2.0)] * 2, 0.95) is None


def test_intervals_of_one_report_hold_together() -> None:
    assert shared_level(1) == 0.95 and shared_level(5) == pytest.approx(0.99)
