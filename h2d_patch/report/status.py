"""`h2d-patch status`: what is in, in every process that has written its state, and why nothing is where nothing is."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .state import ProcessState

ENTRY_POINT = "h2d_patch"
# Reasons that both the process that writes them and the table know.
NOT_SELECTED = "not selected by H2D_PATCH"
DOES_NOT_APPLY = "does not apply"
SWITCHED_OFF = "switched off"
BAD = ("refused", "failed")
_WIDTH = 120  # of a line of many words
ROLES = {
    "api-server": "API server",
    "engine-core": "engine core",
    "worker": "worker",
    "inspector": "inspector",
    "coordinator": "coordinator",
}


def as_json(states: Iterable[ProcessState], why_nothing: Sequence[str]) -> dict[str, Any]:
    """`processes` (with `alive`), and `notes`: why nothing is in, where that can be told."""
    return {"processes": [{**state.content, "alive": state.alive} for state in states], "notes": list(why_nothing)}


def as_text(states: Sequence[ProcessState], directory: Path, why_nothing: Sequence[str], everything: bool) -> str:
    """One table for each process, of what an operator would act on, and for each server the fixes that are in none.

    Where `everything` is asked for, of every target.
    """
    parts = [_process(state, everything) for state in states]
    if not everything:
        parts += _in_no_process(states)
    if not states:
        parts.append(
            f"No process has written its state to {directory}. "
            "(status must run as the server's user, with the same H2D_PATCH_RUN_DIR.)"
        )
    return "\n\n".join([*parts, *why_nothing])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def short(function: str) -> str:
    """`module:Class.name` with only the module's last part: enough for a person to know it by."""
    module, _, name = function.partition(":")
    return f"{module.rpartition('.')[2]}:{name}"


def why_nothing(environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[str]:
    """Reasons why no fix is in, from this environment and from those of this user's running vLLM processes."""
    reasons = [f"In this environment, {reason}." for reason in left_out(environ, expects=False)]
    for pid, name, env in serving(proc):
        reasons += [f"Process {pid} ({name}): {reason}." for reason in left_out(env, expects=True)]
    return reasons


def serving(proc: Path = Path("/proc")) -> Iterator[tuple[int, str, dict[str, str]]]:
    """The pid of each of this user's processes that was started as a vLLM server, what it runs, and its environment."""
    for directory in proc.glob("[0-9]*"):
        try:
            arguments = (directory / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            name = _serves(arguments)
            if name is None or int(directory.name) == os.getpid():
                continue
            pairs = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(directory.name), name, dict(pair.partition("=")[::2] for pair in pairs)


def _serves(arguments: Sequence[str]) -> str | None:
    """What a command line starts of vLLM, `vllm serve` or a module of it run as a program; None: something else.

    None of its arguments: a key may be among them.
    """
    names = [os.path.basename(argument) for argument in arguments[:3]]
    if "vllm" in names[:2] and "serve" in arguments[1:3]:
        return "vllm serve"
    for flag, module in itertools.pairwise(arguments):
        if flag == "-m" and module.startswith("vllm.") and module != "vllm.model_executor.models.registry":
            return f"python -m {module}"
    return None


def left_out(environ: Mapping[str, str], expects: bool) -> list[str]:
    """Why nothing is patched in a process with this environment; `expects`: although it is a server of vLLM's."""
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and ENTRY_POINT not in plugins.split(","):
        return [f"VLLM_PLUGINS={plugins!r} leaves {ENTRY_POINT} out; add it, or unset the variable"]
    if expects and environ.get("H2D_PATCH", "").strip() in ("", "0"):
        return ["H2D_PATCH is not set, so nothing is patched; set H2D_PATCH=1 and restart"]
    return []


def _process(state: ProcessState, everything: bool) -> str:
    content = state.content
    role = ROLES.get(content.get("role", ""), str(content.get("role")))
    rank = f" {content['rank']}" if content.get("rank") is not None else ""
    if engine := content.get("data_parallel_rank"):  # of the first one nothing is said: mostly it is the only one
        rank += f" of data-parallel rank {engine}"
    dead = "" if state.alive else "  (dead; h2d-patch status --clean removes it)"
    title = f"{content['pid']}  {role}{rank}  vLLM {content.get('vllm') or 'unknown'}  server {content['server']}{dead}"
    if not state.alive and not everything and "error" not in content:
        return title
    if error := content.get("error"):
        return f"{title}\n  {error}"
    targets = content.get("targets", [])
    shown = [target for target in targets if everything or not left_out_of_table(target)]
    idle = [] if everything or content.get("role") == "worker" else _idle(shown)
    rows = [
        [
            target["fix"],
            short(target["function"]),
            target["verdict"],
            str(target["calls"]),
            str(target["fallbacks"]),
            "" if target.get("selftest_ms") is None else f"{target['selftest_ms']:.1f}",
            target["reason"],
        ]
        for target in shown
        if target not in idle
    ]
    device = content.get("device", {})
    notes = _in_lines(idle)
    notes += [f"  device profile: {device['profile']}"] if device.get("profile") else []
    notes += [f"  {note}" for note in device.get("notes", [])]
    notes += [f"  the switches stay as they are: {content['control']}"] if content.get("control") else []
    notes += [f"  {_ab(content['ab'])}"] if content.get("ab") else []
    if not everything and (hidden := Counter(filter(None, map(left_out_of_table, targets)))):
        notes.append(f"  and {', '.join(f'{number} {why}' for why, number in hidden.items())} (--all shows them)")
    if not rows:
        return "\n".join([title, *notes])
    header = ["fix", "function", "verdict", "calls", "fallbacks", "self-test ms", "reason"]
    return "\n".join([title, table(header, rows), *notes])


def _idle(targets: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What is in a process that has called nothing, or off there: the workers' tables have it with its calls."""
    if any(target["calls"] or target["fallbacks"] for target in targets):
        return []
    return [target for target in targets if target["verdict"] in ("active", "off")]


def _in_lines(idle: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for what is active, and for each reason why something is off; fixes with the number of their functions."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for target in idle:
        kinds["active" if target["verdict"] == "active" else f"off ({target['reason']})"][target["fix"]] += 1
    return [
        textwrap.fill(
            f"{kind}, not called here: "
            + ", ".join(f"{fix} in {number} functions" if number > 1 else fix for fix, number in fixes.items()),
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for kind, fixes in kinds.items()
    ]


def _in_no_process(states: Iterable[ProcessState]) -> Iterator[str]:
    """Of each live server, the selected fixes that no process's table has: what became of them."""
    servers: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        selected = state.content.get("switches", {})
        for target in state.content.get("targets", []) if state.alive else []:
            if target["fix"] in selected:
                servers[state.content["server"]][target["fix"]].append(target)
    for server, fixes in servers.items():
        unseen = {fix: targets for fix, targets in fixes.items() if all(map(left_out_of_table, targets))}
        if unseen:
            lines = (f"  {fix}: {_what_became_of(targets)}" for fix, targets in unseen.items())
            yield "\n".join([f"in no process of server {server}:", *lines])


def _what_became_of(targets: Sequence[Mapping[str, Any]]) -> str:
    verdicts = {target["verdict"] for target in targets}
    if "pending" in verdicts:
        return "pending, its modules are not loaded"
    reasons = {target["reason"] for target in targets} - {""}
    why = reasons.pop() if len(reasons) == 1 else "this release does not need it"
    return f"{' or '.join(sorted(verdicts))}, {why}"


def _ab(ab: Mapping[str, Any]) -> str:
    """What a process says of its A/B: the slices that count, and what a call took in each arm."""
    words = []
    for arm in ("off", "on"):
        found = ab["arms"][arm]
        mean = f", {found['seconds'] / found['count'] * 1e6:.1f} µs each" if found["count"] else ""
        words.append(f"{arm} {found['count']} calls{mean}")
    left_out = [f"{number} left out: {why}" for why, number in ab["left_out"].items()]
    now = f"over: {ab['ended']}" if ab["ended"] else "not begun" if ab["on"] is None else "on" if ab["on"] else "off"
    return f"A/B of {ab['fix']}, slices of {ab['slice_s']:g} s, now {now}; {'; '.join([*words, *left_out])}"


def left_out_of_table(target: Mapping[str, Any]) -> str | None:
    """Why a row would tell an operator nothing: this process has no use for the target, or nobody asked for it."""
    verdict, reason = target["verdict"], target["reason"]
    if verdict == "pending":
        return "whose modules this process has not loaded"
    if verdict == "off" and reason == NOT_SELECTED:
        return "not selected"
    if verdict in ("absent", "upstream") and not reason.startswith(DOES_NOT_APPLY):
        return "that this release does not need"
    return None


def _is_number(text: str) -> bool:
    return text == "" or text.replace(".", "", 1).isdigit()
