"""Find modules and functions without importing anything: post-import hooks, and what other modules bound by name."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from .rewrite import Refused


def when_loaded(name: str, callback: Callable[[types.ModuleType], None]) -> bool:
    """Calls `callback` with the module once it is loaded: now, if it is, else after its import.

    False if the module is half imported at this moment (a circular import): nothing was registered, ask again later.
    `callback` must not raise: an exception in it would make the import of that module fail.
    """
    module = sys.modules.get(name)
    if module is not None:
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            return False
        callback(module)
        return True
    wrapt.register_post_import_hook(callback, name)
    return True


@dataclass(frozen=True)
class Located:
    """A function as it stands in its module: `holder.name` is `found`, with `function` inside the release's decorators.

    `layers` is how many wrappers lie between the two.
    """

    holder: Any
    name: str
    found: Any
    function: types.FunctionType
    layers: int

    @property
    def clear_cache(self) -> Callable[[], object] | None:
        """Empties the cache that the release keeps of its results, where it does."""
        clear = getattr(self.found, "cache_clear", None)
        return clear if callable(clear) else None


def locate(module: types.ModuleType, qualname: str) -> Located | None:
    """The function `qualname` of `module`, or None when there is no such name.

    Raises Refused when what stands there was not defined in the module's own file, naming where it was.
    """
    holder: Any = module
    *path, name = qualname.split(".")
    for part in path:
        holder = vars(holder).get(part)
        if holder is None:
            return None
    found = vars(holder).get(name)
    if found is None:
        return None
    filename = getattr(module, "__file__", None)
    for function, layers in _functions_in(found):
        code = function.__code__  # functools.wraps gives a wrapper the function's own __qualname__, not its code's
        named = getattr(code, "co_qualname", qualname) == qualname and code.co_name == name
        if named and _same_file(code.co_filename, filename):
            return Located(holder, name, found, function, layers)
    raise Refused(f"another package has replaced it: {describe(found)}")


def rebind(original: object, replacement: object) -> list[tuple[types.ModuleType, str]]:
    """Puts `replacement` wherever a loaded module holds `original` under a global name; returns the places."""
    places = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) if isinstance(module, types.ModuleType) else None
        if names is None:
            continue
        for name, value in list(names.items()):
            if value is original:
                names[name] = replacement
                places.append((module, name))
    return places


def describe(found: Any) -> str:
    """Where something callable was defined, for a person."""
    seen = found
    for attribute in ("_self_wrapper", "__func__", "fget"):
        seen = getattr(seen, attribute, None) or seen
    code = getattr(seen, "__code__", None)
    if code is not None:
        return f"{getattr(seen, '__qualname__', code.co_name)} in {code.co_filename}:{code.co_firstlineno}"
    kind = seen if inspect.isclass(seen) else type(seen)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _functions_in(found: Any) -> list[tuple[types.FunctionType, int]]:
    """Every plain function that `found` is or wraps, outermost first, with how many wrappers lie around it."""
    result: list[tuple[types.FunctionType, int]] = []
    seen: set[int] = set()
    level = [found]
    for layers in range(8):
        inner: list[Any] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if type(item) is types.FunctionType:  # a proxy claims to be one too
                result.append((item, layers))
                for cell in item.__closure__ or ():
                    try:
                        inner.append(cell.cell_contents)
                    except ValueError:  # an empty cell
                        continue
            for attribute in ("__wrapped__", "__func__", "fget", "func"):
                try:
                    part = inspect.getattr_static(item, attribute, None)
                    part = getattr(item, attribute, None) if part is not None else None
                except Exception:
                    part = None
                if callable(part):
                    inner.append(part)
        level = [item for item in inner if callable(item)]
    return result


def _same_file(one: str, other: str | None) -> bool:
    return other is not None and (one == other or one.removesuffix("c") == other.removesuffix("c"))
