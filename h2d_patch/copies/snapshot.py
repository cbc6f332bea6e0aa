"""Copies within host memory: a source as it is now, into the staging ring."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import torch

from h2d_patch.copies.staging import Piece

# From here on several threads copy; torch's own would not help, since vLLM gives its workers one. Below, handing the
# work to threads takes as long as it saves: 4 MiB took 0.7 ms with eight threads and 0.5 with one, on an H200's host.
PARALLEL_BYTES: Final = 8 << 20
_MOST_THREADS: Final = 8
_SMALLEST_SHARE: Final = 1 << 20
# Row by row with memmove where there are few rows; where there are many, torch's copy takes less time than Python.
_MOST_ROWS: Final = 64

_libc = ctypes.CDLL(None)
_memcpy = _libc.memcpy  # lets other threads run; ctypes.memmove does not, and is quicker for a few bytes
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = None


class _Threads:
    """The threads that copy, made at the first large copy of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        # Half of what this process may use: the rest is the engine's.
        self.number = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.number - 1, thread_name_prefix="h2d_patch-snapshot")
            return self._pool


_threads = _Threads()


def _renew() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_renew)


def start_threads() -> None:
    """At device start-up, so that no copy waits for threads to start."""
    if _threads.number > 1:
        pool = _threads.pool()
        wait([pool.submit(int) for _ in range(_threads.number - 1)])


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """`nbytes` from address to address, in host memory that does not overlap."""
    if nbytes < PARALLEL_BYTES:
        ctypes.memmove(dst, src, nbytes)
        return
    shares = min(_threads.number, nbytes // _SMALLEST_SHARE)
    if shares < 2:
        _memcpy(dst, src, nbytes)
        return
    share = -(-nbytes // shares) + 63 & ~63
    pool = _threads.pool()
    rest = [
        pool.submit(_memcpy, dst + start, src + start, min(share, nbytes - start))
        for start in range(share, nbytes, share)
    ]
    _memcpy(dst, src, min(share, nbytes))
    for future in rest:
        future.result()


def snapshot(source: torch.Tensor, piece: Piece, strides: tuple[int, ...], skip: int = 0) -> None:
    """`source` as it is now, into `piece` from byte `skip` on, laid out by `strides`, which have no gaps."""
    if source.stride() == strides:
        copy_bytes(piece.address + skip, source.data_ptr(), source.nbytes)
        return
    shape = source.shape
    if (
        len(shape) == 2
        and shape[0] <= _MOST_ROWS
        and source.stride(1) == 1
        and strides[1] == 1
        and strides[0] == shape[1]
    ):
        width = shape[1] * source.itemsize
        pitch = source.stride(0) * source.itemsize
        src, dst = source.data_ptr(), piece.address + skip
        if pitch >= width:
            for _ in range(shape[0]):
                ctypes.memmove(dst, src, width)
                src += pitch
                dst += width
            return
    piece.view(source.dtype, shape, strides, skip).copy_(source)
