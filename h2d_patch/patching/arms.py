"""Host time of one arm, the fixed or the original, at one place: how often, how long, in which bucket."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Final

_MOST_EXPONENT: Final = 16
# Upper bounds of the buckets in seconds, each inclusive: 1 µs to 65.5 ms. One bucket more holds what took longer.
BOUNDS_S: Final = tuple(1e-6 * (1 << exponent) for exponent in range(_MOST_EXPONENT + 1))
_MOST_DIGITS: Final = 64  # binary ones of the microseconds that anything can take


class Arm:
    """What the evaluations of one arm took; `ended` is all that a call pays for, and asks for no lock."""

    __slots__ = ("_by_digits", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self._by_digits = [0] * (_MOST_DIGITS + 1)

    def ended(self, start: int | None, value: Any) -> Any:
        """`value`, which the arm has made since `start`; None: whose time does not matter."""
        if start is not None:
            ns = perf_counter_ns() - start
            self.ns += ns
            self._by_digits[((ns - 1) // 1000).bit_length()] += 1
        return value

    @property
    def count(self) -> int:
        return sum(self._by_digits)

    def state(self) -> dict[str, Any]:
        """`buckets[i]` evaluations took more than bound i - 1 and up to bound i."""
        found = list(self._by_digits)
        last = len(BOUNDS_S)
        return {
            "count": sum(found),
            "seconds": round(self.ns * 1e-9, 9),
            "buckets": [*found[:last], sum(found[last:])],
        }
