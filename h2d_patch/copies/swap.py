"""Swaps of many blocks between host and device: by our kernel where it pays and is safe, else by the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from h2d_patch.copies.call import Binder, Declined, falling_back
from h2d_patch.copies.cuda import pinned_range
from h2d_patch.copies.ranges import Checked, Swappable
from h2d_patch.copies.staging import Ring, current_ring

# Where the kernel beats the driver's batch: (largest block in bytes, fewest blocks). On an H200, where both lines lie
# elsewhere for each direction (docs/measurements.md).
CPU_TO_GPU: Final = ((24 << 10, 16), (64 << 10, 1024))
GPU_TO_CPU: Final = ((32 << 10, 128),)

DRIVER_PAYS: Final = Declined("the driver's batch is as fast for so few or so large blocks", counted=False)
_FORM: Final = Declined("descriptors are not three dense 1-D int64 CPU tensors of one length")
_NUMBERS: Final = Declined("a size that is not positive, or an address that is negative")
_OUTSIDE: Final = Declined("an address outside the tensors of the swap")
_ALIGNMENT: Final = Declined("addresses or sizes are not multiples of 8")
_DEVICE: Final = Declined("the tensors are not on the current device")

_checked = Checked()
# Devices the kernels are compiled for, or why not; written at device start-up only, so no request ever compiles.
_without_kernels: dict[int, str | None] = {}


def pays(gpu_to_cpu: bool, largest: int, blocks: int) -> bool:
    """Whether the kernel beats the driver's batch for `blocks` blocks of up to `largest` bytes."""
    lines = GPU_TO_CPU if gpu_to_cpu else CPU_TO_GPU
    return any(largest <= bytes_ and blocks >= fewest for bytes_, fewest in lines)


def compile_kernels(index: int) -> str | None:
    """Compile and load both kernels for CUDA device `index`, once; waits for it. Returns why they cannot be had."""
    if index not in _without_kernels:
        try:
            if _interpreted():
                raise RuntimeError("TRITON_INTERPRET is set; on device addresses the interpreter would crash")
            with torch.cuda.device(index):
                _swap_on_device(16)
                _swap_on_device(8)
            _without_kernels[index] = None
        except Exception as error:
            _without_kernels[index] = f"{type(error).__name__}: {error}"
    return _without_kernels[index]


def forget_kernels() -> None:
    """For tests: as before the first device start-up."""
    _without_kernels.clear()


def _swap_on_device(width: int) -> None:
    from h2d_patch.copies.swap_kernel import launch

    blocks = torch.arange(64, dtype=torch.int64, device="cuda").reshape(2, 32)
    read, write = blocks[0], blocks[1]
    # Not the last words: what a mask forbids must stay as it is.
    nbytes = 240 if width == 16 else 248
    launch(torch.tensor([[read.data_ptr()], [write.data_ptr()], [nbytes]], dtype=torch.int64).cuda(), width)
    copied = blocks.cpu()
    if not torch.equal(copied[1, : nbytes // 8], copied[0, : nbytes // 8]) or copied[1, -1] != 63:
        raise RuntimeError("the kernel copied wrongly")


def _no_kernels(ring: Ring) -> str | None:
    if ring.device.type == "cpu":
        return None if _interpreted() else "compiled kernels do not run on the CPU"
    return _without_kernels.get(ring.device.index, "the device was not started")


def _interpreted() -> bool:
    try:
        from h2d_patch.copies.swap_kernel import interpreted
    except ImportError:
        return False
    return interpreted()


def swap_blocks(
    original: Any,
    src: Any,
    dst: Any,
    sizes: Any,
    gpu_to_cpu: bool,
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Declined | None:
    """`original(src, dst, sizes, **kwargs)`: copy `sizes[i]` bytes from address `src[i]` to `dst[i]`, in stream order.

    `src`, `dst`, `sizes`: CPU tensors, int64 `[n]`, read before this returns. All blocks lie inside `src_tensors` and
    `dst_tensors`; those on the CPU are 2-D, rows of bytes, maybe views of a larger region that is pinned in part.
    """
    if not all(_descriptor(tensor) for tensor in (src, dst, sizes)) or not len(src) == len(dst) == len(sizes):
        return _FORM
    host, device = (dst_tensors, src_tensors) if gpu_to_cpu else (src_tensors, dst_tensors)
    return swap_arrays(
        src.numpy(),
        dst.numpy(),
        sizes.numpy(),
        gpu_to_cpu,
        lambda ring: _checked.swappable(host, device, pinned_range if ring.device.type == "cuda" else None),
    )


def swap_arrays(
    reads: Any, writes: Any, lengths: Any, gpu_to_cpu: bool, touchable: Callable[[Ring], Swappable | str]
) -> Declined | None:
    """Copy `lengths[i]` bytes from address `reads[i]` to `writes[i]` on the current stream, or say why not.

    `reads`, `writes`, `lengths`: int64 arrays `[n]`, read before this returns. `touchable` says which addresses a
    kernel may touch between host and the device of a ring, or why none.
    """
    blocks = len(reads)
    if not blocks:
        return DRIVER_PAYS
    if not pays(gpu_to_cpu, int(lengths.max()), blocks):
        return DRIVER_PAYS
    if min(int(reads.min()), int(writes.min()), int(lengths.min()) - 1) < 0:  # 2^63 and above are negative here
        return _NUMBERS
    ring = current_ring()
    if type(ring) is Declined:
        return ring
    why_not = _no_kernels(ring)
    if why_not is not None:
        return Declined(f"no swap kernel: {why_not}")
    found = touchable(ring)
    if not isinstance(found, Swappable):
        return Declined(found)
    if found.index != ring.device.index:
        return _DEVICE
    on_host, on_device = (writes, reads) if gpu_to_cpu else (reads, writes)
    if not found.host.hold_all(on_host, lengths):
        return _OUTSIDE
    if not found.device.span_all(on_device, lengths):  # the original would go wrong there as well
        return _OUTSIDE
    odd = int(np.bitwise_or.reduce(reads | writes | lengths))
    if odd % 8:
        return _ALIGNMENT
    piece = ring.reserve(3 * 8 * blocks)
    if type(piece) is Declined:
        return piece
    with piece:
        descriptors = torch.empty((3, blocks), dtype=torch.int64, device=ring.device)
        np.stack((reads, writes, lengths), out=piece.view(torch.int64, (3, blocks), (blocks, 1)).numpy())
        piece.submitted = True
        ring.link.copy(descriptors.data_ptr(), piece.address, 3 * 8 * blocks, piece.stream)
    from h2d_patch.copies.swap_kernel import launch

    launch(descriptors, 8 if odd % 16 else 16)
    return None


def _descriptor(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.dtype is torch.int64
        and tensor.dim() == 1
        and tensor.is_contiguous()
    )


def original_swap_blocks(
    original: Any,
    src: Any,
    dst: Any,
    sizes: Any,
    gpu_to_cpu: bool,
    src_tensors: Sequence[torch.Tensor],
    dst_tensors: Sequence[torch.Tensor],
    **kwargs: Any,
) -> Any:
    return original(src, dst, sizes, **kwargs)


BINDERS: Final[Mapping[str, Binder]] = {"swap_blocks": falling_back(swap_blocks, original_swap_blocks)}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {"swap_blocks": original_swap_blocks}
