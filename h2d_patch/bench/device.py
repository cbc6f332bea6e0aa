"""The device as a benchmark sees it: work queued for a known time, and the pinned memory that torch has allocated."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

_CALIBRATION_CYCLES: Final = 50_000_000


class Gpu:
    """A CUDA device, which becomes the current one. `own_stream`: the calling thread leaves the default stream."""

    def __init__(self, device: torch.device, own_stream: bool = False) -> None:
        self.device: Final = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self.device)
        if own_stream:
            torch.cuda.set_stream(torch.cuda.Stream())
        self.cycles_per_ms: Final = self._calibrate()

    def queue(self, ms: float) -> None:
        """Put `ms` of work on the current stream."""
        if ms:
            torch.cuda._sleep(round(ms * self.cycles_per_ms))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> Any:
        """An event behind what is queued on the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The calling thread's current stream is `stream`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def pinned_allocations(self) -> int | None:
        """Blocks of pinned memory that torch's host allocator has ever taken from CUDA; None where torch cannot say."""
        found = self._host_stat("num_host_alloc")
        return None if found is None else int(found)

    def pinned_bytes(self) -> int | None:
        """Bytes of pinned memory that torch's host allocator holds; None where torch cannot say."""
        found = self._host_stat("allocated_bytes")
        return int(found["current"]) if found and "current" in found else None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def dense_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the shape of `tensor`, without gaps, in the order of its strides."""
        return torch.empty_like(tensor, pin_memory=True)

    def _host_stat(self, name: str) -> Any:
        ask = getattr(torch.cuda, "host_memory_stats_as_nested_dict", None)
        return None if ask is None else ask().get(name)

    def _calibrate(self) -> float:
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # brings the clocks up
        found = []
        for _ in range(5):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            ended.record()
            ended.synchronize()
            found.append(_CALIBRATION_CYCLES / float(began.elapsed_time(ended)))
        return statistics.median(found)


class Cpu:
    """The CPU in a device's place, to try the programs: nothing is ever queued, and no number means anything."""

    device: Final = torch.device("cpu")
    cycles_per_ms: Final = None

    def queue(self, ms: float) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def mark(self) -> Any:
        return _Passed()

    def new_stream(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def pinned_allocations(self) -> int | None:
        return None

    def pinned_bytes(self) -> int | None:
        return None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def empty_pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def dense_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


Device = Gpu | Cpu


def open_device(name: str, own_stream: bool = False) -> Device:
    """Raises ValueError, with what was expected, for a device that is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is no device; expected cuda, cuda:N or cpu") from None
    if device.type == "cpu":
        return Cpu()
    if device.type != "cuda":
        raise ValueError(f"{name!r} is not a CUDA device; expected cuda, cuda:N or cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"{name}: torch {torch.__version__} finds no GPU here; expected one")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f"{name}: torch finds {torch.cuda.device_count()} GPUs; expected one of those")
    return Gpu(device, own_stream)
