"""A ring whose events pass when the test says so."""

from __future__ import annotations

import ctypes
import shutil

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies.staging import CpuLink, Ring  # noqa: E402  (needs torch)


class HeldEvents(CpuLink):
    """Copies in host memory, with events that pass only when told."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.recorded: list[int] = []
        self.in_capture = False
        self.fail_to_record: Exception | None = None
        self._made = 0

    def captures(self) -> bool:
        return self.in_capture

    def is_capturing(self, stream: int) -> bool:
        return self.in_capture

    def new(self) -> int:
        self._made += 1
        return self._made

    def record(self, event: int, stream: int) -> None:
        if self.fail_to_record is not None:
            raise self.fail_to_record
        self.passed.discard(event)
        self.recorded.append(event)

    def finished(self, event: int) -> bool:
        return event in self.passed


@pytest.fixture
def held() -> HeldEvents:
    return HeldEvents()


@pytest.fixture
def make_ring(held: HeldEvents):
    def make(nbytes: int) -> Ring:
        return Ring(torch.empty(nbytes, dtype=torch.uint8), held, torch.device("cpu"))

    return make


@pytest.fixture
def force(monkeypatch):
    """Send this thread's copies to the CPU through a given ring."""
    from h2d_patch.copies import staging

    def use(ring: Ring) -> Ring:
        monkeypatch.setattr(staging._thread, "forced", ring)
        return ring

    return use


class FakeRuntime:
    """The CUDA functions that the compiled copies call. Copies arrive when `run` is called."""

    def __init__(self) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        signatures = {
            "cudaMemcpyAsync": (pointer, pointer, size, number, pointer),
            "cudaMemcpy2DAsync": (pointer, size, pointer, size, size, size, number, pointer),
            "cudaStreamIsCapturing": (pointer, ctypes.POINTER(number)),
            "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(number),),
            "cudaStreamQuery": (pointer,),
            "cudaEventRecord": (pointer, pointer),
            "cudaEventQuery": (pointer,),
            "cudaGetLastError": (),
            "cudaPointerGetAttributes": (ctypes.POINTER(number), pointer),
        }
        self._functions = [
            ctypes.CFUNCTYPE(number, *arguments)(getattr(self, name)) for name, arguments in signatures.items()
        ]
        self.addresses = [ctypes.cast(function, pointer).value for function in self._functions]
        self.reset()

    def reset(self) -> None:
        self.submitted: list[tuple] = []
        self.idle: set[int] = set()
        self.capturing: set[int] = set()
        self.passed: set[int] = set()
        self.recorded: list[tuple[int, int]] = []
        self.fail: dict[str, int] = {}
        self.pinned: set[int] = set()
        self.mode = 0

    def run(self) -> None:
        """Everything submitted is done now."""
        for kind, dst, dst_pitch, src, width, rows, _ in self.submitted:
            assert kind in ("1d", "2d")
            for row in range(rows):
                ctypes.memmove(dst + row * dst_pitch, src + row * width, width)
        self.submitted.clear()

    def cudaMemcpyAsync(self, dst, src, nbytes, kind, stream):
        assert kind == 1
        if "copy" not in self.fail:
            self.submitted.append(("1d", dst, nbytes, src, nbytes, 1, stream or 0))
        return self.fail.get("copy", 0)

    def cudaMemcpy2DAsync(self, dst, dst_pitch, src, src_pitch, width, rows, kind, stream):
        assert kind == 1 and src_pitch == width
        self.submitted.append(("2d", dst, dst_pitch, src, width, rows, stream or 0))
        return 0

    def cudaStreamIsCapturing(self, stream, answer):
        answer[0] = int((stream or 0) in self.capturing)
        return 0

    def cudaThreadExchangeStreamCaptureMode(self, mode):
        mode[0], self.mode = self.mode, mode[0]
        return 0

    def cudaStreamQuery(self, stream):
        assert self.mode == 2 and (stream or 0) not in self.capturing, "the query would break a capture"
        return 0 if (stream or 0) in self.idle else 600

    def cudaEventRecord(self, event, stream):
        self.passed.discard(event)
        self.recorded.append((event, stream or 0))
        return self.fail.get("record", 0)

    def cudaEventQuery(self, event):
        assert self.mode == 2, "the query would break a capture"
        return 0 if event in self.passed else 600

    def cudaGetLastError(self):
        return 0

    def cudaPointerGetAttributes(self, attributes, address):
        attributes[0] = int(address in self.pinned)
        return self.fail.get("attributes", 0)


_libraries: dict = {}


@pytest.fixture(params=["module", "ctypes"])
def library(request, monkeypatch):
    """The compiled copies with three helpers, which call `runtime`: with Python's headers and without.

    One of each for all tests: their threads stay.
    """
    from h2d_patch.copies import native

    if request.param not in _libraries:
        if not any(map(shutil.which, native.COMPILERS)):
            pytest.skip("no C compiler")
        monkeypatch.setattr(native, "usable_cpus", lambda: 8)
        if request.param == "ctypes":
            monkeypatch.setattr(native, "_headers", lambda: None)
        fake = FakeRuntime()
        made = native.Native(fake.addresses)
        assert made.helpers == 3
        if request.param == "module" and isinstance(made.send, ctypes._CFuncPtr):
            pytest.skip("no headers of Python")
        _libraries[request.param] = (made, fake)
    made, fake = _libraries[request.param]
    fake.reset()
    return made


@pytest.fixture
def runtime(library):
    return next(fake for made, fake in _libraries.values() if made is library)
