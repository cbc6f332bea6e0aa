"""The result of `bench copies` in words: its table, and what is wrong with it. Importing this imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from h2d_patch.settings import ConfigurationError

_WIDTHS: Final = (26, 6, 10, 10, 10, 6)
_ARMS: Final = ("original", "upstream", "ours")


def _line(cells: list[str], rest: str) -> str:
    first, *others = (
        cell.ljust(width) if not column else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return "  ".join([first, *others, rest]).rstrip()


HEADER: Final = _line(["case, median µs", "queued", *_ARMS, "ratio"], "snapshot lost by")


def lines_of_row(row: Mapping[str, Any]) -> Iterator[str]:
    for ms, arms in row["queued"].items():
        notes = _lost(arms) + (" (left alone)" if row["asynchronous"] else "") + _fallbacks(arms)
        yield _line([row["case"], f"{ms} ms", *_medians(arms)], notes.strip())


def lines_of_in_a_row(result: Mapping[str, Any]) -> Iterator[str]:
    found = result["in_a_row"]
    yield f"\n{found['copies']} copies of {found['bytes'] >> 10} KiB in a row, {found['queued_ms']} ms queued:"
    for arm, rounds in found["rounds"].items():
        slow, longest = ([once[key] for once in rounds] for key in ("over_1_ms", "max_us"))
        kept = "" if all(once["snapshot_kept"] for once in rounds) else "; snapshot lost"
        yield f"  {arm:9s} over 1 ms: {max(slow)}; longest: {max(longest):.1f} µs{kept}"
    yield "\nAnother stream busy with a large copy, nothing queued on the current one:"


def line_of_other_stream(row: Mapping[str, Any]) -> str:
    return _line([row["case"], "other", *_medians(row["arms"])], _lost(row["arms"]) + _fallbacks(row["arms"]))


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The whole table, as it is printed while it is measured."""
    yield HEADER
    for row in result["rows"]:
        yield from lines_of_row(row)
    if "in_a_row" in result:
        yield from lines_of_in_a_row(result)
    for row in result.get("other_stream_busy", {}).get("rows", []):
        yield line_of_other_stream(row)


def problems(result: Mapping[str, Any]) -> list[str]:
    """Where our copies lost a snapshot that the original takes, or did not run; and whether the run ended early."""
    found = []
    if not result["complete"]:
        found.append(f"the run ended early, after {len(result['rows'])} cases")
    for row in result["rows"]:
        for ms, arms in row["queued"].items():
            found += _problems(f"{row['case']}, {ms} ms queued", arms["ours"], row["asynchronous"])
    if "in_a_row" in result:
        for once in result["in_a_row"]["rounds"]["ours"]:
            found += _problems(f"{result['in_a_row']['copies']} copies in a row", once, False)
    for row in result.get("other_stream_busy", {}).get("rows", []):
        found += _problems(f"{row['case']}, another stream busy", row["arms"]["ours"], False)
    return found


def load(path: Path) -> dict[str, Any]:
    """A file that `bench copies --json` wrote. Raises ConfigurationError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError("it has no rows")
        for row in content["rows"]:
            for ms, arms in row["queued"].items():
                for arm in _ARMS:
                    if not {"median_us", "snapshot_kept"} <= set(arms.get(arm, ())):
                        raise ValueError(f"{row['case']}, {ms} ms queued, has no {arm}")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; expected a file of bench copies --json") from None
    except (KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{path}: its rows are of another form; expected a file of bench copies --json"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; expected a file of bench copies --json") from None
    loaded: dict[str, Any] = content
    return loaded


def _medians(arms: Mapping[str, Any]) -> list[str]:
    medians = [arms[arm]["median_us"] for arm in _ARMS]
    ratio = f"{medians[2] / medians[0]:.2f}" if medians[0] else ""
    return [*(f"{median:.1f}" for median in medians), ratio]


def _lost(arms: Mapping[str, Any]) -> str:
    return ", ".join(arm for arm in _ARMS if not arms[arm]["snapshot_kept"])


def _fallbacks(arms: Mapping[str, Any]) -> str:
    number = arms["ours"]["fallbacks"]
    return f" {number} fallbacks" if number else ""


def _problems(where: str, ours: Mapping[str, Any], asynchronous: bool) -> list[str]:
    found = []
    if not asynchronous and not ours["snapshot_kept"]:
        found.append(f"{where}: ours lost the snapshot")
    if ours["fallbacks"]:
        reasons = ", ".join(ours.get("reasons", {}))
        found.append(f"{where}: ours fell back {ours['fallbacks']} times{': ' if reasons else ''}{reasons}")
    return found
