"""The processes of a server that is a process group of its own: their processor time, and where they may run. Linux."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of_group(leader: int) -> float:
    """Processor time of the processes of the group that are there now, in seconds."""
    return sum(_took(fields) for _, fields in _members(leader)) / _TICKS


def seconds_of_process(pid: int) -> float:
    return _took(_fields(Path("/proc", str(pid)))) / _TICKS


@contextmanager
def one_left_free(leader: int) -> Iterator[None]:
    """The group without one of the processors that we may use, the last, as beside a GPU, where most have little to do.

    Where every processor is busy, a command that takes a tenth of a second has been seen to wait three for its share.
    """
    processors = os.sched_getaffinity(0)
    if len(processors) < 2:
        raise SystemExit("one processor only: none could be left free")
    _bind(leader, processors - {max(processors)})
    try:
        yield
    finally:
        _bind(leader, processors)


def _bind(leader: int, processors: Collection[int]) -> None:
    for directory, _ in _members(leader):
        for thread in (directory / "task").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)


def _members(leader: int) -> Iterator[tuple[Path, list[str]]]:
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = _fields(directory)
            if int(fields[2]) == leader:
                yield directory, fields


def _fields(directory: Path) -> list[str]:
    """Of /proc/PID/stat, from the state on."""
    return (directory / "stat").read_text().rpartition(")")[2].split()


def _took(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12])
