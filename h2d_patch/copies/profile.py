"""Which way of copying blocks is the best on a device, by direction, bytes of a block and number of blocks."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import sqrt
from typing import Final

DRIVER: Final = "driver"  # cuMemcpyBatchAsync, or whatever the original calls
BULK: Final = "bulk"
TRITON: Final = "triton"

DIRECTIONS: Final[Mapping[bool, str]] = {False: "CPU to GPU", True: "GPU to CPU"}  # by gpu_to_cpu


@dataclass(frozen=True)
class Choice:
    """A path, and for a kernel how many programs, each on an SM of its own."""

    path: str
    programs: int = 0

    @cached_property  # each swap is counted by it
    def name(self) -> str:
        return f"{self.path} {self.programs}" if self.programs else self.path

    def __str__(self) -> str:
        return self.name


_REMEMBERED: Final = 1024


class Profile:
    """A choice for each of `sizes` (bytes of a block) and `counts` (blocks), both rising, for each direction.

    `cells[gpu_to_cpu][size][count]`: a choice.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Sequence[int], cells: Mapping[bool, Sequence[Sequence[Choice]]]
    ) -> None:
        # In between, what is nearer by ratio.
        self._sizes: Final = [sqrt(a * b) for a, b in pairwise(sizes)]
        self._counts: Final = [sqrt(a * b) for a, b in pairwise(counts)]
        self._cells: Final = cells
        # A server's batches recur. With the processor's caches cold, looking them up takes 1 µs longer.
        self._remembered: Final[dict[tuple[bool, int, int], Choice]] = {}

    def choose_of(self, gpu_to_cpu: bool, total: int, blocks: int) -> Choice:
        """For `blocks` blocks of `total` bytes."""
        key = gpu_to_cpu, total, blocks
        found = self._remembered.get(key)
        if found is None:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            found = self._remembered[key] = self.choose(gpu_to_cpu, total / blocks, blocks)
        return found

    def choose(self, gpu_to_cpu: bool, nbytes: float, blocks: int) -> Choice:
        """For `blocks` blocks of `nbytes` on average."""
        return self._cells[gpu_to_cpu][bisect(self._sizes, nbytes)][bisect(self._counts, blocks)]


def default(paths: Sequence[str]) -> Profile:
    """Where nothing is known of a device: what holds with a margin on those that were measured."""
    driver = Choice(DRIVER)
    kernel = Choice(BULK, 8) if BULK in paths else Choice(TRITON, 16) if TRITON in paths else driver
    rows = [[driver, kernel, kernel]] * 2 + [[driver] * 3] * 2
    return Profile((512, 8 << 10, 64 << 10, 1 << 20), (1, 64, 4096), {False: rows, True: rows})
