"""Which host addresses a kernel may touch: asked once for a set of tensors, forgotten when one of them dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch

Registered = tuple[int, int, int]  # start, end, and what to add to its addresses for those of the device
_MOST_SEQUENCES: Final = 64
PinnedRange = Callable[[int], "Registered | str"]

T = TypeVar("T")


class Ranges:
    """Address ranges [start, end), each with a shift: sorted, merged where they touch and are shifted alike."""

    def __init__(self, ranges: Sequence[Registered] = ()) -> None:
        merged: list[list[int]] = []
        for start, end, shift in sorted(ranges):
            if merged and start <= merged[-1][1] and shift == merged[-1][2]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end, shift])
        self.merged: Final = [(start, end, shift) for start, end, shift in merged]
        self._starts, self._ends, self._shifts = np.ascontiguousarray(np.array(merged, dtype=np.int64).reshape(-1, 3).T)
        self.arrays: Final = self._starts, self._ends, self._shifts
        self._shifted: Final = bool(self._shifts.any())

    def hold(self, starts: Any, lengths: Any) -> Any:
        """For each of `starts` (int64 array): whether `lengths` bytes (array or int) from there lie in one range."""
        if not self.merged:
            return np.zeros(len(starts), dtype=bool)
        at = np.searchsorted(self._starts, starts, side="right") - 1
        # Subtracted, as the sum of an absurd address and a length would overflow.
        return (at >= 0) & (self._ends[at] - starts >= np.maximum(lengths, 1))

    def hold_all(self, starts: Any, lengths: Any) -> bool:
        """`hold(starts, lengths).all()` of arrays not empty, lengths positive; asked at every swap."""
        if not self.merged or starts.min() < self._starts[0]:
            return False
        if len(self.merged) == 1:
            return bool((self._ends[0] - starts >= lengths).all())
        at = np.searchsorted(self._starts, starts, side="right") - 1
        return bool((self._ends[at] - starts >= lengths).all())

    def span_all(self, starts: Any, lengths: Any) -> bool:
        """Whether all lies between the first range and the last; cheaper, and blind to what lies between ranges."""
        return bool(self.merged) and bool(
            starts.min() >= self._starts[0] and (self._ends[-1] - starts >= lengths).all()
        )

    def shifted(self, starts: Any) -> Any:
        """Where the device sees `starts` (int64 array), each of which lies in a range."""
        if not self._shifted:
            return starts
        return starts + self._shifts[np.searchsorted(self._starts, starts, side="right") - 1]


class Swappable:
    """What a swap between these tensors may touch: `host` and `device` ranges, and the index of the device."""

    def __init__(self, host: Ranges, device: Ranges, index: int | None) -> None:
        self.host: Final = host
        self.device: Final = device
        self.index: Final = index
        starts, ends, shifts = host.arrays
        whole = (device.merged[0][0], device.merged[-1][1]) if device.merged else (0, 0)
        # As native.c has it. The arrays live as long as the ranges.
        self._numbers: Final = np.array(
            [*whole, starts.ctypes.data, ends.ctypes.data, shifts.ctypes.data, len(starts)], dtype=np.int64
        )
        self.address: Final[int] = self._numbers.ctypes.data


class Remembered(Generic[T]):
    """What was found for a set of objects, told apart by their identity, until one of them dies."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[T, list[weakref.ref[Any]]]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: tuple[object, ...]) -> T | None:
        found = self._found.get(key)
        return None if found is None else found[0]

    def keep(self, key: tuple[object, ...], value: T, objects: Sequence[Any]) -> None:
        """`key` holds the identities of `objects`, and whatever else tells one value from another."""

        def forget(_: object) -> None:
            self._found.pop(key, None)

        self._found[key] = value, [weakref.ref(each, forget) for each in objects]


class Checked:
    """Remembers what was found for tensors. Only what was good: memory may still be registered later.

    What is remembered goes when one of its tensors does, so whatever is found here may be touched.
    """

    def __init__(self) -> None:
        # Tensors are told apart by id and address, never by ==.
        self._found: Final = Remembered[Swappable]()
        # The same by the ids of the sequences they came in, of which a handler keeps its own: asked at every swap.
        self._by_sequences: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def swappable(
        self, host: Sequence[torch.Tensor], device: Sequence[torch.Tensor], pinned_range: PinnedRange | None
    ) -> Swappable | str:
        """What may be touched between `host` (2-D, rows of bytes) and `device` tensors, or why none of it.

        Without `pinned_range`, host memory is taken to be good as it is.
        """
        if not host or not device:
            return "not a swap between the CPU and one device"
        # The first of each too: the ids of sequences that are gone come back.
        sequences = (id(host), id(device), len(host), len(device), id(host[0]), id(device[0]))
        found = self._found.get(self._by_sequences.get(sequences, ()))
        if found is not None:
            return found
        tensors = (*host, *device)
        key = (len(host), *map(id, tensors), *(t.data_ptr() for t in tensors))
        found = self._found.get(key)
        if found is None:
            looked = _look(host, device, pinned_range)
            if isinstance(looked, str):
                return looked
            found = looked
            self._found.keep(key, found, tensors)
        if len(self._by_sequences) >= _MOST_SEQUENCES:
            self._by_sequences.clear()
        self._by_sequences[sequences] = key
        return found


def _look(
    host: Sequence[torch.Tensor], device: Sequence[torch.Tensor], pinned_range: PinnedRange | None
) -> Swappable | str:
    devices = {t.device for t in device}
    if len(devices) != 1 or not all(t.is_cpu for t in host):
        return "not a swap between the CPU and one device"
    known = Ranges([_extent(t) for t in host] if pinned_range is None else ())
    for tensor in host:
        if tensor.dim() != 2 or tensor.stride(1) != 1:
            return "host tensors are not rows of bytes"
        new = _rows_pinned(tensor, known, pinned_range) if pinned_range is not None else []
        if isinstance(new, str):
            return new
        if new:
            known = Ranges(known.merged + new)
    return Swappable(known, Ranges([_extent(t) for t in device]), devices.pop().index)


def _rows_pinned(tensor: torch.Tensor, known: Ranges, pinned_range: PinnedRange) -> list[Registered] | str:
    """The ranges not in `known` that hold the rows of `tensor`, or why a row is not held.

    What lies between the rows is not asked for: vLLM may register one worker's slots only (docs/measurements.md).
    """
    rows, row_bytes = tensor.shape[0], tensor.shape[1] * tensor.element_size()
    starts = tensor.data_ptr() + np.arange(rows, dtype=np.int64) * (tensor.stride(0) * tensor.element_size())
    starts = starts[~known.hold(starts, row_bytes)]
    new: list[Registered] = []
    row = 0
    while row < len(starts) and row_bytes:
        at = int(starts[row])
        row_end = at + row_bytes
        while at < row_end:  # a row may lie across two registrations
            found = pinned_range(at)
            if isinstance(found, str):
                return found
            new.append(found)
            at = found[1]
        row = int(np.searchsorted(starts, at - row_bytes, side="right"))  # the first row that ends behind `at`
    return new


def _extent(tensor: torch.Tensor) -> Registered:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size(), 0
