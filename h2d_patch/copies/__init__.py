"""What fixes are made of: copies to the device that neither wait nor pin memory. Knows nothing of vLLM.

Importing this imports no torch: `h2d-patch check` runs where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from h2d_patch.copies.call import CopyFunction, Declined, Ledger
from h2d_patch.copies.profile_file import Places
from h2d_patch.copies.startup import StartReport, start, stop

__all__ = [
    "EXPORTS",
    "CopyFunction",
    "Declined",
    "Ledger",
    "Places",
    "StartReport",
    "call_pinned",
    "cat_to_device",
    "copy_h2d",
    "forced_staging",
    "nested_to_device",
    "padded_rows",
    "rows_to_device",
    "snapshot_to_device",
    "start",
    "stop",
    "swap_addresses",
    "swap_blocks",
    "swap_tensors",
    "tensor_to_device",
    "to_device",
]

to_device = CopyFunction("to_device", "h2d")
snapshot_to_device = CopyFunction("snapshot_to_device", "h2d")
copy_h2d = CopyFunction("copy_h2d", "h2d")
cat_to_device = CopyFunction("cat_to_device", "h2d")
nested_to_device = CopyFunction("nested_to_device", "h2d")
tensor_to_device = CopyFunction("tensor_to_device", "lists")
rows_to_device = CopyFunction("rows_to_device", "lists")
padded_rows = CopyFunction("padded_rows", "lists")
call_pinned = CopyFunction("call_pinned", "pinned_call")
swap_blocks = CopyFunction("swap_blocks", "swap")
swap_tensors = CopyFunction("swap_tensors", "swap_forms")
swap_addresses = CopyFunction("swap_addresses", "swap_forms")

_FUNCTIONS = (
    to_device, snapshot_to_device, copy_h2d, cat_to_device, nested_to_device, tensor_to_device, rows_to_device,
    padded_rows, call_pinned, swap_blocks, swap_tensors, swap_addresses,
)  # fmt: skip
EXPORTS: Mapping[str, CopyFunction] = MappingProxyType({function.name: function for function in _FUNCTIONS})


def forced_staging(bytes: int = 16 << 20) -> AbstractContextManager[Any]:
    """Send this thread's copies *to the CPU* through the staging path, over a ring of `bytes` of ordinary memory.

    For self-tests where there is no GPU. Raises ImportError without torch.
    """
    from h2d_patch.copies.staging import forced_staging

    return forced_staging(bytes)
