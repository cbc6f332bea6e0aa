"""`h2d-patch switch`: writes the control files of live servers and waits until their processes have taken them."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..report.state import ProcessState, read_states
from ..report.status import BAD, ROLES, SWITCHED_OFF, table
from ..settings import ConfigurationError
from . import control

ALL = "all"
TAKEN_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Answer:
    """What one process made of a switch: `why` says what it has not taken, and is empty where it has taken all."""

    server: str
    pid: int
    host: str
    role: str
    rank: int | None
    why: str


@dataclass(frozen=True)
class Turned:
    """`took_s`: from the writing of the first control file until the last answer, or until the wait was over."""

    on: bool
    fixes: tuple[str, ...]
    answers: tuple[Answer, ...]
    took_s: float
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether every process has taken it."""
        return bool(self.answers) and not any(answer.why for answer in self.answers)

    def as_text(self) -> str:
        word = "on" if self.on else "off"
        rows = []
        for one in self.answers:
            rank = "" if one.rank is None else str(one.rank)
            rows.append([one.server, str(one.pid), ROLES.get(one.role, one.role), rank, one.why or word])
        what = self.fixes[0] if len(self.fixes) == 1 else "every fix"
        return table(["server", "pid", "process", "rank", what], rows)


def turn(
    directory: Path,
    fix: str,
    on: bool,
    server: str | None = None,
    rank: int | None = None,
    patience_s: float = TAKEN_WITHIN_S,
) -> Turned:
    """Turns `fix`, or all of them, on or off in the live processes of the servers of this host, or of `server`.

    With a `rank`, only in the workers of that rank. Raises ConfigurationError, before anything is written, where there
    is no such server, fix or rank, and where nothing can be written.
    """
    notes: list[str] = []
    chosen = live_servers(directory, server, notes, "switch")
    known = {name: _known(states) for name, states in chosen.items()}
    fixes = {name: sorted(there) if fix == ALL else [fix] for name, there in known.items()}
    everyone = [state for states in chosen.values() for state in states]
    if fix not in (there := {ALL}.union(*known.values())):
        if any(target["fix"] == fix for state in everyone for target in state.content["targets"]):
            where = "any live server" if server is None else f"server {server}"
            raise ConfigurationError(
                f"switch: {fix} is not selected by H2D_PATCH in {where}; that takes the variable and a restart"
            )
        expected = ", ".join(sorted(there))
        raise ConfigurationError(f"switch: no live server has a fix {fix!r}; expected one of: {expected}")
    asked = [state for state in everyone if _is_asked(state, rank)]
    if not asked:
        ranks = sorted({state.content["rank"] for state in everyone if state.content["rank"] is not None})
        raise ConfigurationError(f"switch: no live worker has rank {rank}; expected one of {ranks}")
    start = time.monotonic()
    for name, names in fixes.items():
        change = functools.partial(control.Control.turned, fixes=names, on=on, rank=rank)
        if known[name].intersection(names) and (replaced := control.update(directory, name, change)):
            notes.append(f"replaced, with what the processes had, since no process could read it: {replaced}")
    deadline = time.monotonic() + patience_s
    found = {state.path: state for state in asked}
    while True:
        found |= {state.path: state for state in read_states(directory, []) if state.path in found}
        took = time.monotonic() - start
        live = [state for state in found.values() if state.alive and state.path.exists()]
        late = [state for state in live if any(_not_taken(state, one, on) for one in fixes[_server(state)])]
        if not late or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    every = tuple(sorted({one for names in fixes.values() for one in names}))
    return Turned(on, every, tuple(_answers(live, fixes, on)), took, tuple(notes))


def live_servers(directory: Path, server: str | None, notes: list[str], command: str) -> dict[str, list[ProcessState]]:
    """The live processes with fixes of each server that has one on this host, or of `server`, wherever they are.

    States that cannot be read are said in `notes`. Raises ConfigurationError where there is no such server.
    """
    everyone = [state for state in read_states(directory, notes) if state.alive]
    live = [state for state in everyone if "error" not in state.content]
    here = {_server(state) for state in live if state.content.get("host") == socket.gethostname()}
    names = here if server is None else {_server(state) for state in live if _server(state) == server}
    if not names:
        what = "no live server" if server is None else f"no live server {server}"
        for state in everyone:
            if "error" in state.content and server in (None, _server(state)):
                error = str(state.content["error"]).removeprefix("h2d_patch: ")
                raise ConfigurationError(f"{command}: server {_server(state)} has no fix in: {error}")
        others = ", ".join(sorted({_server(state) for state in everyone})) or "none at all"
        raise ConfigurationError(f"{command}: {what} in {directory}; there: {others} (run as the server's user)")
    return {name: [state for state in live if _server(state) == name] for name in sorted(names)}


def _server(state: ProcessState) -> str:
    return str(state.content["server"])


def _known(states: Iterable[ProcessState]) -> set[str]:
    return {fix for state in states for fix in state.content["switches"]}


def _is_asked(state: ProcessState, rank: int | None) -> bool:
    return rank is None or state.content["rank"] == rank


def _not_taken(state: ProcessState, fix: str, on: bool) -> bool:
    return state.content["switches"].get(fix, on) is not on


def _answers(states: Sequence[ProcessState], fixes: Mapping[str, Sequence[str]], on: bool) -> Iterator[Answer]:
    for state in sorted(states, key=lambda state: (_server(state), state.content["pid"])):
        content, names = state.content, fixes[_server(state)]
        reasons = []
        if late := [one for one in names if _not_taken(state, one, on)]:
            reasons.append(f"{', '.join(late)} not taken: {content.get('control') or 'no answer yet'}")
        if on:
            reasons += [text for one in names for text in _stays_out(content, one)]
        role, rank = content["role"], content["rank"]
        yield Answer(_server(state), content["pid"], str(content.get("host")), role, rank, "; ".join(reasons))


def _stays_out(content: dict[str, Any], fix: str) -> Iterator[str]:
    """Why `fix` stays out of a process whose switch is on: not selected, failed, refused or kept off."""
    if fix not in content["switches"]:
        yield f"{fix} is not selected by H2D_PATCH"
        return
    for target in content["targets"]:
        verdict, reason = target["verdict"], target["reason"]
        if target["fix"] == fix and (verdict in BAD or (verdict == "off" and reason != SWITCHED_OFF)):
            yield f"{target['function'].partition(':')[2]} stays {verdict}: {reason}"
