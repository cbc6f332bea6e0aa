"""Host-to-device copies: snapshot into the staging ring, then an asynchronous copy out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from h2d_patch.copies.call import Binder, Declined, Ledger, falling_back, note
from h2d_patch.copies.snapshot import dense_rows, gather, snapshot, worth
from h2d_patch.copies.staging import DTYPES, FULL, NOT_TO_CUDA, TOO_LARGE, Ring, ring_for

# From here on, or from a quarter of the ring on, in parts: the first is on its way while the second is copied into it.
_IN_PARTS_BYTES: Final = 16 << 20
_PART_BYTES: Final = 8 << 20
# From here on, in tensors of that size, concatenated into the ring itself: below, torch.cat takes less time than a look
# at each tensor.
_GATHERED_BYTES: Final = 1 << 20
_GATHERED_TENSOR_BYTES: Final = 32 << 10
_MOST_PITCH: Final = 1 << 31  # of cudaMemcpy2D

NOT_FROM_CPU: Final = Declined("source is not a CPU tensor", counted=False)
ASYNCHRONOUS_ALREADY: Final = Declined("source is pinned and dense", counted=False)
NOTHING_TO_COPY: Final = Declined("nothing to copy", counted=False)
BLOCKING: Final = Declined("a copy that is meant to block", counted=False)
OTHER_ARGUMENTS: Final = Declined("arguments of .to() other than device and dtype")
CONVERTED_ON_THE_HOST: Final = Declined("a copy that waits, and converts on the host")

_SUBCLASS: Final = Declined("a tensor subclass")
_GRADIENT: Final = Declined("requires a gradient")
_LAYOUT: Final = Declined("not a strided tensor")
_INFERENCE: Final = Declined("an inference tensor, outside of inference mode")
_LAZY_BIT: Final = Declined("a lazy conjugate or negative, or named dimensions")
_NO_MEMORY: Final = Declined("a tensor without memory of its own")
_BROADCAST: Final = Declined("a broadcast source")
_STAGING: Final = "staging"
_DTYPES: Final = frozenset(DTYPES)
# Only a complex tensor can be a lazy conjugate, and only what has a sign and a fraction a lazy negative: a part of one.
_NEVER_LAZY: Final = frozenset(d for d in DTYPES if not d.is_floating_point and not d.is_complex)
# Looked up once: each of these copies takes but a few microseconds.
_Tensor: Final = torch.Tensor
_STRIDED: Final = torch.strided
_empty_like: Final = torch.empty_like
_increment_version: Final = torch.autograd.graph.increment_version
# torch 2.13 has no named tensors any more.
_has_names: Final[Callable[[torch.Tensor], bool]] = getattr(torch.Tensor, "has_names", lambda _: False)


def unfit(source: torch.Tensor) -> Declined | None:
    """Why a tensor, known to be a CPU tensor, is not staged; None if it is."""
    if type(source) is not _Tensor:
        return _SUBCLASS
    if source.requires_grad:
        return _GRADIENT
    if source.layout is not _STRIDED or source.is_nested:
        return _LAYOUT
    dtype = source.dtype
    if dtype not in _DTYPES:
        return Declined(f"dtype {dtype}")
    if (dtype not in _NEVER_LAZY and (source.is_neg() or source.is_conj())) or _has_names(source):
        return _LAZY_BIT
    if not source.data_ptr() and source.nbytes:
        return _NO_MEMORY
    if not source.is_contiguous():
        strides = source.stride()
        if 0 in strides and any(not stride and size > 1 for size, stride in zip(source.shape, strides, strict=True)):
            return _BROADCAST
    return None


def asynchronous_already(source: torch.Tensor, ring: Ring, same_order: bool) -> bool:
    """Whether the original copies `source` from where it lies: pinned, and contiguous or dense in the right order.

    `same_order`: the destination has the dtype of the source and, if that is dense, its strides.
    """
    return (
        ring.is_pinned
        and (source.is_contiguous() or (same_order and _dense(source)))
        and source.is_pinned()  # last: it asks the driver
    )


def dense_strides(source: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps for the shape of `source`: its own if they have none."""
    return tuple(source.stride()) if _dense(source) else _contiguous_strides(source.shape)


def _dense(source: torch.Tensor) -> bool:
    if source.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(source.stride(), source.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _destination(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """`(device, dtype)` of the arguments of a `.to()`, None for what is not given; None for a form not known here.

    What `.to()` would refuse must not pass: the fast way would accept it.
    """
    device = dtype = None
    if args:
        device = args[0]
        if len(args) == 2:
            dtype = args[1]
        elif len(args) > 2:
            return None
        if isinstance(device, torch.dtype):
            return None, device
        if isinstance(device, torch.Tensor):
            return None if len(args) > 1 or kwargs else (device.device, device.dtype)
    for name, value in kwargs.items():
        if name == "device" and not args:
            device = value
        elif name == "dtype" and len(args) < 2:
            dtype = value
        else:
            return None
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return None
    if type(device) in (str, int):
        device = torch.device(device)
    elif device is not None and not isinstance(device, torch.device):
        return None
    return device, dtype


def ring_to(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Ring | Declined, Any]:
    """The ring on the way to the destination of `.to(*args, **kwargs)`, and the dtype there."""
    destination = _destination(args, kwargs)
    if destination is None:
        return OTHER_ARGUMENTS, None
    device, dtype = destination
    return NOT_TO_CUDA if device is None else ring_for(device), dtype


def to_device(source: Any, /, *args: Any, non_blocking: bool = True, **kwargs: Any) -> torch.Tensor | Declined:
    """`source.to(*args, non_blocking=non_blocking, **kwargs)`: a new tensor with the same strides, dtype and device."""
    if non_blocking is not True:
        return BLOCKING
    if not isinstance(source, _Tensor) or not source.is_cpu:
        return NOT_FROM_CPU
    device = (
        args[0] if len(args) == 1 and not kwargs else kwargs.get("device") if not args and len(kwargs) == 1 else None
    )
    if type(device) is torch.device:  # the two usual forms, for which there is nothing more to find out
        return staged(source, ring_for(device), None)
    return staged(source, *ring_to(args, kwargs))


def staged(source: torch.Tensor, ring: Ring | Declined, dtype: torch.dtype | None) -> torch.Tensor | Declined:
    """A CPU tensor, through the ring; a dtype is converted to on the device, as `.to` does where it may not block."""
    if type(ring) is Declined:
        return ring
    result = _at_once(source, ring)
    if result is None:
        result = _by_size(source, ring, converts=dtype is not None and dtype != source.dtype)
    return result if dtype is None or type(result) is Declined else result.to(dtype)


def _at_once(source: torch.Tensor, ring: Ring) -> torch.Tensor | Declined | None:
    """What `_by_size` does, for the usual small copy; None, nothing being done, for any other.

    In one frame: where the interpreter has just woken, a call of Python's takes as long as one of CUDA's.
    """
    lane = ring.lane
    if (
        lane is None
        or lane.current_device() != lane.index  # what is asked below is asked of the current one
        or type(source) is not _Tensor
        or source.requires_grad
        or source.layout is not _STRIDED
        or source.is_nested
        or source.dtype not in _DTYPES
        or source.is_neg()
        or source.is_conj()
        or _has_names(source)
    ):
        return None
    nbytes = source.nbytes
    address = source.data_ptr()
    if not 0 < nbytes <= lane.most or not address:
        return None
    contiguous = source.is_contiguous()
    if lane.pinned(address):
        return ASYNCHRONOUS_ALREADY if contiguous else None
    result = _empty_like(source, device=ring.device)
    # Not a tensor: a mode that makes up tensors is on. Other strides: the source has gaps.
    if type(result) is not _Tensor or not (contiguous or result.stride() == source.stride()):
        return None
    if lane.send(result.data_ptr(), nbytes, address, nbytes, nbytes, 1):
        return None
    note(_STAGING, nbytes)
    return result


def _by_size(source: torch.Tensor, ring: Ring, converts: bool, pinned_too: bool = False) -> torch.Tensor | Declined:
    """The same for any tensor, in one piece of the ring or several; `pinned_too`: one that is pinned as well."""
    declined = unfit(source)
    if declined is not None:
        return declined
    nbytes = source.nbytes
    if not nbytes:
        return NOTHING_TO_COPY
    contiguous = source.is_contiguous()
    looks = ring.is_pinned and not pinned_too
    if contiguous and looks and source.is_pinned():
        return ASYNCHRONOUS_ALREADY
    result = _empty_like(source, device=ring.device)
    if type(result) is not _Tensor:
        return _SUBCLASS
    strides = result.stride()  # those of the source, if it has no gaps
    if not contiguous and not converts and looks and strides == source.stride() and source.is_pinned():
        return ASYNCHRONOUS_ALREADY
    declined = _send(ring, source, strides, result, nbytes)
    return result if declined is None else declined


def _send(
    ring: Ring, source: torch.Tensor, strides: tuple[int, ...], target: torch.Tensor, nbytes: int
) -> Declined | None:
    """Copy `source` as it is now to `target`, of its dtype, both laid out by `strides`, without gaps."""
    if source.stride() == strides:
        return _send_dense(ring, target.data_ptr(), source.data_ptr(), nbytes)
    rows = dense_rows(source) if target.is_contiguous() else None
    if rows is not None:
        pitch, width, number = rows
        return _send_rows(ring, target.data_ptr(), width, source.data_ptr(), pitch, width, number)
    piece = ring.reserve(nbytes)
    if type(piece) is Declined:
        return piece
    with piece:
        snapshot(source, piece, strides)
        piece.submitted = True
        ring.link.copy(target.data_ptr(), piece.address, nbytes, piece.stream)
    note("strided", nbytes)
    return None


def _send_dense(ring: Ring, target: int, source: int, nbytes: int) -> Declined | None:
    """The same for dense memory; what is large in parts: one travels while the next is copied into the ring."""
    quarter = ring.capacity // 4
    if nbytes < _IN_PARTS_BYTES and nbytes <= quarter:
        note(_STAGING, nbytes)
        return ring.send(target, nbytes, source, nbytes, nbytes, 1)
    note("staging in parts", nbytes)
    declined = _no_room(ring, nbytes)
    part = min(_PART_BYTES, quarter)
    for start in range(0, nbytes, part):
        if declined is not None:
            break  # the original copies all of it again, behind what has been submitted
        length = min(part, nbytes - start)
        declined = ring.send(target + start, length, source + start, length, length, 1)
    return declined


def _send_rows(
    ring: Ring, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
) -> Declined | None:
    """`ring.send`, some rows at a time where all of them are more than a quarter of the ring."""
    note("pitched", width * rows)
    quarter = ring.capacity // 4
    if width * rows <= quarter:
        return ring.send(target, target_pitch, source, source_pitch, width, rows)
    declined = _no_room(ring, width * rows)
    part = max(1, quarter // width)
    for row in range(0, rows, part):
        if declined is not None:
            break
        declined = ring.send(
            target + row * target_pitch,
            target_pitch,
            source + row * source_pitch,
            source_pitch,
            width,
            min(part, rows - row),
        )
    return declined


def _no_room(ring: Ring, nbytes: int) -> Declined | None:
    """Asked before the first part: what is started is finished, but for other threads that take the room meanwhile."""
    if nbytes > ring.capacity:
        return TOO_LARGE
    return FULL if ring.room() < nbytes else None


def original_to_device(source: Any, /, *args: Any, non_blocking: bool = True, **kwargs: Any) -> Any:
    return source.to(*args, non_blocking=non_blocking, **kwargs)


def snapshot_to_device(source: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor | Declined:
    """`source.to(*args, **kwargs)`, which waits until it is done: the caller may write to `source` at once.

    So pinned memory is staged too, which `to_device` leaves to torch.
    """
    if not isinstance(source, _Tensor) or not source.is_cpu:
        return NOT_FROM_CPU
    ring, dtype = ring_to(args, kwargs)
    if type(ring) is Declined:
        return ring
    if dtype is not None and dtype is not source.dtype:
        return CONVERTED_ON_THE_HOST
    return _by_size(source, ring, converts=False, pinned_too=True)


def original_snapshot_to_device(source: Any, /, *args: Any, **kwargs: Any) -> Any:
    return source.to(*args, **kwargs)


def copy_h2d(dst: Any, src: Any, non_blocking: bool = True, pin: bool = False) -> torch.Tensor | Declined:
    """`dst.copy_(src, non_blocking=non_blocking)`, which returns `dst`; `pin`: of `src.pin_memory()`."""
    if non_blocking is not True:
        return BLOCKING
    if not isinstance(src, torch.Tensor) or not src.is_cpu:
        return NOT_FROM_CPU
    if not isinstance(dst, torch.Tensor):
        return NOT_TO_CUDA
    ring = ring_for(dst.device)
    if type(ring) is Declined:
        return ring
    declined = unfit(src)
    if declined is not None:
        return declined
    nbytes = src.nbytes
    if not nbytes:
        return NOTHING_TO_COPY
    if type(dst) is not torch.Tensor:
        return _SUBCLASS
    if dst.requires_grad:
        return _GRADIENT
    if dst.layout is not torch.strided or dst.is_nested:
        return _LAYOUT
    if dst.is_inference():
        if not torch.is_inference_mode_enabled():
            return _INFERENCE
    else:
        _increment_version(dst)  # as every change in place: autograd would use what it has saved of it otherwise
    if dst.is_conj() or dst.is_neg() or _has_names(dst):
        return _LAZY_BIT
    if dst.dtype not in _DTYPES:
        return Declined(f"dtype {dst.dtype}")
    shape = src.shape
    if dst.shape != shape:
        return _BROADCAST
    same_dtype = dst.dtype is src.dtype
    if same_dtype and len(shape) == 2:  # gaps in both, as where the first columns are copied
        pitches = _pitches(dst, src)
        if pitches is not None:
            dst_pitch, src_pitch, width = pitches
            return _send_rows(ring, dst.data_ptr(), dst_pitch, src.data_ptr(), src_pitch, width, shape[0]) or dst
    if asynchronous_already(src, ring, same_order=same_dtype and dst.stride() == src.stride()):
        return ASYNCHRONOUS_ALREADY
    if same_dtype:
        if dst.is_contiguous():
            return _send(ring, src, dst.stride(), dst, nbytes) or dst
        if dst.stride() == src.stride() and _dense(src):
            return _send(ring, src, src.stride(), dst, nbytes) or dst
        if len(shape) == 2 and dst.stride(1) == 1 and shape[1] <= dst.stride(0) < _MOST_PITCH // dst.itemsize:
            width = shape[1] * dst.itemsize
            if src.is_contiguous():
                pitch = dst.stride(0) * dst.itemsize
                return _send_rows(ring, dst.data_ptr(), pitch, src.data_ptr(), width, width, shape[0]) or dst
    piece = ring.reserve(nbytes)
    if type(piece) is Declined:
        return piece
    strides = _contiguous_strides(shape)
    with piece:
        snapshot(src, piece, strides)
        piece.submitted = True
        # torch converts or spreads it on the device, and needs no temporary on the host.
        dst.copy_(piece.view(src.dtype, shape, strides), non_blocking=True)
    note("converted" if not same_dtype else "strided", nbytes)
    return dst


def _pitches(dst: torch.Tensor, src: torch.Tensor) -> tuple[int, int, int] | None:
    """`(pitch of dst, pitch of src, width of a row)` in bytes, of 2-D tensors with gaps between dense rows in both."""
    rows, columns = src.shape
    to_row, to_column = dst.stride()
    from_row, from_column = src.stride()
    size = src.itemsize
    dense = to_column == 1 and from_column == 1 and columns < from_row and columns <= to_row < _MOST_PITCH // size
    if dense and worth(columns * size, rows):
        return to_row * size, from_row * size, columns * size
    return None


def original_copy_h2d(dst: Any, src: Any, non_blocking: bool = True, pin: bool = False) -> Any:
    return dst.copy_(src.pin_memory() if pin else src, non_blocking=non_blocking)


def cat_to_device(tensors: Any, /, *args: Any, dim: Any = 0, **kwargs: Any) -> torch.Tensor | Declined:
    """`torch.cat(tensors, dim=dim).to(*args, non_blocking=True, **kwargs)`; large ones are concatenated in the ring."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return NOT_FROM_CPU
    first = tensors[0]
    if not isinstance(first, _Tensor) or not first.is_cpu:
        return NOT_FROM_CPU
    ring, dtype = ring_to(args, kwargs)
    if type(ring) is Declined:
        return ring
    each = first.nbytes
    if each < _GATHERED_TENSOR_BYTES or len(tensors) * each < _GATHERED_BYTES or not _end_to_end(tensors, dim):
        return staged(torch.cat(tensors, dim=dim), ring, dtype)
    sizes = [tensor.nbytes for tensor in tensors]
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    result = torch.empty(shape, dtype=first.dtype, device=ring.device)
    declined = _send_gathered(ring, result.data_ptr(), [tensor.data_ptr() for tensor in tensors], sizes)
    if declined is not None:
        return declined
    note("gathered", sum(sizes))
    return result if dtype is None or dtype == first.dtype else result.to(dtype)


def _send_gathered(ring: Ring, target: int, parts: list[int], sizes: list[int]) -> Declined | None:
    """`sizes[i]` bytes from each of `parts` as they are now, one behind the other, to `target`."""
    nbytes = sum(sizes)
    if nbytes > ring.capacity // 4:
        declined = _no_room(ring, nbytes)
        for part, size in zip(parts, sizes, strict=True):
            if declined is not None:
                break
            declined = _send_dense(ring, target, part, size)
            target += size
        return declined
    piece = ring.reserve(nbytes)
    if type(piece) is Declined:
        return piece
    with piece:
        gather(piece.address, parts, sizes)
        piece.submitted = True
        ring.link.copy(target, piece.address, nbytes, piece.stream)
    return None


def _end_to_end(tensors: Sequence[Any], dim: Any) -> bool:
    """Whether the memory of `tensors`, one behind the other, is their concatenation."""
    first = tensors[0]
    ndim = first.dim()
    # Of four dimensions torch.cat may keep channels_last.
    if type(dim) is not int or dim not in (0, -ndim) or not 0 < ndim <= 3:
        return False
    dtype, rest = first.dtype, first.shape[1:]
    return all(
        isinstance(tensor, _Tensor)
        and tensor.is_cpu
        and unfit(tensor) is None
        and tensor.dtype is dtype
        and tensor.dim() == ndim
        and tensor.shape[1:] == rest
        and tensor.is_contiguous()
        and tensor.numel() > 0
        for tensor in tensors
    )


def original_cat_to_device(tensors: Any, /, *args: Any, dim: Any = 0, **kwargs: Any) -> Any:
    return torch.cat(tensors, dim=dim).to(*args, non_blocking=True, **kwargs)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return tuple(strides)


def _leaf_to_device(source: torch.Tensor, device: Any) -> torch.Tensor | Declined:
    if type(device) is not torch.device:
        return to_device(source, device=device)
    return staged(source, ring_for(device), None) if source.is_cpu else NOT_FROM_CPU


def _original_leaf_to_device(source: torch.Tensor, device: Any) -> torch.Tensor:
    return source.to(device=device, non_blocking=True)


def bind_nested(ledger: Ledger) -> Callable[..., Any]:
    """`nested_to_device(tensors, device)`: `.to(device=device, non_blocking=True)` of each tensor in `tensors`.

    `tensors`: any nesting of lists, tuples and dicts, which come back as plain lists, tuples and dicts; other leaves
    are not touched. The ledger counts tensors.
    """
    return _nested(bind_leaf(ledger))


bind_leaf: Final = falling_back(_leaf_to_device, _original_leaf_to_device)


def _nested(leaf: Callable[[torch.Tensor, Any], Any]) -> Callable[..., Any]:
    def walk(value: Any, device: Any) -> Any:
        if isinstance(value, _Tensor):
            return leaf(value, device)
        if isinstance(value, dict):
            return {key: walk(item, device) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, device) for item in value]
        if isinstance(value, tuple):
            return tuple(walk(item, device) for item in value)
        return value

    def nested_to_device(tensors: Any, device: Any) -> Any:
        return tensors if device is None else walk(tensors, device)

    return nested_to_device


bind_to_device: Final = falling_back(to_device, original_to_device)

BINDERS: Final[Mapping[str, Binder]] = {
    "to_device": bind_to_device,
    "snapshot_to_device": falling_back(snapshot_to_device, original_snapshot_to_device),
    "copy_h2d": falling_back(copy_h2d, original_copy_h2d),
    "cat_to_device": falling_back(cat_to_device, original_cat_to_device),
    "nested_to_device": bind_nested,
}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {
    "to_device": original_to_device,
    "snapshot_to_device": original_snapshot_to_device,
    "copy_h2d": original_copy_h2d,
    "cat_to_device": original_cat_to_device,
    "nested_to_device": _nested(_original_leaf_to_device),
}
