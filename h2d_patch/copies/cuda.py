"""What torch does not offer of the CUDA runtime and driver: exact pinned regions, pointer attributes."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Final

import torch

RELAXED_CAPTURE: Final = 2  # cudaStreamCaptureModeRelaxed
_HOST_TO_DEVICE: Final = 1  # cudaMemcpyHostToDevice
_NO_TIMING: Final = 2  # cudaEventDisableTiming
_NOT_READY: Final = 600  # cudaErrorNotReady

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
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._copy = self._library.cudaMemcpyAsync
        self._copy.argtypes = [address, address, size, number, address]
        self._copy_rows = self._library.cudaMemcpy2DAsync
        self._copy_rows.argtypes = [address, size, address, size, size, size, number, address]
        self._record = self._library.cudaEventRecord
        self._record.argtypes = [address, address]
        self._query = self._library.cudaEventQuery
        self._query.argtypes = [address]
        self._is_capturing = self._library.cudaStreamIsCapturing
        self._is_capturing.argtypes = [address, ctypes.POINTER(number)]

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of exactly `nbytes` of pinned memory. Raises OSError. torch would round up to a power of two."""
        address = ctypes.c_void_p()
        self._check("cudaHostAlloc", self._library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0))
        assert address.value is not None
        return address.value

    def free_pinned(self, address: int) -> None:
        """Give memory of `allocate_pinned` back; waits for the device. Raises OSError."""
        self._check("cudaFreeHost", self._library.cudaFreeHost(ctypes.c_void_p(address)))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Host to device, on `stream`. Raises OSError, having submitted nothing."""
        if code := self._copy(dst, src, nbytes, _HOST_TO_DEVICE, stream):
            self._check("cudaMemcpyAsync", code)

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        """`rows` rows of `width` bytes that lie one behind the other at `src`, to every `pitch` bytes of `dst`."""
        if code := self._copy_rows(dst, pitch, src, width, width, rows, _HOST_TO_DEVICE, stream):
            self._check("cudaMemcpy2DAsync", code)

    def new_event(self) -> int:
        """An event of the current device, never recorded. Raises OSError."""
        event = ctypes.c_void_p()
        create = self._library.cudaEventCreateWithFlags
        self._check("cudaEventCreateWithFlags", create(ctypes.byref(event), ctypes.c_uint(_NO_TIMING)))
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            self._check("cudaEventRecord", code)

    def finished(self, event: int) -> bool:
        """Whether everything in front of `event` is done. Allowed while any thread captures a graph: without the
        relaxed mode a query would break that thread's capture. Raises OSError."""
        mode = ctypes.c_int(RELAXED_CAPTURE)
        self._exchange_capture_mode(ctypes.byref(mode))
        try:
            code = self._query(event)
        finally:
            self._exchange_capture_mode(ctypes.byref(mode))
        if code == _NOT_READY:
            return False
        self._check("cudaEventQuery", code)
        return True

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        self._check("cudaStreamIsCapturing", self._is_capturing(stream, ctypes.byref(status)))
        return bool(status.value)

    def _check(self, function: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # or torch would blame its own next launch for it
            raise OSError(code, f"{function}: {self._library.cudaGetErrorString(code).decode()}")


class CudaLink:
    """One device as the ring sees it: its current stream, copies to it, and events that say when they are done.

    Stream 0 means the default stream of whatever device is current, which need not be this one.
    """

    def __init__(self, index: int, runtime: Runtime) -> None:
        self._index = index
        self._runtime = runtime
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

    def stream(self) -> int:
        return int(self._current_stream(self._index))

    def is_capturing(self, stream: int) -> bool:
        if stream or self._current_device() == self._index:
            return self._runtime.is_capturing(stream)
        with torch.cuda.device(self._index):
            return self._runtime.is_capturing(stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        if stream or self._current_device() == self._index:
            self._runtime.copy(dst, src, nbytes, stream)
            return
        with torch.cuda.device(self._index):
            self._runtime.copy(dst, src, nbytes, stream)

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        if stream or self._current_device() == self._index:
            self._runtime.copy_rows(dst, pitch, src, width, rows, stream)
            return
        with torch.cuda.device(self._index):
            self._runtime.copy_rows(dst, pitch, src, width, rows, stream)

    def new(self) -> int:
        with torch.cuda.device(self._index):
            return self._runtime.new_event()

    def record(self, event: int, stream: int) -> None:
        if stream or self._current_device() == self._index:
            self._runtime.record(event, stream)
            return
        with torch.cuda.device(self._index):
            self._runtime.record(event, stream)

    def finished(self, event: int) -> bool:
        return self._runtime.finished(event)


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
