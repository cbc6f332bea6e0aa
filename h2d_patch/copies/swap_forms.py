"""The forms in which releases hand over a swap, other than three tensors of one batch: tensors and block numbers, or
arrays of addresses with a stream of their own. Both end in `swap_arrays`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from h2d_patch.copies.call import Binder, Declined, falling_back
from h2d_patch.copies.cuda import device_range, pinned_range
from h2d_patch.copies.ranges import Checked, PinnedRange, Ranges, Registered, Remembered, Swappable
from h2d_patch.copies.staging import Ring, current_ring
from h2d_patch.copies.swap import NOTHING, swap_arrays

_TENSORS: Final = Declined("not pairs of plain tensors, each with a size or a flag")
_MAPPING: Final = Declined("the block mapping is not an int64 CPU tensor of pairs")
_NUMBERS: Final = Declined("a block number outside the destination")
_TWICE: Final = Declined("two blocks go to one place, where the order decides which stays")
_ARRAYS: Final = Declined("addresses and sizes are not dense 1-D uint64 arrays of one length")
_HIP: Final = Declined("the driver is not CUDA's", counted=False)
_EVERYWHERE: Final = Ranges([(0, 2**63 - 1, 0)])


@dataclass(frozen=True)
class _Layout:
    """Where the blocks of a set of tensors lie. The arrays are int64 `[parts, 1]`: a part is a tensor or half of one.

    No tensor has room for more than `places` blocks to be written.
    """

    reads: Any
    writes: Any
    block_bytes: Any
    places: int
    gpu_to_cpu: bool
    swappable: Swappable


# What was not good is asked again: memory may still be registered.
_layouts: Final = Remembered[_Layout]()
_directions: Final = Remembered[tuple[bool, Swappable]]()


def swap_tensors(
    original: Any,
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    mapping: Any,
    *,
    sizes: Sequence[int] | None = None,
    halved: Sequence[bool] | None = None,
) -> Declined | None:
    """What a loop over pairs of tensors copies with `original`, block by block, in one batch on the current stream.

    `mapping`: CPU tensor, int64 `[n, 2]`, read before this returns: the numbers of the blocks to read and to write.
    Block i is the bytes [i * size, (i + 1) * size) of a tensor's memory. With `sizes` (bytes) the loop calls
    `original(src, dst, size, mapping)`. With `halved` it calls `original(src, dst, mapping)`, where the flag is set for
    `src[0]` and then `src[1]` (keys and values), and the size is that of a row of the source.
    """
    ring = current_ring()
    if type(ring) is Declined:
        return ring
    if not (type(mapping) is torch.Tensor and mapping.is_cpu and mapping.dtype is torch.int64 and mapping.dim() == 2):
        return _MAPPING
    blocks, columns = mapping.shape
    if columns != 2:
        return _MAPPING
    layout = _layout_of(ring, src_tensors, dst_tensors, sizes, halved)
    if type(layout) is Declined:
        return layout
    if not blocks:
        return NOTHING
    to_read, to_write = mapping.numpy().T
    last = int(to_write.max())
    if last >= layout.places or int(to_write.min()) < 0:
        return _NUMBERS
    taken = np.zeros(last + 1, dtype=bool)
    taken[to_write] = True
    if np.count_nonzero(taken) < blocks:
        return _TWICE
    return swap_arrays(
        (layout.reads + layout.block_bytes * to_read).ravel(),
        (layout.writes + layout.block_bytes * to_write).ravel(),
        layout.block_bytes.repeat(blocks),
        layout.gpu_to_cpu,
        lambda _: layout.swappable,
    )


def original_swap_tensors(
    original: Any,
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    mapping: Any,
    *,
    sizes: Sequence[int] | None = None,
    halved: Sequence[bool] | None = None,
) -> None:
    if sizes is not None:
        for src, dst, size in zip(src_tensors, dst_tensors, sizes):  # noqa: B905  (the release's own zip)
            original(src, dst, size, mapping)
        return
    for src, dst, has_halves in zip(src_tensors, dst_tensors, halved or ()):  # noqa: B905
        if has_halves:
            original(src[0], dst[0], mapping)
            original(src[1], dst[1], mapping)
        else:
            original(src, dst, mapping)


def swap_addresses(
    original: Any, params: Any, dst: Any, src: Any, sizes: Any, count: int, *attributes: Any
) -> Declined | int:
    """`original` with the addresses of `dst`, `src` and `sizes`: a driver batch, ordered by `params.stream_handle`.

    `dst`, `src`, `sizes`: uint64 arrays `[count]`, read before this returns: addresses, and bytes. `params.src_bases`
    and `params.dst_bases`: arrays with an address in each allocation that `src` and `dst` lie in. Returns 0.
    """
    if torch.version.hip is not None:
        return _HIP
    ring = current_ring()
    if type(ring) is Declined:
        return ring
    if not all(_addresses(array, count) for array in (dst, src, sizes)):
        return _ARRAYS
    found = _direction_of(ring, params)
    if isinstance(found, str):
        return Declined(found)
    gpu_to_cpu, swappable = found
    with _current(params.stream_handle, ring):
        declined = swap_arrays(
            src.view(np.int64), dst.view(np.int64), sizes.view(np.int64), gpu_to_cpu, lambda _: swappable
        )
    return 0 if declined is None else declined


def original_swap_addresses(
    original: Any, params: Any, dst: Any, src: Any, sizes: Any, count: int, *attributes: Any
) -> Any:
    return original(dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, count, *attributes, params.stream_handle)


def _layout_of(
    ring: Ring,
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    halved: Sequence[bool] | None,
) -> _Layout | Declined:
    tensors = (*src_tensors, *dst_tensors)
    each = sizes if sizes is not None else halved
    if each is None or not len(src_tensors) == len(dst_tensors) == len(each) > 0:
        return _TENSORS
    key = (sizes is None, *each, *map(id, tensors), *[tensor.data_ptr() for tensor in tensors])
    layout = _layouts.get(key)
    if layout is None:
        if not all(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors):
            return _TENSORS
        found = _lay_out(src_tensors, dst_tensors, sizes, halved, pinned_range if ring.is_pinned else None)
        if type(found) is Declined:
            return found
        layout = found
        _layouts.keep(key, layout, tensors)
    return layout


def _lay_out(
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    sizes: Sequence[int] | None,
    halved: Sequence[bool] | None,
    pinned_range: PinnedRange | None,
) -> _Layout | Declined:
    pairs = list(zip(src_tensors, dst_tensors, strict=True))
    if halved is not None:
        if not all(len(src) == len(dst) == 2 for (src, dst), flag in zip(pairs, halved, strict=True) if flag):
            return _TENSORS
        both = [
            [(src[0], dst[0]), (src[1], dst[1])] if flag else [(src, dst)]
            for (src, dst), flag in zip(pairs, halved, strict=True)
        ]
        pairs = [pair for parts in both for pair in parts]
    block_bytes = sizes if sizes is not None else [src.element_size() * src.stride(0) for src, _ in pairs]
    gpu_to_cpu = not src_tensors[0].is_cpu
    host, device = (dst_tensors, src_tensors) if gpu_to_cpu else (src_tensors, dst_tensors)
    if not all(tensor.is_cpu for tensor in host):
        return _TENSORS
    swappable = Checked().swappable(list(map(_memory_of, host)), list(map(_memory_of, device)), pinned_range)
    if not isinstance(swappable, Swappable):
        return Declined(swappable)
    columns = ([src.data_ptr() for src, _ in pairs], [dst.data_ptr() for _, dst in pairs], block_bytes)
    reads, writes, lengths = (np.array(column, dtype=np.int64)[:, None] for column in columns)
    room = max(dst.untyped_storage().nbytes() for dst in dst_tensors)
    return _Layout(reads, writes, lengths, room // max(1, min(block_bytes)), gpu_to_cpu, swappable)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage in one row: the last block may reach into the gap behind the last row."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[None]


def _addresses(array: Any, count: int) -> bool:
    return (
        type(array) is np.ndarray and array.dtype == np.uint64 and array.shape == (count,) and array.flags.c_contiguous
    )


def _direction_of(ring: Ring, params: Any) -> tuple[bool, Swappable] | str:
    """Whether a swap with `params` goes to the CPU and what it may touch, or why nothing."""
    if not ring.is_pinned:
        return False, Swappable(_EVERYWHERE, _EVERYWHERE, None)
    sides = params.src_bases, params.dst_bases
    key = (*map(id, sides),)
    found = _directions.get(key)
    if found is None:
        looked = _ask_driver(*(side.tolist() for side in sides))
        if isinstance(looked, str):
            return looked
        found = looked
        _directions.keep(key, found, sides)
    return found


def _ask_driver(reads: Sequence[int], writes: Sequence[int]) -> tuple[bool, Swappable] | str:
    """The same for the allocations that these addresses lie in, at least one on each side."""
    gpu_to_cpu = not isinstance(device_range(reads[0]), str)
    on_host, on_device = (writes, reads) if gpu_to_cpu else (reads, writes)
    host: list[Registered] = []
    device: list[Registered] = []
    indices = set()
    for address in on_host:
        pinned = pinned_range(address)
        if isinstance(pinned, str):
            return pinned
        host.append(pinned)
    for address in on_device:
        allocation = device_range(address)
        if isinstance(allocation, str):
            return allocation
        start, end, index = allocation
        device.append((start, end, 0))
        indices.add(index)
    if len(indices) != 1:
        return "not a swap between the CPU and one device"
    return gpu_to_cpu, Swappable(Ranges(host), Ranges(device), indices.pop())


def _current(stream: int, ring: Ring) -> AbstractContextManager[Any]:
    if not ring.is_pinned:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.ExternalStream(stream, ring.device))
    return context


BINDERS: Final[Mapping[str, Binder]] = {
    "swap_tensors": falling_back(swap_tensors, original_swap_tensors),
    "swap_addresses": falling_back(swap_addresses, original_swap_addresses),
}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {
    "swap_tensors": original_swap_tensors,
    "swap_addresses": original_swap_addresses,
}
