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
        self.is_idle = False
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

    def idle(self, stream: int) -> bool:
        return self.is_idle


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


_submitted: list = []
_library = None


def _note(kind):
    def call(*args):
        if _submitted and _submitted[-1] == "fail":
            return 17
        _submitted.append((kind, *args))
        return 0

    return call


_A, _S, _N = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_COPY = ctypes.CFUNCTYPE(_N, _A, _A, _S, _N, _A)(_note("1d"))
_COPY_ROWS = ctypes.CFUNCTYPE(_N, _A, _S, _A, _S, _S, _S, _N, _A)(_note("2d"))


@pytest.fixture
def library(monkeypatch):
    """The compiled copies with three helpers, which submit to `submitted`. One for all tests: its threads stay."""
    global _library
    from h2d_patch.copies import native

    if _library is None:
        if not any(map(shutil.which, native._COMPILERS)):
            pytest.skip("no C compiler")
        monkeypatch.setattr(native, "usable_cpus", lambda: 8)
        _library = native.Native(*(ctypes.cast(f, _A).value for f in (_COPY, _COPY_ROWS)))
        assert _library.helpers == 3
    return _library


@pytest.fixture
def submitted():
    _submitted.clear()
    return _submitted
