"""Put new code or a replacement in, and take it out again so that everything is the identical object it was."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import wrapt

from .locate import Located, rebind
from .pattern import Definition
from .rewrite import ModuleSource, Rewrite
from .switch import Site

_lock = threading.RLock()


def _renew() -> None:
    """In a forked child: a lock that no thread of the parent's holds."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)

_rewritten: dict[int, RewrittenFunction] = {}


class RewrittenFunction:
    """A function whose code we exchanged in place: identity, decorators and every alias stay."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.original = function.__code__
        self.new = self.original
        self.exchanges: list[tuple[Rewrite, Site]] = []


def original_code(function: types.FunctionType) -> types.CodeType:
    """The code that `function` had before we touched it."""
    entry = _rewritten.get(id(function))
    return entry.original if entry is not None else function.__code__


def build_rewrite(
    function: types.FunctionType,
    source: ModuleSource,
    definition: Definition,
    rewrites: Sequence[Rewrite],
    site: Site,
) -> Callable[[], Callable[[], None]]:
    """Compiles `function` with `rewrites` exchanged, beside those that are in it already.

    Returns what installs it, which returns what takes it out. Raises Refused; nothing has changed then.
    """
    with _lock:
        entry = _rewritten.get(id(function)) or RewrittenFunction(function)
        exchanges = [*entry.exchanges, *((rewrite, site) for rewrite in rewrites)]
        code = source.build(definition, entry.original, exchanges)

    def install() -> Callable[[], None]:
        with _lock:
            _rewritten[id(function)] = entry
            entry.exchanges = exchanges
            function.__globals__[site.name] = site
            entry.new = function.__code__ = code
        return lambda: _take_out(entry, site)

    return install


def _take_out(entry: RewrittenFunction, site: Site) -> None:
    """Turns `site` off; with the last one gone, the function has its own code object again."""
    with _lock:
        site.on = False
        entry.exchanges = [pair for pair in entry.exchanges if pair[1] is not site]
        if entry.exchanges or _rewritten.pop(id(entry.function), None) is not entry:
            return
        if entry.function.__code__ is entry.new:  # code that someone else has put there since is theirs
            entry.function.__code__ = entry.original


def install_replacement(located: Located, put: Callable[..., Any], site: Site) -> Callable[[], None]:
    """Wraps the function so that `put` runs in its place while `site` is on; returns what takes the wrapper off.

    Where `put` raises, the function itself runs: it must be one that may run after half of `put` has. Names that other
    modules bound with `from … import …` are re-bound, and put back.
    """

    def chosen(wrapped: Callable[..., Any], _instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not site.on:
            return site.ended_off(site.if_timed(), wrapped(*args, **kwargs))
        try:
            return site.ended_on(site.now(), put(*args, **kwargs))
        except Exception as error:
            failure = error
        result = wrapped(*args, **kwargs)  # not in the except block: what it raises is its caller's alone
        site.failed(failure)
        return result

    with _lock:
        wrapper = wrapt.FunctionWrapper(located.found, chosen)
        places: list[tuple[Any, str]] = [(located.holder, located.name)]
        setattr(located.holder, located.name, wrapper)
        if isinstance(located.holder, types.ModuleType):
            places += rebind(located.found, wrapper)

    def take_off() -> None:
        with _lock:
            site.on = False
            for holder, name in places:
                if vars(holder).get(name) is wrapper:
                    setattr(holder, name, located.found)
            if isinstance(located.holder, types.ModuleType):  # whoever bound the name while we were in
                rebind(wrapper, located.found)

    return take_off
