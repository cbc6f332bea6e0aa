"""What torch does not offer of the CUDA runtime and driver: exact pinned regions, pointer attributes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

RELAXED_CAPTURE: Final = 2  # cudaStreamCaptureModeRelaxed

# CUpointer_attribute
_MEMORY_TYPE, _DEVICE_POINTER, _RANGE_START, _RANGE_SIZE = 2, 3, 11, 12
_HOST_MEMORY: Final = 1  # CU_MEMORYTYPE_HOST


class Runtime:
    """The libcudart that torch has loaded. Raises OSError where there is none."""

    def __init__(self) -> None:
        path = _loaded_runtime()
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        # Keeps the GIL: it takes less time than letting go of the GIL and asking for it again.
        self._exchange_capture_mode = ctypes.PyDLL(path).cudaThreadExchangeStreamCaptureMode

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of exactly `nbytes` of pinned memory. Raises OSError. torch would round up to a power of two."""
        address = ctypes.c_void_p()
        self._check("cudaHostAlloc", self._library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0))
        assert address.value is not None
        return address.value

    def free_pinned(self, address: int) -> None:
        """Give memory of `allocate_pinned` back; waits for the device. Raises OSError."""
        self._check("cudaFreeHost", self._library.cudaFreeHost(ctypes.c_void_p(address)))

    def relaxed(self, call: Callable[[], Any]) -> Any:
        """`call()`, allowed while any thread captures a graph: otherwise a query would break that thread's capture."""
        mode = ctypes.c_int(RELAXED_CAPTURE)
        self._exchange_capture_mode(ctypes.byref(mode))
        try:
            return call()
        finally:
            self._exchange_capture_mode(ctypes.byref(mode))

    def _check(self, function: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # or torch would blame its own next launch for it
            raise OSError(code, f"{function}: {self._library.cudaGetErrorString(code).decode()}")


class CudaEvents:
    """Events on the current stream of one device."""

    def __init__(self, index: int, runtime: Runtime) -> None:
        self._index = index
        self._runtime = runtime

    def capturing(self) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return True
        if torch.cuda.current_device() == self._index:
            return False
        with torch.cuda.device(self._index):
            return bool(torch.cuda.is_current_stream_capturing())

    def new(self) -> Any:
        return torch.cuda.Event()

    def record(self, event: Any) -> None:
        event.record(torch.cuda.current_stream(self._index))

    def finished(self, event: Any) -> bool:
        return bool(self._runtime.relaxed(event.query))


def _loaded_runtime() -> str:
    major = (torch.version.cuda or "").partition(".")[0]
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            name = re.search(r"/libcudart[^/]*\.so\.(\d+)[^/]*$", path)
            if name and name.group(1) == major:
                return path
            if name:
                found.add(path)
    raise OSError(f"torch {torch.__version__} has no libcudart.so.{major} loaded; loaded are {sorted(found) or 'none'}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def pinned_range(address: int) -> tuple[int, int] | str:
    """The pinned range [start, end) around a host address, if the device knows it by the same addresses; else why not.

    Raises OSError without a driver.
    """
    asked = (ctypes.c_int * 4)(_MEMORY_TYPE, _DEVICE_POINTER, _RANGE_START, _RANGE_SIZE)
    answers = (ctypes.c_uint64 * 4)()  # the first is 4 bytes long, the rest 8
    at = ctypes.addressof(answers)
    places = (ctypes.c_void_p * 4)(at, at + 8, at + 16, at + 24)
    code = _driver().cuPointerGetAttributes(ctypes.c_uint(4), asked, places, ctypes.c_uint64(address))
    if code:
        return f"host memory is unknown to the driver (cuPointerGetAttributes: {code})"
    kind, device_address, start, size = answers
    if kind != _HOST_MEMORY:
        return "host memory is not pinned"
    if device_address != address:
        return "the device address of the host memory differs from its host address"
    if not start <= address < start + size:
        return "host memory is pinned, but the driver does not say how far"
    return start, start + size
