"""A call whose CPU tensors should have been pinned: it gets them out of the staging ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from h2d_patch.copies.call import LEFT, Binder, Declined, Ledger
from h2d_patch.copies.h2d import NOTHING_TO_COPY, asynchronous_already, dense_strides, unfit
from h2d_patch.copies.snapshot import snapshot
from h2d_patch.copies.staging import ALIGNMENT, Piece, Ring, current_ring

# FlashInfer's plan() keeps this one (docs/measurements.md), and a ring piece must not outlive the call.
KEPT_BY_CALLEE: Final = frozenset({"seq_lens"})


class _Staged:
    """The arguments of one call, their tensors in one piece that is not submitted yet."""

    def __init__(self, piece: Piece, nbytes: int, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.piece: Final = piece
        self.nbytes: Final = nbytes
        self.args: Final = args
        self.kwargs: Final = kwargs


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any], ring: Ring) -> dict[int, torch.Tensor]:
    """The tensors to stage, by id: one given twice stays one."""
    found: dict[int, torch.Tensor] = {}
    for value in (*args, *(v for k, v in kwargs.items() if k not in KEPT_BY_CALLEE)):
        for leaf in value if type(value) in (list, tuple) else (value,):
            if type(leaf) is not torch.Tensor or not leaf.is_cpu or not leaf.nbytes or unfit(leaf) is not None:
                continue
            if not asynchronous_already(leaf, ring, same_order=True):
                found[id(leaf)] = leaf
    return found


def _stage(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Staged | Declined:
    ring = current_ring()
    if type(ring) is Declined:
        return ring
    tensors = _tensors(args, kwargs, ring)
    if not tensors:
        return NOTHING_TO_COPY
    piece = ring.reserve(sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors.values()))
    if type(piece) is Declined:
        return piece
    try:
        at = 0
        staged: dict[int, torch.Tensor] = {}
        for key, tensor in tensors.items():
            strides = dense_strides(tensor)
            snapshot(tensor, piece, strides, at)
            staged[key] = piece.view(tensor.dtype, tensor.shape, strides, at)
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

        def swapped(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(staged.get(id(leaf), leaf) for leaf in value)
            return staged.get(id(value), value)

        return _Staged(
            piece,
            sum(tensor.nbytes for tensor in tensors.values()),
            [swapped(value) for value in args],
            {name: value if name in KEPT_BY_CALLEE else swapped(value) for name, value in kwargs.items()},
        )
    except BaseException:
        with piece:
            pass
        raise


def bind_call_pinned(ledger: Ledger) -> Callable[..., Any]:
    """`call_pinned(function, *args, **kwargs)`: `function(*args, **kwargs)`, called once, with its CPU tensors pinned.

    `function` must read them only, on the current stream of the current device or at once, and must not keep them; that
    is known of `seq_lens`, which stays as it is. Also looks into lists and tuples, one level deep.
    """

    def call_pinned(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        ledger.calls += 1
        failure = None
        try:
            staged = _stage(args, kwargs)
        except Exception as error:
            failure = error
        else:
            if type(staged) is not Declined:
                # An exception of `function` is the caller's own. What it submitted before still reads the piece.
                staged.piece.submitted = True
                ledger.took("pinned arguments", staged.nbytes)
                try:
                    return function(*staged.args, **staged.kwargs)
                finally:
                    try:
                        staged.piece.__exit__()
                    except Exception as error:
                        ledger.failed(error)
            if staged.counted:
                ledger.declined(staged.reason)
            else:
                ledger.took(*LEFT)
        if failure is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
            ledger.failed(failure)
            return result
        finally:
            del failure

    return call_pinned


def original_call_pinned(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


BINDERS: Final[Mapping[str, Binder]] = {"call_pinned": bind_call_pinned}
ORIGINALS: Final[Mapping[str, Callable[..., Any]]] = {"call_pinned": original_call_pinned}
