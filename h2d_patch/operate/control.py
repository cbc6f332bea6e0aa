"""The control file of a server: what `h2d-patch` tells its processes while they run, read by each of them.

`control-SERVER.json` in the run directory: only this user's, written whole or not at all, by one writer at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import owned
from ..report.state import ProcessState, read_states, write_whole
from ..settings import ConfigurationError, checked_run_dir, checked_server
from .slices import Slices

SCHEMA = 1
MOST_BYTES = 1 << 20
LOCK_PATIENCE_S = 5.0
SETTLED_NS = 1_000_000_000
_LOCK = "control.lock"
_EXPECTED = "expected a control file, written by h2d-patch"


@dataclass(frozen=True)
class Switched:
    """A fix turned on or off at unix time `at`: in every process, or in the workers of one `rank`."""

    fix: str
    on: bool
    rank: int | None
    at: float


@dataclass(frozen=True)
class Control:
    """What a control file says. Of its switches, a later one wins."""

    server: str
    switches: tuple[Switched, ...] = ()
    ab: Slices | None = None

    def wanted(self, fix: str, rank: int | None) -> bool | None:
        """Whether a process with that rank is to have `fix` on; None where nobody has switched it."""
        found = [one.on for one in self.switches if one.fix == fix and one.rank in (None, rank)]
        return found[-1] if found else None

    def turned(self, fixes: Iterable[str], on: bool, rank: int | None = None) -> Control:
        """With `fixes` on or off from now on; in all processes, that also ends what was said of single ranks.

        An A/B of one of them is over.
        """
        chosen, now = tuple(fixes), time.time()
        kept = [one for one in self.switches if one.fix not in chosen or rank not in (None, one.rank)]
        ab = None if self.ab is not None and self.ab.fix in chosen else self.ab
        return replace(self, switches=(*kept, *(Switched(fix, on, rank, now) for fix in chosen)), ab=ab)

    @classmethod
    def as_taken(cls, server: str, states: Iterable[ProcessState]) -> Control:
        """The switches that the live processes of `server` have taken, for workers that start later.

        A fix is off in every process where one without a rank has it off, or, if there is none, each has.
        """
        off: dict[str, dict[int | None, bool]] = {}
        for state in states:
            if state.alive and state.content["server"] == server:
                rank = state.content.get("rank")
                for fix, on in state.content["switches"].items():
                    by_rank = off.setdefault(fix, {})
                    by_rank[rank] = by_rank.get(rank, False) or not on
        taken = cls(server)
        for fix, by_rank in sorted(off.items()):
            everywhere = by_rank.pop(None, all(by_rank.values()))
            if everywhere:
                taken = taken.turned([fix], False)
            for rank, is_off in by_rank.items():
                if is_off is not everywhere:
                    taken = taken.turned([fix], not is_off, rank)
        return taken


def path_of(directory: Path, server: str) -> Path:
    return directory / f"control-{server}.json"


def read(directory: Path, server: str) -> Control | None:
    """What the control file of `server` says; None where there is none.

    Raises ConfigurationError for a directory or a file that others may write or own, a link, or damaged content.
    """
    path = path_of(directory, server)
    try:
        checked_run_dir(directory)
        text = _read_own(path)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}; {_EXPECTED}") from None
    return _parse(path, server, content)


def update(directory: Path, server: str, change: Callable[[Control], Control]) -> str | None:
    """Writes what `change` makes of the control file of `server`.

    A file that cannot be read is replaced, and why is returned: the processes have kept what they had, and the new
    file begins with that. Raises ConfigurationError where nothing can be written.
    """
    checked_server(server)
    try:
        checked_run_dir(directory)
        with _locked(directory):
            replaced, found = None, None
            try:
                found = read(directory, server)
            except ConfigurationError as error:
                replaced, found = str(error), Control.as_taken(server, read_states(directory, []))
            new = change(found or Control(server))
            write_whole(path_of(directory, server), json.dumps({"schema": SCHEMA, **asdict(new)}))
    except OSError as error:
        raise ConfigurationError(
            f"{path_of(directory, server)}: {error.strerror or error}; expected a run directory that can be written"
        ) from None
    return replaced


def signature(directory: Path, server: str) -> tuple[int, ...]:
    """Changes when the file, its owner or mode, or those of its directory do; empty where there is no file."""
    try:
        held = os.lstat(directory)
        file = os.lstat(path_of(directory, server))
    except OSError:
        return ()
    whose = (held.st_ino, held.st_mode, held.st_uid)
    return (*whose, file.st_ino, file.st_size, file.st_mode, file.st_uid, file.st_mtime_ns, file.st_ctime_ns)


def is_settled(found: tuple[int, ...]) -> bool:
    """Whether a change from now on would show in that signature: times of files go in steps, of 4 ms and more."""
    return not found or abs(time.time_ns() - found[-1]) > SETTLED_NS


def remove_left_behind(directory: Path, server: str) -> None:
    """Removes the control file of an earlier server of this name: none of its processes lives on this host.

    Called by a process as it starts; under a live server of that name the file stays.
    """
    if not signature(directory, server):
        return
    with contextlib.suppress(ConfigurationError, OSError):
        for state in read_states(directory, []):
            here = state.content.get("host") == socket.gethostname()
            if here and state.alive and state.content["server"] == server:
                return
        path_of(directory, server).unlink(missing_ok=True)


def clean(directory: Path, states: Iterable[ProcessState]) -> list[Path]:
    """Removes the control files of servers of which no process lives; which they were."""
    live = {path_of(directory, state.content["server"]) for state in states if state.alive}
    gone = sorted(set(directory.glob("control-*.json")) - live)
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time; the system lets go of the lock of one that is killed."""
    handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{directory / _LOCK}: held by another process for {LOCK_PATIENCE_S:g} s; expected it to be free"
                )
            time.sleep(0.002)
        yield
    finally:
        os.close(handle)


def _read_own(path: Path) -> str:
    """Raises FileNotFoundError, or ConfigurationError for what is not a file that only this user can write."""
    try:
        return owned.read(path, MOST_BYTES).decode()
    except FileNotFoundError:
        raise
    except owned.NotOurs as refusal:
        raise ConfigurationError(f"{path} {refusal}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}; {_EXPECTED}") from None


def _parse(path: Path, server: str, content: Any) -> Control:
    def wrong(key: str, found: object, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{path}: {key}: found {repr(found)[:80]}; expected {expected}")

    def made(key: str, kind: type, types: dict[str, tuple[type, ...]], value: Any) -> Any:
        names = [field.name for field in fields(kind)]
        if type(value) is not dict or sorted(value) != sorted(names):
            raise wrong(key, value, f"an object of {', '.join(names)}")
        for name in names:
            if type(value[name]) not in types[name]:
                raise wrong(f"{key}.{name}", value[name], " or ".join(one.__name__ for one in types[name]))
        try:
            return kind(**value)
        except ValueError as error:
            raise wrong(key, value, str(error)) from None

    if type(content) is not dict:
        raise wrong("schema", type(content).__name__, str(SCHEMA))
    if content.get("schema") != SCHEMA:
        raise wrong("schema", content.get("schema"), f"{SCHEMA}, a file of this version")
    if content.get("server") != server:
        raise wrong("server", content.get("server"), repr(server))
    if type(content.get("switches")) is not list:
        raise wrong("switches", content.get("switches"), "a list")
    switched = tuple(made(f"switches[{at}]", Switched, _SWITCHED, one) for at, one in enumerate(content["switches"]))
    ab = content.get("ab")
    return Control(server, switched, None if ab is None else made("ab", Slices, _SLICES, ab))


_NONE = type(None)
_NUMBER = (float, int)
_SWITCHED = {"fix": (str,), "on": (bool,), "rank": (int, _NONE), "at": _NUMBER}
_SLICES = {
    "fix": (str,), "slice_s": _NUMBER, "start": _NUMBER, "stop": (*_NUMBER, _NONE), "settle_s": _NUMBER,
    "same": (bool,),
}  # fmt: skip
