"""The kernel of `swap_bulk.cu`, loaded from its PTX through the driver that torch has loaded. No compiler is needed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

from h2d_patch.copies.cuda import Driver

PTX: Final = Path(__file__).with_name("swap_bulk.ptx")
_FUNCTION: Final = b"h2d_patch_copy_blocks"
_LEAST_CAPABILITY: Final = (9, 0)
_MOST_STAGES: Final = 128  # as in swap_bulk.cu
# Of blocks of up to so many bytes on average: bytes of a stage. A stage holds (a piece of) one block.
_STAGE_BYTES: Final = ((1024, 1024), (2048, 2048), (4096, 4096))
_LARGEST_STAGE: Final = 8192
_KEPT_BYTES: Final = 4096  # of an SM's shared memory: what the kernel keeps beside its stages
_SHARED_BYTES: Final = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def supported(index: int) -> bool:
    """Whether CUDA device `index` has bulk asynchronous copies."""
    return bool(torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY)


class Bulk:
    """The kernel on CUDA device `index`. Raises OSError where it cannot be had."""

    def __init__(self, index: int) -> None:
        self._driver: Final = Driver()
        with torch.cuda.device(index):
            torch.cuda.init()
            torch.cuda.current_stream().synchronize()  # the device's context is current from here on
            self._function = self._driver.load_function(PTX.read_bytes(), _FUNCTION)
            self._shared: Final = self._driver.device_attribute(_SHARED_BYTES, index) - _KEPT_BYTES
            self._driver.set_function_attribute(self._function, _DYNAMIC_SHARED_BYTES, self._shared)

    def launch(self, descriptors: int, blocks: int, cuts: int, programs: int, mean: int, stream: int) -> None:
        """Copy on `stream`. `descriptors` and `cuts`: as in swap_bulk.cu, addresses on the current device or of pinned
        memory. `mean`: bytes of a block, on average. Raises OSError."""
        stage = next((stage for most, stage in _STAGE_BYTES if mean <= most), _LARGEST_STAGE)
        stages = min(_MOST_STAGES, (self._shared - 16) // stage)
        values = (ctypes.c_uint64 * 5)(descriptors, blocks, cuts, stage, stages)
        at = ctypes.addressof(values)
        arguments = (ctypes.c_void_p * 5)(at, at + 8, at + 16, at + 24, at + 32)
        self._driver.launch(self._function, programs, 32, stages * stage + 16, stream, arguments)
