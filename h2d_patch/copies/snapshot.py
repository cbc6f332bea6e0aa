"""Copies within host memory: a source as it is now, into the staging ring."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from h2d_patch.copies import native

if TYPE_CHECKING:
    from h2d_patch.copies.staging import Piece

# Row by row with memmove where there are few rows; where there are many, torch's copy takes less time than Python.
_MOST_ROWS: Final = 8
_NARROW_BYTES: Final = 32  # rows that the compiled copies are slower at than torch
# Up to this many bytes the GIL is kept: letting go of it and getting it back takes longer.
_SHORT_BYTES: Final = 64 << 10
_ADDRESS: Final = ctypes.c_void_p
_memmove_short: Final = ctypes.PYFUNCTYPE(None, _ADDRESS, _ADDRESS, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, _ADDRESS).value or 0
)


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """`nbytes` from address to address, in host memory that does not overlap."""
    if nbytes <= _SHORT_BYTES:
        _memmove_short(dst, src, nbytes)
    elif native.loaded is not None:
        native.loaded.copy(dst, src, nbytes, nbytes, 1, native.loaded.helpers_for(nbytes))
    else:
        ctypes.memmove(dst, src, nbytes)


def copy_rows(dst: int, src: int, pitch: int, width: int, rows: int) -> None:
    """`rows` rows of `width` bytes, every `pitch` bytes from `src`, to dense memory at `dst`."""
    if pitch == width or rows == 1:
        copy_bytes(dst, src, width * rows)
    elif native.loaded is not None:
        native.loaded.copy(dst, src, pitch, width, rows, native.loaded.helpers_for(width * rows))
    else:
        for _ in range(rows):
            copy_bytes(dst, src, width)
            src += pitch
            dst += width


def gather(dst: int, parts: Sequence[int], sizes: Sequence[int]) -> None:
    """`sizes[i]` bytes, more than none, from each of `parts`, one behind the other to `dst`."""
    if native.loaded is not None:
        native.loaded.gather(dst, parts, sizes)
        return
    for part, size in zip(parts, sizes, strict=True):
        copy_bytes(dst, part, size)
        dst += size


def dense_rows(source: torch.Tensor) -> tuple[int, int, int] | None:
    """`(pitch, width, rows)` in bytes, for `copy_rows` to make `source` contiguous; None where that is not the way."""
    if source.is_contiguous():
        nbytes = source.nbytes
        return nbytes, nbytes, 1
    if source.dim() != 2:
        return None
    pitch, step = source.stride()
    rows, columns = source.shape
    size = source.itemsize
    if step != 1 or pitch < columns or not worth(columns * size, rows):
        return None
    return pitch * size, columns * size, rows


def worth(width: int, rows: int) -> bool:
    """Whether `copy_rows` takes less time than torch for `rows` rows of `width` bytes."""
    return rows <= _MOST_ROWS or (native.loaded is not None and width >= _NARROW_BYTES)


def snapshot(source: torch.Tensor, piece: Piece, strides: tuple[int, ...], skip: int = 0) -> None:
    """`source` as it is now, into `piece` from byte `skip` on, laid out by `strides`, which have no gaps."""
    if source.stride() == strides:
        copy_bytes(piece.address + skip, source.data_ptr(), source.nbytes)
        return
    target = piece.view(source.dtype, source.shape, strides, skip)
    rows = dense_rows(source) if target.is_contiguous() else None
    if rows is None:
        target.copy_(source)
    else:
        copy_rows(piece.address + skip, source.data_ptr(), *rows)
