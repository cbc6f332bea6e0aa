"""`h2d-patch calibrate`: measure a device's block copies, show them, store its profile."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from h2d_patch.bench import heat_map, swap_device
from h2d_patch.bench.copies import CannotWrite, as_in_a_worker
from h2d_patch.bench.progress import Progress
from h2d_patch.bench.provenance import provenance, write
from h2d_patch.copies import Places, calibrate
from h2d_patch.copies.profile_file import Measured, followed, rounded, save


def run(
    device: torch.device, pinned_bytes: int, places: Places, out: Path | None, result: Path | None, quick: bool
) -> int:
    """The exit status. Raises CannotWrite, NoRing, CannotMeasure, OSError, RuntimeError."""
    began = time.perf_counter()
    with as_in_a_worker(), swap_device.opened(device, pinned_bytes, None) as bench:
        path = out or (places.stored(bench.key.gpu) if bench.on_gpu else None)
        if path is not None:
            _writable(path)
        if result is not None and (not result.exists() or result.is_file()):  # else a pipe, or /dev/stdout
            _writable(result)
        found = measure(bench, calibrate.QUICK_S if quick else calibrate.FULL_S, quick)
        key, paths, on_gpu = bench.key, bench.kernels.paths, bench.on_gpu
        notes = [*bench.notes, *found.wrong]
    about = provenance()
    seconds = round(time.perf_counter() - began, 1)
    made = {"time": about["time"], "commit": about["commit"], "seconds": seconds, "quick": quick}
    measured = Measured(key, found.cells, made)
    if found.cells and path is not None:  # before anything else, which may fail
        try:
            save(path, measured)
        except OSError as error:
            raise CannotWrite(f"{path}: {error.strerror}") from None
    if result is not None:
        _write(result, measured, found, {**about, "complete": found.complete, "quick": quick, "seconds": seconds})
    print(
        f"{key.gpu}, {key.link}, driver {key.driver}, CUDA {key.cuda}, Triton {key.triton}; paths: {', '.join(paths)}"
    )
    print(*heat_map.lines(found.cells), sep="\n")
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    if not found.cells:
        return 1
    if path is None:
        print("not stored: on the CPU nothing is measured that means anything" if not on_gpu else "not stored: no home")
    else:
        print(f"stored in {path}")
    return 1 if notes else 0


def measure(bench: swap_device.Bench, seconds: float, quick: bool) -> calibrate.Calibration:
    """Of all paths but those that copy wrongly."""
    grid = None if bench.on_gpu else (bench.sizes, bench.counts)
    programs = None if bench.on_gpu else bench.programs
    with Progress("calibrating") as progress:
        found = calibrate.calibrate(
            bench.ground, bench.kernels.paths, seconds, quick, grid, programs=programs, progress=progress
        )
    if found.wrong:
        right = found.right(bench.kernels.paths)
        for cell in found.cells:
            for choice in [choice for choice in cell.gbps if choice.path not in right]:
                del cell.gbps[choice]
        whole = [number for number, cell in enumerate(found.cells) if cell.gbps]
        found.cells, found.times = [found.cells[n] for n in whole], [found.times[n] for n in whole]
    return found


def _writable(path: Path) -> None:
    """Said now, not after the measurement."""
    try:
        parent = followed(path).parent
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path}: {error.strerror}") from None
    if not os.access(parent, os.W_OK):
        raise CannotWrite(f"{path}: {os.strerror(errno.EACCES)}")


def _write(path: Path, measured: Measured, found: calibrate.Calibration, about: dict[str, Any]) -> None:
    rows = [
        {
            "gpu_to_cpu": cell.gpu_to_cpu,
            "bytes": cell.nbytes,
            "blocks": cell.blocks,
            "chosen": str(cell.best()),
            "arms": {
                str(choice): {"gbps": rounded(rate), "us": [round(s * 1e6, 1) for s in times[str(choice)]]}
                for choice, rate in cell.gbps.items()
            },
        }
        for cell, times in zip(measured.cells, found.times, strict=True)
    ]
    try:
        write(path, {"what": "GB/s of scattered blocks, median", "key": vars(measured.key), "rows": rows}, about)
    except OSError as error:
        raise CannotWrite(f"{path}: {error.strerror}") from None
