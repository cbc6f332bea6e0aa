"""Tensors made of Python lists: built on the host, then through the staging ring. torch waits for all queued work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn.utils.rnn import pad_sequence

from h2d_patch.copies.call import Binder, Declined, falling_back, note
from h2d_patch.copies.h2d import ring_to, staged
from h2d_patch.copies.staging import Ring, ring_for

NOT_A_LIST: Final = Declined("not a list, a tuple or a number")
OTHER_ARGUMENTS: Final = Declined("arguments of torch.tensor other than dtype and device")
OTHER_ROWS: Final = Declined("rows of another form")

_MADE_OF: Final = frozenset({list, tuple, int, float, bool})
_LISTS: Final = frozenset({list, tuple})


def _ring(device: Any) -> Ring | Declined:
    return ring_for(device) if type(device) is torch.device else ring_to((), {"device": device})[0]


def tensor_to_device(data: Any, /, *, dtype: Any = None, device: Any = None, **others: Any) -> torch.Tensor | Declined:
    """`torch.tensor(data, dtype=dtype, device=device)` of numbers in lists and tuples, nested or not, or of one."""
    if others:
        return OTHER_ARGUMENTS
    if type(data) not in _MADE_OF:
        return NOT_A_LIST
    ring = _ring(device)
    if type(ring) is Declined:
        return ring
    return staged(torch.tensor(data, dtype=dtype, device="cpu"), ring, None)


def original_tensor_to_device(data: Any, /, **kwargs: Any) -> Any:
    return torch.tensor(data, **kwargs)


def rows_to_device(
    rows: Any, width: int, /, *, dtype: Any = None, device: Any = None, **others: Any
) -> list[torch.Tensor] | Declined:
    """`[torch.tensor(row, dtype=dtype, device=device).view(-1, width) for row in rows]`, in one copy.

    Of rows of `width` numbers each; the tensors are parts of one.
    """
    if others:
        return OTHER_ARGUMENTS
    ring = _ring(device)
    if type(ring) is Declined:
        return ring
    if dtype is None or not _all_of(rows, width):  # inferred, it would be each row's own
        return OTHER_ROWS
    flat = staged(torch.tensor([part for row in rows for part in row], dtype=dtype, device="cpu"), ring, None)
    return flat if type(flat) is Declined else list(flat.split([len(row) for row in rows]))


def _all_of(rows: Any, width: int) -> bool:
    """Whether `rows` are lists of lists of `width` numbers."""
    return type(rows) in _LISTS and all(
        type(row) in _LISTS and all(type(part) in _LISTS and len(part) == width for part in row) for row in rows
    )


def original_rows_to_device(rows: Any, width: int, /, **kwargs: Any) -> Any:
    return [torch.tensor(row, **kwargs).view(-1, width) for row in rows]


def padded_rows(rows: Any, /, **layout: Any) -> torch.Tensor | Declined:
    """`torch.nested.nested_tensor(rows, **layout).to_padded_tensor(0)` of what `rows_to_device` gives.

    With `layout=torch.jagged`, where the rows begin is a tensor made of a list, and so a copy that waits.
    """
    if layout.keys() - {"layout"} or type(rows) is not list or not rows:
        return OTHER_ARGUMENTS if layout else OTHER_ROWS
    first = rows[0]
    if type(first) is not torch.Tensor:
        return OTHER_ROWS
    ring = ring_for(first.device)
    if type(ring) is Declined:
        return ring
    for row in rows:
        if type(row) is not torch.Tensor or row.dim() != 2 or not row.numel() or row.requires_grad:
            return OTHER_ROWS
        if row.shape[1] != first.shape[1] or row.dtype is not first.dtype or row.device != first.device:
            return OTHER_ROWS
    padded = pad_sequence(rows, batch_first=True)
    note("padded", padded.nbytes)
    return padded


def original_padded_rows(rows: Any, /, **layout: Any) -> Any:
    return torch.nested.nested_tensor(rows, **layout).to_padded_tensor(0)


BINDERS: Final[Mapping[str, Binder]] = {
    "tensor_to_device": falling_back(tensor_to_device, original_tensor_to_device),
    "rows_to_device": falling_back(rows_to_device, original_rows_to_device),
    "padded_rows": falling_back(padded_rows, original_padded_rows),
}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {
    "tensor_to_device": original_tensor_to_device,
    "rows_to_device": original_rows_to_device,
    "padded_rows": original_padded_rows,
}
