"""Copies within host memory: a source as it is now, into the staging ring."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
_START_S: Final = 10.0


class _Threads:
    """The threads that copy. There are none before device start-up, nor in a forked child."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        # Half of what this process may use: the rest is the engine's.
        self.number = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))

    def start(self) -> None:
        """All of them at once, so that a copy never starts one: an executor queues work before it starts a thread."""
        others = self.number - 1
        if self.pool is not None or not others:
            return
        pool = ThreadPoolExecutor(others, thread_name_prefix="h2d_patch-snapshot")
        barrier = threading.Barrier(others + 1)
        for _ in range(others):
            pool.submit(barrier.wait, _START_S)
        barrier.wait(_START_S)
        self.pool = pool


_threads = _Threads()


def _renew() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_renew)


def start_threads() -> None:
    """At device start-up. Raises where they cannot be had."""
    _threads.start()


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """`nbytes` from address to address, in host memory that does not overlap. Other Python threads run meanwhile."""
    pool = _threads.pool
    shares = min(_threads.number, nbytes // _SMALLEST_SHARE)
    if pool is None or nbytes < PARALLEL_BYTES or shares < 2:
        ctypes.memmove(dst, src, nbytes)
        return
    share = -(-nbytes // shares) + 63 & ~63
    rest: list[Future[object]] = []
    try:
        for start in range(share, nbytes, share):
            rest.append(pool.submit(ctypes.memmove, dst + start, src + start, min(share, nbytes - start)))
        ctypes.memmove(dst, src, min(share, nbytes))
    finally:
        _finish(rest)
    for future in rest:
        future.result()


def _finish(futures: list[Future[object]]) -> None:
    """Waits whatever happens: nobody may write to the piece, or read the source, once this has returned or raised."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as error:  # a signal's
            interrupted = error
    if interrupted is not None:
        raise interrupted


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
