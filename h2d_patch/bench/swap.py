"""GB/s of scattered blocks: the driver's batch, upstream's kernel settings and ours, in turn in one run."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from h2d_patch import copies
from h2d_patch.bench import swap_device, swap_results
from h2d_patch.bench.calibrate import measure
from h2d_patch.bench.cases import Ledger
from h2d_patch.bench.copies import CannotWrite, as_in_a_worker, be_busy
from h2d_patch.bench.provenance import provenance, write
from h2d_patch.bench.swap_results import CHOSEN, DRIVER_BATCH, UPSTREAM
from h2d_patch.copies import calibrate
from h2d_patch.copies.calibrate import Batch, Verified, arms_of, choices, in_turn
from h2d_patch.copies.profile import BULK, DIRECTIONS, TRITON, Choice
from h2d_patch.copies.profile_file import Measured, rounded

SECONDS: Final = 170.0
QUICK_SECONDS: Final = 25.0
_CALIBRATION_SHARE: Final = 0.25  # of the seconds, where the device has no stored or shipped profile
_ROWS_UNTIL_SHARE: Final = 0.97  # of the seconds
_PASSES: Final = 2  # over all rows: another tenant's noise lasts a second or two
_LEAST, _MOST = 2, 40  # repetitions in a pass
_SAVE_EVERY_S: Final = 10.0
# Up to so many blocks, what asking costs shows: the driver's batch is measured through swap_arrays as well.
_ASKED_BLOCKS: Final = 64
# From so many on, also with the GPU held until the call has returned: what the copies take without the host's part.
_HELD_FROM_BLOCKS: Final = 1024
_QUICK_SIZES: Final = (512, 4 << 10, 8008, 8 << 10, 32 << 10, 128 << 10)
_QUICK_COUNTS: Final = (1, 64, 1024, 4096)
_ONE_COPY_REPETITIONS: Final = 8

_HOST_BYTES: Final = 8 << 10
_HOST_PASSES: Final = 8
_HOST_REPETITIONS: Final = 5  # in a pass
_BESIDE: Final = (Choice(BULK, 8), Choice(TRITON, 16))

_MATMUL_SIZE: Final = 8192
_SWAP_BYTES, _SWAP_BLOCKS, _SWAPS = 8 << 10, 4096, 10
_MATMUL_ROUNDS: Final = 5
_LEAST_MULTIPLICATIONS: Final = 20
_MOST_SWAPS: Final = 200  # the launch queue holds about a thousand
_MATMUL_MARGIN: Final = 1.3  # so much longer than the slowest swaps do they run


def run(
    device: torch.device,
    pinned_bytes: int,
    places: copies.Places,
    path: Path | None,
    quick: bool,
    seconds: float | None,
) -> dict[str, Any]:
    """Measure everything in about `seconds`, and print each row when it is there. Writes `path` as it goes.

    Raises NoRing, CannotMeasure, CannotWrite, OSError, RuntimeError. After a KeyboardInterrupt the result says
    `complete: false`.
    """
    began = time.perf_counter()
    with as_in_a_worker(), swap_device.opened(device, pinned_bytes, places) as bench:
        measured = _Run(bench, path, quick, seconds or (QUICK_SECONDS if quick else SECONDS), began)
        measured.save()  # what cannot be written is said now
        try:
            measured.everything()
            measured.result["complete"] = True
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        finally:
            measured.save()
    return measured.result


class _Run:
    def __init__(self, bench: swap_device.Bench, path: Path | None, quick: bool, seconds: float, began: float) -> None:
        self.bench: Final = bench
        self.ground: Final = bench.ground
        self.path: Final = path
        self.quick: Final = quick
        self.seconds: Final = seconds
        self._began: Final = began
        self._saved = began
        self._about: Final = provenance()
        self._verified: Final = Verified(bench.ground)
        self._upstream = _upstream()
        self.choices: Final = choices(bench.kernels.paths, bench.programs)
        self.result: Final[dict[str, Any]] = {
            "what": "GB/s of scattered blocks, median; `arms`: from the call on an idle GPU, `held`: of the GPU alone",
            "device": str(bench.ground.device),
            "quick": quick,
            "complete": False,
            "seconds_asked": seconds,
            "region_bytes": bench.ground.nbytes,
            "key": vars(bench.key),
            "paths": list(bench.kernels.paths),
            "driver_batch": "cuMemcpyBatchAsync" if self.ground.has_driver_batch else "a copy for each block",
            "profile": bench.profile,
            "profile_at_start": bench.profile,
            "notes": list(bench.notes),
            "problems": [],
            "one_copy": {},
            "rows": [],
            "host_time": [],
            "matmul": {"rows": []},
        }

    def save(self) -> None:
        self._saved = time.perf_counter()
        self.result["seconds"] = round(self._saved - self._began, 1)
        if self.path is not None:
            try:
                write(self.path, self.result, self._about)
            except OSError as error:
                raise CannotWrite(f"{self.path}: {error.strerror}") from None

    def everything(self) -> None:
        print(*self.result["notes"], sep="\n", end="\n" if self.result["notes"] else "", file=sys.stderr)
        self.one_copy()
        self.calibrate()
        print(f"profile: {self.result['profile']}; driver batch: {self.result['driver_batch']}", flush=True)
        self.part("host time", self.host_times)
        self.part("multiplications", self.beside_multiplications)
        self.save()
        self.rows()
        self.result["problems"] += self._verified.wrong

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """What fails is said, and the rest measured."""
        try:
            measure()
        except Exception as error:
            self.result["problems"].append(f"{name}: {type(error).__name__}: {error}")

    def one_copy(self) -> None:
        """The limit: everything in one piece."""
        host, device = self.ground.on_host, self.ground.on_device
        for direction, name in DIRECTIONS.items():
            target, source = (host, device) if direction else (device, host)
            copy = partial(target.copy_, source, non_blocking=True)
            times = [self.ground.seconds(copy) for _ in range(_ONE_COPY_REPETITIONS + 1)][1:]
            gbps = round(self.ground.nbytes / max(statistics.median(times), 1e-9) / 1e9, 2)
            found = {"bytes": self.ground.nbytes, "gbps": gbps, "us": _us(times)}
            self.result["one_copy"][name] = found
            print(swap_results.line_of_one_copy(name, found), flush=True)

    def calibrate(self) -> None:
        """As `h2d-patch calibrate` does, unless a profile is stored or shipped: that of start-up is a rough one."""
        if self.bench.profile.startswith(("of ", "shipped")):
            return
        began = time.perf_counter()
        found = measure(self.bench, _CALIBRATION_SHARE * self.seconds, self.quick)
        self.result["problems"] += found.wrong
        measured = Measured(self.bench.key, found.cells, {"time": self._about["time"]})
        self.bench.kernels.profile = measured.profile(self.bench.kernels.paths)
        self.result["profile"] = f"calibrated in this run, in {time.perf_counter() - began:.1f} s"
        self.result["calibration"] = [{**cell.as_dict(), "chosen": str(cell.best())} for cell in found.cells]

    def rows(self) -> None:
        sizes, counts = (_QUICK_SIZES, _QUICK_COUNTS) if self.quick and self.bench.on_gpu else (
            self.bench.sizes, self.bench.counts
        )  # fmt: skip
        cells = [
            (direction, nbytes, blocks)
            for nbytes in sizes
            for blocks in counts
            for direction in DIRECTIONS
            if nbytes * blocks <= self.ground.nbytes
        ]
        began = time.perf_counter()
        until = max(began, self._began + _ROWS_UNTIL_SHARE * self.seconds)
        found = [_Row(*cell) for cell in cells]
        try:
            for number in range(_PASSES):
                pass_ends = began + (until - began) * (number + 1) / _PASSES
                for index, row in enumerate(found):
                    left = len(found) - index
                    now = time.perf_counter()
                    self.measure(row, now + max(0.0, pass_ends - now) / left)
                    # The first pass may be all that a run that is cut short has to show.
                    out = sys.stdout if number == _PASSES - 1 else sys.stderr
                    print(swap_results.line_of_row(row.as_dict()), file=out, flush=True)
                    if time.perf_counter() - self._saved > _SAVE_EVERY_S:
                        self.result["rows"] = [row.as_dict() for row in found if row.times]
                        self.save()
        finally:
            self.result["rows"] = [row.as_dict() for row in found if row.times]

    def measure(self, row: _Row, until: float) -> None:
        batch = self.ground.batch(row.gpu_to_cpu, row.nbytes, row.blocks)
        assert batch is not None
        right = self._verified.right(self.arms(row), row.gpu_to_cpu)
        if self._upstream is not None and not row.gpu_to_cpu:
            try:
                copy = self._upstream(self.ground, batch)
                if row.blocks <= _ASKED_BLOCKS and not row.times and not self.ground.arrives(batch, copy):
                    raise RuntimeError(f"{swap_results.name_of(row.as_dict())} copied wrongly")
                right[UPSTREAM] = copy
            except Exception as error:
                self.result["problems"].append(f"{UPSTREAM}: {type(error).__name__}: {error}")
                self._upstream = None
        row.chosen = str(self.bench.kernels.profile.choose(row.gpu_to_cpu, row.nbytes, row.blocks))
        held = row.blocks >= _HELD_FROM_BLOCKS
        now = time.perf_counter()
        row.add(row.times, in_turn(self.ground, batch, right, (now + until) / 2 if held else until, _LEAST, _MOST))
        if held:
            row.add(row.held, in_turn(self.ground, batch, right, until, _LEAST, _MOST, held=True))

    def arms(self, row: _Row) -> dict[str, Callable[[Batch], object]]:
        arms: dict[str, Callable[[Batch], object]] = {DRIVER_BATCH: self.ground.driver_batch}
        asked = self.choices if row.blocks <= _ASKED_BLOCKS else self.choices[1:]
        return {**arms, **arms_of(self.ground, asked), CHOSEN: partial(self.ground.copy, choice=None)}

    def host_times(self) -> None:
        """From call to return with nothing queued: the whole call of a release's, and the copy alone by each path."""
        rows_of_host, on_device = self.ground.on_host.view(-1, 1 << 16), self.ground.on_device
        counts = [n for n in self.bench.counts if not self.quick or n in _QUICK_COUNTS]
        repetitions = 1 if self.quick else _HOST_REPETITIONS
        cells = [(blocks, mixed, direction) for blocks in counts for mixed in (False, True) for direction in DIRECTIONS]
        found: list[tuple[dict[str, Any], dict[str, Callable[[], object]], dict[str, list[float]]]] = []
        for blocks, mixed, direction in cells:
            batch = self.ground.batch(direction, _HOST_BYTES, blocks)
            if batch is None:
                continue
            if mixed:
                batch.lengths[::2] = _HOST_BYTES // 2
            arms = self._host_arms(batch, rows_of_host, on_device)
            row = {
                "gpu_to_cpu": direction,
                "bytes": _HOST_BYTES,
                "blocks": blocks,
                "mixed": mixed,
                "chosen": str(self.bench.kernels.profile.choose(direction, batch.lengths.mean(), blocks)),
            }
            found.append((row, arms, {name: [] for name in arms}))
        # Every row many times, a little each time: another tenant's noise lasts a second or two.
        for _, (_, arms, times) in itertools.product(range(_HOST_PASSES), found):
            for number in range(repetitions + 1):
                for name, call in arms.items():
                    self.ground.synchronize()
                    be_busy()
                    began = time.perf_counter()
                    call()
                    if number:  # the first is a warm-up
                        times[name].append(time.perf_counter() - began)
        self.ground.synchronize()
        for row, _, times in found:
            row["arms"] = {
                name: {"median_us": round(statistics.median(took) * 1e6, 1), "us": _us(took)}
                for name, took in times.items()
            }
            self.result["host_time"].append(row)
            print(swap_results.line_of_host_time(row), flush=True)

    def _host_arms(
        self, batch: Batch, rows_of_host: torch.Tensor, on_device: torch.Tensor
    ) -> dict[str, Callable[[], object]]:
        descriptors = [torch.from_numpy(array) for array in (batch.reads, batch.writes, batch.lengths)]
        ends = ([on_device], [rows_of_host]) if batch.gpu_to_cpu else ([rows_of_host], [on_device])
        bound = copies.swap_blocks.bind(Ledger())
        driver = partial(self.ground.driver_batch, batch)

        def original(src: object, dst: object, sizes: object) -> object:
            return driver()

        paths = [choice for choice in _BESIDE if choice.path in self.bench.kernels.paths]
        return {
            "call": partial(bound, original, *descriptors, batch.gpu_to_cpu, *ends),
            **{str(choice): partial(self.ground.copy, batch, choice) for choice in paths},
        }

    def beside_multiplications(self) -> None:
        """How long multiplications take on another stream while blocks are swapped, by each path.

        `arms`: the same bytes each, all of them while the multiplications last. `saturated`: as many as it takes to
        swap all the while.
        """
        on_gpu, ground = self.bench.on_gpu, self.ground
        size, blocks, swaps = (_MATMUL_SIZE, _SWAP_BLOCKS, _SWAPS) if on_gpu else (64, 8, 1)
        multiply = _Multiply(ground.device, size)
        found = self.result["matmul"]
        found |= {"size": size, "swap": f"{swaps} x {blocks} blocks of {_SWAP_BYTES} bytes"}
        kernels = [choice for choice in _BESIDE if choice.path in self.bench.kernels.paths]
        one = min(multiply.ms(4, lambda: None)[0] / 4 for _ in range(4))
        for direction in DIRECTIONS:
            batch = ground.batch(direction, _SWAP_BYTES, blocks)
            assert batch is not None
            copies_of: dict[str, Callable[[Batch], object]] = {DRIVER_BATCH: ground.driver_batch}
            copies_of |= {**arms_of(ground, kernels), CHOSEN: partial(ground.copy, choice=None)}
            took = {name: min(self._ms(copy, batch) for _ in range(3)) for name, copy in copies_of.items()}
            number = max(_LEAST_MULTIPLICATIONS, math.ceil(_MATMUL_MARGIN * swaps * max(took.values()) / one))
            calls = {name: partial(_repeat, swaps, copy, batch) for name, copy in copies_of.items()}
            lasting = _MATMUL_MARGIN * _LEAST_MULTIPLICATIONS * one
            most = _MOST_SWAPS if on_gpu else 1
            saturating = {
                name: partial(_repeat, min(most, math.ceil(lasting / took[name])), copy, batch)
                for name, copy in copies_of.items()
            }
            row: dict[str, Any] = {
                "gpu_to_cpu": direction,
                "bytes_swapped": swaps * batch.total,
                "multiplications": number,
                "arms": self._multiplied(multiply, number, calls),
                "saturated": {
                    "multiplications": _LEAST_MULTIPLICATIONS,
                    "arms": self._multiplied(multiply, _LEAST_MULTIPLICATIONS, saturating),
                },
            }
            found["rows"].append(row)
            print(*swap_results.lines_of_matmul({"rows": [row]}), sep="\n", flush=True)

    def _ms(self, copy: Callable[[Batch], object], batch: Batch) -> float:
        return max(self.ground.seconds(partial(copy, batch)) * 1e3, 1e-3)

    def _multiplied(
        self, multiply: _Multiply, number: int, calls: Mapping[str, Callable[[], object]]
    ) -> dict[str, Any]:
        arms = {"alone": lambda: None, **calls}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for turn in range((1 if self.quick else _MATMUL_ROUNDS) + 1):
            for name, call in arms.items():
                found = multiply.ms(number, call)
                if turn:  # the first is a warm-up
                    times[name].append(found)
        return {
            name: {
                "median_ms": round(statistics.median(took for took, _ in found), 3),
                "ms": [round(took, 3) for took, _ in found],
                "swapped_after_ms": [round(swapped, 3) for _, swapped in found],
            }
            for name, found in times.items()
        }


def _repeat(times: int, copy: Callable[[Batch], object], batch: Batch) -> None:
    for _ in range(times):
        copy(batch)


class _Row:
    def __init__(self, gpu_to_cpu: bool, nbytes: int, blocks: int) -> None:
        self.gpu_to_cpu: Final = gpu_to_cpu
        self.nbytes: Final = nbytes
        self.blocks: Final = blocks
        self.chosen = ""
        self.times: Final[dict[str, list[float]]] = {}
        self.held: Final[dict[str, list[float]]] = {}

    @staticmethod
    def add(to: dict[str, list[float]], times: Mapping[str, list[float]]) -> None:
        for arm, found in times.items():
            to.setdefault(arm, []).extend(found)

    def as_dict(self) -> dict[str, Any]:
        total = self.nbytes * self.blocks
        return {
            "gpu_to_cpu": self.gpu_to_cpu,
            "bytes": self.nbytes,
            "blocks": self.blocks,
            "chosen": self.chosen,
            "arms": _rates(total, self.times),
            "held": _rates(total, self.held),
        }


def _rates(total: int, times: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        arm: {"gbps": rounded(total / max(statistics.median(found), 1e-9) / 1e9), "us": _us(found)}
        for arm, found in times.items()
    }


class _Multiply:
    """Multiplications of two bf16 matrices on a stream of their own."""

    def __init__(self, device: torch.device, size: int) -> None:
        # Not of one number each: with those a GPU draws less power, and keeps a higher clock.
        self._a, self._b, self._c = (torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(3))
        self._on_gpu: Final = device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.Stream()
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda.current_stream().synchronize()  # the matrices are there

    def ms(self, number: int, swap: Callable[[], object]) -> tuple[float, float]:
        """Until `number` of them are done, and until `swap`, submitted behind them to the current stream, is."""
        if not self._on_gpu:
            began = time.perf_counter()
            for _ in range(number):
                torch.matmul(self._a, self._b, out=self._c)
            took = (time.perf_counter() - began) * 1e3
            swap()
            return took, took
        began_at, ended, swapped = self._events
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            began_at.record()
            for _ in range(number):
                torch.matmul(self._a, self._b, out=self._c)
            ended.record()
        swap()
        swapped.record()
        torch.cuda.synchronize()
        return float(began_at.elapsed_time(ended)), float(began_at.elapsed_time(swapped))


def _upstream() -> Callable[[calibrate.Ground, Batch], Callable[[Batch], object]] | None:
    try:
        from h2d_patch.bench.upstream_swap import prepared
    except ImportError:
        return None
    return prepared


def _us(seconds: list[float]) -> list[float]:
    return [round(took * 1e6, 1) for took in seconds]
