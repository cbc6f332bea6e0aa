"""Host time of the copies that the fixes exchange: the original, upstream's form and ours, in turn in one run."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from h2d_patch import copies
from h2d_patch.bench import results
from h2d_patch.bench.cases import Case, Ours, Prepared, all_cases, pageable, size_text
from h2d_patch.bench.device import Cpu, Device
from h2d_patch.bench.provenance import provenance, write

ARMS: Final = ("original", "upstream", "ours")
QUEUED_MS: Final = (0, 2, 20)
# Of the repetitions that are asked for, by queued ms: up to 1 MiB, and above.
_SHARES_SMALL: Final = {0: 1.0, 2: 1 / 3, 20: 0.15}
_SHARES_LARGE: Final = {0: 0.5, 2: 1 / 6, 20: 7 / 60}
_WARM_UP: Final = 3
# As a worker is busy with its step before it copies. After 20 ms of waiting the processor itself needs a while to get
# going, and whatever came first then would pay for it.
_BUSY_S: Final = 0.0005
_SAVE_EVERY_S: Final = 10.0
# Over which the repetitions of a case are spread: another tenant's noise lasts a second or two, and would otherwise hit
# all repetitions of one case and none of the next.
_ROUNDS: Final = 3

_ROW_COPIES, _ROW_BYTES, _ROW_QUEUED_MS, _ROW_ROUNDS = 200, 256 << 10, 40, 3
_SLOW_US: Final = 1000.0
_OTHER_BYTES: Final = 512 << 20
_OTHER_REPETITIONS: Final = 15


class NoRing(Exception):
    """The staging region could not be had; the text says why."""


class CannotWrite(Exception):
    """The result file could not be written; the text says why."""


def run(
    device: Device, pinned_bytes: int, path: Path | None, quick: bool, repetitions: int, own_stream: bool
) -> dict[str, Any]:
    """Measure everything, and print each row when it is there. Writes `path` as it goes, also if it is interrupted.

    Raises NoRing and CannotWrite. After a KeyboardInterrupt the result says `complete: false`.
    """
    with ExitStack() as stack:
        stack.enter_context(as_in_a_worker())
        result: dict[str, Any] = {
            "what": "µs of host time until the call returns; arms take turns; see `h2d-patch bench copies --help`",
            "device": str(device.device),
            "quick": quick,
            "complete": False,
            "stream": "its own" if own_stream else "default",
            "torch_threads": torch.get_num_threads(),
            "cycles_per_ms": device.cycles_per_ms,
            "ring_bytes": _open_ring(device, pinned_bytes, stack),
            "queued_ms": list(QUEUED_MS),
            "busy_ms_before_each_call": _BUSY_S * 1e3,
            "arms": list(ARMS),
            "rows": [],
        }
        measured = _Run(device, result, path, quick, repetitions)
        measured.save()  # what cannot be written is said now
        try:
            measured.everything()
            result["complete"] = True
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        finally:
            measured.save()
    return result


def _open_ring(device: Device, pinned_bytes: int, stack: ExitStack) -> int:
    if isinstance(device, Cpu):
        stack.enter_context(copies.forced_staging(pinned_bytes))
        return pinned_bytes
    report = copies.start(device.device, pinned_bytes)
    if not report.ring_bytes:
        raise NoRing("; ".join(report.reasons))
    return report.ring_bytes


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """One thread for torch, as in vLLM's workers; no garbage collection in the middle of a call."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


class _Run:
    def __init__(
        self, device: Device, result: dict[str, Any], path: Path | None, quick: bool, repetitions: int
    ) -> None:
        self.device: Final = device
        self.result: Final = result
        self.path: Final = path
        self.quick: Final = quick
        self.repetitions: Final = repetitions
        self.ours: Final = Ours()
        self.about: Final = provenance()
        self._began = self._saved = time.perf_counter()

    def save(self) -> None:
        self._saved = time.perf_counter()
        self.result["seconds"] = round(self._saved - self._began, 1)
        if self.path is not None:
            try:
                write(self.path, self.result, self.about)
            except OSError as error:
                raise CannotWrite(f"{self.path}: {error.strerror}") from None

    def everything(self) -> None:
        found = [_Found(case) for case in all_cases(self.quick)]
        try:
            for number in range(_ROUNDS):
                for each in found:
                    self.measure(each, number)
                    if time.perf_counter() - self._saved > _SAVE_EVERY_S:
                        self.result["rows"] = [one.row() for one in found if one.queued]
                        self.save()
                print(f"round {number + 1} of {_ROUNDS} done", file=sys.stderr, flush=True)
        finally:
            self.result["rows"] = [one.row() for one in found if one.queued]
        print(results.HEADER)
        for row in self.result["rows"]:
            for line in results.lines_of_row(row):
                print(line, flush=True)
        self.result["in_a_row"] = self.in_a_row()
        for line in results.lines_of_in_a_row(self.result):
            print(line, flush=True)
        self.result["other_stream_busy"] = {"bytes": self._other_bytes, "rows": []}
        for row in self.other_stream_busy():
            self.result["other_stream_busy"]["rows"].append(row)
            print(results.line_of_other_stream(row), flush=True)

    def measure(self, found: _Found, number: int) -> None:
        """Round `number` of a case."""
        prepared = found.case.prepare(self.device, self.ours)
        self._warm_up(prepared)
        shares = _SHARES_SMALL if found.case.nbytes <= 1 << 20 else _SHARES_LARGE
        for ms in QUEUED_MS:
            # Rounded before it is rounded up: 60 × 0.15 is a little more than 9.
            in_all = max(1, math.ceil(round(self.repetitions * shares[ms], 6)))
            times = in_all * (number + 1) // _ROUNDS - in_all * number // _ROUNDS
            found.add(ms, *self._in_turn(prepared, times, partial(self.device.queue, ms)))

    def _warm_up(self, prepared: Prepared) -> None:
        gc.collect()
        for _ in range(_WARM_UP):
            for call in prepared.arms.values():
                _Once(self.device, prepared, call, lambda: None)

    def _in_turn(
        self, prepared: Prepared, number: int, queue: Callable[[], None]
    ) -> tuple[dict[str, list[_Once]], int, Counter[str]]:
        """The repetitions of each arm, and how often ours was called and why it fell back."""
        calls, reasons = self.ours.ledger.calls, self.ours.ledger.reasons.copy()
        found: dict[str, list[_Once]] = {arm: [] for arm in ARMS}
        for _ in range(number):
            for arm, call in prepared.arms.items():
                found[arm].append(_Once(self.device, prepared, call, queue))
        return found, self.ours.ledger.calls - calls, self.ours.ledger.reasons - reasons

    def in_a_row(self) -> dict[str, Any]:
        """Many small copies with work queued all the while: the driver's own staging takes about 4 MiB of them."""
        device = self.device
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        one = pageable(_ROW_BYTES)
        prepared = [one.prepare(device, self.ours) for _ in range(_ROW_COPIES)]
        for number in range(_ROW_ROUNDS + 1):
            for arm in ARMS:
                calls = [each.arms[arm] for each in prepared]
                fallbacks = self.ours.ledger.fallbacks
                device.synchronize()
                before = device.pinned_allocations()
                device.queue(_ROW_QUEUED_MS)
                behind = device.mark()
                us, arrived = [], []
                for each, call in zip(prepared, calls, strict=True):
                    began = time.perf_counter()
                    arrived.append(call())
                    us.append((time.perf_counter() - began) * 1e6)
                    each.sources.overwrite()
                busy = not behind.query()
                after = device.pinned_allocations()
                device.synchronize()
                kept = all(each.arrived(result) for each, result in zip(prepared, arrived, strict=True))
                del arrived
                for each in prepared:
                    each.sources.follow()
                found: dict[str, Any] = {
                    "over_1_ms": sum(took > _SLOW_US for took in us),
                    "max_us": round(max(us), 1),
                    "total_us": round(sum(us), 1),
                    "work_still_queued_at_the_end": busy,
                    "snapshot_kept": kept,
                    "pinned_allocations": _difference(before, after),
                    "us": [round(took, 1) for took in us],
                }
                if arm == "ours":
                    found["fallbacks"] = self.ours.ledger.fallbacks - fallbacks
                if number:  # the first is a warm-up
                    rounds[arm].append(found)
        return {"copies": _ROW_COPIES, "bytes": _ROW_BYTES, "queued_ms": _ROW_QUEUED_MS, "rounds": rounds}

    @property
    def _other_bytes(self) -> int:
        return _OTHER_BYTES >> 3 if self.quick else _OTHER_BYTES

    def other_stream_busy(self) -> Iterator[dict[str, Any]]:
        """Nothing queued on the current stream; another one copies from pinned memory."""
        device = self.device
        source = device.empty_pinned(self._other_bytes, dtype=torch.uint8).fill_(1)
        target = torch.empty(self._other_bytes, dtype=torch.uint8, device=device.device)
        other = device.new_stream()
        still_busy: list[bool] = []

        def occupy() -> None:
            with device.on(other):
                target.copy_(source, non_blocking=True)

        repetitions = max(1, min(self.repetitions, _OTHER_REPETITIONS))
        for power in (14, 16, 20) if self.quick else range(14, 25):
            prepared = pageable(1 << power).prepare(device, self.ours)
            self._warm_up(prepared)
            # Whether the other copy outlasts ours, once for each arm.
            still_busy.clear()
            for call in prepared.arms.values():
                device.synchronize()
                occupy()
                with device.on(other):
                    behind = device.mark()
                call()
                still_busy.append(not behind.query())
            arms = _summaries(*self._in_turn(prepared, repetitions, occupy))
            yield {
                "case": f"pageable {size_text(1 << power)}",
                "bytes": 1 << power,
                "other_stream_still_busy": dict(zip(ARMS, still_busy, strict=True)),
                "arms": arms,
            }


class _Found:
    """What the rounds of a case have given so far."""

    def __init__(self, case: Case) -> None:
        self.case: Final = case
        self.queued: Final[dict[int, tuple[dict[str, list[_Once]], int, Counter[str]]]] = {}

    def add(self, ms: int, once: dict[str, list[_Once]], calls: int, reasons: Counter[str]) -> None:
        before, calls_before, reasons_before = self.queued.get(ms, ({arm: [] for arm in ARMS}, 0, Counter()))
        merged = {arm: before[arm] + once[arm] for arm in ARMS}
        self.queued[ms] = merged, calls_before + calls, reasons_before + reasons

    def row(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "kind": self.case.kind,
            "bytes": self.case.nbytes,
            "copies": self.case.copies,
            "asynchronous": self.case.asynchronous,
            "queued": {str(ms): _summaries(*found) for ms, found in self.queued.items() if found[0]["ours"]},
        }


class _Once:
    """One call, with the source overwritten at once after it."""

    __slots__ = ("kept", "pinned", "us")

    def __init__(self, device: Device, prepared: Prepared, call: Callable[[], Any], queue: Callable[[], None]) -> None:
        sources = prepared.sources
        device.synchronize()
        before = device.pinned_allocations()
        queue()
        be_busy()
        began = time.perf_counter()
        result = call()
        self.us = (time.perf_counter() - began) * 1e6
        sources.overwrite()
        self.pinned = _difference(before, device.pinned_allocations())
        device.synchronize()
        self.kept = prepared.arrived(result)
        sources.follow()


def be_busy() -> None:
    small, until = torch.zeros(64, device="cpu"), time.perf_counter() + _BUSY_S
    while time.perf_counter() < until:
        small[:32].add_(1)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _summaries(found: dict[str, list[_Once]], calls: int, reasons: Counter[str]) -> dict[str, Any]:
    summary = {arm: _summary(once) for arm, once in found.items()}
    summary["ours"] |= {"calls": calls, "fallbacks": reasons.total()}
    if reasons:
        summary["ours"]["reasons"] = dict(reasons)
    return summary


def _summary(found: list[_Once]) -> dict[str, Any]:
    us = sorted(once.us for once in found)
    pinned = [once.pinned for once in found if once.pinned is not None]
    return {
        "median_us": round(statistics.median(us), 1),
        "p99_us": round(us[math.ceil(0.99 * len(us)) - 1], 1),
        "snapshot_kept": all(once.kept for once in found),
        "snapshots_lost": sum(not once.kept for once in found),
        "pinned_allocations": sum(pinned) if len(pinned) == len(found) else None,
        "us": [round(once.us, 1) for once in found],
    }
