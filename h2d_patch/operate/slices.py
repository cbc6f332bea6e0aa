"""The slices of an A/B: the same in every process, worked out of the wall clock and a start that all of them know."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_S, MOST_S = 1.0, 3600.0
_LATEST = 1e11  # unix time; far beyond it, a float has no seconds
SETTLE_SHARE = 0.2  # of a slice, where nobody says how long its first seconds are


@dataclass(frozen=True)
class Slices:
    """An A/B of `fix`: slices of `slice_s` seconds from unix time `start` on, each without its first `settle_s`
    seconds; ended at `stop`.

    Slices 2k and 2k + 1 are a pair, one with the fix on and one with it off. Which comes first follows the Thue-Morse
    sequence (on for an odd number of binary ones), so that neither a drift nor anything periodic favours an arm. With
    `same`, both arms are the original: what is found then is what the measurement itself sees. Raises ValueError for
    what are no slices.
    """

    fix: str
    slice_s: float
    start: float
    stop: float | None
    settle_s: float
    same: bool = False

    def __post_init__(self) -> None:
        if not LEAST_S <= self.slice_s <= MOST_S:
            raise ValueError(f"slices of {self.slice_s} s; expected {LEAST_S:g} to {MOST_S:g} s")
        if not 0 <= self.settle_s < self.slice_s:
            raise ValueError(f"{self.settle_s} s of each slice left out; expected less than a slice, {self.slice_s} s")
        if not all(0 <= moment <= _LATEST for moment in (self.start, self.stop or 0.0)):
            raise ValueError("a start or a stop that is none; expected unix times")

    def number(self, now: float) -> int:
        """Of the slice that runs at unix time `now`; negative before the first."""
        return math.floor((now - self.start) / self.slice_s)

    def begin(self, number: int) -> float:
        """When slice `number` begins, and the one before it ends."""
        return self.start + number * self.slice_s

    def settled(self, number: int) -> float:
        """From when on slice `number` counts."""
        return self.begin(number) + self.settle_s

    def ended(self, now: float) -> bool:
        return self.stop is not None and now >= self.stop


def is_on(number: int) -> bool:
    """Whether the fix is on in slice `number`."""
    return number.bit_count() % 2 == 1
