"""Result files of the programs here: `h2d_patch.bench.provenance`, from the checkout that they lie in."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from h2d_patch.bench import provenance as _provenance

provenance = _provenance.provenance


def write(path: str, result: dict[str, Any]) -> None:
    """`result`, and where it comes from. Raises OSError."""
    _provenance.write(path, result)
    print(f"wrote {path}", flush=True)


def without_folders(command: Iterable[str]) -> list[str]:
    """A command line as it would be typed where its files lie."""
    return [Path(part).name if part.startswith("/") else part for part in command]


def paired_ratios(pairs: Iterable[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Of (off, on): on / off of each pair in which both are, their median, and where 95 % of resampled medians lie."""
    ratios = [on / off for off, on in pairs if off and on is not None]
    if not ratios:
        return {"ratios": []}
    numbers = random.Random(0)
    medians = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return {
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median": round(statistics.median(ratios), 4),
        "interval_95": [round(medians[250], 4), round(medians[-251], 4)],
    }
