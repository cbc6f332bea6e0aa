"""A device whose block copies are measured: its kernels, its staging region, memory to copy between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from h2d_patch import copies
from h2d_patch.bench.copies import NoRing
from h2d_patch.copies import calibrate, swap
from h2d_patch.copies.profile_file import Key, kernels_hash, key_of

# With the CPU in the device's place, where Triton's interpreter copies a block in milliseconds.
_CPU_SIZES: Final = (512, 4096)
_CPU_COUNTS: Final = (1, 4, 16)
_CPU_PROGRAMS: Final = {"triton": (2, 3)}
_CPU_REGION_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Bench:
    ground: calibrate.Ground
    kernels: swap.Kernels
    key: Key
    sizes: Sequence[int]
    counts: Sequence[int]
    programs: Mapping[str, Sequence[int]]
    profile: str  # which one the kernels have, in words
    notes: Sequence[str]

    @property
    def on_gpu(self) -> bool:
        return self.ground.stream is not None


@contextmanager
def opened(device: torch.device, pinned_bytes: int, places: copies.Places | None) -> Iterator[Bench]:
    """With the profile that `places` give. Raises NoRing, calibrate.CannotMeasure, OSError, RuntimeError."""
    if device.type == "cpu":
        with copies.forced_staging(pinned_bytes) as ring, calibrate.Ground(device, _CPU_REGION_BYTES) as ground:
            kernels = swap.kernels_for(ring)
            if isinstance(kernels, str):
                raise calibrate.CannotMeasure(f"{kernels}; expected TRITON_INTERPRET=1 on the CPU")
            key = Key("CPU", "none", "none", "none", "interpreted", kernels_hash())
            before = kernels.profile
            try:
                yield Bench(ground, kernels, key, _CPU_SIZES, _CPU_COUNTS, _CPU_PROGRAMS, "built in", ())
            finally:
                kernels.profile = before
        return
    report = copies.start(device, pinned_bytes, places)
    if not report.ring_bytes:
        raise NoRing("; ".join(report.reasons))
    index = int(device.index)
    found = swap.kernels_on(index)
    if isinstance(found, str):
        raise calibrate.CannotMeasure(found)
    with calibrate.Ground(device, calibrate.REGION_BYTES) as ground:
        sizes, counts, programs = calibrate.SIZES, calibrate.COUNTS, calibrate.PROGRAMS
        yield Bench(ground, found, key_of(index), sizes, counts, programs, report.profile, report.reasons)
