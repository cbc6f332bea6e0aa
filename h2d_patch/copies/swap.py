"""Swaps of many blocks between host and device: by a kernel of ours where it pays and is safe, else by the original."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from h2d_patch.copies import native
from h2d_patch.copies.call import Binder, Declined, falling_back, note
from h2d_patch.copies.cuda import pinned_range
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice, Profile, default
from h2d_patch.copies.ranges import Checked, Swappable
from h2d_patch.copies.staging import Ring, current_ring

if TYPE_CHECKING:
    from h2d_patch.copies.swap_bulk import Bulk

DRIVER_PAYS: Final = Declined("the driver's batch is as fast for so few or so large blocks", counted=False)
_FORM: Final = Declined("descriptors are not three dense 1-D int64 CPU tensors of one length")
# The one that releases have (0.21 on); what another would ask for, we would not do.
_KNOWN: Final = frozenset({"is_src_access_order_any"})
_KEYWORDS: Final = Declined("an argument that no known release gives")
_NUMBERS: Final = Declined("a size or an address that is negative")  # 2^63 and above are, as int64
_OUTSIDE: Final = Declined("an address outside the tensors of the swap")
_DEVICE: Final = Declined("the tensors are not on the current device")
_NO_MEMORY: Final = Declined("no memory on the device for descriptors")
NOTHING: Final = Declined("no bytes to copy", counted=False)

_SHARE_BYTES: Final = 1024  # every share but the last is a multiple of it; as in native.c

_checked = Checked()


class Kernels:
    """What can copy blocks on a device. Made at device start-up only, so that no request ever compiles."""

    def __init__(self, bulk: Bulk | None, triton: bool, profile: Profile | None = None) -> None:
        self.bulk: Final = bulk
        self.paths: Final = [DRIVER, *([BULK] if bulk is not None else []), *([TRITON] if triton else [])]
        self.profile = profile or default(self.paths)


# By index of a CUDA device; a reason where there are none.
_kernels: dict[int, Kernels | str] = {}


def start_kernels(index: int) -> list[str]:
    """Load and compile what there is for CUDA device `index`, once, and try it; waits for it. Says what is missing."""
    reasons: list[str] = []
    if index in _kernels:
        return reasons
    bulk, triton = None, False
    with torch.cuda.device(index):
        try:
            from h2d_patch.copies import swap_bulk

            if swap_bulk.supported(index):
                loaded = swap_bulk.Bulk(index)
                stream = torch.cuda.current_stream().cuda_stream
                _try(lambda described: loaded.launch(described.data_ptr(), 2, 2, stream), 2 * loaded.warps)
                bulk = loaded
        except Exception as error:
            reasons.append(f"no bulk copies: {_words(error)}")
        try:
            if _interpreted():
                raise RuntimeError("TRITON_INTERPRET is set; on device addresses the interpreter would crash")
            from h2d_patch.copies.swap_kernel import WIDTHS

            for width in WIDTHS:
                _try(partial(_launch_triton, blocks=2, programs=2, odd=width), 2, width)
            triton = True
        except Exception as error:
            reasons.append(f"no kernel of Triton's: {_words(error)}")
    _kernels[index] = Kernels(bulk, triton) if bulk is not None or triton else "; ".join(reasons)
    return reasons


def kernels_on(index: int) -> Kernels | str:
    """What can copy blocks on CUDA device `index`, or why nothing can."""
    return _kernels.get(index, "the device was not started")


def forget_kernels() -> None:
    """For tests: as before the first device start-up."""
    _kernels.clear()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _try(copy: Callable[[torch.Tensor], None], shares: int, width: int = 16) -> None:
    """Raises RuntimeError if `copy` does not copy two blocks, whose sizes are odd multiples of `width`, or copies more.

    `copy` is given their descriptors, and the cuts behind them, on the current device.
    """
    words = torch.stack((torch.arange(1024), torch.arange(1024).flip(0))).to(torch.uint8).cuda()
    read, write = words[0].data_ptr(), words[1].data_ptr()
    blocks = np.array([[read, read + 512], [write + 512, write], [160 + width, 240 + width]], dtype=np.int64)
    described = np.concatenate((blocks.ravel(), _cuts(blocks[2], shares).ravel()))
    expected = words.cpu().numpy()
    for source, target, nbytes in (blocks - [[read], [write], [0]]).T:
        expected[1, target : target + nbytes] = expected[0, source : source + nbytes]
    copy(torch.from_numpy(described).cuda())
    if not np.array_equal(words.cpu().numpy(), expected):
        raise RuntimeError("the kernel copied wrongly")


def _launch_triton(described: torch.Tensor, blocks: int, programs: int, odd: int) -> None:
    """`described`: int64, as in swap_kernel.py, with the cuts behind the descriptors."""
    from h2d_patch.copies.swap_kernel import launch, width_of

    launch(described, blocks, described[3 * blocks :], programs, width_of(odd))


def _interpreted() -> bool:
    try:
        from h2d_patch.copies.swap_kernel import interpreted
    except ImportError:
        return False
    return interpreted()


def kernels_for(ring: Ring) -> Kernels | str:
    """What can copy blocks on the device of `ring`, or why nothing can."""
    if ring.device.type == "cpu":
        return _ON_CPU if _interpreted() else "compiled kernels do not run on the CPU"
    return kernels_on(ring.device.index)


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
    if kwargs.keys() - _KNOWN:
        return _KEYWORDS
    if not (_descriptor(src) and _descriptor(dst) and _descriptor(sizes) and len(src) == len(dst) == len(sizes)):
        return _FORM
    host, device = (dst_tensors, src_tensors) if gpu_to_cpu else (src_tensors, dst_tensors)
    return _swap(
        (src.data_ptr(), dst.data_ptr(), sizes.data_ptr()),
        len(src),
        gpu_to_cpu,
        lambda ring: _checked.swappable(host, device, pinned_range if ring.device.type == "cuda" else None),
        None,
    )


def swap_arrays(
    reads: Any,
    writes: Any,
    lengths: Any,
    gpu_to_cpu: bool,
    touchable: Callable[[Ring], Swappable | str],
    choice: Choice | None = None,
) -> Declined | None:
    """Copy `lengths[i]` bytes from address `reads[i]` to `writes[i]` on the current stream, or say why not.

    `reads`, `writes`, `lengths`: int64 arrays `[n]`, dense, read before this returns. `touchable` says which addresses
    a kernel may touch between host and the device of a ring, or why none. Without `choice`, the profile's.
    """
    addresses = (reads.ctypes.data, writes.ctypes.data, lengths.ctypes.data)
    return _swap(addresses, len(reads), gpu_to_cpu, touchable, choice)


def _swap(
    rows: tuple[int, int, int],
    blocks: int,
    gpu_to_cpu: bool,
    touchable: Callable[[Ring], Swappable | str],
    choice: Choice | None,
) -> Declined | None:
    """The same with `rows`, the addresses of the three arrays of `blocks` numbers."""
    library = native.loaded
    total = library.total(rows[2], blocks) if library is not None else int(_array(rows[2], blocks).sum())
    if total <= 0:
        return _NUMBERS if total else NOTHING
    ring = current_ring()
    if type(ring) is Declined:
        return ring
    kernels = kernels_for(ring)
    if isinstance(kernels, str):
        return Declined(f"no swap kernel: {kernels}")
    if choice is None:
        choice = kernels.profile.choose_of(gpu_to_cpu, total, blocks)
    if choice.path == DRIVER:
        note("driver batch", total)
        return DRIVER_PAYS
    note(choice.name, total)
    found = touchable(ring)
    if isinstance(found, str):
        return Declined(found)
    if found.index != ring.device.index:
        return _DEVICE
    bulk = kernels.bulk if choice.path == BULK else None
    shares = choice.programs * (1 if bulk is None else bulk.warps)
    numbers = 3 * blocks + 2 * (shares + 1)
    piece = ring.reserve(8 * numbers)
    if type(piece) is Declined:
        return piece
    with piece:
        if library is not None:
            kernel = bulk.kernel if bulk is not None else 0
            code = library.swap(
                *rows, blocks, total, gpu_to_cpu, found.address, shares, piece.address, kernel, piece.stream
            )
            if code < 0:
                return _NUMBERS if code == native.NEGATIVE else _OUTSIDE
            piece.submitted = True
            if bulk is not None:
                if code:
                    bulk.check("cuLaunchKernel", code)
                return None
        else:
            declined = _describe(rows, blocks, gpu_to_cpu, found, shares, piece.address)
            if declined is not None:
                return declined
            piece.submitted = True
        if bulk is not None:
            bulk.launch(piece.address, blocks, choice.programs, piece.stream)
            return None
        # Of a program of Triton's each block waits for its descriptor, which had better not lie behind the link.
        try:
            described = torch.empty(numbers, dtype=torch.int64, device=ring.device)
        except torch.cuda.OutOfMemoryError:
            return _NO_MEMORY
        ring.link.copy(described.data_ptr(), piece.address, 8 * numbers, piece.stream)
        odd = int(np.bitwise_or.reduce(_array(piece.address, 3 * blocks)))
    _launch_triton(described, blocks, choice.programs, odd)
    return None


def _describe(
    rows: tuple[int, int, int], blocks: int, gpu_to_cpu: bool, may: Swappable, shares: int, at: int
) -> Declined | None:
    """Descriptors and cuts, to address `at`, as native.c does it."""
    reads, writes, lengths = (_array(row, blocks) for row in rows)
    if min(int(reads.min()), int(writes.min()), int(lengths.min())) < 0:
        return _NUMBERS
    on_host, on_device = (writes, reads) if gpu_to_cpu else (reads, writes)
    if not (may.host.hold_all(on_host, lengths) and may.device.span_all(on_device, lengths)):
        return _OUTSIDE  # on the device: the original would go wrong there as well
    if gpu_to_cpu:
        writes = may.host.shifted(writes)
    else:
        reads = may.host.shifted(reads)
    cuts = _cuts(lengths, shares).ravel()
    np.concatenate((reads, writes, lengths, cuts), out=_array(at, 3 * blocks + len(cuts)))
    return None


def _array(address: int, number: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_int64 * number).from_address(address))


def _cuts(lengths: Any, shares: int) -> Any:
    """Where `shares` begin, and the last ends: int64 `[shares + 1, 2]`, (block, offset in it).

    `lengths`: int64 array, some of it positive. The bytes are shared out evenly, whatever the sizes.
    """
    blocks = len(lengths)
    largest = int(lengths.max())
    if int(lengths.min()) == largest:
        total = blocks * largest
        at = _share_out(total, shares)
        block = at // largest
        offset = at - block * largest
    else:
        ends = np.cumsum(lengths)
        at = _share_out(int(ends[-1]), shares)
        block = np.searchsorted(ends, at, side="right")
        inside = np.minimum(block, blocks - 1)
        offset = at - ends[inside] + lengths[inside]
        block[-1], offset[-1] = blocks, 0
        offset[block == blocks] = 0
    return np.stack((block, offset & ~15), axis=1)  # at a multiple of 16 bytes of its block


def _share_out(total: int, shares: int) -> Any:
    share = -(-total // (shares * _SHARE_BYTES)) * _SHARE_BYTES
    return np.minimum(np.arange(shares + 1, dtype=np.int64) * share, total)


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


# Under Triton's interpreter a kernel copies whatever there is: on the CPU nothing is measured.
_ON_CPU: Final = Kernels(
    None, True, Profile((1,), (1,), {direction: [[Choice(TRITON, 3)]] for direction in (False, True)})
)

BINDERS: Final[Mapping[str, Binder]] = {"swap_blocks": falling_back(swap_blocks, original_swap_blocks)}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {"swap_blocks": original_swap_blocks}
