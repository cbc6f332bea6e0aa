"""One process's part in an A/B: turns the fix on and off with the slices, and keeps what each slice's arm did."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from ..patching.switch import Site, Switch, last_line
from . import control
from .slices import Slices, is_on

KEPT_SLICES: Final = 8  # in the state, for whoever reads it while the A/B runs
CLOCK_SET: Final = "the clock was set"
LATE: Final = "this process was late"
_LOOK_EVERY_S: Final = 0.25  # at the clock, which may have been set meanwhile
_CLOCKS_PART_S: Final = 0.05  # and a thousandth of a slice: what adjusting the clock's speed may add up to

logger = logging.getLogger("vllm.plugins.h2d_patch")


class Clock:
    """The clocks, and how to wait; tests have others."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        """Whether `stopped` was set within `seconds`."""
        return stopped.wait(seconds)


class Parted:
    """Tells whether wall and monotonic clock have parted since it was made."""

    def __init__(self, clock: Clock, slice_s: float) -> None:
        self._clock = clock
        self._may = _CLOCKS_PART_S + slice_s / 1000
        self._gap = self._now()

    def __bool__(self) -> bool:
        return abs(self._now() - self._gap) > self._may

    def _now(self) -> float:
        return self._clock.wall() - self._clock.monotonic()


Figures = dict[str, Any]
Sites = Callable[[str], Iterable[tuple[str, Site]]]


def none_yet() -> Figures:
    return {"count": 0, "seconds": 0.0, "buckets": [], "fallbacks": 0}


def added(one: Figures, other: Figures, sign: int = 1) -> Figures:
    """The sum of what two slices, processes or functions did, or with `sign` -1 what is more in `one`."""
    buckets, more = one["buckets"], other["buckets"]
    length = max(len(buckets), len(more))
    padded = (list(each) + [0] * (length - len(each)) for each in (buckets, more))
    return {
        "count": one["count"] + sign * other["count"],
        "seconds": round(one["seconds"] + sign * other["seconds"], 9),
        "buckets": [a + sign * b for a, b in zip(*padded, strict=True)],
        "fallbacks": one["fallbacks"] + sign * other["fallbacks"],
    }


class Alternation:
    """The A/B of this process, if there is one. `wanted` is what a fix is to be once it has ended.

    `sites` gives the functions that a fix is in, with their sites.
    """

    def __init__(
        self,
        switches: Mapping[str, Switch],
        sites: Sites,
        wanted: Mapping[str, bool],
        own: Slices | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._switches = switches
        self._sites = sites
        self._wanted = wanted
        self._own = own  # H2D_PATCH_AB's
        self._clock = clock or Clock()
        self._run: _Run | None = None
        self.renew()

    def renew(self) -> None:
        """In a forked child, which has no thread of the parent's: as if it had never heard of an A/B."""
        run, self._run = self._run, None
        self._lock = threading.Lock()
        self._news = False
        if run is not None and run.ended is None:
            self._leave(run.slices.fix)

    def follow(self, told: control.Control | None) -> bool:
        """Takes the A/B that `told` or H2D_PATCH_AB asks for; whether there is anything new in the state."""
        slices = self._asked(told)
        with self._lock:
            news, self._news = self._news, False
            run = self._run
            if run is None and slices is None:
                return news
            if run is not None and slices is not None and replace(slices, stop=run.slices.stop) == run.slices:
                run.slices = slices  # whoever measures puts the end off as long as it lives
                return news
            if run is not None:
                self._end(run)
            self._run = None if slices is None else _Run(slices)
            if self._run is not None:
                name = "h2d_patch-ab"
                threading.Thread(target=self._alternate, args=(self._run,), name=name, daemon=True).start()
        return True

    def state(self) -> dict[str, Any] | None:
        """Of the A/B that runs, or has ended and not been taken back."""
        run = self._run
        if run is None:
            return None
        return {
            **asdict(run.slices),
            "on": run.on,
            "ended": run.ended,
            "left_out": dict(run.left_out),
            "arms": {"on": run.arms[True], "off": run.arms[False]},
            "slices": list(run.slices_done),
        }

    def _asked(self, told: control.Control | None) -> Slices | None:
        slices = self._own
        if told is not None:
            if told.ab is not None:
                slices = told.ab
            elif slices is not None and any(one.fix == slices.fix for one in told.switches):
                return None  # someone has switched it by hand, which is to last
        return slices if slices is not None and slices.fix in self._switches else None

    def _end(self, run: _Run, why: str = "") -> None:
        """Leaves the fix as it is to be without an A/B. The lock is held."""
        if run.ended is None:
            run.stopped.set()
            run.on, run.ended = None, why or "taken back"
            self._leave(run.slices.fix)
            self._news = True

    def _leave(self, fix: str) -> None:
        for _, site in self._sites(fix):
            site.timed = False
        self._switches[fix].turn(self._wanted[fix])

    def _alternate(self, run: _Run) -> None:
        why = "it is over"
        try:
            while not run.stopped.is_set() and not run.slices.ended(self._clock.wall()):
                number = run.slices.number(self._clock.wall())
                if number < 0:
                    self._clock.wait(run.stopped, min(_LOOK_EVERY_S, run.slices.start - self._clock.wall()))
                else:
                    self._one_slice(run, number)
        except Exception as error:
            why = f"an error of ours: {last_line(error)}"
            logger.warning("h2d_patch: the A/B of %s ends in this process: %s", run.slices.fix, why)
        with self._lock:
            self._end(run, why)

    def _one_slice(self, run: _Run, number: int) -> None:
        slices, on = run.slices, is_on(number)
        parted = Parted(self._clock, slices.slice_s)
        with self._lock:
            if run.stopped.is_set():
                return
            run.on = on
            self._switches[slices.fix].turn(on and not slices.same)
            for _, site in self._sites(slices.fix):
                site.timed = True
        late = self._clock.wall() > slices.begin(number) + max(slices.settle_s, _LOOK_EVERY_S)
        self._until(run, number, slices.settled(number))
        before = self._figures(slices.fix, on and not slices.same)
        self._until(run, number, slices.begin(number + 1))
        after = self._figures(slices.fix, on and not slices.same)
        left_out = CLOCK_SET if parted else LATE if late else ""
        if not left_out and run.slices.number(self._clock.wall()) == number:
            return  # the A/B has ended within it
        figures = none_yet()
        for site, then in before.items():
            figures = added(figures, added(after[site], then, -1)) if site in after else figures
        self._keep(run, number, on, left_out, figures)

    def _keep(self, run: _Run, number: int, on: bool, left_out: str, figures: Figures) -> None:
        if left_out:
            run.left_out[left_out] = run.left_out.get(left_out, 0) + 1
            if left_out == CLOCK_SET:
                logger.warning(
                    "h2d_patch: wall and monotonic clock have parted: slice %d of the A/B of %s is left out",
                    number,
                    run.slices.fix,
                )
        else:
            run.arms[on] = added(run.arms[on], figures)
        run.slices_done.append({"number": number, "on": on, "left_out": left_out, **figures})
        self._news = True

    def _until(self, run: _Run, number: int, moment: float) -> None:
        """Waits until `moment` of slice `number`; not beyond its end, whatever becomes of the clock."""
        while (now := self._clock.wall()) < moment and run.slices.number(now) == number:
            if run.slices.ended(now) or self._clock.wait(run.stopped, min(_LOOK_EVERY_S, moment - now)):
                return

    def _figures(self, fix: str, on: bool) -> dict[Site, Figures]:
        return {site: {**site.arms[on].state(), "fallbacks": site.fallbacks} for _, site in self._sites(fix)}


class _Run:
    """What one process knows of an A/B."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.stopped = threading.Event()
        self.on: bool | None = None
        self.ended: str | None = None
        self.left_out: dict[str, int] = {}
        self.arms = {True: none_yet(), False: none_yet()}
        self.slices_done: deque[dict[str, Any]] = deque(maxlen=KEPT_SLICES)
