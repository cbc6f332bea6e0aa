"""Measures which way of copying blocks is the best on a device, on memory of its own and on a stream of its own."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from h2d_patch.copies.cuda import ANY_ORDER, IN_STREAM_ORDER, Driver, Runtime, pinned_range
from h2d_patch.copies.profile import BULK, DIRECTIONS, DRIVER, TRITON, Choice
from h2d_patch.copies.profile_file import Cell, Key, Measured, Places, find, key_of
from h2d_patch.copies.ranges import Ranges, Swappable
from h2d_patch.copies.swap import DRIVER_PAYS, Kernels, kernels_on, swap_arrays

SIZES: Final = (
    *(512, 1 << 10, 2 << 10, 4 << 10, 8008, 8 << 10, 12 << 10, 16 << 10, 24 << 10, 28 << 10, 32 << 10, 48 << 10),
    *(64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20),
)
COUNTS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
PROGRAMS: Final = {BULK: (1, 2, 4, 8, 16), TRITON: (16, 32, 64)}
REGION_BYTES: Final = 512 << 20
FULL_S: Final = 50.0

# At start-up: less of everything, and of kernels only the better one.
QUICK_SIZES: Final = (1 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
QUICK_COUNTS: Final = (4, 16, 64, 256, 1024, 4096)
QUICK_PROGRAMS: Final = {BULK: (2, 4, 8), TRITON: (16, 32)}
QUICK_REGION_BYTES: Final = 256 << 20
QUICK_CELL_BYTES: Final = 64 << 20
QUICK_S: Final = 2.0
_TO_CLEAN_UP_S: Final = 0.3  # of it

_LEAST_REGION_BYTES: Final = 16 << 20
_LEAST, _MOST = 3, 60  # repetitions of a cell
_HELD_CYCLES: Final = 700_000
_SEED: Final = 20
_VERIFIED_BYTES: Final = 8008  # no multiple of 16
_VERIFIED_BLOCKS: Final = 1000
_VERIFIED_BLOCKS_ON_CPU: Final = 20  # where Triton's interpreter copies

Clock = Callable[[], float]


class CannotMeasure(Exception):
    """Blocks cannot be copied here; the text says why."""


@dataclass(frozen=True)
class Batch:
    """`blocks` blocks of `nbytes` from everywhere to everywhere: where from, where to (int64 `[blocks]`).

    `from_slots`, `to_slots`: the same, counted in blocks from the beginning of a region.
    """

    gpu_to_cpu: bool
    nbytes: int
    blocks: int
    reads: Any
    writes: Any
    lengths: Any
    from_slots: Any
    to_slots: Any
    arrays: tuple[int, int, int]  # where `writes`, `reads` and `lengths` lie

    @property
    def total(self) -> int:
        return self.nbytes * self.blocks


class Ground:
    """A region on the host and one on the device, to copy blocks between; the stream to copy on is the current one.

    A context. `nbytes` of each where there is as much, else less. With a CPU in the device's place, no time means
    anything. Raises CannotMeasure, OSError and RuntimeError (of torch's).
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device: Final = device
        self._wanted: Final = nbytes
        self._random: Final = np.random.default_rng(_SEED)
        self._stack: Final = ExitStack()

    def __enter__(self) -> Ground:
        with ExitStack() as stack:
            self._open(stack)
            self._stack.enter_context(stack.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(False))
        if self.device.type == "cuda":
            stack.enter_context(torch.cuda.device(self.device))
            if torch.cuda.is_current_stream_capturing():
                raise CannotMeasure("a CUDA graph is being captured")
            self._runtime, self._driver = Runtime(), Driver()
            self.has_driver_batch = self._driver.has_memcpy_batch()
            self.stream = torch.cuda.Stream()
            stack.enter_context(torch.cuda.stream(self.stream))
            self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            free = torch.cuda.mem_get_info()[0] // 4
            self.nbytes, address = self._pin(min(self._wanted, max(free, _LEAST_REGION_BYTES)))
            stack.callback(self._runtime.free_pinned, address)
            stack.callback(torch.cuda.empty_cache)
            buffer = (ctypes.c_uint8 * self.nbytes).from_address(address)
            self.on_host = torch.frombuffer(buffer, dtype=torch.uint8)
            stack.callback(self._forget)
            pinned = pinned_range(address)
            if isinstance(pinned, str):
                raise CannotMeasure(pinned)
        else:
            self.nbytes, self.stream, self.has_driver_batch = self._wanted, None, False
            self.on_host = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            pinned = (self.on_host.data_ptr(), self.on_host.data_ptr() + self.nbytes, 0)
        generator = torch.Generator(self.device).manual_seed(_SEED)  # vLLM has seeded torch's own
        words = torch.randint(
            -(1 << 62), 1 << 62, (self.nbytes // 8,), dtype=torch.int64, device=self.device, generator=generator
        )
        self.on_device = words.view(torch.uint8)
        self.on_host.copy_(self.on_device)
        start = self.on_device.data_ptr()
        self._touchable = Swappable(Ranges([pinned]), Ranges([(start, start + self.nbytes, 0)]), self.device.index)

    def _forget(self) -> None:
        self.synchronize()
        del self.on_host
        self.__dict__.pop("on_device", None)

    def _pin(self, nbytes: int) -> tuple[int, int]:
        nbytes -= nbytes % _LEAST_REGION_BYTES
        while True:
            try:
                return nbytes, self._runtime.allocate_pinned(nbytes)
            except OSError:
                if nbytes < 2 * _LEAST_REGION_BYTES:
                    raise
                nbytes = nbytes // 2 // _LEAST_REGION_BYTES * _LEAST_REGION_BYTES

    def batch(self, gpu_to_cpu: bool, nbytes: int, blocks: int) -> Batch | None:
        """Blocks side by side in each region, picked at random; None where there is no room for so many."""
        slots = self.nbytes // nbytes
        if blocks > slots:
            return None
        source, target = (self._random.permutation(slots)[:blocks].astype(np.int64) for _ in range(2))
        ends = (self.on_device, self.on_host) if gpu_to_cpu else (self.on_host, self.on_device)
        reads, writes = (end.data_ptr() + slot * nbytes for end, slot in zip(ends, (source, target), strict=True))
        lengths = np.full(blocks, nbytes, dtype=np.int64)
        arrays = writes.ctypes.data, reads.ctypes.data, lengths.ctypes.data
        return Batch(gpu_to_cpu, nbytes, blocks, reads, writes, lengths, source, target, arrays)

    def touchable(self, ring: object) -> Swappable:
        return self._touchable

    def copy(self, batch: Batch, choice: Choice | None) -> None:
        """By swap_arrays, and by the driver's batch where it leaves the blocks to that. None: as the profile says."""
        declined = swap_arrays(batch.reads, batch.writes, batch.lengths, batch.gpu_to_cpu, self.touchable, choice)
        if declined is DRIVER_PAYS:
            self.driver_batch(batch)
        elif declined is not None:
            raise CannotMeasure(declined.reason)

    def driver_batch(self, batch: Batch) -> None:
        """As vLLM's releases call it; a copy for each block where the driver has no batch."""
        if self.device.type == "cpu":
            for write, read in zip(batch.writes.tolist(), batch.reads.tolist(), strict=True):
                ctypes.memmove(write, read, batch.nbytes)
            return
        order, stream = IN_STREAM_ORDER if batch.gpu_to_cpu else ANY_ORDER, self.stream.cuda_stream
        if self.has_driver_batch:
            self._driver.memcpy_batch(*batch.arrays, batch.blocks, order, stream)
        else:
            blocks = (batch.writes.tolist(), batch.reads.tolist(), batch.lengths.tolist())
            self._runtime.copy_each(*blocks, batch.gpu_to_cpu, stream)

    def seconds(self, call: Callable[[], object], held: bool = False) -> float:
        """From an event in front of `call` to one behind it, with nothing else on the stream.

        `held`: with work in front of both, which keeps the GPU until `call` has returned, as long as that takes no more
        than a few tenths of a millisecond: the time of the GPU alone.
        """
        if self.stream is None:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        self.synchronize()
        if held:
            torch.cuda._sleep(_HELD_CYCLES)
        self._began.record()
        call()
        self._ended.record()
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def arrives(self, batch: Batch, copy: Callable[[Batch], object]) -> bool:
        """Whether `copy` copies the blocks of `batch`; destroys what lay where they go."""
        source, target = (self.on_device, self.on_host) if batch.gpu_to_cpu else (self.on_host, self.on_device)
        sent, arrived = self._slots(source, batch.nbytes), self._slots(target, batch.nbytes)
        from_slots, to_slots = torch.from_numpy(batch.from_slots), torch.from_numpy(batch.to_slots)
        arrived[to_slots.to(target.device)] = 0
        self.synchronize()
        copy(batch)
        self.synchronize()
        found, expected = arrived[to_slots.to(target.device)], sent[from_slots.to(source.device)]
        return bool(torch.equal(found.cpu(), expected.cpu()))

    def _slots(self, region: torch.Tensor, nbytes: int) -> torch.Tensor:
        slots = self.nbytes // nbytes
        return region[: slots * nbytes].view(slots, nbytes)


Arms = Mapping[str, Callable[[Batch], object]]


def in_turn(
    ground: Ground,
    batch: Batch,
    arms: Arms,
    until: float,
    least: int = _LEAST,
    most: int = _MOST,
    deadline: float = float("inf"),
    clock: Clock = time.perf_counter,
    held: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each repetition, the arms in turn: at least `least`, then until `until`, at most `most`.

    A warm-up goes before them, which counts only where nothing followed it. Behind `deadline` nothing is begun, and a
    round that did not end does not count.
    """
    rounds: list[dict[str, float]] = []
    order, shuffled = list(arms.items()), random.Random(_SEED)
    for number in range(most + 1):
        if number > least and clock() >= until:
            break
        times: dict[str, float] = {}
        shuffled.shuffle(order)  # behind another arm, the processor's caches hold more or less of one's own
        for name, copy in order:
            if clock() >= deadline:
                return _by_arm(arms, rounds)
            times[name] = ground.seconds(partial(copy, batch), held)
        rounds.append(times)
    return _by_arm(arms, rounds)


def _by_arm(arms: Arms, rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    counted = rounds[1:] or rounds
    return {name: [times[name] for times in counted] for name in arms}


def choices(paths: Sequence[str], programs: Mapping[str, Sequence[int]]) -> list[Choice]:
    """What there is to choose from: the driver's batch, and each kernel with as many programs."""
    kernels = [Choice(path, number) for path in paths if path != DRIVER for number in programs[path]]
    return [Choice(DRIVER), *kernels]


def arms_of(ground: Ground, chosen: Iterable[Choice]) -> dict[str, Callable[[Batch], object]]:
    return {str(choice): partial(ground.copy, choice=choice) for choice in chosen}


class Verified:
    """Whether an arm copies rightly in a direction, asked once for each."""

    def __init__(self, ground: Ground) -> None:
        self._ground: Final = ground
        self._right: Final[dict[tuple[str, bool], bool]] = {}

    def right(self, arms: Arms, gpu_to_cpu: bool) -> dict[str, Callable[[Batch], object]]:
        """Those of `arms` that do."""
        for name, copy in arms.items():
            if (name, gpu_to_cpu) not in self._right:
                blocks = _VERIFIED_BLOCKS if self._ground.stream is not None else _VERIFIED_BLOCKS_ON_CPU
                batch = self._ground.batch(gpu_to_cpu, _VERIFIED_BYTES, blocks)
                self._right[name, gpu_to_cpu] = batch is not None and self._ground.arrives(batch, copy)
        return {name: copy for name, copy in arms.items() if self._right[name, gpu_to_cpu]}

    @property
    def wrong(self) -> list[str]:
        """In words, the arms that do not."""
        return [f"{name}, {DIRECTIONS[way]}: copied wrongly" for (name, way), right in self._right.items() if not right]


@dataclass
class Calibration:
    """What a calibration found. `times`: seconds of all repetitions, for each of `cells`. `wrong`: as of Verified."""

    cells: list[Cell]
    times: list[dict[str, list[float]]]
    wrong: list[str]
    complete: bool

    def right(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that copied rightly, whatever the direction and the number of programs."""
        return [path for path in paths if not any(name.startswith(path) for name in self.wrong)]


def calibrate(
    ground: Ground,
    paths: Sequence[str],
    seconds: float,
    quick: bool = False,
    grid: tuple[Sequence[int], Sequence[int]] | None = None,
    programs: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Measure every cell, both directions in turn; ends about `seconds` from now, and if `quick` never behind it.

    Raises CannotMeasure, OSError.
    """
    began = clock()
    if quick and BULK in paths:
        paths = [path for path in paths if path != TRITON]
    sizes, counts = grid or ((QUICK_SIZES, QUICK_COUNTS) if quick else (SIZES, COUNTS))
    chosen = choices(paths, programs or (QUICK_PROGRAMS if quick else PROGRAMS))
    arms = arms_of(ground, chosen)
    most_bytes = min(ground.nbytes, QUICK_CELL_BYTES) if quick else ground.nbytes
    cells = [
        (gpu_to_cpu, nbytes, blocks)
        for nbytes, blocks in _order(sizes, counts, coarse_first=quick)
        for gpu_to_cpu in (False, True)
        if nbytes * blocks <= most_bytes
    ]
    verified = Verified(ground)
    found = Calibration([], [], [], complete=False)
    deadline = began + seconds if quick else float("inf")
    for number, (gpu_to_cpu, nbytes, blocks) in enumerate(cells):
        progress(number, len(cells))
        if clock() >= deadline:
            break
        batch = ground.batch(gpu_to_cpu, nbytes, blocks)
        assert batch is not None
        right = verified.right(arms, gpu_to_cpu)
        share = (began + seconds - clock()) / (len(cells) - number)
        times = in_turn(
            ground, batch, right, clock() + share, least=0 if quick else _LEAST, deadline=deadline, clock=clock
        )
        if not right or not all(times.values()):
            continue
        gbps = {choice: gbps_of(batch, times[str(choice)]) for choice in chosen if str(choice) in times}
        found.cells.append(Cell(gpu_to_cpu, nbytes, blocks, gbps))
        found.times.append(times)
    else:
        found.complete = True
    progress(len(cells), len(cells))
    found.wrong = verified.wrong
    return found


def gbps_of(batch: Batch, seconds: Sequence[float]) -> float:
    """Of the median."""
    return batch.total / max(statistics.median(seconds), 1e-9) / 1e9


def _order(sizes: Sequence[int], counts: Sequence[int], coarse_first: bool) -> list[tuple[int, int]]:
    """By size and number; `coarse_first`: every other of both, then what lies between."""
    cells = [(i, j) for i in range(len(sizes)) for j in range(len(counts))]
    if coarse_first:
        cells.sort(key=lambda cell: cell[0] % 2 + cell[1] % 2)
    return [(sizes[i], counts[j]) for i, j in cells]


# --- device start-up ---


def start_profile(index: int, places: Places, reasons: list[str], clock: Clock = time.perf_counter) -> str:
    """Give the kernels of CUDA device `index` the profile that fits it. Says which; what went wrong goes to `reasons`.

    Takes at most `QUICK_S`, where none is stored or shipped. Waits for nothing but its own copies.
    """
    kernels = kernels_on(index)
    if isinstance(kernels, str):
        return ""
    key = key_of(index)
    measured, words, why_not = find(key, places)
    reasons += why_not
    if measured is not None:
        kernels.profile = measured.profile(kernels.paths)
        return words
    try:
        return _quick(index, key, kernels, reasons, clock)
    except Exception as error:
        reasons.append(f"no calibration: {type(error).__name__}: {error}")
        return "built in, of no device in particular"


def _quick(index: int, key: Key, kernels: Kernels, reasons: list[str], clock: Clock) -> str:
    began = clock()
    with Ground(torch.device("cuda", index), QUICK_REGION_BYTES) as ground:
        left = began + QUICK_S - _TO_CLEAN_UP_S - clock()
        found = calibrate(ground, kernels.paths, left, quick=True, clock=clock)
    reasons += found.wrong
    if not found.cells:
        raise CannotMeasure(f"nothing could be measured in {QUICK_S:g} s")
    kernels.profile = Measured(key, found.cells, {}).profile(found.right(kernels.paths))
    cut = "" if found.complete else f", cut short with {len(found.cells)} cells"
    return f"calibrated in {clock() - began:.1f} s{cut}"
