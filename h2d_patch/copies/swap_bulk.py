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
_STAGES: Final = (1024, 2048, 4096, 8192)  # bytes; a stage holds (a piece of) one block
_BEHIND_THE_LAST: Final = 16  # bytes that may be read there
_KEPT_BYTES: Final = 4096  # of an SM's shared memory: what the kernel keeps beside its stages
_SHARED_BYTES: Final = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def supported(index: int) -> bool:
    """Whether CUDA device `index` has bulk asynchronous copies."""
    return bool(torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY)


def stages(mean: float, shared: int) -> tuple[int, int]:
    """Bytes of a stage, and how many of them, for blocks of `mean` bytes in `shared` bytes of memory."""
    stage = next((stage for stage in _STAGES if mean <= stage), _STAGES[-1])
    return stage, min(_MOST_STAGES, (shared - _BEHIND_THE_LAST) // stage)


class Bulk:
    """The kernel on CUDA device `index`. Raises OSError where it cannot be had."""

    def __init__(self, index: int) -> None:
        driver = Driver()
        with torch.cuda.device(index):
            torch.cuda.init()
            torch.cuda.current_stream().synchronize()  # the device's context is current from here on
            function = driver.load_function(PTX.read_bytes(), _FUNCTION)
            shared = driver.device_attribute(_SHARED_BYTES, index) - _KEPT_BYTES
            driver.set_function_attribute(function, _DYNAMIC_SHARED_BYTES, shared)
        self.check: Final = driver.check
        self._driver: Final = driver
        self._function: Final = function
        self._shared: Final = shared
        # For each size of a stage, native.c's `struct kernel`.
        self._kernels: Final = {}
        for stage in _STAGES:
            _, number = stages(stage, shared)
            all_stages = number * stage + _BEHIND_THE_LAST
            self._kernels[stage] = (ctypes.c_uint64 * 5)(driver.launch_address, function, stage, number, all_stages)

    def kernel(self, mean: float) -> int:
        """The address of native.c's `struct kernel`, for blocks of `mean` bytes."""
        return ctypes.addressof(self._kernels[stages(mean, self._shared)[0]])

    def launch(self, descriptors: int, blocks: int, cuts: int, programs: int, mean: float, stream: int) -> None:
        """Copy on `stream`. `descriptors` and `cuts`: as in swap_bulk.cu, addresses on the current device or of pinned
        memory. `mean`: bytes of a block. Raises OSError."""
        *_, stage, number, shared = self._kernels[stages(mean, self._shared)[0]]
        values = (ctypes.c_uint64 * 5)(descriptors, blocks, cuts, stage, number)
        at = ctypes.addressof(values)
        arguments = (ctypes.c_void_p * 5)(at, at + 8, at + 16, at + 24, at + 32)
        self._driver.launch(self._function, programs, 32, shared, stream, arguments)
