"""The staging ring: a bounded region of pinned memory, handed out in order, with an event behind each piece."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import torch

from h2d_patch.copies.call import Declined

# Every piece starts on this boundary: any dtype fits, and two pieces never share a cache line.
ALIGNMENT: Final = 256

_DTYPE_NAMES: Final = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
# What is staged. Others (quantized, sub-byte) do not copy as plain bytes. Old releases of torch lack a few of these.
DTYPES: Final = tuple(getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name))

# Above this, memmove, which writes around the caches, beats torch's copy: 14 against 4 GB/s at 25 MiB on one thread of
# a Xeon. (FACTS.md section 4: torch's copy, 5 GB/s. vLLM gives its workers one thread.)
_BYPASS_BYTES: Final = 1 << 20

CAPTURING: Final = Declined("a CUDA graph is being captured")
FULL: Final = Declined("staging is full")
TOO_LARGE: Final = Declined("larger than the staging region")
NOT_TO_CUDA: Final = Declined("destination is not a CUDA device", counted=False)


class Events(Protocol):
    """Tells when the device has read a piece."""

    def capturing(self) -> bool:
        """Whether the current stream records a graph, in which a piece would be read again at every replay."""

    def new(self) -> Any:
        """An event that was never recorded."""

    def record(self, event: Any) -> None:
        """Put `event` behind everything submitted to the current stream."""

    def finished(self, event: Any) -> bool:
        """Whether everything in front of `event` is done. Never waits."""


class NoEvents:
    """Events for a device whose copies are done when they return: the CPU."""

    def capturing(self) -> bool:
        return False

    def new(self) -> None:
        return None

    def record(self, event: None) -> None:
        pass

    def finished(self, event: None) -> bool:
        return True


@final
class Piece:
    """A part of the ring, in use until its event has passed.

    A context: leave it on the stream that was given the piece. If `submitted` was not set by then, nothing reads the
    piece, and it is free at once.
    """

    __slots__ = ("_closed", "_ring", "end", "event", "offset", "submitted")

    def __init__(self, ring: Ring, offset: int, end: int, event: Any) -> None:
        self._ring = ring
        self.offset = offset
        self.end = end
        self.event = event
        self.submitted = False
        self._closed = False

    def view(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], skip: int = 0) -> torch.Tensor:
        """The piece as a tensor, `skip` bytes in. Never to be kept: it aliases the ring."""
        return self._ring.typed[dtype].as_strided(shape, strides, (self.offset + skip) // dtype.itemsize)

    def snapshot(self, source: torch.Tensor, strides: tuple[int, ...], skip: int = 0) -> torch.Tensor:
        """`source` as it is now, copied into the piece with `strides`, which have no gaps."""
        staged = self.view(source.dtype, source.shape, strides, skip)
        if source.nbytes >= _BYPASS_BYTES and source.stride() == strides:
            ctypes.memmove(staged.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            staged.copy_(source)
        return staged

    def __enter__(self) -> Piece:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.submitted:
            try:
                self._ring.events.record(self.event)
            except BaseException as error:
                # Left open, so neither it nor anything behind it is ever handed out again.
                self._ring.retire(f"an event could not be recorded: {error}")
                raise
        self._closed = True

    def free(self) -> bool:
        return self._closed and (not self.submitted or self._ring.events.finished(self.event))


class Ring:
    """`memory` (1-D uint8), handed out front to back and around. Any thread may reserve and use pieces."""

    def __init__(self, memory: torch.Tensor, events: Events, device: torch.device) -> None:
        self.memory: Final = memory
        self.events: Final = events
        self.device: Final = device
        self.capacity: Final = memory.numel() // ALIGNMENT * ALIGNMENT
        with torch.inference_mode(False):  # views made in inference mode could not be written outside it
            self.typed: Final = {dtype: memory[: self.capacity].view(dtype) for dtype in DTYPES}
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._idle_events: list[Any] = []
        # Positions only grow; a position modulo the capacity is an offset. In use is [tail, head).
        self._tail = self._head = 0
        self._retired: Declined | None = None

    def reserve(self, nbytes: int) -> Piece | Declined:
        """A piece of at least `nbytes`, or the reason why there is none. Never waits for the device."""
        if self.events.capturing():
            return CAPTURING
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.capacity:
            return TOO_LARGE
        with self._lock:
            if self._retired is not None:
                return self._retired
            # Two for the one that is added: finished pieces cannot pile up, and nobody pays for a long row of them.
            self._reclaim(2)
            start = self._fit(size)
            if start is None:
                self._reclaim(len(self._pieces))
                start = self._fit(size)
                if start is None:
                    return FULL
            event = self._idle_events.pop() if self._idle_events else self.events.new()
            piece = Piece(self, start % self.capacity, start + size, event)
            self._head = piece.end
            self._pieces.append(piece)
            return piece

    def retire(self, reason: str) -> None:
        """Hand out nothing any more."""
        self._retired = Declined(f"staging is out of use: {reason}")

    def in_use(self) -> int:
        """Bytes that could not be handed out now, gaps at the end of the region included."""
        with self._lock:
            self._reclaim(len(self._pieces))
            return self._head - self._tail

    def _fit(self, size: int) -> int | None:
        start = self._head
        to_the_end = self.capacity - start % self.capacity
        if size > to_the_end:
            start += to_the_end
        return start if start + size - self._tail <= self.capacity else None

    def _reclaim(self, at_most: int) -> None:
        pieces = self._pieces
        while pieces and at_most and pieces[0].free():
            piece = pieces.popleft()
            self._tail = piece.end
            self._idle_events.append(piece.event)
            at_most -= 1
        if not pieces:
            self._tail = self._head = 0  # so that a piece as large as the region fits


class _Process:
    """The rings of this process by CUDA device index, what frees their memory, and why a device has none."""

    def __init__(self) -> None:
        self.rings: dict[int, Ring] = {}
        self.free: dict[int, Callable[[], None]] = {}
        self.without: dict[int, str] = {}


class _Thread(threading.local):
    forced: Ring | None = None


process = _Process()
_thread = _Thread()


def _renew() -> None:
    """In a forked child: have no ring, and never destroy the parent's events, which would be a CUDA call."""
    global process
    if process.rings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process))
    process = _Process()


os.register_at_fork(after_in_child=_renew)


def ring_for(device: torch.device) -> Ring | Declined:
    """The ring that copies to `device` go through."""
    kind = device.type
    if kind == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        ring = process.rings.get(index)
        if ring is None:
            why = process.without.get(index, "the device was not started")
            return Declined(f"no staging region on cuda:{index}: {why}")
        return ring
    if kind == "cpu" and _thread.forced is not None:
        return _thread.forced
    return NOT_TO_CUDA


def current_ring() -> Ring | Declined:
    """The ring of this thread's current device."""
    if _thread.forced is not None:
        return _thread.forced
    if not torch.cuda.is_initialized():
        return NOT_TO_CUDA
    return ring_for(torch.device("cuda"))


@contextmanager
def forced_staging(nbytes: int) -> Iterator[Ring]:
    """Send this thread's copies to the CPU through a ring of ordinary memory."""
    outer = _thread.forced
    with torch.inference_mode(False):
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    _thread.forced = Ring(memory, NoEvents(), torch.device("cpu"))
    try:
        yield _thread.forced
    finally:
        _thread.forced = outer
