"""The result of `bench swap` in words. Importing this imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from h2d_patch.bench.heat_map import size_text
from h2d_patch.copies.profile import DIRECTIONS
from h2d_patch.settings import ConfigurationError

DRIVER_BATCH: Final = "driver batch"  # called at once, not through this package
UPSTREAM: Final = "upstream 12"
CHOSEN: Final = "chosen"


def arms_of(result: Mapping[str, Any]) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(arm for row in result["rows"] for arm in row["arms"]))


def name_of(row: Mapping[str, Any]) -> str:
    return f"{DIRECTIONS[row['gpu_to_cpu']]} {size_text(row['bytes'])} x {row['blocks']}"


def line_of_row(row: Mapping[str, Any]) -> str:
    rates = "  ".join(f"{arm} {found['gbps']:.3g}" for arm, found in row["arms"].items())
    return f"{name_of(row):32s} {rates}  ({row['chosen']})"


def line_of_one_copy(name: str, found: Mapping[str, Any]) -> str:
    return f"{name}, one copy of {size_text(found['bytes'])}: {found['gbps']:.1f} GB/s"


def line_of_host_time(row: Mapping[str, Any]) -> str:
    form = "two sizes" if row["mixed"] else size_text(row["bytes"])
    times = ", ".join(f"{arm} {found['median_us']:.0f}" for arm, found in row["arms"].items())
    return f"host µs, {DIRECTIONS[row['gpu_to_cpu']]} {form} x {row['blocks']}: {times}  (chosen: {row['chosen']})"


def lines_of_matmul(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        where = f"{DIRECTIONS[row['gpu_to_cpu']]} beside them"
        for words, one in (("equal bytes", row), ("all the while", row["saturated"])):
            times = ", ".join(f"{arm} {found['median_ms']:.1f}" for arm, found in one["arms"].items())
            yield f"ms of {one['multiplications']} multiplications, {where}, {words}: {times}"


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"profile: {result['profile']}; driver batch: {result['driver_batch']}"
    for name, found in result["one_copy"].items():
        yield line_of_one_copy(name, found)
    for row in result["host_time"]:
        yield line_of_host_time(row)
    yield from lines_of_matmul(result["matmul"])
    for row in result["rows"]:
        yield line_of_row(row)


def problems(result: Mapping[str, Any]) -> list[str]:
    found = list(result["problems"])
    if not result["complete"]:
        found.append(f"the run ended early, after {len(result['rows'])} rows")
    return found


def load(path: Path) -> dict[str, Any]:
    """A file that `bench swap --json` wrote. Raises ConfigurationError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError("it has no rows")
        missing = {"profile", "driver_batch", "one_copy", "host_time", "matmul", "problems", "complete"} - set(content)
        if missing:
            raise ValueError(f"it has no {min(missing)}")
        list(lines(content))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; expected a file of bench swap --json") from None
    except (KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{path}: its rows are of another form; expected a file of bench swap --json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}; expected a file of bench swap --json") from None
    loaded: dict[str, Any] = content
    return loaded
