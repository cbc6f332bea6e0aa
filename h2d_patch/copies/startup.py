"""Device start-up: the one moment at which pinned memory is allocated and kernels are compiled."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from h2d_patch.copies.profile_file import Places


@dataclass(frozen=True)
class StartReport:
    """What came up on a device. `reasons` says in words what did not; empty means all of it did.

    `profile`: which device profile is in use, in words.
    """

    device: str
    ring_bytes: int
    kernels: bool
    reasons: list[str]
    seconds: float
    profile: str = ""


# Of the staging region, one in so many bytes is for small copies, and no more than these.
_LANE_SHARE = 8
_MOST_LANE_BYTES = 32 << 20

_lock = threading.Lock()
_reports: dict[str, StartReport] = {}


def _renew() -> None:
    global _lock, _reports
    _lock = threading.Lock()
    _reports = {}


os.register_at_fork(after_in_child=_renew)


def start(device: Any, pinned_bytes: int, profiles: Places | None = None) -> StartReport:
    """Allocate `pinned_bytes` of pinned memory for copies to `device`, compile the kernels, run each once.

    With `profiles`, the device profile is looked for there, or measured in at most 2 s. Once per process and device;
    a later call returns the first report. Never raises. Waits for the device.
    """
    began = time.perf_counter()
    with _lock:
        try:
            index = _index(device)
        except Exception as error:
            return StartReport(str(device), 0, False, [_words(error)], time.perf_counter() - began)
        name = f"cuda:{index}"
        if name not in _reports:
            reasons = []
            ring_bytes = 0
            try:
                _start_native()
            except Exception as error:
                reasons.append(f"one thread copies into the staging region: {_words(error)}")
            try:
                ring_bytes = _open_ring(index, pinned_bytes)
            except Exception as error:
                reasons.append(f"no staging region: {_words(error)}")
            try:
                kernels = _start_kernels(index, reasons)
            except Exception as error:
                kernels = False
                reasons.append(f"no swap kernel: {_words(error)}")
            profile = _start_profile(index, profiles, reasons) if kernels and ring_bytes and profiles else ""
            _reports[name] = StartReport(name, ring_bytes, kernels, reasons, time.perf_counter() - began, profile)
        return _reports[name]


def stop() -> None:
    """Free everything that `start` made; waits for the devices. For tests: no copy may be under way in any thread."""
    with _lock:
        _reports.clear()
        if f"{__package__}.staging" in sys.modules:
            _close_rings()
        if f"{__package__}.swap" in sys.modules:
            from h2d_patch.copies.swap import forget_kernels

            forget_kernels()


def _index(device: Any) -> int:
    import torch

    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(f"{device} is not a CUDA device")
    return int(torch.cuda.current_device() if device.index is None else device.index)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _start_native() -> None:
    import torch

    from h2d_patch.copies import native
    from h2d_patch.copies.cuda import Runtime

    native.start(Runtime().addresses(), sharing=torch.cuda.device_count())  # a worker for each, at the most


def _open_ring(index: int, nbytes: int) -> int:
    import ctypes

    import torch

    from h2d_patch.copies import native
    from h2d_patch.copies.cuda import CudaLink, Runtime
    from h2d_patch.copies.lane import Lane
    from h2d_patch.copies.staging import ALIGNMENT, Ring, process

    device = torch.device("cuda", index)
    try:
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes of pinned memory asked for")
        runtime = Runtime()
        with torch.cuda.device(index), torch.inference_mode(False):
            torch.cuda.init()
            address = runtime.allocate_pinned(nbytes)
            try:
                memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
                if not memory.is_pinned():
                    raise OSError("torch does not see the region as pinned")
                link = CudaLink(index, runtime)
                for_lane = min(nbytes // _LANE_SHARE, _MOST_LANE_BYTES) // ALIGNMENT * ALIGNMENT
                try:
                    lane = Lane(native.loaded, link, runtime, index, address, for_lane) if native.loaded else None
                except RuntimeError:  # the ring does the same with more calls
                    lane = None
                ring = Ring(memory[for_lane if lane is not None else 0 :], link, device, lane)
                _first_copies(ring)
            except BaseException:
                runtime.free_pinned(address)
                raise
        process.rings[device] = ring
        process.free[device] = lambda: runtime.free_pinned(address)
    except Exception as error:
        process.without[index] = _words(error)
        raise
    return nbytes


def _first_copies(ring: Any) -> None:
    """What the device loads at its first copy, it loads now."""
    import torch

    sent = torch.arange(min(ring.capacity, 4096) // 8, dtype=torch.int64, device="cpu")
    arrived = torch.zeros((2, *sent.shape), dtype=sent.dtype, device=ring.device)
    ring.send(arrived[0].data_ptr(), sent.nbytes, sent.data_ptr(), sent.nbytes, sent.nbytes, 1)
    with ring.reserve(sent.nbytes) as piece:
        view = piece.view(sent.dtype, sent.shape, sent.stride())
        view.copy_(sent)
        piece.submitted = True
        ring.link.copy(arrived[1].data_ptr(), piece.address, sent.nbytes, piece.stream)
    if not torch.equal(arrived.cpu(), torch.stack((sent, sent))):
        raise OSError("the first copies out of the staging region arrived changed")


def _start_kernels(index: int, reasons: list[str]) -> bool:
    """Whether blocks can be copied by something else than the driver's batch."""
    from h2d_patch.copies import swap

    reasons += swap.start_kernels(index)
    return isinstance(swap.kernels_on(index), swap.Kernels)


def _start_profile(index: int, profiles: Places, reasons: list[str]) -> str:
    try:
        from h2d_patch.copies.calibrate import start_profile

        return start_profile(index, profiles, reasons)
    except Exception as error:
        reasons.append(f"no device profile: {_words(error)}")
        return ""


def _close_rings() -> None:
    import torch

    from h2d_patch.copies.staging import process

    for device, ring in list(process.rings.items()):
        ring.retire("stopped")
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            del process.rings[device]
            process.free.pop(device)()
    process.without.clear()
