"""What bench/serve_multimodal.py asks of each worker: methods that vLLM mixes into its worker class.

    --worker-extension-cls multimodal_worker.Extension        and this folder in PYTHONPATH

They are called through vLLM's /collective_rpc, so between two steps, on the thread that runs the steps.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

SAMPLES = 20_000  # of each function: the last ones


class Timed:
    """One function with a timer around it, in every place that names it. It waits for no GPU work."""

    def __init__(self, holder: Any, name: str) -> None:
        self.calls = 0
        self.samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._original = vars(holder)[name]
        self._timer = self._around(self._original)
        self._places = [(holder, name)]
        if isinstance(holder, types.ModuleType):  # and wherever `from holder import name` has put it
            for module in list(sys.modules.values()):
                if isinstance(module, types.ModuleType) and module is not holder:
                    named = [key for key, value in list(vars(module).items()) if value is self._original]
                    self._places += [(module, key) for key in named]
        for place, key in self._places:
            setattr(place, key, self._timer)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.samples.append((start, clock() - start))
                self.calls += 1

        return timed

    def take_off(self) -> None:
        for place, key in self._places:
            if vars(place).get(key) is self._timer:
                setattr(place, key, self._original)


_timed: dict[str, Timed] = {}


class Extension:
    """Answers are dictionaries of plain values, which is what /collective_rpc hands on. Times are of perf_counter."""

    def h2d_bench_switch(self, fixes: Sequence[str], on: bool) -> dict[str, Any]:
        """Turns `fixes` on or off; the counts until then."""
        process = _process()
        for fix in fixes:
            process.switches[fix].turn(on)
        return {"at": time.perf_counter(), "patches": _states(fixes)}

    def h2d_bench_time(self, fixes: Sequence[str]) -> dict[str, Any]:
        """Puts a timer around each function that a fix is active in. Answers with what it cannot time, too."""
        left_out = {}
        for patch in _process().patches:
            function = patch.target.function
            if patch.fix.id not in fixes or patch.undo is None or function in _timed:
                continue
            holder: Any = sys.modules[patch.target.module]
            *outer, name = patch.target.qualname.split(".")
            for part in outer:
                holder = getattr(holder, part)
            found = vars(holder).get(name)
            if not (inspect.isroutine(found) and callable(found)) or isinstance(found, staticmethod | classmethod):
                left_out[function] = f"a {type(found).__name__}"
                continue
            _timed[function] = Timed(holder, name)
        return {"timed": sorted(_timed), "left_out": left_out, "patches": _states(fixes)}

    def h2d_bench_times(self) -> dict[str, Any]:
        """The calls of each function since the last time this was asked: start, seconds."""
        answer = {}
        for function, timed in _timed.items():
            answer[function] = {"calls": timed.calls, "samples": [list(sample) for sample in timed.samples]}
            timed.calls = 0
            timed.samples.clear()
        return answer

    def h2d_bench_stop(self, fixes: Sequence[str]) -> dict[str, Any]:
        """Takes the timers off; every function is the one that it was."""
        for timed in _timed.values():
            timed.take_off()
        _timed.clear()
        return {"patches": _states(fixes), "process": _process().state()}


def _process() -> Any:
    from h2d_patch import process

    assert process.current is not None, "h2d_patch did not register in the worker"
    return process.current


def _states(fixes: Sequence[str]) -> list[dict[str, Any]]:
    """Of every target of `fixes` that this release has the fault in."""
    states = [patch.state() for patch in _process().patches if patch.fix.id in fixes]
    return [state for state in states if state["verdict"] not in ("absent", "upstream", "pending")]
