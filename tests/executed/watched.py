"""The copy functions of one run, watched: what a call copies is overwritten while it is under way and behind it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pretended import bytes_of

from h2d_patch.copies import EXPORTS, staging
from h2d_patch.patching.switch import Site


class OverwritingLink(staging.CpuLink):
    """A device whose copies are under way while their sources are overwritten."""

    sources: Sequence[torch.Tensor] = ()

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        with overwritten(self.sources):
            super().copy(dst, src, nbytes, stream)

    def copy_rows(self, dst: int, pitch: int, src: int, width: int, rows: int, stream: int) -> None:
        with overwritten(self.sources):
            super().copy_rows(dst, pitch, src, width, rows, stream)


@contextlib.contextmanager
def overwritten(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """All memory of `tensors` full of something else, and as it was on leaving."""
    memories = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    with torch.inference_mode(False):
        rows = [torch.empty(0, dtype=torch.uint8).set_(memory) for memory in memories.values()]
        kept = [row.clone() for row in rows]
        for row in rows:
            row.fill_(0x5A)
    try:
        yield
    finally:
        with torch.inference_mode(False):
            for row, values in zip(rows, kept, strict=True):
                row.copy_(values)


class Watched:
    """The copy functions of one run: each call's sources are overwritten behind it. `spoilt`: their results are wrong.

    Without a ring they are as they are.
    """

    def __init__(self, ring: Any, spoilt: bool) -> None:
        self._ring = ring
        self._spoilt = spoilt
        self.lines: set[int] = set()  # that they were called from
        if ring is not None:
            ring.link = OverwritingLink()

    def bind(self, site: Site, name: str) -> None:
        ours = EXPORTS[name].bind(site)
        copying = functools.partial(self._copy, site, name)
        call = self._swap if name.startswith("swap_") else self._pinned if name == "call_pinned" else copying

        if self._ring is None:
            site.bind(name, ours)
            return

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.lines.add(sys._getframe(1).f_lineno)
            return call(ours, *args, **kwargs)

        site.bind(name, noted)

    def _copy(self, site: Site, name: str, ours: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sources = tensors_of(args[1:] if name == "copy_h2d" else args[:1])
        fallbacks = site.fallbacks
        self._ring.link.sources = sources
        try:
            result = ours(*args, **kwargs)
        finally:
            self._ring.link.sources = ()
        if site.fallbacks > fallbacks:
            return result
        # Neither the source nor the ring is what was returned.
        before = [bytes_of(leaf) for leaf in tensors_of([result])]
        with overwritten([*sources, self._ring.memory]):
            assert before == [bytes_of(leaf) for leaf in tensors_of([result])], f"{name} gives back its source"
        for leaf in tensors_of([result]) if self._spoilt else ():
            leaf.data.copy_(_other(leaf.data))
        return result

    def _pinned(self, ours: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sources = tensors_of([*args, *(value for name, value in kwargs.items() if name != "seq_lens")])

        def called(*args: Any, **kwargs: Any) -> Any:
            with overwritten(sources):
                if self._spoilt:
                    self._ring.memory.fill_(1)
                return function(*args, **kwargs)

        return ours(called, *args, **kwargs)

    def _swap(self, ours: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._spoilt:
            return 0
        # What says which blocks: the blocks themselves are left alone until the swap is done.
        self._ring.link.sources = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
        try:
            return ours(*args, **kwargs)
        finally:
            self._ring.link.sources = ()


def _other(values: torch.Tensor) -> torch.Tensor:
    """Values that differ from these; of indices, if possible, those in another order."""
    if values.dtype is torch.bool:
        return ~values
    if values.is_floating_point():
        return values + 1
    return values.flip(0) if not torch.equal(values, values.flip(0)) else values ^ 1


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dictionaries, in order."""
    if isinstance(values, torch.Tensor):
        return [values] if values.numel() else []
    if isinstance(values, dict):
        values = list(values.values())
    return [leaf for value in values for leaf in tensors_of(value)] if isinstance(values, (list, tuple)) else []
