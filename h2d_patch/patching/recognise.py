"""Verdicts from source: is this function one that we know, does upstream's fix stand in it, or neither?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .pattern import Definition, Pattern, normal_form
from .rewrite import ModuleSource, Refused, Rewrite, of_self


class Verdict(str, Enum):
    """What became of one target in one process; `APPLIES` is what a static check says instead of the first two."""

    PENDING = "pending"
    ACTIVE = "active"
    OFF = "off"
    UPSTREAM = "upstream"
    ABSENT = "absent"
    REFUSED = "refused"
    FAILED = "failed"
    APPLIES = "applies"


@dataclass(frozen=True)
class Replace:
    """A whole function to be replaced by a copy function called `put`.

    `known` are the hashes of sources that it may stand in for; `given` makes arguments for its self-test.
    """

    put: str
    known: frozenset[str]
    upstream: tuple[Pattern, ...] = ()
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """One function of one fix. Exactly one of `rewrites` and `replace` says what happens to it.

    `releases` are those known to have the fault: elsewhere its absence is no surprise. `owner` names the attribute of
    the worker whose object must have this method for it ever to run. `supersedes` says why ours takes the place of
    upstream's own fix where both could stand.
    """

    function: str
    releases: SpecifierSet
    rewrites: tuple[Rewrite, ...] = ()
    replace: Replace | None = None
    fixed_in: str | None = None
    owner: str | None = None
    supersedes: str | None = None
    note: str | None = None

    @property
    def span(self) -> str:
        """`releases` for a person, its beginning first."""
        return ",".join(sorted(map(str, self.releases), key=lambda part: part[0] != ">")) or "of any release"

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.function.partition(":")[2]


@dataclass(frozen=True)
class Recognition:
    verdict: Verdict
    reason: str


def recognise(target: Target, source: ModuleSource, definition: Definition, release: Version | None) -> Recognition:
    """The verdict on one definition of `target`'s function: applies, upstream, absent (nothing to fix) or refused."""
    results = (
        [_replaceable(target.replace, definition)]
        if target.replace
        else [_rewritable(rewrite, source, definition, target.supersedes) for rewrite in target.rewrites]
    )
    verdicts = {result.verdict for result in results}
    verdict = verdicts.pop() if len(verdicts) == 1 else Verdict.REFUSED
    reason = "; ".join(dict.fromkeys(result.reason for result in results if result.verdict != Verdict.APPLIES))
    if verdict is Verdict.APPLIES and target.supersedes:
        reason = f"ours takes the place of upstream's fix: {target.supersedes}"
    elif verdict is Verdict.APPLIES:
        reason = target.note or ""
    elif verdict is Verdict.UPSTREAM and target.fixed_in:
        reason = f"{reason} (since {target.fixed_in})"
    if verdict is Verdict.REFUSED and release is not None and not target.releases.contains(release, prereleases=True):
        return Recognition(
            Verdict.ABSENT, f"not in this release: the fault is in vLLM {target.span}, and here {reason}"
        )
    return Recognition(verdict, reason)


def recognise_statically(target: Target, source: ModuleSource | None, release: Version | None) -> Recognition:
    """The verdict from a module's source alone; `source` is None where the release has no such module."""
    if source is None:
        return Recognition(Verdict.ABSENT, f"there is no module {target.module} here")
    definitions = [definition for definition in source.named(target.qualname) if not _only_typed(definition)]
    if not definitions:
        return Recognition(Verdict.ABSENT, f"this release has no {target.qualname} in {target.module}")
    found = [recognise(target, source, definition, release) for definition in definitions]
    if len({result.verdict for result in found}) > 1:
        return Recognition(Verdict.REFUSED, f"{target.qualname} is defined {len(found)} times, in different forms")
    return found[0]


def _only_typed(definition: Definition) -> bool:
    """Whether it is one of several signatures that stand in front of a function for type checkers."""
    return any(getattr(part, "attr", getattr(part, "id", "")) == "overload" for part in definition.decorator_list)


def source_hash(definition: Definition) -> str:
    """A hash of what a definition means: not of comments, formatting, annotations or docstring."""
    return hashlib.sha256(repr(normal_form(definition)).encode()).hexdigest()[:16]


def function_hash(source: ModuleSource | None, qualname: str) -> str | None:
    """`source_hash` of the function `qualname`, over all of its definitions; None where it has none."""
    hashes = [source_hash(definition) for definition in source.named(qualname)] if source is not None else []
    if len(hashes) > 1:
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
    return hashes[0] if hashes else None


def _rewritable(rewrite: Rewrite, source: ModuleSource, definition: Definition, supersedes: str | None) -> Recognition:
    if not supersedes and _has_any(rewrite.upstream, definition):
        return _UPSTREAM
    try:
        rewrite.matches(definition)
    except Refused as refusal:
        return Recognition(Verdict.REFUSED, str(refusal))
    # One that a vendor has renamed would be missed in the middle of a request.
    if missing := sorted(rewrite.needs() - of_self([source.scope(definition)])):
        reason = f"its class does not use self.{missing[0]}, which the new expression needs"
        return Recognition(Verdict.REFUSED, reason)
    return Recognition(Verdict.APPLIES, "")


def _replaceable(replace: Replace, definition: Definition) -> Recognition:
    found = source_hash(definition)
    if found in replace.known:
        return Recognition(Verdict.APPLIES, "")
    if _has_any(replace.upstream, definition):
        return _UPSTREAM
    return Recognition(Verdict.REFUSED, f"its source (hash {found}) is not one that we know")


def _has_any(patterns: tuple[Pattern, ...], definition: Definition) -> bool:
    return any(pattern.find(definition) for pattern in patterns)


_UPSTREAM = Recognition(Verdict.UPSTREAM, "this release has upstream's own fix")
