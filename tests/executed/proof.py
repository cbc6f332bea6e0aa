"""A form is run as the release has it, with the fix off and on, without staging, and with copies that are wrong."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from forms import CASES, PASSED_BY, Form, World, source_of, targets
from pretended import Pretended, frozen, tensors_in
from triton.runtime.interpreter import InterpretedFunction
from watched import Watched

from h2d_patch.copies import forced_staging, staging, swap_kernel
from h2d_patch.patching.install import build_rewrite, install_replacement
from h2d_patch.patching.locate import Located
from h2d_patch.patching.recognise import Target, Verdict, function_hash, recognise
from h2d_patch.patching.rewrite import ModuleSource
from h2d_patch.patching.switch import Site

STAGING_BYTES = 1 << 18


@contextlib.contextmanager
def without_a_device() -> Iterator[None]:
    """What torch would need a GPU for does nothing: pinning, streams, events. Kernels are interpreted."""
    log: list[Any] = []
    with contextlib.ExitStack() as stack:
        interpreted = InterpretedFunction(swap_kernel._copy_blocks)
        stack.enter_context(mock.patch.object(swap_kernel, "copy_blocks", interpreted))
        for name in ("zeros", "empty", "full", "tensor", "empty_like", "zeros_like"):
            made = getattr(torch, name)
            stack.enter_context(mock.patch.object(torch, name, _unpinned(made)))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self.clone()))
        for name in ("stream", "current_stream", "Stream", "Event", "device"):
            stack.enter_context(mock.patch.object(torch.cuda, name, Pretended(f"torch.cuda.{name}", log)))
        stack.enter_context(mock.patch.object(torch, "Event", Pretended("torch.Event", log)))
        yield


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


@dataclass(frozen=True)
class Ran:
    """One run of a function: what it gave, did and left behind; the site of the fix; the lines that copied through the
    site; whether the staging ring was used."""

    outcome: Any
    site: Site
    lines: set[int]
    staged: bool


def run(form: Form, arm: str) -> Ran:
    """Runs the function of `form`.

    `arm`: "original" is the release's own code; "off" and "on" are the rewritten one; "unstaged" is "on" where there is
    no staging, "spoilt" is "on" with copies that are wrong.
    """
    target = targets()[form.target]
    source = source_of(form.release, target.module)
    world, site = World(source), Site()
    torch.manual_seed(0)
    with without_a_device(), forced_staging(STAGING_BYTES) as ring:
        watched = Watched(ring if arm != "unstaged" else None, spoilt=arm == "spoilt")
        if arm == "unstaged":
            staging._thread.forced = None
        call = CASES[form.function](world, form)
        function: Callable[..., Any] = world.function(target.qualname)
        if arm == "original":
            result = call(function)
        else:
            function, undo = fixed(target, source, function, site, watched)
            site.on = arm != "off"
            result = call(function)
            undo()
        outcome = frozen([result, world.watched, world.log], deep=True)
    return Ran(outcome, site, watched.lines, staged=ring._reserved > 0)


def fixed(
    target: Target, source: ModuleSource, function: Any, site: Site, watched: Watched
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The function with one target in it, and what takes that out."""
    definition = source.definition_of(target.qualname, function.__code__)
    if target.replace:
        holder = types.ModuleType(target.module)
        setattr(holder, target.qualname, function)
        watched.bind(site, target.replace.put)
        located = Located(holder, target.qualname, function, function, ())
        undo = install_replacement(located, getattr(site, target.replace.put), site)
        return getattr(holder, target.qualname), undo
    for name in {name for rewrite in target.rewrites for name in rewrite.put.called()}:
        watched.bind(site, name)
    return function, build_rewrite(function, source, definition, target.rewrites, site)()


def places(form: Form) -> set[int]:
    """The lines in which the function calls what copies."""
    target = targets()[form.target]
    definition = source_of(form.release, target.module).named(form.qualname)[-1]
    calling = [rewrite for rewrite in target.rewrites if rewrite.put.called()]
    return {match.line for rewrite in calling for match in rewrite.matches(definition)}


class NotRun(Exception):
    """The release's own function does not run with the stand-ins that its case has; the text is the table's."""


def said(form: Form) -> str:
    """What the table says of a form that `prove` passes."""
    return "; ".join(["yes", *(f"but for one copy: {reason}" for reason in PASSED_BY.get(form.function, ()))])


def prove(form: Form) -> None:
    """Raises AssertionError unless the fixed function does what the release's own does, through a copy of ours.

    Raises NotRun where nothing can be said.
    """
    if form.function not in CASES:
        raise NotRun("no: what it touches has not been written down")
    target = targets()[form.target]
    source = source_of(form.release, target.module)
    assert function_hash(source, form.qualname) == form.source, "the release has another source than the table says"
    assert recognise(target, source, source.named(form.qualname)[-1], None).verdict is Verdict.APPLIES
    try:
        expected = run(form, "original").outcome
    except Exception as error:
        raise NotRun(f"no: it touches what has not been written down ({type(error).__name__})") from error
    assert tensors_in(expected), "nothing was seen of what the function did"
    assert run(form, "original").outcome == expected, "the function does not do the same twice"
    off = run(form, "off")
    assert off.outcome == expected, "with the fix off, the function does something else"
    assert not (off.site.calls or off.lines or off.staged)
    on = run(form, "on")
    assert on.site.calls, "no copy function of ours was called"
    assert not on.site.fallbacks, on.site.reasons
    assert on.staged, "no copy went through the staging ring"
    missed = sorted(places(form) - on.lines)
    assert len(missed) == len(PASSED_BY.get(form.function, ())), f"no copy function was called in lines {missed}"
    assert on.outcome == expected, "with the fix on, the function does something else"
    without = run(form, "unstaged")
    assert without.outcome == expected and without.site.calls and not without.staged, "it does not fall back"
    try:
        spoilt = run(form, "spoilt").outcome
    except (IndexError, ValueError, RuntimeError):
        return  # it was an index or a length
    assert spoilt != expected, "a copy of ours that is wrong would not have been noticed"
