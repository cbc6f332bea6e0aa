"""The staging ring: a bounded region of pinned memory, handed out in order, with events that say what is free again."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

import torch

from h2d_patch.copies import native
from h2d_patch.copies.call import Declined
from h2d_patch.copies.lane import Lane
from h2d_patch.copies.snapshot import copy_rows

# Every piece starts on this boundary: any dtype fits, and two pieces never share a cache line.
ALIGNMENT: Final = 256

_DTYPE_NAMES: Final = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
# What is staged. Others (quantized, sub-byte) do not copy as plain bytes. Old releases of torch lack a few of these.
DTYPES: Final = tuple(getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name))

# An event stands behind this part of the ring rather than behind each piece: recording one takes as long as a copy.
_EVENTS_IN_RING: Final = 16
_PIECES_TO_AN_EVENT: Final = 256
_RECLAIM_EVERY: Final = 32

CAPTURING: Final = Declined("a CUDA graph is being captured")
FULL: Final = Declined("staging is full")
TOO_LARGE: Final = Declined("larger than the staging region")
NOT_TO_CUDA: Final = Declined("destination is not a CUDA device", counted=False)


class Link(Protocol):
    """A device as the ring sees it. Addresses and streams are integers, as the CUDA runtime takes them."""

    def stream(self) -> int:
        """The current stream."""

    def captures(self) -> bool:
        """Whether the current stream records a graph, in which a piece would be read again at every replay."""

    def is_capturing(self, stream: int) -> bool:
        """The same of `stream`."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Submit a copy to the device."""

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        """Submit a copy of `rows` dense rows of `width` bytes to every `pitch` bytes of the device's memory."""

    def new(self) -> Any:
        """An event that was never recorded."""

    def record(self, event: Any, stream: int) -> None:
        """Put `event` behind everything submitted to `stream`."""

    def finished(self, event: Any) -> bool:
        """Whether everything in front of `event` is done. Never waits."""


class CpuLink:
    """The CPU in a device's place: its copies are done when they return."""

    def stream(self) -> int:
        return 0

    def captures(self) -> bool:
        return False

    def is_capturing(self, stream: int) -> bool:
        return False

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        for row in range(rows):
            ctypes.memmove(dst + row * pitch, src + row * width, width)

    def new(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        pass

    def finished(self, event: int) -> bool:
        return True


@final
class _Batch:
    """Pieces submitted to one stream, with one event behind them all."""

    __slots__ = ("done", "event", "nbytes", "pieces", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.event: Any = None
        self.nbytes = 0
        self.pieces = 0
        self.done = False


@final
class Piece:
    """A part of the ring, in use until the event behind it has passed.

    A context: leave it when everything that reads the piece has been submitted to `stream`. If `submitted` was not set
    by then, nothing reads the piece, and it is free at once.
    """

    __slots__ = ("_batch", "_closed", "_ring", "address", "end", "offset", "size", "stream", "submitted")

    def __init__(self, ring: Ring, offset: int, size: int, end: int, stream: int) -> None:
        self._ring = ring
        self.offset = offset
        self.address = ring.address + offset
        self.size = size
        self.end = end
        self.stream = stream
        self.submitted = False
        self._closed = False
        self._batch: _Batch | None = None

    def view(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], skip: int = 0) -> torch.Tensor:
        """The piece as a tensor, `skip` bytes in. Never to be kept: it aliases the ring."""
        return self._ring.typed[dtype].as_strided(
            shape, strides, (self._ring.origin + self.offset + skip) // dtype.itemsize
        )

    @property
    def event(self) -> Any:
        """The event behind it, None as long as there is none."""
        return self._batch.event if self._batch is not None else None

    def __enter__(self) -> Piece:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.submitted:
            self._ring.close(self)
        self._closed = True


class Ring:
    """`memory` (1-D uint8), handed out front to back and around. Any thread may reserve and use pieces.

    `lane`: tried first by `send`.
    """

    def __init__(self, memory: torch.Tensor, link: Link, device: torch.device, lane: Lane | None = None) -> None:
        self.lane: Final = lane
        self.memory: Final = memory
        self.address: Final = memory.data_ptr()
        self.origin: Final = memory.storage_offset()
        self.link: Final = link
        self.device: Final = device
        self.is_pinned: Final = device.type == "cuda"
        self.capacity: Final = memory.numel() // ALIGNMENT * ALIGNMENT
        with torch.inference_mode(False):  # views made in inference mode could not be written outside it
            self.typed: Final = {dtype: memory[: self.capacity].view(dtype) for dtype in DTYPES}
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._open: dict[int, _Batch] = {}  # by stream: submitted pieces that no event stands behind yet
        self._idle_events: list[Any] = []
        self._reserved = 0
        # Positions only grow; a position modulo the capacity is an offset. In use is [tail, head).
        self._tail = self._head = 0
        self._retired: Declined | None = None

    def reserve(self, nbytes: int) -> Piece | Declined:
        """A piece of at least `nbytes` for the current stream, or why there is none. Never waits for the device."""
        link = self.link
        if link.captures():
            return CAPTURING
        stream = link.stream()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.capacity:
            return TOO_LARGE
        with self._lock:
            if self._retired is not None:
                return self._retired
            self._reserved += 1
            if not self._reserved % _RECLAIM_EVERY:  # finished pieces do not pile up, and few calls pay for it
                self._reclaim()
            start = self._fit(size)
            if start is None:
                self._reclaim()
                start = self._fit(size)
                if start is None:
                    return FULL
            piece = Piece(self, start % self.capacity, size, start + size, stream)
            self._head = piece.end
            self._pieces.append(piece)
            return piece

    def send(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int) -> Declined | None:
        """Copy `rows` rows of `width` bytes, every `src_pitch` bytes from host address `src`, to every `dst_pitch`
        bytes from device address `dst`. `src` is read before this returns, `dst` is written in stream order."""
        if self.lane is not None:
            answer = self.lane.send(dst, dst_pitch, src, src_pitch, width, rows)
            if not answer:
                return None
            if answer == native.CAPTURING:
                return CAPTURING
        link = self.link
        piece = self.reserve(width * rows)
        if type(piece) is Declined:
            return piece
        with piece:
            copy_rows(piece.address, src, src_pitch, width, rows)
            piece.submitted = True
            if rows == 1 or dst_pitch == width:
                link.copy(dst, piece.address, width * rows, piece.stream)
            else:
                link.copy_rows(dst, dst_pitch, piece.address, width, rows, piece.stream)
        return None

    def close(self, piece: Piece) -> None:
        """Everything that reads `piece` has been submitted to its stream."""
        with self._lock:
            batch = self._open.get(piece.stream)
            if batch is None:
                batch = self._open[piece.stream] = _Batch(piece.stream)
            batch.nbytes += piece.size
            batch.pieces += 1
            piece._batch = batch
            if batch.nbytes * _EVENTS_IN_RING >= self.capacity or batch.pieces >= _PIECES_TO_AN_EVENT:
                self._record(batch)

    def retire(self, reason: str) -> None:
        """Hand out nothing any more."""
        self._retired = Declined(f"staging is out of use: {reason}")
        if self.lane is not None:
            self.lane.close()

    def in_use(self) -> int:
        """Bytes that could not be handed out now, gaps at the end of the region included."""
        with self._lock:
            self._reclaim()
            return self._head - self._tail

    def room(self) -> int:
        """Bytes that could be handed out now, in pieces."""
        return int(self.capacity - self.in_use())

    def _record(self, batch: _Batch) -> None:
        event = self._idle_events.pop() if self._idle_events else self.link.new()
        try:
            self.link.record(event, batch.stream)
        except BaseException as error:
            # Without an event, neither these pieces nor any behind them are ever handed out again.
            self.retire(f"an event could not be recorded: {error}")
            raise
        batch.event = event
        del self._open[batch.stream]

    def _fit(self, size: int) -> int | None:
        start = self._head
        to_the_end = self.capacity - start % self.capacity
        if size > to_the_end:
            start += to_the_end
        return start if start + size - self._tail <= self.capacity else None

    def _reclaim(self) -> None:
        pieces = self._pieces
        while pieces and self._free(pieces[0]):
            self._tail = pieces.popleft().end
        if not pieces:
            self._tail = self._head = 0  # so that a piece as large as the region fits

    def _free(self, piece: Piece) -> bool:
        if not piece._closed:
            return False
        batch = piece._batch
        if batch is None or batch.done:
            return True
        if batch.event is None:
            if self.link.is_capturing(batch.stream):
                return False  # a graph would take the event for one of its own
            self._record(batch)
        if not self.link.finished(batch.event):
            return False
        batch.done = True
        self._idle_events.append(batch.event)
        return True


class _Process:
    """The rings of this process by CUDA device, what frees their memory, and why a device (by its index) has none."""

    def __init__(self) -> None:
        self.rings: dict[torch.device, Ring] = {}
        self.free: dict[torch.device, Callable[[], None]] = {}
        self.without: dict[int, str] = {}


class _Thread(threading.local):
    forced: Ring | None = None


process = _Process()
_thread = _Thread()


def _renew() -> None:
    """In a forked child: have no ring. Nothing of the parent's is a Python object that would end with a CUDA call."""
    global process
    process = _Process()


os.register_at_fork(after_in_child=_renew)


def ring_for(device: torch.device) -> Ring | Declined:
    """The ring that copies to `device` go through."""
    ring = process.rings.get(device)
    if ring is not None:
        return ring
    if device.type == "cuda":
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
            if torch.device("cuda", index) in process.rings:
                return process.rings[torch.device("cuda", index)]
        why = process.without.get(index, "the device was not started")
        return Declined(f"no staging region on cuda:{index}: {why}")
    if _thread.forced is not None and device.type == "cpu":
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
    _thread.forced = Ring(memory, CpuLink(), torch.device("cpu"))
    try:
        yield _thread.forced
    finally:
        _thread.forced = outer
