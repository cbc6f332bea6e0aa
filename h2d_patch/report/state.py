"""One state file for each process: written whole or not at all, read by `h2d-patch status`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import owned
from ..settings import ConfigurationError, checked_run_dir

SCHEMA = 2
POLL_EVERY_S = 0.5
WRITE_EVERY_S = 1.0
_PREFIX = "state-"
_LEFT_BEHIND_S = 60.0
# A host cannot ask whether another one's process lives. Its file tells, dated anew although nothing in it has changed.
_DATED_EVERY_S = 30.0
_SILENT_S = 300.0
_MOST_BYTES = 16 << 20

logger = logging.getLogger("vllm.plugins.h2d_patch")


class StateWriter:
    """Writes what `snapshot` returns to the run directory whenever it has changed, from a thread of its own.

    A directory that cannot be written is said once in the log; the process goes on without being seen in `status`.
    `poll` is called from that thread more often, and says whether to write at once.
    """

    def __init__(
        self, directory: Path, snapshot: Callable[[], dict[str, Any]], poll: Callable[[], bool] | None = None
    ) -> None:
        self._directory = directory
        self._snapshot = snapshot
        self._poll = poll
        self._written: str | None = None
        self._dated = 0.0
        self._complained = self._poll_complained = False

    def start(self, delay_s: float = 0.0) -> None:
        """Writes from now on; after a fork, `delay_s` lets children pass by that exist only to run another program."""
        if not delay_s:
            self.write()
        threading.Thread(target=self._run, args=(delay_s,), name="h2d_patch-state", daemon=True).start()

    def _run(self, delay_s: float) -> None:
        time.sleep(delay_s)
        due = 0.0
        while True:
            if (self._poll is not None and self._polled(self._poll)) or time.monotonic() >= due:
                self.write()
                due = time.monotonic() + WRITE_EVERY_S - POLL_EVERY_S / 2
            time.sleep(POLL_EVERY_S)

    def _polled(self, poll: Callable[[], bool]) -> bool:
        try:
            return poll()
        except Exception as error:
            if not self._poll_complained:
                self._poll_complained = True
                logger.warning("h2d_patch: what the control file says cannot be taken: %s", error)
            return False

    def write(self) -> None:
        try:
            text = json.dumps(self._snapshot())
            path = self._directory / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}.json"
            if text != self._written or not path.exists():
                checked_run_dir(self._directory, create=True)
                write_whole(path, text)
                self._written = text
            elif time.monotonic() - self._dated < _DATED_EVERY_S:
                return
            else:
                os.utime(path)
            self._dated = time.monotonic()
        except Exception as error:
            if not self._complained:
                self._complained = True
                logger.warning("h2d_patch: no state is written for `h2d-patch status`: %s", error)


@dataclass(frozen=True)
class ProcessState:
    """What one state file says, and whether its process still lives."""

    path: Path
    content: dict[str, Any]
    alive: bool


def read_states(directory: Path, refused: list[str] | None = None) -> Iterator[ProcessState]:
    """The state of every process that has written one to `directory`, by pid; half-written files are none of ours.

    Raises ConfigurationError when the directory is not one that only this user can write, or a file in it is damaged
    or of another version; with `refused`, that is added there and the others are read.
    """
    try:
        checked_run_dir(directory)
        paths = sorted(directory.glob(f"{_PREFIX}*.json"))
    except FileNotFoundError:
        return
    states = []
    for path in paths:
        try:
            states.append(_read(path))
        except FileNotFoundError:
            continue
        except ConfigurationError as error:
            if refused is None:
                raise
            refused.append(str(error))
    yield from sorted(states, key=lambda state: int(state.content["pid"]))


def _read(path: Path) -> ProcessState:
    try:
        content = json.loads(owned.read(path, _MOST_BYTES))
    except FileNotFoundError:
        raise
    except owned.NotOurs as refusal:
        raise ConfigurationError(f"{path} {refusal}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}; expected a state file, written by h2d_patch") from None
    _check(path, content)
    return ProcessState(path, content, _alive(path, content))


_TARGET = {
    "fix": str, "function": str, "verdict": str, "reason": str, "calls": int, "fallbacks": int, "bytes": int,
    "paths": dict, "arms": dict,
}  # fmt: skip


_AB = {"fix", "slice_s", "start", "on", "ended", "left_out", "arms", "slices"}


def _check(path: Path, content: Any) -> None:
    """Raises ConfigurationError for what is no state of this version, naming the key."""
    found = content.get("schema") if isinstance(content, dict) else type(content).__name__
    if found != SCHEMA:
        raise ConfigurationError(f"{path}: schema: found {found!r}; expected {SCHEMA}, a file of this version")
    kinds = {"pid": int, "role": str, "server": str, "switches": dict, "targets": list}
    wrong = [key for key, kind in kinds.items() if type(content.get(key)) is not kind]
    if type(content.get("device", {})) is not dict:
        wrong.append("device")
    if (ab := content.get("ab")) is not None and (type(ab) is not dict or not ab.keys() >= _AB):
        wrong.append("ab")
    for target in content["targets"] if not wrong else []:
        if not isinstance(target, dict) or any(type(target.get(key)) is not kind for key, kind in _TARGET.items()):
            wrong.append("targets")
            break
    if wrong:
        shown = repr(content.get(wrong[0]))[:80]
        raise ConfigurationError(f"{path}: {wrong[0]}: found {shown}; expected a state file, written by h2d_patch")


def clean(directory: Path, states: Iterable[ProcessState]) -> list[Path]:
    """Removes the states of processes that are gone, and what processes killed while writing have left; which."""
    gone = [state.path for state in states if not state.alive]
    for path in gone:
        path.unlink(missing_ok=True)
    for path in sorted(directory.glob(".*.tmp")):
        with contextlib.suppress(FileNotFoundError):  # its writer lives, and has named it
            if time.time() - path.lstat().st_mtime > _LEFT_BEHIND_S:
                path.unlink()
                gone.append(path)
    return gone


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: tells two processes of one pid apart. None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _alive(path: Path, content: dict[str, Any]) -> bool:
    if content.get("host") != socket.gethostname():  # another host's, or another container's
        return time.time() - path.stat().st_mtime < _SILENT_S
    return start_time(int(content["pid"])) == content.get("start_time")


def write_whole(path: Path, text: str) -> None:
    """`path` has all of `text`, or what it had; only this user can read or write it. Raises OSError."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
