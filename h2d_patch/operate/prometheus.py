"""What the state files say, as Prometheus reads it (text format 0.0.4). Shows no path and nothing of a request.

Counters are of single processes, each with its pid among its labels: they only grow, and end with their process. So
`sum by (fix) (rate(...))` is right whatever dies, starts or is cleaned away; the rate of a sum made here would not be.
What a process wrote last is still shown for some minutes after its death, for a scrape to see it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..patching.arms import BOUNDS_S
from ..report import status
from ..report.state import ProcessState, read_states
from ..settings import ConfigurationError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Longer than anyone leaves between two scrapes. A file that is older had been seen before its process died.
RECENT_S = 600.0
OTHER = "other"
_MOST_REASONS = 20  # of one target; more are one
_MOST_LETTERS = 80  # of a label that is not from a manifest
_COUNTED = ("active", "failed", "off")
# The worse one is shown where a process has two targets in one function.
_WORST_FIRST = ("failed", "refused", "active", "off", "pending", "upstream", "absent")

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Family:
    kind: str
    help: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


FAMILIES: Mapping[str, tuple[str, str]] = {
    "h2d_patch_calls_total": ("counter", "Calls of the fixed code."),
    "h2d_patch_bytes_total": ("counter", "Bytes that fixes have copied."),
    "h2d_patch_path_calls_total": ("counter", "Calls by the path that was chosen."),
    "h2d_patch_fallbacks_total": ("counter", "Calls that were left to the original."),
    "h2d_patch_fallback_reasons_total": ("counter", "Calls that were left to the original, by reason."),
    "h2d_patch_host_seconds": ("histogram", "Host time of a call; arm off (the original) is timed during an A/B only."),
    "h2d_patch_verdict_info": ("gauge", "1 for the verdict that a function has, of those that status shows."),
    "h2d_patch_pinned_bytes": ("gauge", "Pinned staging memory."),
    "h2d_patch_process_info": ("gauge", "1 for each live process, with the versions in it."),
    "h2d_patch_process_patched": ("gauge", "0 where a bad setting or file keeps every fix out of a process."),
    "h2d_patch_control_refused": ("gauge", "1 where a process refuses the control file of its server."),
    "h2d_patch_processes": ("gauge", "Live processes that have written a state."),
    "h2d_patch_states_unreadable": ("gauge", "State files that are damaged, not this user's, or of another version."),
    "h2d_patch_run_dir_refused": ("gauge", "1 where the run directory is not one that only this user can write."),
}


def scrape(directory: Path, now: float | None = None) -> str:
    """All metrics of the processes that write to `directory`. A directory or a file that cannot be read is a metric."""
    refused: list[str] = []
    unusable = 0
    states: list[ProcessState] = []
    try:
        states = list(read_states(directory, refused))
    except (ConfigurationError, OSError):
        unusable = 1
    return exposition(states, len(refused), unusable, time.time() if now is None else now)


def exposition(states: Iterable[ProcessState], unreadable: int, unusable: int, now: float) -> str:
    """`unreadable`: files beside `states`; `unusable`: 1 where the directory could not be read at all."""
    families = {name: _Family(kind, text) for name, (kind, text) in FAMILIES.items()}
    live = 0
    for state in states:
        try:
            found = list(_of_process(state.content) if state.alive else _of_the_dead(state, now))
        except (LookupError, TypeError, ValueError, AttributeError):
            unreadable += 1
            continue
        live += state.alive
        for family, suffix, labels, value in found:
            samples = families[family].samples
            samples[suffix, labels] = samples.get((suffix, labels), 0) + value
    for name, value in (("processes", live), ("states_unreadable", unreadable), ("run_dir_refused", unusable)):
        families[f"h2d_patch_{name}"].samples["", ()] = value
    return "".join(_lines(name, family) for name, family in families.items() if family.samples)


Sample = tuple[str, str, Labels, float]  # family, what stands behind its name, labels, value


def _of_process(content: dict[str, Any]) -> Iterator[Sample]:
    labels = _labels(content)
    versions = ("version", _text(content.get("h2d_patch"))), ("vllm", _text(content.get("vllm") or "unknown"))
    yield "h2d_patch_process_info", "", (*labels, *versions), 1
    yield "h2d_patch_process_patched", "", labels, int("error" not in content)
    yield "h2d_patch_control_refused", "", labels, int(bool(content.get("control")))
    pinned = content.get("device", {}).get("staging_bytes")
    if pinned is not None:
        yield "h2d_patch_pinned_bytes", "", labels, _number(pinned)
    verdicts: dict[Labels, str] = {}
    for target in content["targets"]:
        if status.left_out_of_table(target) is None:
            of = (*labels, *_of_target(target))
            verdicts[of] = min(verdicts.get(of, "absent"), target["verdict"], key=_WORST_FIRST.index)
    for of, verdict in verdicts.items():
        yield "h2d_patch_verdict_info", "", (*of, ("verdict", verdict)), 1
    yield from _counters(content)


def _of_the_dead(state: ProcessState, now: float) -> Iterator[Sample]:
    try:
        written = state.path.stat().st_mtime
    except OSError:
        return
    if now - written < RECENT_S:
        yield from _counters(state.content)


def _counters(content: dict[str, Any]) -> Iterator[Sample]:
    for target in content["targets"]:
        if target["verdict"] not in _COUNTED or target["reason"] == status.NOT_SELECTED:
            continue
        labels = (*_labels(content), *_of_target(target))
        for name in ("calls", "fallbacks", "bytes"):
            yield f"h2d_patch_{name}_total", "", labels, _number(target[name])
        for path, count in target["paths"].items():
            yield "h2d_patch_path_calls_total", "", (*labels, ("path", _text(path))), _number(count)
        for reason, count in _reasons(target["fallback_reasons"]):
            yield "h2d_patch_fallback_reasons_total", "", (*labels, ("reason", reason)), _number(count)
        for name, arm in target["arms"].items():
            if arm["count"] or name == "on":
                yield from _histogram((*labels, ("arm", name)), arm)


def _histogram(labels: Labels, arm: Mapping[str, Any]) -> Iterator[Sample]:
    name, buckets = "h2d_patch_host_seconds", arm["buckets"]
    for bound, count in zip((*BOUNDS_S, None), accumulate(map(_number, buckets)), strict=True):
        end = "+Inf" if bound is None else f"{bound:.9g}"
        yield name, "_bucket", (*labels, ("le", end)), count
    yield name, "_sum", labels, _number(arm["seconds"])
    yield name, "_count", labels, sum(map(_number, buckets))


def _labels(content: Mapping[str, Any]) -> Labels:
    rank = content.get("rank")
    return (
        ("server", _text(content["server"])),
        ("role", _text(content["role"])),
        ("rank", "" if rank is None else str(int(rank))),
        ("pid", str(int(content["pid"]))),
    )


def _of_target(target: Mapping[str, Any]) -> Labels:
    return ("fix", target["fix"]), ("function", status.short(target["function"]))


def _reasons(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The kinds of reasons, without what differs from call to call, and no more of them than `_MOST_REASONS`."""
    kinds: dict[str, float] = {}
    for text, count in found.items():
        kind = _kind(text)
        if kind not in kinds and len(kinds) >= _MOST_REASONS:
            kind = OTHER
        kinds[kind] = kinds.get(kind, 0) + _number(count)
    yield from kinds.items()


def _kind(reason: str) -> str:
    """`no swap kernel: OSError: /tmp/x …` is `no swap kernel`: what follows may be of any length, or name a file."""
    kind = reason.partition(": ")[0].partition(" (")[0]
    return OTHER if "/" in kind or not kind else _text(kind)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value[:_MOST_LETTERS]


def _number(value: Any) -> float:
    """As JSON has numbers. Raises TypeError for anything else, ValueError for what no counter can be."""
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no count")
    number: float = value
    return number


def _lines(name: str, family: _Family) -> str:
    lines = [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
    lines += [f"{name}{suffix}{_shown(labels)} {value!r}" for (suffix, labels), value in family.samples.items()]
    return "\n".join(lines) + "\n"


def _shown(labels: Sequence[tuple[str, str]]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    value = value.encode("utf-8", "backslashreplace").decode()  # half a pair of surrogates is valid JSON
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
