"""Find modules and functions without importing anything: post-import hooks, and what other modules bound by name."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
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

    `layers` are the wrappers around it, outermost first.
    """

    holder: Any
    name: str
    found: Any
    function: types.FunctionType
    layers: tuple[Any, ...]

    def foreign(self, decorators: int) -> Any:
        """The outermost wrapper that another package has put around it; None where there is none.

        Wrappers written in the function's own package are the release's own. Of those that Python or torch make, as
        many may be as its source has `decorators`.
        """
        package = self.function.__globals__.get("__name__", "").partition(".")[0]
        others = [layer for layer in self.layers if _origin(layer).partition(".")[0] != package]
        made = {"torch", *sys.stdlib_module_names}
        unknown = next((layer for layer in others if _origin(layer).partition(".")[0] not in made), None)
        return others[0] if unknown is None and len(others) > decorators else unknown

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
        if not isinstance(module, types.ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # getattr would load a module that is loaded lazily
        for name, value in list(names.items()):
            if value is original:
                names[name] = replacement
                places.append((module, name))
    return places


def overriding(holder: Any, name: str) -> list[str]:
    """The loaded subclasses of `holder`, written in another package, that have a `name` of their own."""
    own = str(getattr(holder, "__module__", "")).partition(".")[0]
    others = (kind for kind in subclasses(holder) if kind.__module__.partition(".")[0] != own)
    return sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in others if name in vars(kind)})


def subclasses(holder: Any) -> Iterator[type]:
    """The loaded subclasses of a class, near ones first; none of anything else."""
    level: list[Any] = type.__subclasses__(holder) if isinstance(holder, type) else []
    while level:
        yield from level
        level = [inner for kind in level for inner in type.__subclasses__(kind)]


def describe(found: Any) -> str:
    """Where something callable was defined, for a person."""
    seen = _written(found)
    code = getattr(seen, "__code__", None)
    if code is not None:
        return f"{getattr(seen, '__qualname__', code.co_name)} in {code.co_filename}:{code.co_firstlineno}"
    kind = seen if inspect.isclass(seen) else type(seen)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _written(found: Any) -> Any:
    """The function that someone wrote behind a wrapper object: wrapt's, a static or class method, a property."""
    for attribute in ("_self_wrapper", "__func__", "fget"):
        found = getattr(found, attribute, None) or found
    return found


def _origin(layer: Any) -> str:
    """The module in which a wrapper was written (functools.wraps copies the name of the wrapped function's)."""
    seen = _written(layer)
    names = getattr(seen, "__globals__", None)
    return str(names.get("__name__", "")) if isinstance(names, dict) else str(type(seen).__module__)


def _functions_in(found: Any) -> Iterator[tuple[types.FunctionType, tuple[Any, ...]]]:
    """Every plain function that `found` is or wraps, outermost first, with the wrappers around it."""
    seen: set[int] = set()
    level: list[tuple[Any, tuple[Any, ...]]] = [(found, ())]
    for _ in range(8):
        inner: list[tuple[Any, tuple[Any, ...]]] = []
        for item, around in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            parts: list[Any] = []
            if type(item) is types.FunctionType:  # a proxy claims to be one too
                yield item, around
                for cell in item.__closure__ or ():
                    try:
                        parts.append(cell.cell_contents)
                    except ValueError:  # an empty cell
                        continue
            for attribute in ("__wrapped__", "__func__", "fget", "func"):
                try:
                    if inspect.getattr_static(item, attribute, None) is not None:
                        parts.append(getattr(item, attribute, None))
                except Exception:  # an attribute of someone else's object may do anything
                    continue
            inner += [(part, (*around, item)) for part in parts if callable(part)]
        level = inner


def _same_file(one: str, other: str | None) -> bool:
    return other is not None and (one == other or one.removesuffix("c") == other.removesuffix("c"))
