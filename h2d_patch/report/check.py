"""Which fixes would apply to a vLLM that is installed, or unpacked somewhere. Imports nothing of it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..manifest import Manifest
from ..patching.recognise import Recognition, Verdict, recognise_statically
from ..patching.rewrite import ModuleSource
from ..settings import ConfigurationError

_VERSION_LINE = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """One target's static verdict."""

    fix: str
    function: str
    verdict: Verdict
    reason: str


class Installed:
    """The packages in a directory, such as an unpacked wheel; None: this interpreter's. Imports none of them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def package(self, name: str) -> Path | None:
        """The directory of a top-level package, or None."""
        if self._directory is not None:
            path = self._directory / name
            if (path / "__init__.py").is_file():
                return path
            return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        if places:
            return Path(places[0])
        return Path(spec.origin) if spec is not None and spec.origin else None

    def module(self, name: str) -> Path | None:
        """The source file of a module, or None."""
        top, *rest = name.split(".")
        path = self.package(top)
        if path is None:
            return None
        path = path.joinpath(*rest)
        candidates = (path, path / "__init__.py", path.with_name(path.name + ".py"))
        return next((candidate for candidate in candidates if candidate.is_file()), None)


class Site(Installed):
    """Where vLLM is. Raises ConfigurationError when it is not there."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        root = self.package("vllm")
        if root is None:
            place = f"in {directory}" if directory else f"installed for {sys.executable}"
            raise ConfigurationError(
                f"no vLLM {place}; expected to run in vLLM's environment, or --site DIR with DIR/vllm in it"
            )
        self.vllm = root

    def release(self) -> str | None:
        """The version of vLLM, from the file that its build writes or from whatever distribution provides the package.

        None when neither says; releases are then judged by their sources alone.
        """
        try:
            found = _VERSION_LINE.search((self.vllm / "_version.py").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            found = None
        if found:
            return found.group(1)
        for distribution in metadata.distributions(path=[str(self.vllm.parent)]):
            name = (distribution.metadata["Name"] or "").lower()
            if name.startswith("vllm") and distribution.locate_file("vllm/__init__.py").exists():  # type: ignore[attr-defined]
                return distribution.version
        return None


def check(manifest: Manifest, site: Site, selected: Collection[str] | None = None) -> Iterator[Checked]:
    """The verdict on every target of `manifest` for the vLLM in `site`; each module is read once.

    Where a target applies, its reason says so if its fix is not among `selected` (None: those on by default).
    """
    release = parsed(site.release())
    sources: dict[str, ModuleSource | None] = {}
    refusals: dict[str, str] = {}
    for fix, target in manifest.targets():
        if target.module not in sources and target.module not in refusals:
            path = site.module(target.module)
            try:
                sources[target.module] = ModuleSource(path.read_bytes(), str(path)) if path else None
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
                refusals[target.module] = f"{path} cannot be read as source: {error or type(error).__name__}"
        if target.module in refusals:
            result = Recognition(Verdict.REFUSED, refusals[target.module])
        else:
            try:
                result = recognise_statically(target, sources[target.module], release)
            except (RecursionError, MemoryError):
                result = Recognition(Verdict.REFUSED, f"{target.qualname} is nested too deeply to be read")
        reason = result.reason
        if result.verdict is Verdict.APPLIES and not (fix.default if selected is None else fix.id in selected):
            unasked = "off by default" if selected is None else "not selected by H2D_PATCH"
            reason = f"{unasked}; {reason}" if reason else unasked
        yield Checked(fix.id, target.function, result.verdict, reason)


def parsed(release: str | None) -> Version | None:
    try:
        return Version(release) if release else None
    except InvalidVersion:
        return None
