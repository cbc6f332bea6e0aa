"""releases.json → what vLLM's releases look like: a hash of each function that a fix touches, and the verdicts on it.

The file is made by tools/releases.py (`make releases`). It never decides a verdict: sources do. It says whether an
installed function is the release's own, and whether a release is one that anyone has looked at.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from .manifest import Fix
from .patching.recognise import Target, Verdict

SCHEMA = 1
FILE = Path(__file__).with_name("releases.json")
# What fixes touch in other packages is not the release's: it leaves open which version of them is installed.
_PACKAGE = "vllm"
LETTERS = {"A": Verdict.APPLIES, "U": Verdict.UPSTREAM, "N": Verdict.ABSENT, "R": Verdict.REFUSED}
NONE = "-"


@dataclass(frozen=True)
class Release:
    """One release: of each function the hash of its source (None: it has no such function), of each target the verdict.

    Targets are called `FIX FUNCTION`, and `FIX FUNCTION #2` where a fix has another for the same function.
    """

    sources: Mapping[str, str | None]
    verdicts: Mapping[str, Verdict]


@dataclass(frozen=True)
class Releases:
    """Every release that has been looked at, oldest first. `problem` says why the table could not be read."""

    known: Mapping[Version, Release] = field(default_factory=dict)
    problem: str = ""

    def about(self, release: str | None) -> str:
        """A sentence on a release that nobody has looked at yet; empty where it is known."""
        if self.problem:
            return f"{self.problem}; sources alone are judged"
        if not self.known:
            return ""
        version = _parsed(release)
        if version is None:
            return f"which vLLM release this is cannot be told (found {release!r}); it is judged by its sources alone"
        if _public(version) in self.known:
            return ""
        oldest, newest = min(self.known), max(self.known)
        if version > newest:
            return f"vLLM {release} is new (later than {newest}, the last known here): judged by its sources alone"
        return f"vLLM {release} is none of the releases known here ({oldest} to {newest}): judged by its sources alone"

    def difference(self, function: str, source: str | None, release: Version | None) -> str:
        """How an installed function, whose source has the hash `source`, differs from the release's own; or empty."""
        if release is None:
            return ""
        release = _public(release)
        known = self.known.get(release)
        if known is None or function not in known.sources or known.sources[function] == source:
            return ""
        if known.sources[function] is None:
            return f"differs from the release's own: vLLM {release} has no such function"
        if source is None:
            return f"differs from the release's own: vLLM {release} has this function"
        return f"its source differs from the release's own, vLLM {release}"


def named(targets: Iterable[tuple[Fix, Target]]) -> Iterator[tuple[str, Target]]:
    """The targets that are vLLM's own functions, each with the name that it has in the table."""
    seen: dict[str, int] = {}
    for fix, target in targets:
        if target.module.partition(".")[0] == _PACKAGE:
            name = f"{fix.id} {target.function}"
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), target


@functools.cache
def shipped() -> Releases:
    """The table in the package. A damaged one is none: it is there to be told more, not to keep fixes out."""
    try:
        return parse(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        return Releases(problem=f"{FILE.name} cannot be read ({type(error).__name__}: {error})")


def parse(text: str) -> Releases:
    """Raises what a document of another shape happens to raise."""
    document: Any = json.loads(text)
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema: found {document['schema']!r}; expected {SCHEMA}")
    sources, targets = document["sources"], document["targets"]
    known = {}
    for release, row in document["releases"].items():
        numbers = row["sources"].split()
        hashes = {
            function: None if number == NONE else hashes[int(number)]
            for (function, hashes), number in zip(sources.items(), numbers, strict=True)
        }
        verdicts = {name: LETTERS[letter] for name, letter in zip(targets, row["verdicts"], strict=True)}
        known[Version(release)] = Release(hashes, verdicts)
    return Releases(dict(sorted(known.items())))


def _public(version: Version) -> Version:
    """Without the local part that says who built it: `0.22.1+cpu` is 0.22.1, built for CPUs."""
    return Version(version.public)


def _parsed(release: str | None) -> Version | None:
    try:
        return Version(release) if release else None
    except InvalidVersion:
        return None
