"""The choices of a device profile as text, by size and number of blocks. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from h2d_patch.copies.profile import BULK, DIRECTIONS, DRIVER, TRITON, Choice
from h2d_patch.copies.profile_file import Cell
from h2d_patch.report.status import table

LEGEND: Final = "d: the driver's batch; b8: bulk copies on 8 SMs; t16: Triton's kernel on 16; the darker, the faster"
_LETTERS: Final = {DRIVER: "d", BULK: "b", TRITON: "t"}
_SHADES: Final = " ░▒▓█"


def size_text(nbytes: int) -> str:
    if nbytes % (1 << 20) == 0:
        return f"{nbytes >> 20} MiB"
    return f"{nbytes >> 10} KiB" if nbytes % 1024 == 0 else f"{nbytes} B"


def short(choice: Choice) -> str:
    return f"{_LETTERS.get(choice.path, choice.path)}{choice.programs or ''}"


def lines(cells: Sequence[Cell]) -> Iterator[str]:
    """For each direction a map of the choices, and a table of what was chosen how often."""
    for direction, name in DIRECTIONS.items():
        those = [cell for cell in cells if cell.gpu_to_cpu is direction]
        if those:
            yield from _of_one(name, those)
    yield LEGEND


def _of_one(name: str, cells: Sequence[Cell]) -> Iterator[str]:
    best = {(cell.nbytes, cell.blocks): cell.best() for cell in cells}
    rates = {(cell.nbytes, cell.blocks): cell.gbps[cell.best()] for cell in cells}
    top = max(rates.values())
    counts = sorted({blocks for _, blocks in best})
    yield f"{name}: choice and GB/s, by bytes of a block (down) and number of blocks (across)"
    rows = []
    for size in sorted({nbytes for nbytes, _ in best}):
        row = [size_text(size)]
        for blocks in counts:
            at = (size, blocks)
            if at not in best:
                row.append("")
                continue
            shade = _SHADES[min(len(_SHADES) - 1, int(rates[at] / top * len(_SHADES)))]
            row.append(f"{short(best[at]):>3s} {rates[at]:5.1f}{shade}")
        rows.append(row)
    yield table(["", *map(str, counts)], rows)
    yield ""
    every = sorted(
        {choice for cell in cells for choice in cell.gbps}, key=lambda choice: (choice.path, choice.programs)
    )
    chosen = list(best.values())
    yield table(
        [name, "chosen in cells", "most GB/s"],
        [
            [str(choice), str(chosen.count(choice)), f"{max(cell.gbps.get(choice, 0) for cell in cells):.1f}"]
            for choice in every
        ],
    )
    yield ""
