"""Which fixes would apply to a vLLM that is installed, or unpacked somewhere. Imports nothing of it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from ..manifest import Manifest
from ..manifest import shipped as shipped_manifest
from ..patching.recognise import Verdict, function_hash, recognise_statically
from ..patching.rewrite import ModuleSource, Refused
from ..releases import Releases, shipped
from ..settings import ConfigurationError
from .status import short, table

_VERSION_LINE = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)
_RECORD_LINE = re.compile(r"^vllm/__init__\.pyc?,", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """One target's static verdict, and the hash of its function's source (None: there is none to be read).

    `unasked` says why a fix that applies would not go in; `elsewhere`, that the target is absent as it is to be in this
    release: a form of a shipped fix that is for others.
    """

    fix: str
    function: str
    verdict: Verdict
    reason: str
    source: str | None = None
    unasked: str = ""
    elsewhere: bool = False


class Installed:
    """The packages in a directory, such as an unpacked wheel; None: this interpreter's. Imports none of them."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._packages: dict[str, Path | None] = {}

    def package(self, name: str) -> Path | None:
        """The directory of a top-level package, or None."""
        if name not in self._packages:
            self._packages[name] = self._find(name)
        return self._packages[name]

    def _find(self, name: str) -> Path | None:
        if self._directory is not None:
            for directory in itertools.chain([self._directory], _editable(self._directory, name)):
                path = directory / name
                if any((path / f"__init__{suffix}").is_file() for suffix in (".py", ".pyc")):
                    return path
                if path.with_suffix(".py").is_file():
                    return path.with_suffix(".py")
            return None
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        if places:
            return Path(places[0])
        return Path(spec.origin) if spec is not None and spec.origin else None

    def module(self, name: str) -> Path | None:
        """The source file of a module; None where there is no such module. Raises Refused where it has no source."""
        top, *rest = name.split(".")
        path = self.package(top)
        if path is None:
            return None
        path = path.joinpath(*rest)
        if (archive := next((parent for parent in path.parents if parent.is_file()), None)) and _holds(archive, path):
            raise Refused(f"{name} is in an archive, {archive}; sources are read from files only")
        for place in (path / "__init__", path):  # in the order in which Python would take them
            for found in (path, *place.parent.glob(f"{place.name}.*so"), *map(place.with_suffix, (".py", ".pyc"))):
                if found.is_file():
                    if why := without_source(str(found)):
                        raise Refused(why)
                    return found
        return None


def _holds(archive: Path, path: Path) -> bool:
    """Whether a module or package is in a zip file; `path` is where it would be if that were a folder."""
    try:
        with zipfile.ZipFile(archive) as opened:
            inner = path.relative_to(archive).as_posix().removesuffix(".py")
            return any(name.startswith((f"{inner}.", f"{inner}/__init__.")) for name in opened.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def without_source(filename: str) -> str | None:
    """Why a module that is loaded from `filename` cannot be judged; None where that is its source."""
    if filename.endswith((".pyc", ".so")):
        return f"{filename} is compiled; its source, by which it would be judged, is not there"
    return None


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
        distribution = self.distribution()
        return distribution.version if distribution is not None else None

    def distribution(self) -> metadata.Distribution | None:
        """What provides the package: vLLM's own distribution, a fork's, or a checkout installed as editable."""
        beside = [str(self.vllm.parent), *([str(self._directory)] if self._directory else sys.path)]
        for distribution in metadata.distributions(path=beside):
            if (distribution.metadata["Name"] or "").lower().startswith("vllm") and (
                _RECORD_LINE.search(distribution.read_text("RECORD") or "")
                or any(self.vllm.is_relative_to(root) for root in _checkouts(distribution))
            ):
                return distribution
        return None


def _editable(directory: Path, package: str) -> Iterator[Path]:
    """The folders of checkouts that are installed as editable in `directory` and have `package` in them."""
    for distribution in metadata.distributions(path=[str(directory)]):
        for root in _checkouts(distribution):
            yield from (folder for folder in (root, root / "src") if (folder / package).is_dir())


def _checkouts(distribution: metadata.Distribution) -> list[Path]:
    """Where the files of an editable distribution are (PEP 610); empty for any other."""
    try:
        said = json.loads(distribution.read_text("direct_url.json") or "null")
        if said["dir_info"].get("editable") and said["url"].startswith("file://"):
            from urllib.request import url2pathname  # which brings ssl

            return [Path(url2pathname(urlsplit(said["url"]).path))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return []


def check(
    manifest: Manifest, site: Site, selected: Collection[str] | None = None, releases: Releases | None = None
) -> Iterator[Checked]:
    """The verdict on every target of `manifest` for the vLLM in `site`; each module is read once.

    Where a target applies, its reason says so if its fix is not among `selected` (None: those on by default); where its
    function is not that of the release, as `releases` knows it (None: as shipped), its reason says that first.
    """
    release = parsed(site.release())
    ours, _ = shipped_manifest()
    releases = shipped() if releases is None else releases
    sources: dict[str, ModuleSource | None] = {}
    refusals: dict[str, str] = {}
    hashes: dict[str, str | None] = {}
    for fix, target in manifest.targets():
        if target.module not in sources and target.module not in refusals:
            path = None
            try:
                path = site.module(target.module)
                sources[target.module] = ModuleSource(path.read_bytes(), str(path)) if path else None
            except Refused as refusal:
                refusals[target.module] = str(refusal)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
                refusals[target.module] = f"{path} cannot be read as source: {error or type(error).__name__}"
        reason = refusals.get(target.module)
        if reason is None:
            source = sources[target.module]
            try:
                result = recognise_statically(target, source, release)
                if target.function not in hashes:
                    hashes[target.function] = function_hash(source, target.qualname)
            except (RecursionError, MemoryError):
                reason = f"{target.qualname} is nested too deeply to be read"
        if reason is not None:
            yield Checked(fix.id, target.function, Verdict.REFUSED, reason)
            continue
        unasked = ""
        if result.verdict is Verdict.APPLIES and not (fix.default if selected is None else fix.id in selected):
            unasked = "off by default" if selected is None else "not selected by H2D_PATCH"
        found = hashes[target.function]
        difference = releases.difference(target.function, found, release)
        reason = "; ".join(filter(None, (difference, unasked, result.reason)))
        elsewhere = result.verdict is Verdict.ABSENT and not difference and fix.manifest == ours
        yield Checked(fix.id, target.function, result.verdict, reason, found, unasked, elsewhere)


def as_text(found: Sequence[Checked], everything: bool) -> str:
    """A table of the targets. Unless `everything` is asked for, without the forms for other releases; then, a line for
    each fix."""
    rows = [row for row in found if everything or not row.elsewhere]
    cells = [[row.fix, short(row.function), row.verdict.value, row.reason] for row in rows]
    parts = [table(["fix", "function", "verdict", "reason"], cells)] if cells else []
    if not everything:
        if hidden := len(found) - len(rows):
            parts.append(f"and {hidden} absent: forms for other releases (--all shows them)")
        parts.append("\n".join(_in_a_line(fix, list(of)) for fix, of in itertools.groupby(found, lambda row: row.fix)))
    return "\n\n".join(parts)


def _in_a_line(fix: str, rows: Sequence[Checked]) -> str:
    counts = Counter(row.verdict for row in rows)
    order = (Verdict.REFUSED, Verdict.APPLIES, Verdict.UPSTREAM, Verdict.ABSENT)
    said = ", ".join(
        f"{number} {'apply' if verdict is Verdict.APPLIES and number > 1 else verdict.value}"
        for verdict in order
        if (number := counts[verdict])
    )
    unasked = next((f" ({row.unasked})" for row in rows if row.unasked), "")
    return f"{fix}: {said}{unasked}"


def parsed(release: str | None) -> Version | None:
    try:
        return Version(release) if release else None
    except InvalidVersion:
        return None
