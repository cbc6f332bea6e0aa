"""The lane of a device: where small copies go before the ring is asked. Most calls end here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from h2d_patch.copies import native

if TYPE_CHECKING:
    from h2d_patch.copies.cuda import CudaLink, Runtime


class Lane:
    """`nbytes` of pinned memory at address `at`, in segments; a copy of up to `most` bytes can be sent through it.

    Raises RuntimeError where there can be no (more) lanes.
    """

    def __init__(
        self, library: native.Native, link: CudaLink, runtime: Runtime, index: int, at: int, nbytes: int
    ) -> None:
        number = library.open_lane(at, nbytes, [link.new() for _ in range(native.SEGMENTS)])
        if number is None:
            raise RuntimeError(f"no lane of {nbytes} bytes")
        self.most = nbytes // native.SEGMENTS
        self._number: Final = number
        self._library: Final = library
        self._send: Final = library.send
        self.pinned: Final = library.pinned
        self._runtime: Final = runtime
        self.index: Final = index
        self._current_stream: Final[Callable[[int], int]] = torch._C._cuda_getCurrentRawStream
        self.current_device: Final[Callable[[], int]] = torch._C._cuda_getDevice

    def send(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int) -> int:
        """What `Ring.send` does, on the current stream. Returns 0, or why nothing was done, as `native` calls it.

        Raises OSError, having submitted nothing.
        """
        nbytes = width * rows
        stream = self._current_stream(self.index)
        # Stream 0 would mean that of another device, if another is current.
        if nbytes > self.most or not (stream or self.current_device() == self.index):
            return native.NOT_HERE
        helpers = self._library.helpers_for(nbytes) if nbytes >= native.PARALLEL_BYTES else 0
        code = self._send(self._number, dst, dst_pitch, src, src_pitch, width, rows, stream, helpers)
        if code > 0:
            self._runtime.check("a copy out of the staging region", code)
        return code

    def close(self) -> None:
        """Send nothing any more."""
        self.most = 0
        self._library.close_lane(self._number)
