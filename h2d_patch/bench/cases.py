"""The copies that are measured: as releases make them, as upstream's fixes make them, and as this package does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from h2d_patch import copies
from h2d_patch.bench.device import Device

Call = Callable[[], Any]

# Of the values of a source: each differs from its neighbours, and float32 (bfloat16) holds it exactly with a version.
_PERIOD: Final = 65521
_PERIOD_BFLOAT16: Final = 61
_VERSIONS: Final = 128

_MROPE_COLUMNS: Final = 65537  # of vLLM's position buffers, `[3, max_num_tokens + 1]`


class Ledger:
    """What our functions say of their calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fallbacks = 0
        self.reasons: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()

    def took(self, path: str, nbytes: int) -> None:
        self.paths[path] += 1

    def declined(self, reason: str) -> None:
        self.fallbacks += 1
        self.reasons[reason] += 1

    def failed(self, error: BaseException) -> None:
        self.declined(f"{type(error).__name__}: {error}")


class Ours:
    """The functions under test, writing into one ledger."""

    def __init__(self) -> None:
        self.ledger: Final = Ledger()
        self.to_device: Final = copies.to_device.bind(self.ledger)
        self.copy_h2d: Final = copies.copy_h2d.bind(self.ledger)
        self.cat_to_device: Final = copies.cat_to_device.bind(self.ledger)
        self.nested_to_device: Final = copies.nested_to_device.bind(self.ledger)


class Sources:
    """CPU tensors whose values are known on the device as well, and differ everywhere from one version to the next."""

    def __init__(self, host: Sequence[torch.Tensor], device: Device, period: int = _PERIOD) -> None:
        self.host: Final = host
        self.on_device: Final = []
        for tensor in host:
            values = torch.arange(tensor.numel(), device=device.device).remainder_(period)
            known = values.to(tensor.dtype).view(tensor.shape)
            tensor.copy_(known)
            self.on_device.append(known)
        self._version = 0

    def overwrite(self) -> None:
        """The next version, on the CPU only."""
        self._version = (self._version + 1) % _VERSIONS
        step = 1 if self._version else 1 - _VERSIONS
        for tensor in self.host:
            tensor.add_(step)

    def follow(self) -> None:
        """The version of the CPU, on the device too."""
        step = 1 if self._version else 1 - _VERSIONS
        for tensor in self.on_device:
            tensor.add_(step)


@dataclass(frozen=True)
class Prepared:
    """A case with its memory. Each arm returns a tensor, or a list of them."""

    sources: Sources
    original: Call
    upstream: Call
    ours: Call
    expected: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list

    @property
    def arms(self) -> dict[str, Call]:
        return {"original": self.original, "upstream": self.upstream, "ours": self.ours}

    def arrived(self, result: Any) -> bool:
        """Whether `result` is what the sources were at the version that the device knows. Waits."""
        found = result if isinstance(result, list) else [result]
        return all(
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
            for one, other in zip(found, self.expected(self.sources.on_device), strict=True)
        )


@dataclass(frozen=True)
class Case:
    """`nbytes` travel, in `copies` copies. `prepare` allocates.

    `asynchronous`: the original copies from where the source lies, takes no snapshot, and is to be left alone.
    """

    name: str
    kind: str
    nbytes: int
    prepare: Callable[[Device, Ours], Prepared]
    asynchronous: bool = False
    copies: int = 1


def size_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 and not nbytes % (1 << 20) else f"{nbytes / 1024:g} KiB"


def _powers(smallest: int, largest: int, step: int = 1) -> list[int]:
    return [1 << power for power in range(smallest.bit_length() - 1, largest.bit_length(), step)]


def all_cases(quick: bool) -> Iterator[Case]:
    """`quick`: a few sizes of each kind, up to 8 MiB."""
    kib, mib = 1 << 10, 1 << 20
    sizes = [4 * kib, 64 * kib, mib, 8 * mib] if quick else _powers(kib, 64 * mib)
    together = [64 * kib, 4 * mib] if quick else _powers(64 * kib, 64 * mib)
    for nbytes in sizes:
        yield pageable(nbytes)
    for nbytes in sizes[1 if quick else 2 :]:  # a matrix with gaps is one from 4 KiB on
        yield _to("gapped", nbytes, _gapped, fresh=True)
        yield _to("transposed", nbytes, _transposed, fresh=True)
    for nbytes in [64 * kib, mib] if quick else _powers(16 * kib, 16 * mib, 2):
        yield _to("transposed gapped", nbytes, _transposed_gapped, fresh=True)
    for nbytes in sizes:
        yield _to("converted", nbytes, _contiguous, torch.bfloat16)
    for columns in (16, 2048) if quick else (16, 256, 2048, 8192, 32768):
        yield _mrope(columns)
    for nbytes in together:
        for number in (1, 8, 64):
            yield _nested(number, nbytes)
            yield _cat(number, nbytes)
    yield _to("pinned", 4 * mib, _pinned, asynchronous=True)
    yield _to("pinned transposed", 8 * mib, _pinned_transposed, asynchronous=True)
    yield _to("pinned converted", 4 * mib, _pinned, torch.bfloat16, asynchronous=True)


def pageable(nbytes: int) -> Case:
    return _to("pageable", nbytes, _contiguous)


def _sides(nbytes: int) -> tuple[int, int]:
    """Rows and columns of a float32 matrix, about square."""
    elements = nbytes // 4
    rows: int = 1 << (elements.bit_length() - 1) // 2
    return rows, elements // rows


def _contiguous(nbytes: int, device: Device) -> torch.Tensor:
    return torch.empty(nbytes // 4, dtype=torch.float32, device="cpu")


def _gapped(nbytes: int, device: Device) -> torch.Tensor:
    rows, columns = _sides(nbytes)
    return device.empty_pinned(rows, 2 * columns, dtype=torch.float32)[:, :columns]


def _transposed(nbytes: int, device: Device) -> torch.Tensor:
    return torch.empty(_sides(nbytes), dtype=torch.float32, device="cpu").t()


def _transposed_gapped(nbytes: int, device: Device) -> torch.Tensor:
    return _gapped(nbytes, device).t()


def _pinned(nbytes: int, device: Device) -> torch.Tensor:
    return device.empty_pinned(nbytes // 4, dtype=torch.float32)


def _pinned_transposed(nbytes: int, device: Device) -> torch.Tensor:
    return device.empty_pinned(*_sides(nbytes), dtype=torch.float32).t()


def _to(
    kind: str,
    nbytes: int,
    make: Callable[[int, Device], torch.Tensor],
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    asynchronous: bool = False,
) -> Case:
    """`source.to(device[, dtype])`. `fresh`: `pin_memory()` would keep the gaps of the source, or leave it as it is."""

    def prepare(device: Device, ours: Ours) -> Prepared:
        source, to = make(nbytes, device), device.device
        args = (to,) if dtype is None else (to, dtype)

        def original() -> torch.Tensor:
            return source.to(*args, non_blocking=True)

        def upstream() -> torch.Tensor:
            pinned = device.dense_pinned(source).copy_(source) if fresh else device.pin(source)
            return pinned.to(*args, non_blocking=True)

        def call_ours() -> Any:
            return ours.to_device(source, *args)

        def expected(values: list[torch.Tensor]) -> list[torch.Tensor]:
            return values if dtype is None else [value.to(dtype) for value in values]

        period = _PERIOD if dtype is None else _PERIOD_BFLOAT16
        return Prepared(Sources([source], device, period), original, upstream, call_ours, expected)

    return Case(f"{kind} {size_text(nbytes)}", kind, nbytes, prepare, asynchronous)


def _mrope(columns: int) -> Case:
    """The first `columns` of a pinned buffer into those of a buffer on the device."""

    def prepare(device: Device, ours: Ours) -> Prepared:
        source = device.empty_pinned(3, _MROPE_COLUMNS, dtype=torch.int64)[:, :columns]
        target = torch.empty(3, _MROPE_COLUMNS, dtype=torch.int64, device=device.device)[:, :columns]

        def original() -> torch.Tensor:
            return target.copy_(source, non_blocking=True)

        def upstream() -> torch.Tensor:
            for row in range(3):
                target[row].copy_(source[row], non_blocking=True)
            return target

        def call_ours() -> Any:
            return ours.copy_h2d(target, source)

        return Prepared(Sources([source], device), original, upstream, call_ours)

    return Case(f"M-RoPE [3, :{columns}]", "mrope", 3 * 8 * columns, prepare)


def _nested(number: int, nbytes: int) -> Case:
    """A list of `number` tensors, `nbytes` together."""

    def prepare(device: Device, ours: Ours) -> Prepared:
        tensors, to = [_contiguous(nbytes // number, device) for _ in range(number)], device.device

        def original() -> list[torch.Tensor]:
            return [tensor.to(device=to, non_blocking=True) for tensor in tensors]

        def upstream() -> list[torch.Tensor]:
            return [device.pin(tensor).to(device=to, non_blocking=True) for tensor in tensors]

        def call_ours() -> Any:
            return ours.nested_to_device(tensors, to)

        return Prepared(Sources(tensors, device), original, upstream, call_ours)

    return Case(f"nested {number} × {size_text(nbytes // number)}", "nested", nbytes, prepare, copies=number)


def _cat(number: int, nbytes: int) -> Case:
    """`number` parts of int64 `[n, 2]`, as vision models concatenate positions, `nbytes` together."""

    def prepare(device: Device, ours: Ours) -> Prepared:
        rows, to = nbytes // 16, device.device
        parts = [torch.empty(rows // number, 2, dtype=torch.int64, device="cpu") for _ in range(number)]

        def original() -> torch.Tensor:
            return torch.cat(parts, dim=0).to(to, non_blocking=True)

        def upstream() -> torch.Tensor:
            whole = torch.cat(parts, dim=0, out=device.empty_pinned(rows, 2, dtype=torch.int64))
            return whole.to(to, non_blocking=True)

        def call_ours() -> Any:
            return ours.cat_to_device(parts, to, dim=0)

        return Prepared(
            Sources(parts, device), original, upstream, call_ours, lambda values: [torch.cat(values, dim=0)]
        )

    return Case(f"cat {number} × {size_text(nbytes // number)}", "cat", nbytes, prepare)
