"""All that is looked at, in turn. What takes too long or fails is a finding like any other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...patching.switch import last_line
from . import environment, installation, machine, profiles, servers
from .environment import Asked
from .finding import PROBLEM, WARNING, Finding

PATIENCE_S = 30.0


@dataclass
class Examination:
    """The findings, what was asked for, and the versions that are installed."""

    findings: list[Finding] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)
    versions: Mapping[str, str] = field(default_factory=dict)


def examine(
    environ: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S, proc: Path = Path("/proc")
) -> Examination:
    """Looks at everything. Raises nothing, and waits for nothing longer than `patience_s`.

    `environ`: this process's if not given; of running servers, which are looked for in `proc`, their own is read.
    """
    env = os.environ if environ is None else environ
    seen = Examination()

    def look(about: str, ask: Callable[[], Iterable[Finding]]) -> None:
        seen.findings += list(_bounded(about, ask, patience_s))

    def read_environment() -> Iterable[Finding]:
        seen.asked, found = environment.asked(env)
        return found

    def read_versions() -> Iterable[Finding]:
        seen.versions = installation.versions()
        return installation.release(seen.versions)

    look("variables", read_environment)
    look("plugin", lambda: installation.plugin(env))
    look("versions", read_versions)
    look("Ray", lambda: installation.under_ray(env))
    run = servers.Running(proc=proc)
    look("run directory", lambda: servers.run_directory(seen.asked.settings.run_dir, run))
    look("variables", lambda: environment.variables(env, run.is_seen, seen.asked.unusable))
    look("servers", lambda: servers.unpatched(run))
    look("processes", lambda: servers.processes(run))
    look("fixes", lambda: servers.fixes(run, seen.asked))
    devices: list[machine.Device] = []
    look("driver", lambda: machine.driver(env, devices))
    look("memory", lambda: machine.memory(seen.asked.settings.pinned_bytes, run.pids(), len(devices), run.is_unpinned))
    look("compiler", lambda: machine.compiler(env))
    look("profile", lambda: profiles.profiles(seen.asked.settings, devices, run))
    return seen


def exit_status(findings: Iterable[Finding]) -> int:
    """0: no problem; 1: something does not work; 2: and a setting or a file is what is wrong."""
    problems = [finding for finding in findings if finding.level == PROBLEM]
    return 2 if any(finding.bad_input for finding in problems) else 1 if problems else 0


def _bounded(about: str, ask: Callable[[], Iterable[Finding]], patience_s: float) -> Iterator[Finding]:
    """What `ask` finds; a file system or a driver that does not answer is left waiting in a thread of its own."""
    found: list[Finding] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            for finding in ask():
                found.append(finding)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"h2d_patch-doctor-{about}", daemon=True)
    thread.start()
    thread.join(patience_s)
    yield from list(found)
    if thread.is_alive():
        yield Finding(WARNING, about, f"no answer within {patience_s:g} s", "look at what it would have to read")
    for error in errors:
        yield Finding(PROBLEM, about, f"doctor itself failed here: {last_line(error)}", "report it, with this text")
