"""What an A/B found: each arm's figures, on against off with an interval, and whether there is a difference at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..patching.arms import BOUNDS_S
from ..report.status import table
from .ab import FEWEST_SLICES, START_IN_S, Measured, Outcome
from .alternation import added, none_yet
from .ratio import FEWEST_PAIRS, LEVEL, Ratio, paired, shared_level
from .vllm_metrics import Histogram

ARMS: Final[Mapping[bool, str]] = {False: "off", True: "on"}
_QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Measure:
    """`value` is of one slice, in the unit of `name` over `scale`; None where there is none."""

    key: str
    name: str
    value: Callable[[Measured], float | None]
    scale: float = 1.0


def _rate(what: str) -> Callable[[Measured], float | None]:
    return lambda one: None if one.sample is None else float(getattr(one.sample, what)) / one.sample.at


MEASURES: Final = (
    Measure("requests_per_s", "requests/s", _rate("requests")),
    Measure("tokens_per_s", "generated tokens/s", _rate("tokens")),
    Measure("ttft_s", "time to first token, ms", lambda one: one.sample.ttft.mean if one.sample else None, 1e3),
    Measure("itl_s", "inter-token latency, ms", lambda one: one.sample.itl.mean if one.sample else None, 1e3),
    Measure(
        "host_time_s",
        "host time a call, µs",
        lambda one: one.figures["seconds"] / one.figures["count"] if one.figures["count"] else None,
        1e6,
    ),
)


class Report:
    """Of an outcome: slices that count, in pairs."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.kept = [one for one in outcome.measured if not one.left_out]
        by_number = {one.number: one for one in self.kept}
        self.pairs = [
            (a, b) if b.on else (b, a)
            for a, b in ((by_number.get(n), by_number.get(n + 1)) for n in range(0, len(outcome.measured), 2))
            if a is not None and b is not None
        ]
        self.measures = [one for one in MEASURES if any(one.value(each) for each in self.kept)]
        self.level = shared_level(len(self.measures))
        self.ratios = {one.key: self._ratio(one) for one in self.measures}

    @property
    def complete(self) -> bool:
        """Whether it ran to its end, its command well, and enough was measured to say something."""
        outcome = self.outcome
        return not (self.no_answer or outcome.why or outcome.exit_status) and outcome.restored

    @property
    def no_answer(self) -> str:
        """Why there is no interval at all, and what would give one; empty where there is one."""
        if any(ratio is not None for ratio in self.ratios.values()):
            return ""
        plan, measured = self.outcome.plan, len(self.outcome.measured)
        if len(self.pairs) >= FEWEST_PAIRS:
            if not self.measures:
                return f"No answer: {plan.fix} was called in no slice, and nothing else was measured."
            return f"No answer: fewer than {FEWEST_PAIRS} pairs have anything to compare; there was too little load."
        found = f"No answer: too few pairs of slices, {len(self.pairs)} of {FEWEST_PAIRS}"
        if self.outcome.why or self.outcome.exit_status:
            return f"{found}."
        if measured < FEWEST_SLICES:
            least_s = math.ceil(START_IN_S + FEWEST_SLICES * plan.slice_s)
            return f"{found}. COMMAND must last {FEWEST_SLICES} slices, {least_s} s, or choose a shorter --slice."
        return f"{found}, since slices are left out. More slices give more pairs (--slices, or a longer COMMAND)."

    def as_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "what": "A/B of a fix on a live server, in slices",
            "fix": outcome.plan.fix,
            "server": outcome.server,
            "vllm": outcome.vllm,
            "slices": asdict(outcome.slices),
            "urls": list(outcome.plan.urls),
            "command": list(outcome.plan.command),
            "exit_status": outcome.exit_status,
            "ended_early": outcome.why,
            "restored": outcome.restored,
            "notes": outcome.notes,
            "pairs": len(self.pairs),
            "level_of_each_interval": self.level,
            "on_against_off": {
                key: None if ratio is None else {**_rounded(asdict(ratio)), "differs": ratio.differs}
                for key, ratio in self.ratios.items()
            },
            "arms": {ARMS[on]: self._arm(on) for on in (False, True)},
            "bucket_bounds_s": list(BOUNDS_S),
            "measured": [self._slice(one) for one in outcome.measured],
            "complete": self.complete,
        }

    def as_text(self) -> str:
        outcome, slices = self.outcome, self.outcome.slices
        left_out = [one for one in outcome.measured if one.left_out]
        same = ", both arms the original" if slices.same else ""
        parts = [
            f"A/B of {outcome.plan.fix} in server {outcome.server}{same}: {len(outcome.measured)} slices of "
            f"{slices.slice_s:g} s, the first {slices.settle_s:g} s of each left out; {len(self.pairs)} pairs"
        ]
        parts += [f"  slice {one.number} is left out: {one.left_out}" for one in left_out]
        if self.measures:
            parts.append(self._comparison())
        parts.append(self._calls())
        if any(one.figures["count"] for one in self.kept):
            parts.append(self._histogram())
        parts += outcome.notes
        if self.no_answer:
            parts.append(self.no_answer)
        elif not any(one.figures["count"] for one in self.kept):
            parts.append(f"{outcome.plan.fix} was called in no slice: what differs is not its doing.")
        if outcome.why:
            parts.append(f"It ended early: {outcome.why}.")
        if outcome.exit_status:
            parts.append(f"{outcome.plan.command[0]} exited with {outcome.exit_status}.")
        if not outcome.restored:
            parts.append("Not every process has said that its switch is as it was (h2d-patch status).")
        return "\n\n".join(parts)

    def _ratio(self, measure: Measure) -> Ratio | None:
        values = [(measure.value(off), measure.value(on)) for off, on in self.pairs]
        return paired([(off, on) for off, on in values if off and on and min(off, on) > 0], self.level)

    def _comparison(self) -> str:
        rows = []
        for one in self.measures:
            cells = [_number(_mean([one.value(each) for each in self._of(on)]), one.scale) for on in (False, True)]
            ratio = self.ratios[one.key]
            if ratio is None:
                rows.append([one.name, *cells, "", "", f"fewer than {FEWEST_PAIRS} pairs"])
                continue
            found = f"{'more' if ratio.ratio > 1 else 'less'} with the fix" if ratio.differs else "no difference seen"
            rows.append([one.name, *cells, f"{ratio.ratio:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", found])
        text = table(["", "off", "on", "on/off", "interval", ""], rows)
        return (
            f"{text}\n(means of slices; the ratio is the geometric mean of pairs, its interval that of t over their "
            f"logarithms; all intervals hold together in {LEVEL:.0%} of runs, each in {self.level:.1%})"
        )

    def _calls(self) -> str:
        rows = []
        for on in (False, True):
            figures = self._figures(on)
            shares = [_time(_of_buckets(figures["buckets"], share)) for share in _QUANTILES]
            rows.append([ARMS[on], str(figures["count"]), str(figures["fallbacks"]), *shares])
        return table(["arm", "calls", "fallbacks", *(f"{share:.0%} within" for share in _QUANTILES)], rows)

    def _histogram(self) -> str:
        arms = [self._figures(on) for on in (False, True)]
        rows = []
        for at, name in enumerate([*map(_time, BOUNDS_S), "more"]):
            counts = [figures["buckets"][at] if figures["buckets"] else 0 for figures in arms]
            if any(counts):
                rows.append([name, *(f"{n / max(1, f['count']):.1%}" for n, f in zip(counts, arms, strict=True))])
        return table(["host time a call up to", "off", "on"], rows)

    def _of(self, on: bool) -> list[Measured]:
        return [one for one in self.kept if one.on is on]

    def _figures(self, on: bool) -> dict[str, Any]:
        total = none_yet()
        for one in self._of(on):
            total = added(total, one.figures)
        return total

    def _arm(self, on: bool) -> dict[str, Any]:
        kept = self._of(on)
        found = {"slices": len(kept), **self._figures(on)}
        for name in ("ttft", "itl"):
            whole = Histogram()
            for one in kept:
                whole = whole.plus(getattr(one.sample, name)) if one.sample is not None else whole
            found[f"{name}_s"] = {
                f"p{share * 100:g}": _of_histogram(whole, share) for share in _QUANTILES if whole.count
            }
        return found

    def _slice(self, one: Measured) -> dict[str, Any]:
        values = {measure.key: measure.value(one) for measure in MEASURES}
        return {
            "number": one.number,
            "on": one.on,
            "begin": round(one.begin, 3),
            "left_out": one.left_out,
            **_rounded(values),
            "calls": one.figures["count"],
            "fallbacks": one.figures["fallbacks"],
        }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return ""
    return f"{value * scale:.0f}" if value * scale >= 1000 else f"{value * scale:.4g}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _of_buckets(buckets: Sequence[int], share: float) -> float | None:
    """The bound that `share` of the calls were within; None for no calls, or beyond the last bound."""
    seen = 0
    for bound, number in zip(BOUNDS_S, buckets, strict=False):
        seen += number
        if seen and seen >= share * sum(buckets):
            return bound
    return None


def _of_histogram(histogram: Histogram, share: float) -> float | None:
    return next((bound for bound, number in histogram.below.items() if number >= share * histogram.count), None)


def in_a_line(one: Measured) -> str:
    """While it runs."""
    values = [(measure, measure.value(one)) for measure in MEASURES]
    found = ", ".join(f"{measure.name} {_number(value, measure.scale)}" for measure, value in values if value)
    return f"slice {one.number} {ARMS[one.on]}: {f'left out: {one.left_out}' if one.left_out else found or 'done'}"
