"""What torch does not offer of the CUDA runtime and driver: exact pinned regions, pointer attributes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch

from h2d_patch.copies import native

RELAXED_CAPTURE: Final = 2  # cudaStreamCaptureModeRelaxed
_HOST_TO_DEVICE: Final = 1  # cudaMemcpyHostToDevice
_DEVICE_TO_HOST: Final = 2  # cudaMemcpyDeviceToHost
_NO_TIMING: Final = 2  # cudaEventDisableTiming
_NOT_READY: Final = 600  # cudaErrorNotReady

# CUpointer_attribute
_MEMORY_TYPE, _DEVICE_POINTER, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE = 2, 3, 9, 11, 12
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE

# CUmemcpySrcAccessOrder: in stream order, or whenever the driver likes, for sources that nothing writes any more.
IN_STREAM_ORDER, ANY_ORDER = 1, 3
_BATCH_VERSION: Final = 12080  # the form of cuMemcpyBatchAsync that says which copy failed


class Runtime:
    """The libcudart that torch has loaded. Raises OSError where there is none."""

    def __init__(self) -> None:
        path = _loaded_runtime()
        # What submits work may wait for room in the launch queue, and lets go of the GIL; what asks keeps it, which
        # takes less time than letting go of it and getting it back.
        self._library = ctypes.CDLL(path)
        asking = ctypes.PyDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # The same as below, without a look at what they return: `check` does that.
        self.memcpy: Final = self._library.cudaMemcpyAsync
        self.memcpy.argtypes = [address, address, size, number, address]
        self.memcpy_rows: Final = self._library.cudaMemcpy2DAsync
        self.memcpy_rows.argtypes = [address, size, address, size, size, size, number, address]
        self._record = self._library.cudaEventRecord
        self._record.argtypes = [address, address]
        self._exchange_capture_mode = asking.cudaThreadExchangeStreamCaptureMode
        self._query_event = asking.cudaEventQuery
        self._query_event.argtypes = [address]
        self._is_capturing = asking.cudaStreamIsCapturing
        self._is_capturing.argtypes = [address, ctypes.POINTER(number)]

    def addresses(self) -> list[int]:
        """Of the functions that `native` calls."""
        functions = [getattr(self._library, name) for name in native.RUNTIME]
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of exactly `nbytes` of pinned memory. Raises OSError. torch would round up to a power of two."""
        address = ctypes.c_void_p()
        self.check("cudaHostAlloc", self._library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0))
        assert address.value is not None
        return address.value

    def free_pinned(self, address: int) -> None:
        """Give memory of `allocate_pinned` back; waits for the device. Raises OSError."""
        self.check("cudaFreeHost", self._library.cudaFreeHost(ctypes.c_void_p(address)))

    def copy_each(
        self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], to_host: bool, stream: int
    ) -> None:
        """A copy for each block, as releases without a batch make them. Raises OSError."""
        kind = _DEVICE_TO_HOST if to_host else _HOST_TO_DEVICE
        for target, source, size in zip(dst, src, nbytes, strict=True):
            if code := self.memcpy(target, source, size, kind, stream):
                self.check("cudaMemcpyAsync", code)

    def new_event(self) -> int:
        """An event of the current device, never recorded. Raises OSError."""
        event = ctypes.c_void_p()
        create = self._library.cudaEventCreateWithFlags
        self.check("cudaEventCreateWithFlags", create(ctypes.byref(event), ctypes.c_uint(_NO_TIMING)))
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            self.check("cudaEventRecord", code)

    def finished(self, event: int) -> bool:
        """Whether everything in front of `event` is done. Allowed while any thread captures a graph. Raises OSError."""
        mode = ctypes.c_int(RELAXED_CAPTURE)  # in no other would a query leave the captures of other threads intact
        at = ctypes.byref(mode)
        self._exchange_capture_mode(at)
        try:
            code = self._query_event(event)
        finally:
            self._exchange_capture_mode(at)
        if code == _NOT_READY:
            self._library.cudaGetLastError()
            return False
        if code:
            self.check("cudaEventQuery", code)
        return True

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        if code := self._is_capturing(stream, status):
            self.check("cudaStreamIsCapturing", code)
        return status.value != 0

    def check(self, function: str, code: int) -> None:
        """Raise OSError unless `code`, which `function` returned, is 0."""
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
        self._memcpy = runtime.memcpy
        self._memcpy_rows = runtime.memcpy_rows
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_stream_captures: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

    def stream(self) -> int:
        return self._current_stream(self._index)

    def captures(self) -> bool:
        if self._current_device() == self._index:
            return self._current_stream_captures()
        return self.is_capturing(self.stream())

    def is_capturing(self, stream: int) -> bool:
        if stream or self._current_device() == self._index:
            return self._runtime.is_capturing(stream)
        with torch.cuda.device(self._index):
            return self._runtime.is_capturing(stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        if stream or self._current_device() == self._index:
            code = self._memcpy(dst, src, nbytes, _HOST_TO_DEVICE, stream)
        else:
            with torch.cuda.device(self._index):
                code = self._memcpy(dst, src, nbytes, _HOST_TO_DEVICE, stream)
        if code:
            self._runtime.check("cudaMemcpyAsync", code)

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        if stream or self._current_device() == self._index:
            code = self._memcpy_rows(dst, pitch, src, width, width, rows, _HOST_TO_DEVICE, stream)
        else:
            with torch.cuda.device(self._index):
                code = self._memcpy_rows(dst, pitch, src, width, width, rows, _HOST_TO_DEVICE, stream)
        if code:
            self._runtime.check("cudaMemcpy2DAsync", code)

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


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):  # CUmemcpyAttributes
    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)


class Driver:
    """What only the driver offers: kernels from PTX, and copies in batches.

    Each call is for the context of the calling thread's device. Raises OSError, here and below.
    """

    def __init__(self) -> None:
        self._library = _driver()
        number, address = ctypes.c_uint, ctypes.c_void_p
        self._launch = self._library.cuLaunchKernel
        self._launch.argtypes = [address, *[number] * 7, address, address, address]
        self.launch_address: Final[int] = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        self._memcpy_batch: Callable[..., int] | None = None

    def load_function(self, ptx: bytes, name: bytes) -> int:
        """The kernel `name`, compiled for the current device by the driver. Stays loaded."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check("cuModuleLoadData", self._library.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(ptx)))
        get = self._library.cuModuleGetFunction
        self.check("cuModuleGetFunction", get(ctypes.byref(function), module, ctypes.c_char_p(name)))
        assert function.value is not None
        return function.value

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        set_attribute = self._library.cuFuncSetAttribute
        self.check("cuFuncSetAttribute", set_attribute(ctypes.c_void_p(function), attribute, value))

    def device_attribute(self, attribute: int, index: int) -> int:
        """Of CUDA device `index`, as torch counts them."""
        device, value = ctypes.c_int(), ctypes.c_int()
        self.check("cuCtxGetDevice", self._library.cuCtxGetDevice(ctypes.byref(device)))
        self.check("cuDeviceGetAttribute", self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        return value.value

    def launch(
        self,
        function: int,
        programs: int,
        threads: int,
        shared: int,
        stream: int,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """`arguments`: the address of each of the kernel's; they are read before this returns."""
        code = self._launch(function, programs, 1, 1, threads, 1, 1, shared, stream, arguments, None)
        if code:
            self.check("cuLaunchKernel", code)

    def memcpy_batch(self, dst: int, src: int, nbytes: int, count: int, order: int, stream: int) -> None:
        """Copy `count` blocks on `stream`, which is not the default one, as vLLM's releases do.

        `dst`, `src`, `nbytes`: addresses of that many addresses and sizes, 8 bytes each, read before this returns.
        `order`: IN_STREAM_ORDER or ANY_ORDER. Raises OSError also where the driver is older than CUDA 12.8.
        """
        attributes, first, failed = _CopyAttributes(order=order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        at = ctypes.byref
        code = self._batch()(dst, src, nbytes, count, at(attributes), at(first), 1, at(failed), stream)
        if code:
            self.check(f"cuMemcpyBatchAsync, copy {failed.value} of {count}", code)

    def has_memcpy_batch(self) -> bool:
        try:
            self._batch()
        except OSError:
            return False
        return True

    def _batch(self) -> Callable[..., int]:
        if self._memcpy_batch is None:
            self._memcpy_batch = self._find(b"cuMemcpyBatchAsync", _BATCH_VERSION, _BATCH)
        return self._memcpy_batch

    def _find(self, name: bytes, version: int, prototype: Any) -> Callable[..., int]:
        """The driver's function `name` as CUDA `version` had it: by its name alone, another form may come."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        get = getattr(self._library, "cuGetProcAddress_v2", None)
        if get is not None:
            get(name, ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status))
        if not address.value:
            raise OSError(
                f"the driver has no {name.decode()}; it came with CUDA {version // 1000}.{version % 1000 // 10}"
            )
        found: Callable[..., int] = prototype(address.value)
        return found

    def check(self, function: str, code: int) -> None:
        """Raise OSError unless `code`, which `function` returned, is 0."""
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise OSError(code, f"{function}: {(name.value or b'an unknown error').decode()}")


def pinned_range(address: int) -> tuple[int, int, int] | str:
    """The pinned range around a host address: start, end, and what to add to its addresses for those of the device.

    Says why there is none. Raises OSError without a driver.
    """
    answers = _pointer_attributes(address, _MEMORY_TYPE, _DEVICE_POINTER, _RANGE_START, _RANGE_SIZE)
    if isinstance(answers, int):
        return f"host memory is unknown to the driver (cuPointerGetAttributes: {answers})"
    kind, device_address, start, size = answers
    if kind != _HOST_MEMORY:
        return "host memory is not pinned"
    if not device_address:
        return "host memory is not mapped for the device"
    if not start <= address < start + size:
        return "host memory is pinned, but the driver does not say how far"
    return start, start + size, device_address - address


def device_range(address: int) -> tuple[int, int, int] | str:
    """The allocation [start, end) around an address in device memory, and the index of its device.

    Says why there is none. Raises OSError without a driver.
    """
    answers = _pointer_attributes(address, _MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE)
    if isinstance(answers, int):
        return f"device memory is unknown to the driver (cuPointerGetAttributes: {answers})"
    kind, index, start, size = answers
    if kind != _DEVICE_MEMORY:
        return "not an address in device memory"
    if not start <= address < start + size:
        return "device memory of which the driver does not say how far it reaches"
    return start, start + size, index


def _pointer_attributes(address: int, *attributes: int) -> tuple[int, ...] | int:
    """Four attributes of an address, as unsigned numbers, or the driver's error code."""
    asked = (ctypes.c_int * 4)(*attributes)
    answers = (ctypes.c_uint64 * 4)()  # some are 4 bytes long, the rest 8
    at = ctypes.addressof(answers)
    places = (ctypes.c_void_p * 4)(at, at + 8, at + 16, at + 24)
    code: int = _driver().cuPointerGetAttributes(ctypes.c_uint(4), asked, places, ctypes.c_uint64(address))
    return code or tuple(answers)
