"""`h2d-patch ab`: runs an A/B in the processes of a live server, and measures each slice while it lasts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from ..report.state import ProcessState, read_states
from ..report.status import SWITCHED_OFF
from ..settings import ConfigurationError
from . import control
from .alternation import CLOCK_SET, LATE, Clock, Figures, Parted, added, none_yet
from .ratio import FEWEST_PAIRS
from .slices import Slices, is_on
from .switching import TAKEN_WITHIN_S, live_servers
from .vllm_metrics import NoMetrics, Sample, sample

DEFAULT_SLICES: Final = 20
FEWEST_SLICES: Final = 2 * FEWEST_PAIRS
DEFAULT_URL: Final = "http://127.0.0.1:8000/metrics"
START_IN_S: Final = 1.5  # by when every process has seen the control file
_AHEAD: Final = 3  # slices: an A/B whose measurer is killed ends after so many
_STATES_WITHIN_S: Final = 3.0  # what a process has done in a slice is in its state
_COMMAND_ENDS_WITHIN_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.1
_READ_EVERY_S: Final = 2.0  # the states, of which each has the last few slices: a look takes some milliseconds
_BEFORE_THE_END_S: Final = 0.1  # of a slice its metrics are asked for, so that none of the next one are in them
_MOST_MODULES: Final = 2  # that a refusal names
_SLOW_METRICS: Final = 0.2  # of what is measured of a slice


@dataclass(frozen=True)
class Plan:
    """What is asked for. `slices`: how many, None for as many as the command lasts; `urls`: of the server's metrics."""

    fix: str
    slice_s: float
    settle_s: float
    slices: int | None = None
    server: str | None = None
    urls: Sequence[str] = ()
    same: bool = False
    command: Sequence[str] = ()


@dataclass
class Measured:
    """One slice. `sample`: what the server counted in it; `figures`: what the fix's places did in all processes."""

    number: int
    on: bool
    begin: float
    left_out: str = ""
    sample: Sample | None = None
    figures: Figures = field(default_factory=none_yet)


@dataclass
class Outcome:
    """`why` says what ended the run before its time; `exit_status` is the command's, None if it did not end itself."""

    plan: Plan
    server: str
    vllm: str | None
    slices: Slices
    measured: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why: str = ""
    exit_status: int | None = None
    restored: bool = False


class _Ended(Exception):
    """Why there is nothing more to measure; empty where all was."""


def run(
    directory: Path,
    plan: Plan,
    progress: Callable[[Measured], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Raises ConfigurationError, having changed nothing, where the A/B cannot be run or could give no answer.

    However it ends, the fix is again as it was in every process, and the command is over. `warn` is told before the
    first slice what the report will say again.
    """
    if plan.slices is not None and plan.slices < FEWEST_SLICES:
        raise ConfigurationError(
            f"ab --slices {plan.slices}; expected {FEWEST_SLICES} or more: an interval needs {FEWEST_PAIRS} pairs of "
            "slices (a shorter --slice makes it a short A/B)"
        )
    notes: list[str] = []
    name, states = _server_of(directory, plan, notes)
    urls = _with_metrics(plan, notes)
    start = time.time() + START_IN_S
    try:
        slices = Slices(plan.fix, plan.slice_s, start, None, plan.settle_s, plan.same)
    except ValueError as error:
        raise ConfigurationError(f"ab: {error}") from None
    outcome = Outcome(plan, name, states[0].content.get("vllm"), slices, notes=notes)
    for note in notes:
        warn(note)
    measuring = _Measuring(directory, outcome, urls, progress)
    with measuring.in_processes(), measuring.command():
        measuring.measure()
    return outcome


class _Measuring:
    def __init__(
        self, directory: Path, outcome: Outcome, urls: Sequence[str], progress: Callable[[Measured], None]
    ) -> None:
        self._directory = directory
        self._outcome = outcome
        self._slices = outcome.slices
        self._most = outcome.plan.slices if outcome.plan.slices or outcome.plan.command else DEFAULT_SLICES
        self._urls = urls
        self._progress = progress
        self._clock = Clock()
        self._command: subprocess.Popen[bytes] | None = None
        self._read_at = 0.0
        self._stop: float | None = None  # of the A/B, as the processes were told last
        # By process, then by slice: what it says that it did.
        self._said: dict[tuple[str, int, int], dict[int, dict[str, Any]]] = {}

    @contextmanager
    def in_processes(self) -> Iterator[None]:
        """The A/B in all processes of the server; afterwards the fix is as it was, whatever happened."""
        self._extend(-1)
        try:
            self._wait_until_taken()
            yield
        finally:
            self._take_back()
            self._add_up()

    @contextmanager
    def command(self) -> Iterator[None]:
        """The command while the A/B lasts; it is ended where it has not ended itself."""
        if not self._outcome.plan.command:
            yield
            return
        try:
            self._command = subprocess.Popen(self._outcome.plan.command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ConfigurationError(f"ab: {self._outcome.plan.command[0]}: {error.strerror}") from None
        try:
            yield
        finally:
            self._outcome.exit_status = self._command.poll()
            if self._outcome.exit_status is None:
                _end(self._command)

    def measure(self) -> None:
        """Slice after slice, until enough are measured, the command has ended, or the A/B has."""
        try:
            for number in count() if self._most is None else range(self._most):
                self._outcome.measured.append(self._one_slice(number))
            self._until(time.time() + _STATES_WITHIN_S, self._all_said)
        except _Ended as ended:
            self._outcome.why = str(ended)
            with contextlib.suppress(_Ended, ConfigurationError):
                self._until(time.time() + _STATES_WITHIN_S, self._all_said, watching=False)
        except ConfigurationError as error:  # of the run directory, which was well before: what is measured is kept
            self._outcome.why = str(error)
        except KeyboardInterrupt:
            self._outcome.why = "interrupted"

    def _one_slice(self, number: int) -> Measured:
        slices = self._slices
        self._until(slices.begin(number))
        parted = Parted(self._clock, slices.slice_s)
        measured = Measured(number, is_on(number), slices.begin(number))
        self._extend(number)
        self._until(slices.settled(number))
        try:
            before = sample(self._urls) if self._urls else None
            self._until(slices.begin(number + 1) - min(_BEFORE_THE_END_S, slices.slice_s / 20))
            if before is not None:
                start = time.monotonic()
                measured.sample = sample(self._urls).since(before)
                if time.monotonic() - start > _SLOW_METRICS * (slices.slice_s - slices.settle_s):
                    measured.left_out = "the server was slow to give its metrics"
        except NoMetrics as error:
            measured.left_out = str(error)
        if parted:
            measured.left_out = CLOCK_SET
        elif time.time() > slices.settled(number + 1):
            measured.left_out = LATE
        self._progress(measured)
        return measured

    def _until(self, moment: float, done: Callable[[], bool] | None = None, watching: bool = True) -> None:
        """Waits until `moment`, or until `done`. Raises _Ended where there is nothing more to measure."""
        while True:
            if time.monotonic() - self._read_at > (_READ_EVERY_S if watching and not done else _LOOK_EVERY_S):
                why = self._read_states()
                self._read_at = time.monotonic()
                if watching and why:
                    raise _Ended(why)
            if watching and self._command is not None and self._command.poll() is not None:
                raise _Ended
            left = moment - time.time()
            if left <= 0 or (done is not None and done()):
                return
            if left > self._slices.slice_s + START_IN_S + _STATES_WITHIN_S:
                raise _Ended(f"{CLOCK_SET} back by more than a slice")
            time.sleep(min(_LOOK_EVERY_S, left))

    # -- the processes ------------------------------------------------------------------------------------------------

    def _extend(self, number: int) -> None:
        """Puts the end of the A/B off, at slice `number`, so that it outlasts the next few and not its measurer.

        Raises _Ended where that is too late: what a process has ended, it does not begin again.
        """
        ahead = number + 1 + _AHEAD
        stop = self._slices.begin(ahead if self._most is None else min(ahead, self._most))
        if self._stop is not None and stop > self._stop and time.time() > self._stop - START_IN_S:
            raise _Ended(f"its end was not put off in time, at slice {number}: this command was late, or {CLOCK_SET}")
        slices = replace(self._slices, stop=stop)

        def change(found: control.Control) -> control.Control:
            if number < 0:
                if found.ab is not None and not found.ab.ended(time.time()):
                    raise ConfigurationError(f"ab: an A/B of {found.ab.fix} runs there already; expected none")
                return replace(found, ab=slices)
            return replace(found, ab=slices) if self._is_ours(found.ab) else found

        replaced = control.update(self._directory, self._outcome.server, change)
        self._stop = stop
        if replaced:
            self._outcome.notes.append(f"replaced, since no process could read it: {replaced}")

    def _is_ours(self, ab: Slices | None) -> bool:
        return ab is not None and replace(ab, stop=self._slices.stop) == self._slices

    def _wait_until_taken(self) -> None:
        deadline = self._slices.start + TAKEN_WITHIN_S - START_IN_S
        while missing := [state for state in self._live() if not self._has_it(state)]:
            if time.time() > deadline:
                who = ", ".join(f"{state.content['pid']} ({state.content['role']})" for state in missing)
                raise ConfigurationError(
                    f"ab: not taken by {who} of server {self._outcome.server}; expected all to take it within "
                    f"{TAKEN_WITHIN_S:g} s (h2d-patch status)"
                )
            time.sleep(_LOOK_EVERY_S / 2)

    def _take_back(self) -> None:
        """Has every process leave the fix as it is to be without an A/B, and waits until they have.

        Where they cannot be told, they leave it so by themselves within a few slices.
        """

        def change(found: control.Control) -> control.Control:
            return replace(found, ab=None) if self._is_ours(found.ab) else found

        try:
            control.update(self._directory, self._outcome.server, change)
            deadline = time.monotonic() + TAKEN_WITHIN_S
            while time.monotonic() < deadline:
                if not any(self._has_it(state) for state in self._live()):
                    self._outcome.restored = True
                    return
                time.sleep(_LOOK_EVERY_S / 2)
        except ConfigurationError as error:
            self._outcome.notes.append(f"not taken back: {error}; it ends within {_AHEAD + 1} slices")

    def _live(self) -> list[ProcessState]:
        return [
            state
            for state in read_states(self._directory, [])
            if state.alive
            and state.content["server"] == self._outcome.server
            and self._slices.fix in state.content["switches"]
        ]

    def _has_it(self, state: ProcessState) -> bool:
        ab = state.content.get("ab")
        return ab is not None and (ab["fix"], ab["start"]) == (self._slices.fix, self._slices.start)

    def _read_states(self) -> str:
        """Keeps what the processes say of the slices; why there is nothing more to measure, or nothing."""
        live = self._live()
        if not live:
            return "the server has ended"
        for state in live:
            content = state.content
            for target in content["targets"]:
                if target["fix"] == self._slices.fix and target["verdict"] == "failed":
                    return f"{self._slices.fix} has failed in process {content['pid']}: {target['reason']}"
            if not self._has_it(state):
                if time.time() - content["started"] < TAKEN_WITHIN_S:
                    continue  # begun anew meanwhile
                return "the A/B was taken back: the fix was switched by hand, or another one was asked for"
            if content["ab"]["ended"] not in (None, "it is over"):
                return f"the A/B has ended in process {content['pid']}: {content['ab']['ended']}"
            key = (str(content.get("host")), content["pid"], content.get("start_time") or 0)
            said = self._said.setdefault(key, {})
            said.update((one["number"], one) for one in content["ab"]["slices"])
        return ""

    def _all_said(self) -> bool:
        wanted = {one.number for one in self._outcome.measured}
        return all(wanted <= said.keys() for said in self._said.values())

    def _add_up(self) -> None:
        for measured in self._outcome.measured:
            for said in self._said.values():
                one = said.get(measured.number)
                if one is None:
                    continue
                measured.figures = added(measured.figures, one)
                measured.left_out = measured.left_out or one["left_out"]


def _server_of(directory: Path, plan: Plan, notes: list[str]) -> tuple[str, list[ProcessState]]:
    """The server and its processes that have the fix. Raises ConfigurationError where it is active in none of them."""
    deadline = time.monotonic() + TAKEN_WITHIN_S
    while True:
        said: list[str] = []
        name, states = _asked_for(directory, plan, said)
        targets = [one for state in states for one in state.content["targets"] if one["fix"] == plan.fix]
        if any(one["verdict"] == "active" or one["reason"] == SWITCHED_OFF for one in targets):
            notes += said
            return name, states
        pending = sorted({one["function"].partition(":")[0] for one in targets if one["verdict"] == "pending"})
        kept_out = [one for one in targets if one["verdict"] not in ("pending", "absent", "upstream")]
        if kept_out or not pending or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)  # what a process has just loaded is in its state within a second
    if pending and not kept_out:
        raise ConfigurationError(
            f"ab: {plan.fix} is loaded in no process of server {name}: none has imported {_some(pending)}, which it "
            "does not use, or not yet; expected it active"
        )
    why = "; ".join(sorted({f"{one['verdict']}: {one['reason']}" for one in kept_out or targets}))
    raise ConfigurationError(f"ab: {plan.fix} is in no process of server {name} ({why}); expected it active")


def _asked_for(directory: Path, plan: Plan, notes: list[str]) -> tuple[str, list[ProcessState]]:
    servers = live_servers(directory, plan.server, notes, "ab")
    if len(servers) > 1:
        raise ConfigurationError(f"ab: {len(servers)} servers here; expected --server with one of {', '.join(servers)}")
    name, states = next(iter(servers.items()))
    there = [state for state in states if plan.fix in state.content["switches"]]
    if not there:
        known = ", ".join(sorted({fix for state in states for fix in state.content["switches"]})) or "none"
        raise ConfigurationError(f"ab: server {name} has no fix {plan.fix!r}; expected one of: {known}")
    return name, there


def _some(modules: Sequence[str]) -> str:
    more = len(modules) - _MOST_MODULES
    return ", ".join(modules[:_MOST_MODULES]) + (f" and {more} more" if more > 0 else "")


def _with_metrics(plan: Plan, notes: list[str]) -> Sequence[str]:
    """The addresses to ask. Raises ConfigurationError where one that was given does not answer."""
    urls = plan.urls or (DEFAULT_URL,)
    try:
        sample(urls)
    except NoMetrics as error:
        if plan.urls:
            raise ConfigurationError(f"ab --url: {error}") from None
        notes.append(f"only host times are measured: {error} (--url says where the server's metrics are)")
        return ()
    return urls


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.terminate()
    try:
        process.wait(_COMMAND_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        print("h2d-patch: ab: the command does not end; it is killed", file=sys.stderr)
        process.kill()
        process.wait()
