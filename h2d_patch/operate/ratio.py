"""On against off, from slices in pairs: the ratio, and the interval that a t distribution gives for its logarithm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95  # that all intervals of one report hold together
FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of `pairs` ratios; `low` to `high` holds it as often as was asked for."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def differs(self) -> bool:
        return not self.low <= 1 <= self.high


def paired(pairs: Sequence[tuple[float, float]], level: float) -> Ratio | None:
    """Of (off, on), each above 0: on / off. None where there are too few."""
    if len(pairs) < FEWEST_PAIRS:
        return None
    logs = [math.log(on / off) for off, on in pairs]
    middle = statistics.fmean(logs)
    reach = quantile(0.5 + level / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), len(logs))


def shared_level(measures: int, level: float = LEVEL) -> float:
    """Of each of `measures` intervals, for all of them to hold together at `level` (Bonferroni)."""
    return 1 - (1 - level) / max(1, measures)


def quantile(probability: float, freedom: int) -> float:
    """Below which Student's t with `freedom` degrees lies with `probability`, 0.5 or more."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """The probability of at most `t`, 0 or more. With t = tan(angle) · √freedom the density is a power of a cosine."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angle = math.atan(t / math.sqrt(freedom))
    steps = 200  # Simpson's rule
    width = angle / steps
    values = [math.cos(i * width) ** (freedom - 1) for i in range(steps + 1)]
    return 0.5 + scale * width / 3 * (values[0] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]) + values[-1])
