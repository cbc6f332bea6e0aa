"""Inside a worker: GPU work queued ahead of each step, and how far the host ran ahead of that step's copies.

vLLM imports this module in each worker before the device comes up (`worker_extension_cls`) and makes the methods of
`StepProbe` methods of the worker, for `LLM.collective_rpc`. With `H2D_BENCH_KEEP_ON=1` the fixes stay on where the
plugin would keep them off, which is what is to be measured; nothing else of the plugin changes.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from h2d_patch import process
from h2d_patch.report.status import NOT_SELECTED

if os.environ.get("H2D_BENCH_KEEP_ON") == "1":
    process._unguarded = lambda worker: None


class _NoEvent:
    """Without a GPU everything has happened already."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class _Probe:
    """The state of one worker's probe, and the counts of the arm that runs."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.slept: Any = torch.cuda.Event() if on_gpu else _NoEvent()
        self.copied: Any = torch.cuda.Event() if on_gpu else _NoEvent()
        self.cycles_per_ms = _cycles_per_ms() if on_gpu else 0.0
        self.use(0.0, False, "")

    def use(self, sleep_ms: float, in_order: bool, spoil: str) -> None:
        self.sleep_ms = sleep_ms
        self.in_order = in_order
        self.spoil = spoil
        self.steps = self.exposed = self.waited = self.prefill_only = 0
        self.most_requests = 0
        self.host_ms: list[float] = []

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def sleep(self) -> None:
        if self.on_gpu and self.sleep_ms:
            torch.cuda._sleep(int(self.sleep_ms * self.cycles_per_ms))
            self.slept.record()


class StepProbe:
    """Methods for a vLLM worker; each name starts with `probe_`, for vLLM allows no name that a worker has already."""

    def probe_install(self) -> dict[str, Any]:
        """Wraps the model runner's step. Returns what this worker is, and whether an event guards its buffers."""
        worker: Any = self
        runner = worker.model_runner
        probe = worker.probe_state = _Probe(runner.device.type == "cuda")
        execute, update = runner.execute_model, runner._update_states
        inputs, preprocess = runner._prepare_inputs, runner._preprocess

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not scheduler_output.total_num_scheduled_tokens:
                return execute(scheduler_output, *args, **kwargs)
            if probe.in_order:
                probe.synchronize()
            probe.steps += 1
            probe.most_requests = max(probe.most_requests, len(scheduler_output.num_scheduled_tokens))
            probe.sleep()
            start = time.perf_counter()
            result = execute(scheduler_output, *args, **kwargs)
            probe.host_ms.append((time.perf_counter() - start) * 1e3)
            probe.prefill_only += bool(runner._is_all_reqs_chunked_prefill())
            return result

        def update_states(*args: Any, **kwargs: Any) -> Any:
            # From here on the host rewrites the buffers; a guard, where there is one, has waited already.
            probe.exposed += not probe.copied.query()
            return update(*args, **kwargs)

        def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = inputs(scheduler_output, *args, **kwargs)
            if probe.spoil:  # as a copy of the next step's values would: wrong, but every index stays in range
                used = getattr(runner, probe.spoil).gpu[..., : scheduler_output.total_num_scheduled_tokens]
                used.copy_(used.flip(-1))
            return result

        def prepare(*args: Any, **kwargs: Any) -> Any:
            result = preprocess(*args, **kwargs)
            # Queued at the start of this very step and over already: something in the step waited for the GPU.
            probe.waited += bool(probe.sleep_ms) and probe.slept.query()
            probe.copied.record()
            return result

        runner.execute_model, runner._update_states = execute_model, update_states
        runner._prepare_inputs, runner._preprocess = prepare_inputs, prepare
        return {
            "rank": worker.rank,
            "device": str(runner.device),
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "async_scheduling": bool(runner.use_async_scheduling),
            "guarded_by_event": getattr(runner, "prepare_inputs_event", None) is not None,
            "dtype": str(runner.dtype),
            "policy_overridden": process._unguarded.__module__ == __name__,
        }

    def probe_use(self, on: bool, sleep_ms: float, in_order: bool, spoil: str) -> None:
        """Turns every fix on or off, sets the work queued ahead of each step, and counts from zero.

        `spoil` names a buffer of the runner's that is turned backwards on the device in each step.
        """
        worker: Any = self
        worker.probe_state.synchronize()
        assert process.current is not None, "h2d_patch did not register: is its dist-info where Python finds it?"
        for switch in process.current.switches.values():
            switch.turn(on)
        for patch in process.current.patches:
            patch.site.calls = patch.site.fallbacks = 0
            patch.site.reasons = {}
        worker.probe_state.use(sleep_ms, in_order, spoil)

    def probe_read(self) -> dict[str, Any]:
        """The counts since `probe_use`."""
        worker: Any = self
        probe = worker.probe_state
        probe.synchronize()
        assert process.current is not None
        states = [patch.state() for patch in process.current.patches]
        return {
            "rank": worker.rank,
            "steps": probe.steps,
            "steps_of_prefill_only": probe.prefill_only,
            "most_requests_in_a_step": probe.most_requests,
            "steps_begun_before_the_last_one's_copies": probe.exposed,
            "steps_that_waited_for_the_gpu": probe.waited if probe.sleep_ms and probe.on_gpu else None,
            "host_ms_of_a_step": round(statistics.median(probe.host_ms), 2) if probe.host_ms else None,
            "calls": {s["fix"] + " " + s["function"].rpartition(":")[2]: s["calls"] for s in states if s["calls"]},
            "fallbacks": {s["function"]: s["fallback_reasons"] for s in states if s["fallbacks"]},
            "verdicts": {
                s["fix"] + " " + s["function"].rpartition(":")[2]: f"{s['verdict']} {s['reason']}".strip()
                for s in states
                if s["verdict"] in ("active", "failed", "refused", "off") and s["reason"] != NOT_SELECTED
            },
        }


def _cycles_per_ms() -> float:
    """What `torch.cuda._sleep` needs for a millisecond on this GPU."""
    for cycles in (10_000_000, 100_000_000):  # the first one raises the clock
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        per_ms = cycles / ((time.perf_counter() - start) * 1e3)
    return per_ms
