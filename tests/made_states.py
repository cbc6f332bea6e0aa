"""States as processes write them, made up for tests of what reads them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from h2d_patch import __version__
from h2d_patch.patching.arms import BOUNDS_S
from h2d_patch.report.state import SCHEMA, start_time


def arm(*buckets: int, seconds: float = 0.0) -> dict[str, Any]:
    """`buckets`: the first ones; the others are empty."""
    filled = [*buckets, *[0] * (len(BOUNDS_S) + 1 - len(buckets))]
    return {"count": sum(filled), "seconds": seconds, "buckets": filled}


def target(verdict: str = "active", **more: Any) -> dict[str, Any]:
    about = {"fix": "kv-swap", "function": "vllm.x:Y.z", "verdict": verdict, "reason": "", "calls": 0, "fallbacks": 0}
    counts = {"bytes": 0, "paths": {}, "arms": {"on": arm(), "off": arm()}, "selftest_ms": 1.5}
    return {**about, "fallback_reasons": {}, **counts, **more}


def state(*targets: dict[str, Any], pid: int | None = None, **more: Any) -> dict[str, Any]:
    """Of process `pid`, this one if not given."""
    pid = os.getpid() if pid is None else pid
    about = {"schema": SCHEMA, "h2d_patch": __version__, "pid": pid, "start_time": start_time(pid), "role": "worker"}
    about |= {"host": socket.gethostname(), "server": "here-1-1", "started": time.time(), "rank": 0, "vllm": "0.22.1"}
    return {**about, "device": {}, "switches": {}, "control": None, "ab": None, "targets": list(targets), **more}


def ab(fix: str, **more: Any) -> dict[str, Any]:
    """What a process says of an A/B that runs."""
    about = {"fix": fix, "slice_s": 30.0, "start": 0.0, "stop": None, "settle_s": 6.0, "on": False, "ended": None}
    arms = {"on": {"count": 0, "seconds": 0.0}, "off": {"count": 0, "seconds": 0.0}}
    return {**about, "left_out": {}, "arms": arms, "slices": [], **more}


def put(run_dir: Path, *states: dict[str, Any]) -> None:
    """Writes each into a file of its own."""
    for number, content in enumerate(states):
        (run_dir / f"state-x-{number}.json").write_text(json.dumps(content))
