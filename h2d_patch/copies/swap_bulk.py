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
WARPS: Final = 4  # these two as in swap_bulk.cu
_MOST_STAGES: Final = 56
_STAGES: Final = (4096, 2048)  # bytes; a stage holds (a piece of) one block
_FEWEST_STAGES: Final = 8
_BEHIND_THE_LAST: Final = 16  # bytes that may be read there
_KEPT_BYTES: Final = 8192  # of an SM's shared memory: what the kernel keeps beside its stages
_SHARED_BYTES: Final = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def supported(index: int) -> bool:
    """Whether CUDA device `index` has bulk asynchronous copies."""
    return bool(torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY)


def stages(shared: int) -> tuple[int, int]:
    """Bytes of a stage, and how many of them a warp has, in `shared` bytes of an SM's memory."""
    stage = next(stage for stage in _STAGES if shared >= WARPS * stage * _FEWEST_STAGES or stage == _STAGES[-1])
    return stage, min(_MOST_STAGES, (shared - _BEHIND_THE_LAST) // (WARPS * stage))


class Bulk:
    """The kernel on CUDA device `index`, each warp of which has a share. Raises OSError where it cannot be had."""

    warps: Final = WARPS

    def __init__(self, index: int) -> None:
        driver = Driver()
        with torch.cuda.device(index):
            torch.cuda.init()
            torch.cuda.current_stream().synchronize()  # the device's context is current from here on
            function = driver.load_function(PTX.read_bytes(), _FUNCTION)
            shared = driver.device_attribute(_SHARED_BYTES, index) - _KEPT_BYTES
            driver.set_function_attribute(function, _DYNAMIC_SHARED_BYTES, shared)
        stage, number = stages(shared)
        used = WARPS * number * stage + _BEHIND_THE_LAST
        self.check: Final = driver.check
        self._driver: Final = driver
        # As native.c's `struct kernel` has it.
        self._kernel: Final = (ctypes.c_uint64 * 6)(driver.launch_address, function, WARPS, stage, number, used)
        self.kernel: Final[int] = ctypes.addressof(self._kernel)

    def launch(self, descriptors: int, blocks: int, programs: int, stream: int) -> None:
        """Copy on `stream`. `descriptors`: the address, on the current device or in pinned memory, of what swap_bulk.cu
        takes, with the cuts behind. Raises OSError."""
        _, function, _, stage, number, used = self._kernel
        values = (ctypes.c_uint64 * 5)(descriptors, blocks, descriptors + 8 * 3 * blocks, stage, number)
        at = ctypes.addressof(values)
        arguments = (ctypes.c_void_p * 5)(at, at + 8, at + 16, at + 24, at + 32)
        self._driver.launch(function, programs, 32 * WARPS, used, stream, arguments)
