"""patches.toml → typed, validated objects. An error names the file, the key, what was found and what was expected."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import owned
from .patching.pattern import Pattern, PatternError, normal_form, parse_inside, parse_put
from .patching.recognise import Replace, Target
from .patching.rewrite import Rewrite
from .selftest.stand_ins import GivenError, parse
from .settings import ConfigurationError

SCHEMA = 1
_MOST_BYTES = 4 << 20
# Copy functions that call their first argument.
CALLS_ITS_FIRST = frozenset({"call_pinned", "swap_blocks", "swap_tensors", "swap_addresses"})
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_HASH = re.compile(r"[0-9a-f]{16}\Z")


class ManifestError(ConfigurationError):
    """A manifest that cannot be used."""


@dataclass(frozen=True)
class Fix:
    """One fix: why it is there, where upstream's own is, and the functions it touches.

    `removes_wait` says that the original waits for the GPU there and so orders other buffers that are reused in the
    same step: such a fix stays off where nothing else guards those. `risk` and `retire` are for people.
    """

    id: str
    why: str
    upstream: str
    default: bool
    targets: tuple[Target, ...]
    removes_wait: bool = True
    manifest: str = ""
    risk: str = ""
    retire: str = ""


@dataclass(frozen=True)
class Manifest:
    """Every fix by id, in the order of the file."""

    fixes: Mapping[str, Fix]

    @property
    def defaults(self) -> dict[str, bool]:
        return {fix.id: fix.default for fix in self.fixes.values()}

    def targets(self) -> Iterator[tuple[Fix, Target]]:
        for fix in self.fixes.values():
            for target in fix.targets:
                yield fix, target


def load(user_file: Path | None = None) -> Manifest:
    """The manifest that h2d_patch ships, with the user's own fixes and defaults over it.

    Raises ManifestError.
    """
    from .copies import EXPORTS

    exports = frozenset(EXPORTS)
    name, text = shipped()
    fixes = _read(name, text, exports, {})
    if user_file is not None:
        try:
            text = owned.read(user_file, _MOST_BYTES, root=True, follow=True).decode("utf-8")
        except owned.NotOurs as refusal:
            raise ManifestError(f"{user_file}: {refusal} (H2D_PATCH_MANIFEST: what it says is run)") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ManifestError(f"{user_file}: {reason}; expected a readable TOML file (H2D_PATCH_MANIFEST)") from None
        fixes = _read(str(user_file), text, exports, fixes)
    return Manifest(fixes)


def shipped() -> tuple[str, str]:
    """Name and text of our own patches.toml: in the package, or beside it in a checkout."""
    for place in (resources.files(__package__), Path(__file__).resolve().parent.parent):
        path = place / "patches.toml"
        if path.is_file():
            return "patches.toml", path.read_text(encoding="utf-8")
    raise ManifestError("patches.toml: not in the package; expected it beside h2d_patch/manifest.py")


def _read(name: str, text: str, exports: Collection[str], known: Mapping[str, Fix]) -> dict[str, Fix]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
        except ImportError:
            raise ManifestError(f"{name}: found no TOML reader; expected the package tomli on Python 3.10") from None
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not TOML ({error}); expected a manifest as in patches.toml") from None
    root = _Table(name, "", document)
    if (schema := root.take("manifest", int, None)) != SCHEMA:
        raise root.error("manifest", "missing" if schema is None else repr(schema), f"manifest = {SCHEMA}")
    fixes = dict(known)
    patches = root.table("patch")
    for fix_id in list(patches.values):
        table = patches.table(fix_id)
        if not _ID.match(fix_id):
            raise ManifestError(f"{name}: patch.{fix_id}: found this id; expected lower-case words joined by '-'")
        if fix_id in known:
            only = f"only 'default', since {known[fix_id].manifest} defines this fix"
            if "default" not in table.values:
                keys = ", ".join(table.values) or "nothing"
                raise ManifestError(f"{name}: patch.{fix_id}: found {keys}; expected {only}")
            fixes[fix_id] = replace(known[fix_id], default=table.take("default", bool))
            table.finish(only)
        else:
            fixes[fix_id] = _fix(table, fix_id, exports)
    root.finish()
    return fixes


def _fix(table: _Table, fix_id: str, exports: Collection[str]) -> Fix:
    fixed_in = table.take("fixed_in", str, "")
    fix = Fix(
        id=fix_id,
        why=table.text("why"),
        upstream=table.take("upstream", str, ""),
        default=table.take("default", bool, True),
        removes_wait=table.take("removes_wait", bool, True),
        targets=tuple(_target(part, exports, fixed_in) for part in table.tables("target")),
        manifest=table.file,
        risk=table.text("risk") if "risk" in table.values else "",
        retire=table.text("retire") if "retire" in table.values else "",
    )
    table.finish()
    if not fix.targets:
        raise table.error("target", "none", "at least one [[patch.ID.target]]")
    return fix


def _target(table: _Table, exports: Collection[str], fixed_in: str) -> Target:
    function = table.text("function")
    if not _FUNCTION.match(function):
        raise table.error("function", repr(function), "'package.module:Class.function'")
    fixed_in = table.take("fixed_in", str, fixed_in)
    if fixed_in:
        try:
            Version(fixed_in)
        except ValueError:
            raise table.error("fixed_in", repr(fixed_in[:80]), "a version such as '0.28.0'") from None
    releases = table.take("releases", str, "")
    try:
        specifier = SpecifierSet(releases)
        specifier.contains(Version("0.1"))
    except ValueError:
        raise table.error("releases", repr(releases[:80]), "a version range such as '>=0.10.2,<0.28'") from None
    rewrites = tuple(_rewrite(part, exports) for part in table.tables("rewrite"))
    replacements = [_replace(table.table("replace"), exports)] if "replace" in table.values else []
    if bool(rewrites) == bool(replacements):
        found = "both" if rewrites else "neither"
        raise table.error("rewrite", f"{found} of 'rewrite' and 'replace'", "one of the two")
    target = Target(
        function=function,
        releases=specifier,
        rewrites=rewrites,
        replace=replacements[0] if replacements else None,
        fixed_in=fixed_in or None,
        owner=table.take("owner", str, "") or None,
        supersedes=table.take("supersedes", str, "") or None,
        note=table.take("note", str, "") or None,
    )
    table.finish()
    return target


def _rewrite(table: _Table, exports: Collection[str]) -> Rewrite:
    find = table.pattern("find")
    try:
        put = parse_put(table.text("put"), find, exports)
    except PatternError as error:
        raise table.error("put", str(error)) from None
    _check_called(table, put, find)
    inside = table.take("inside", str, None)
    if inside is not None:
        try:
            parse_inside(inside)
        except PatternError as error:
            raise table.error("inside", str(error)) from None
    rewrite = Rewrite(
        find=find,
        put=put,
        times=_times(table),
        upstream=table.patterns("upstream"),
        inside=inside,
        given=_given(table),
    )
    table.finish()
    return rewrite


def _check_called(table: _Table, put: Pattern, find: Pattern) -> None:
    """A copy function that calls its first argument may be given only what the release itself calls there."""
    called = [normal_form(node.func) for root in find.roots for node in ast.walk(root) if isinstance(node, ast.Call)]
    for node in (node for root in put.roots for node in ast.walk(root) if isinstance(node, ast.Call)):
        if not (isinstance(node.func, ast.Name) and node.func.id in CALLS_ITS_FIRST):
            continue
        if not node.args or normal_form(node.args[0]) not in called:
            found = ast.unparse(node.args[0]) if node.args else "nothing"
            raise table.error("put", f"{node.func.id} would call {found!r}", "what 'find' calls")


def _times(table: _Table) -> tuple[int, ...]:
    value = table.values.pop("times", 1)
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(type(number) is int and number > 0 for number in numbers):
        raise table.error("times", repr(value), "a number above 0, or a list of such numbers")
    return tuple(numbers)


def _replace(table: _Table, exports: Collection[str]) -> Replace:
    put = table.text("put")
    if put not in exports:
        raise table.error("put", repr(put), f"a function of h2d_patch.copies: {', '.join(sorted(exports))}")
    known = table.texts("known")
    for value in known:
        if not _HASH.match(value):
            raise table.error("known", repr(value), "16 hexadecimal digits (h2d-patch check prints them)")
    if not known:
        raise table.error("known", "no hash", "a list of source hashes")
    result = Replace(
        put=put,
        known=frozenset(known),
        upstream=table.patterns("upstream"),
        given=_given(table),
    )
    table.finish()
    return result


def _given(table: _Table) -> tuple[str, ...]:
    lines = table.texts("given")
    for line in lines:
        try:
            parse(line)
        except GivenError as error:
            raise table.error("given", str(error)) from None
    return lines


class _Table:
    """One table of the document; keys are taken out as they are read, so that `finish` sees what is left over."""

    def __init__(self, file: str, where: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.where = where
        self.values = dict(values)

    def key(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def error(self, name: str, found: str, expected: str | None = None) -> ManifestError:
        return ManifestError(f"{self.file}: {self.key(name)}: {found}" + (f"; expected {expected}" if expected else ""))

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        if name not in self.values:
            if default is ...:
                raise self.error(name, "missing", f"a {_NAMES[kind]}")
            return default
        value = self.values.pop(name)
        if type(value) is not kind:
            raise self.error(name, f"found {value!r}", f"a {_NAMES[kind]}")
        return value

    def text(self, name: str) -> str:
        value: str = self.take(name, str)
        if not value.strip():
            raise self.error(name, "found an empty string", "some text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.take(name, list, [])
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, f"found {values!r}", "a list of strings")
        return tuple(values)

    def pattern(self, name: str) -> Pattern:
        try:
            return Pattern.parse(self.text(name))
        except PatternError as error:
            raise self.error(name, str(error)) from None

    def patterns(self, name: str) -> tuple[Pattern, ...]:
        """The patterns under a key that may hold none, one or a list of them."""
        value = self.values.pop(name, [])
        found = []
        for text in value if isinstance(value, list) else [value]:
            self.values[name] = text
            found.append(self.pattern(name))
        return tuple(found)

    def table(self, name: str) -> _Table:
        return _Table(self.file, self.key(name), self.take(name, dict, {}))

    def tables(self, name: str) -> list[_Table]:
        values = self.take(name, list, [])
        if not all(isinstance(value, dict) for value in values):
            raise self.error(name, f"found {values!r}", f"tables, each under [[{self.key(name)}]]")
        return [_Table(self.file, f"{self.key(name)}[{number}]", value) for number, value in enumerate(values)]

    def finish(self, expected: str = "") -> None:
        if self.values:
            unknown = next(iter(self.values))
            hint = expected or f"keys that a manifest has (see the comment at the top of {shipped()[0]})"
            raise self.error(unknown, f"unknown key, found {self.values[unknown]!r}", hint)


_NAMES = {str: "string", bool: "true or false", int: "whole number", list: "list", dict: "table"}
