"""On and off, for each fix and at each place: what the new code asks, counts and calls through."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Final

from .arms import Arm


class Site:
    """One target's place in the new code, where it is the global `name`.

    The code reads `on` where the copy is, and calls the copy functions, which `bind` has put here as attributes; they
    count in `calls`, `fallbacks`, `bytes` and `paths` and report through `took`, `declined` and `failed`. Around each
    arm the code calls `now` and `ended_on`, `if_timed` and `ended_off`: the fixed arm's host time is always kept, the
    original's only while `timed` is set, which it is for an A/B. Counts are exact within a thread and may lose a few
    between threads: they are for people, and a lock would cost more than the copy.
    """

    _numbers = itertools.count()
    # Whether a compiler is tracing: it must see the original arm, for it keeps what it sees.
    compiling: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, on_failure: Callable[[Site, str], None] | None = None) -> None:
        self.name = f"__h2d_patch_{next(Site._numbers)}__"
        self._on = False
        self.timed = False
        self._on_failure = on_failure
        self.renew()

    def renew(self) -> None:
        """Counts nothing yet: at first, and in a forked child."""
        self.calls = 0
        self.fallbacks = 0
        self.reasons: dict[str, int] = {}
        self.bytes = 0
        self.paths: dict[str, int] = {}
        self.arms = {True: Arm(), False: Arm()}
        # In an expression, `ended_on(now(), PUT) if on else ended_off(if_timed(), FIND)`: what raises is not kept.
        self.ended_on = self.arms[True].ended
        self.ended_off = self.arms[False].ended
        self._begun = _Begun()

    @property
    def on(self) -> bool:
        return not Site.compiling() and self._on  # in this order: a traced function does not depend on the switch

    @on.setter
    def on(self, value: bool) -> None:
        self._on = value

    now: Final = staticmethod(perf_counter_ns)

    def if_timed(self) -> int | None:
        """When the original arm begins, if that matters."""
        return None if Site.compiling() or not self.timed else perf_counter_ns()

    # Around statements, which have no value to pass on: by thread.

    def begin(self) -> None:
        """An arm begins."""
        if not Site.compiling():
            self._begun.at = perf_counter_ns() if self._on or self.timed else None

    def end_on(self) -> None:
        """The fixed arm has ended. Of what raised, or left a loop or the function, nothing is kept."""
        self._end(True)

    def end_off(self) -> None:
        """The original arm has ended."""
        if not Site.compiling() and self.timed:
            self._end(False)

    def _end(self, on: bool) -> None:
        start, self._begun.at = self._begun.at, None
        self.arms[on].ended(start, None)

    def took(self, path: str, nbytes: int) -> None:
        """A copy function has copied `nbytes` by `path`, or left a call that it could not better to the original."""
        self.bytes += nbytes
        self.paths[path] = self.paths.get(path, 0) + 1

    def declined(self, reason: str) -> None:
        """A copy function left this call to the original, for `reason`."""
        self.fallbacks += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def failed(self, error: BaseException) -> None:
        """A copy function raised; the original has run in its place. Turns the fix off in this process."""
        self.on = False
        self.declined("an error of ours")
        if self._on_failure is not None:
            self._on_failure(self, last_line(error))

    def bind(self, name: str, function: Callable[..., Any]) -> None:
        setattr(self, name, function)


class _Begun(threading.local):
    at: int | None = None


class Switch:
    """One fix in one process: turns all its sites on or off together, and clears what outlives a call."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.renew()
        self._sites: list[Site] = []
        self._caches: list[Callable[[], object]] = []

    def renew(self) -> None:
        """In a forked child: a lock that no thread of the parent's holds."""
        self._lock = threading.Lock()

    def add(self, site: Site, clear_cache: Callable[[], object] | None = None) -> None:
        """`clear_cache` empties a cache of results that the other arm made; called whenever the switch flips."""
        with self._lock:
            self._sites.append(site)
            if clear_cache is not None:
                self._caches.append(clear_cache)
            site.on = self.on

    def remove(self, site: Site) -> None:
        """Turns `site` off for good: its self-test or a call failed, or it must not run in this process."""
        with self._lock:
            site.on = False
            if site in self._sites:
                self._sites.remove(site)

    def turn(self, on: bool) -> None:
        with self._lock:
            flipped = on != self.on
            self.on = on
            for site in self._sites:
                site.on = on
            caches = list(self._caches) if flipped else []
        for clear in caches:
            clear()


def last_line(error: BaseException) -> str:
    """The last line of `error`'s traceback and where it was raised."""
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
