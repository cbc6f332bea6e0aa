"""What the environment asks for: our variables, VLLM_PLUGINS, and the manifest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ...manifest import Manifest, load
from ...report import status
from ...settings import VARIABLES, ConfigurationError, Settings
from .finding import OK, PROBLEM, WARNING, Finding

_NAMED = re.compile(r"H2D_PATCH\w*")


@dataclass(frozen=True)
class Asked:
    """What can be read of it. `selected`: fix ids; those that are on by default where nothing is selected.

    `unusable`: the variables that a server would stop at.
    """

    settings: Settings = field(default_factory=lambda: Settings.from_environ({}))
    manifest: Manifest = field(default_factory=lambda: Manifest({}))
    selected: frozenset[str] = frozenset()
    unusable: frozenset[str] = frozenset()


def ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be shown: of one that we do not know, only that it is there."""
    names = sorted(name for name in environ if name.startswith("H2D_PATCH") or name == "VLLM_PLUGINS")
    return {name: environ[name] if name in (*VARIABLES, "VLLM_PLUGINS") else "(unknown)" for name in names}


def asked(environ: Mapping[str, str]) -> tuple[Asked, list[Finding]]:
    """Reads it as a server would; what a server would stop at is left out, and is a finding."""
    env, found, unusable = dict(environ), [], set()
    settings = Settings.from_environ({})
    for _ in VARIABLES:
        try:
            settings = Settings.from_environ(env)
            break
        except ConfigurationError as error:
            found.append(_unusable("variables", error))
            unusable.add(name := _named(error))
            if env.pop(name, None) is None:
                break
    manifest = Manifest({})
    for path in dict.fromkeys((settings.manifest, None)):
        try:
            manifest = load(path)
            break
        except ConfigurationError as error:
            found.append(_unusable("manifest", error))
    selected = frozenset(fix for fix, default in manifest.defaults.items() if default)
    try:
        selected = settings.selection.fixes(manifest.defaults) if settings.selection else selected
        settings.check_ab(manifest.defaults, selected if settings.selection else None)
    except ConfigurationError as error:
        unusable.add(_named(error))
        found.append(_unusable("variables", error))
    if settings.manifest and not found:
        found.append(Finding(OK, "manifest", f"{settings.manifest} can be read"))
    return Asked(settings, manifest, selected, frozenset(unusable)), found


def variables(environ: Mapping[str, str], runs: bool, unusable: Collection[str] = ()) -> Iterator[Finding]:
    """`runs`: whether a server runs, whose own environment counts; `unusable`: variables of which that is said."""
    said = environ.get("H2D_PATCH", "").strip()
    what = f"H2D_PATCH={said!r} here" if said else "H2D_PATCH is not set here"
    if said in ("", "0"):
        if runs:
            yield Finding(OK, "variables", f"{what}; {_THEIRS}")
        else:
            do = "set H2D_PATCH=1 where the server is started; restart"
            yield Finding(PROBLEM, "variables", f"{what}: nothing is patched", do)
    elif "H2D_PATCH" not in unusable:
        yield Finding(OK, "variables", f"H2D_PATCH={said!r}")
    for reason in status.left_out(environ, expects=False):
        found, _, do = reason.partition("; ")
        if runs:
            yield Finding(OK, "variables", f"{found} in this environment; {_THEIRS}")
        else:
            yield Finding(PROBLEM, "variables", f"{found} in this environment", do)
    for name in environ:
        if name.startswith("H2D_PATCH") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, 1, 0.7)
            yield Finding(
                WARNING,
                "variables",
                f"{name} is set, and nothing reads it",
                f"{near[0]} may be meant" if near else f"those that are read: {', '.join(VARIABLES)}",
            )


_THEIRS = "the running servers have their own environment"


def _named(error: ConfigurationError) -> str:
    """The variable that an error begins with; empty where it is about something else."""
    found = _NAMED.match(str(error))
    return found[0] if found else ""


def _unusable(about: str, error: ConfigurationError) -> Finding:
    found, _, expected = str(error).partition("; expected ")
    return Finding(PROBLEM, about, found, f"expected {expected}" if expected else "correct it", bad_input=True)
