"""What the running servers say of themselves, in their state files; a static check where nothing runs."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ...report import status
from ...report.check import Site, check
from ...report.state import ProcessState, read_states
from ...settings import ConfigurationError, checked_run_dir, run_dir
from .environment import Asked
from .finding import OK, PROBLEM, WARNING, Finding

_ENOUGH_BYTES = 8 << 20
_MANY_CALLS = 100
_MOST_REASONS = 3
# By then a worker has loaded its plugins, however large the model.
_STARTED_S = 180.0
# In the name of every module of vLLM's that only a KV connector which offloads loads.
_OFFLOADING = "kv_offload"


@dataclass
class Running:
    """What runs of this user's: processes by their states, which `run_directory` reads, and servers by `proc`.

    `is_unread`: states may be there that cannot be read.
    """

    directory: Path = field(default_factory=Path)
    states: list[ProcessState] = field(default_factory=list)
    is_unread: bool = False
    proc: Path = Path("/proc")

    @functools.cached_property
    def servers(self) -> list[tuple[int, str, dict[str, str]]]:
        """Pid, what it runs, and environment of each process that was started as a server."""
        return list(status.serving(self.proc))

    @property
    def live(self) -> list[dict[str, Any]]:
        return [state.content for state in self.states if state.alive]

    @property
    def is_patched(self) -> bool:
        return any("error" not in content for content in self.live)

    @property
    def is_seen(self) -> bool:
        return bool(self.live or self.servers)

    @property
    def is_unpinned(self) -> bool:
        return any(content.get("device", {}).get("staging_bytes") == 0 for content in self.live)

    def pids(self) -> list[int]:
        return [int(content["pid"]) for content in self.live]


def run_directory(directory: Path, run: Running) -> Iterator[Finding]:
    """Where processes write their state, and what is in the way of it."""
    run.directory = directory
    try:
        checked_run_dir(directory)
    except FileNotFoundError:
        yield Finding(OK, "run directory", f"{directory} is not there; the first server that is patched makes it")
        return
    except ConfigurationError as error:
        run.is_unread = True
        yield Finding(
            PROBLEM, "run directory", str(error), f"no process writes its state there; {_mend(directory)}", True
        )
        return
    damaged: list[str] = []
    run.states = list(read_states(directory, damaged))
    run.is_unread = bool(damaged)
    for text in damaged:
        other = ": schema: " in text
        do = (
            "restart the servers after an upgrade"
            if other
            else "remove it; its process writes it again within a second"
        )
        yield Finding(PROBLEM, "run directory", text, do, bad_input=True)
    room = os.statvfs(directory)
    if room.f_flag & os.ST_RDONLY or not os.access(directory, os.W_OK):
        yield Finding(
            PROBLEM, "run directory", f"{directory} cannot be written", "name another (H2D_PATCH_RUN_DIR)", True
        )
    elif room.f_bavail * room.f_frsize < _ENOUGH_BYTES or (room.f_files and not room.f_favail):
        yield Finding(
            PROBLEM, "run directory", f"the file system of {directory} is full", "make room, or name another directory"
        )
    elif not damaged:
        gone = sum(not state.alive for state in run.states)
        more = f", {gone} of processes that are gone (h2d-patch status --clean removes them)" if gone else ""
        number = len(run.live)
        yield Finding(OK, "run directory", f"{directory}: {number} live process{'' if number == 1 else 'es'}{more}")


def unpatched(run: Running) -> Iterator[Finding]:
    """Servers that run without us, by their environment."""
    for pid, name, env in run.servers:
        for reason in status.left_out(env, expects=True):
            found, _, do = reason.partition("; ")
            yield Finding(PROBLEM, "servers", f"Process {pid} ({name}): {found}", do)


def processes(run: Running) -> Iterator[Finding]:
    """What keeps whole processes from being patched, or from being the ones that are meant."""
    for content in run.live:
        who = _name(content)
        if error := content.get("error"):
            yield Finding(PROBLEM, "processes", f"{who}: {error}", "correct it, and restart the server", bad_input=True)
        if (version := content.get("h2d_patch")) != __version__:
            do = "two versions are installed, or one was upgraded while the server ran: restart it"
            yield Finding(WARNING, "processes", f"{who} runs h2d_patch {version}, this is {__version__}", do)
        if why := content.get("control"):
            do = "the last good switches stay; h2d-patch switch writes the file anew"
            yield Finding(PROBLEM, "processes", f"{who} refuses its control file: {why}", do, bad_input=True)
        yield from _device(who, content)
    known = set(run.pids())
    for pid, name, env in run.servers:
        if pid in known or status.left_out(env, expects=True):
            continue
        who, place = f"process {pid} ({name}) has H2D_PATCH set", run_dir(env)
        if why := _refused(place):
            yield Finding(WARNING, "servers", f"{who}, and no state of it can be read: {why}", _mend(place))
        elif not _has_state(pid, place):
            do = "if it is not just starting: its log says why, or the plugin is missing in its Python"
            yield Finding(WARNING, "servers", f"{who}, and no state in its run directory, {place}", do)
    yield from _without_workers(run)


def fixes(run: Running, asked: Asked) -> Iterator[Finding]:
    """The verdicts: of the live processes, or, where there are none, on the vLLM that is installed."""
    if run.is_patched:
        yield from _live_fixes(run)
        return
    try:
        found = list(check(asked.manifest, Site(), asked.selected))
    except ConfigurationError:
        return  # said with the versions
    by_fix = defaultdict(list)
    for row in found:
        if row.fix in asked.selected:
            by_fix[row.fix].append(row)
    for fix, rows in by_fix.items():
        refused = [row for row in rows if row.verdict.value == "refused"]
        for row in refused:
            yield Finding(PROBLEM, "fixes", f"{fix} is refused in {status.short(row.function)}: {row.reason}", _REFUSED)
        count = Counter(row.verdict.value for row in rows)
        if not refused:
            shown = ", ".join(f"{verdict} {number}" for verdict, number in count.items() if verdict != "absent")
            missing = "" if shown else _not_found([(row.function, row.reason) for row in rows])
            text = f"{fix}: {shown or missing or 'this release needs none of it'} ({_why_sources(run)}; by its sources)"
            yield Finding(WARNING if missing else OK, "fixes", text, _FIND if missing else "")


_FIND = "put it where the server's Python finds it (PYTHONPATH), or correct the function in the manifest"


def _why_sources(run: Running) -> str:
    """Why the verdicts are not those of running processes."""
    if run.is_unread:
        return "no state can be read"
    if run.live:
        return "no running process has a fix in"
    return "no running server has its state here" if run.servers else "nothing runs"


def _not_found(absent: Sequence[tuple[str, str]]) -> str:
    """Why a fix goes in nowhere, by functions and reasons of its targets; empty where one is in vLLM.

    What a release of vLLM has not it does not need. That of a module of the user's own is mostly an error.
    """
    in_vllm = any(function.startswith("vllm.") for function, _ in absent)
    return "" if in_vllm else "; ".join(dict.fromkeys(reason for _, reason in absent))


_REFUSED = "the function stays as it is; H2D_PATCH=all,-FIX leaves the fix out"
_FAILED = "the original runs; report it with h2d-patch doctor --json"
_KEPT_OFF = "docs/operate.md says why; it is not to be turned on there"


def _live_fixes(run: Running) -> Iterator[Finding]:
    by_fix: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for content in run.live:
        for target in content["targets"]:
            if (target["verdict"], target["reason"]) != ("off", status.NOT_SELECTED):
                by_fix[target["fix"]].append((content, target))
    for fix, found in by_fix.items():
        said: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for content, target in found:
            if not_in := _not_in(fix, content, target):
                said[not_in].append(_name(content))
        for (level, text, do), whose in said.items():
            names = list(dict.fromkeys(whose))
            more = len(names) - _MOST_REASONS
            whom = ", ".join(names[:_MOST_REASONS]) + (f" and {more} more" if more > 0 else "")
            yield Finding(level, "fixes", f"{text} ({whom})", do)
        yield from _calls(fix, [target for _, target in found], bool(said))


def _not_in(fix: str, content: dict[str, Any], target: dict[str, Any]) -> tuple[str, str, str] | None:
    """Level, words and what to do for a target that should run and does not; None where there is nothing to say."""
    verdict, reason = target["verdict"], target["reason"]
    if verdict in status.BAD:
        text = f"{fix} {verdict} in {status.short(target['function'])}: {reason}"
        return PROBLEM, text, _REFUSED if verdict == "refused" else _FAILED
    if verdict != "off":
        return None
    ab = content.get("ab") or {}
    if reason == status.SWITCHED_OFF and ab.get("fix") == fix and ab.get("ended") is None:
        return OK, f"{fix} is off in this slice of an A/B", ""
    return (
        WARNING,
        f"{fix} is off: {reason}",
        f"h2d-patch switch {fix} on" if reason == status.SWITCHED_OFF else _KEPT_OFF,
    )


def _calls(fix: str, targets: list[dict[str, Any]], said: bool) -> Iterator[Finding]:
    active = [target for target in targets if target["verdict"] == "active"]
    calls, fallbacks = (sum(target[key] for target in active) for key in ("calls", "fallbacks"))
    reasons: Counter[str] = Counter()
    for target in active:
        reasons.update(target.get("fallback_reasons") or {})
    if calls >= _MANY_CALLS and fallbacks * 2 > calls:
        shown = "; ".join(f"{number} × {reason}" for reason, number in reasons.most_common(_MOST_REASONS))
        yield Finding(
            WARNING,
            "fixes",
            f"{fix}: {fallbacks} of {calls} calls were left to the original: {shown}",
            "where staging is full or too small, raise H2D_PATCH_PINNED_MB; docs/operate.md has the other reasons",
        )
    elif active:
        times = "once" if calls == 1 else f"{calls} times"
        how_often = f"called {times}, {fallbacks} left to the original" if calls else "not called so far"
        yield Finding(OK, "fixes", f"{fix}: active, {how_often}")
    elif not said:
        yield _nowhere(fix, targets)


def _nowhere(fix: str, targets: list[dict[str, Any]]) -> Finding:
    """Of a fix that no process has in, and in which nothing went wrong."""
    if reason := next((t["reason"] for t in targets if t["reason"].startswith(status.DOES_NOT_APPLY)), ""):
        return Finding(OK, "fixes", f"{fix}: not in ({reason})")
    by_function = defaultdict(set)
    for target in targets:
        by_function[target["function"]].add(target["verdict"])
    unloaded = [function for function, verdicts in by_function.items() if verdicts == {"pending"}]
    count = Counter(target["verdict"] for target in targets)
    if unloaded and count.keys() <= {"pending", "absent"}:
        return Finding(OK, "fixes", f"{fix}: not loaded by any process so far ({_unused(unloaded)})")
    if count.keys() == {"absent"} and (missing := _not_found([(t["function"], t["reason"]) for t in targets])):
        return Finding(WARNING, "fixes", f"{fix}: not in ({missing})", _FIND)
    shown = ", ".join(f"{verdict} {number}" for verdict, number in count.items())
    return Finding(OK, "fixes", f"{fix}: not in ({shown})")


def _unused(functions: Iterable[str]) -> str:
    """What a server has not that would load the modules of these functions."""
    modules = list(dict.fromkeys(function.partition(":")[0] for function in functions))
    if all(_OFFLOADING in module for module in modules):
        return "no KV connector that offloads"
    names = [module.rpartition(".")[2] for module in modules]
    more = len(names) - _MOST_REASONS
    return f"its modules: {', '.join(names[:_MOST_REASONS])}{f' and {more} more' if more > 0 else ''}"


def _device(who: str, content: dict[str, Any]) -> Iterator[Finding]:
    device = content.get("device", {})
    if device.get("staging_bytes") == 0:
        yield Finding(
            PROBLEM,
            "processes",
            f"{who} has no staging region, so that every copy is left to the original",
            "the notes say why; look at the memory limits, and at H2D_PATCH_PINNED_MB",
        )
    for note in device.get("notes", ()):
        yield Finding(WARNING, "processes", f"{who}: {note}", "docs/operate.md says what it means")


def _refused(directory: Path) -> str | None:
    """Why a run directory is not used; None where nothing is in the way, or it is not there."""
    try:
        checked_run_dir(directory)
    except FileNotFoundError:
        return None
    except ConfigurationError as error:
        return str(error)
    return None


def _mend(directory: Path) -> str:
    """What makes a directory that is refused a run directory again."""
    with contextlib.suppress(OSError):
        found = directory.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return f"chmod 700 {shlex.quote(str(directory))} mends it, without a restart"
        if stat.S_ISDIR(found.st_mode):
            return "run doctor as its owner, if that is the server's user, or name another (H2D_PATCH_RUN_DIR)"
    return "remove it, or name another (H2D_PATCH_RUN_DIR)"


def _has_state(pid: int, directory: Path) -> bool:
    """Whether a process has written its state elsewhere than where we look."""
    try:
        return any(directory.glob(f"state-*-{pid}.json"))
    except OSError:
        return False


def _without_workers(run: Running) -> Iterator[Finding]:
    by_server: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for content in run.live:
        if "error" not in content:
            by_server[str(content.get("server"))].append(content)
    for server, contents in by_server.items():
        roles = {content["role"] for content in contents}
        age = time.time() - min(float(content.get("started", time.time())) for content in contents)
        if "engine-core" in roles and "worker" not in roles and age > _STARTED_S:
            yield Finding(
                WARNING,
                "processes",
                f"no worker of the server {server} has written its state",
                "workers on other hosts have a run directory of their own there; with Ray, h2d_patch must be installed "
                "on every node",
            )


def _name(content: dict[str, Any]) -> str:
    rank = f" {content['rank']}" if content.get("rank") is not None else ""
    return f"{status.ROLES.get(content['role'], content['role'])}{rank}, process {content['pid']}"
