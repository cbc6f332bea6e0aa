"""Whether vLLM finds the plugin: distributions, entry point, dependencies, and the versions of what matters."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from ... import __version__
from ...releases import shipped
from ...report.check import Site
from ...report.status import ENTRY_POINT
from ...settings import ConfigurationError
from ..ray_advice import advice
from .finding import OK, PROBLEM, WARNING, Finding

_NAME, _GROUP, _FUNCTION = "h2d-patch", "vllm.general_plugins", "h2d_patch.plugin:register"
_OF_INTEREST = "torch", "triton", "wrapt", "packaging", "prometheus-client", "ray", "flashinfer-python", "transformers"
_PACKAGE = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Of what is installed for this Python, from its metadata; nothing is imported."""
    found = {"h2d_patch": __version__, "python": platform.python_version(), "system": platform.platform()}
    with contextlib.suppress(ConfigurationError):
        found["vllm"] = Site().release() or "unknown"
    for name in _OF_INTEREST:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plugin(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What vLLM would find of us, started with this Python."""
    installed = _distributions()
    if not installed:
        yield Finding(
            PROBLEM,
            "plugin",
            f"{_PACKAGE} runs, but no distribution {_NAME} is installed for {sys.executable}: vLLM finds plugins by "
            "their entry points",
            f"{sys.executable} -m pip install {_PACKAGE.parent}, or what you install it from",
        )
    elif len(installed) > 1:
        shown = ", ".join(f"{one.version} in {place}" for place, one in installed.items())
        yield Finding(
            PROBLEM,
            "plugin",
            f"{len(installed)} distributions {_NAME} are installed: {shown}; which one runs depends on sys.path",
            f"pip uninstall {_NAME} until none is left, and install one",
        )
    yield from _entry_points(bool(installed))
    yield from _copies()
    for one in installed.values():
        if one.version != __version__ and len(installed) == 1:
            yield Finding(
                WARNING,
                "plugin",
                f"{_PACKAGE} is version {__version__}, its distribution says {one.version}",
                "install it again",
            )
        yield from _dependencies(one)


def release(versions: Mapping[str, str]) -> Iterator[Finding]:
    """The versions, and whether this vLLM is one that anyone has looked at."""
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("h2d_patch", "python", "torch", "triton") if name in versions
    )
    yield Finding(OK, "versions", shown)
    try:
        site = Site()
    except ConfigurationError as error:
        yield Finding(
            PROBLEM,
            "vLLM",
            str(error).partition("; ")[0],
            "install h2d_patch into vLLM's environment, and run it there",
        )
        return
    about = shipped().about(site.release())
    yield Finding(WARNING if about else OK, "vLLM", about or f"vLLM {site.release()} in {site.vllm.parent}", _JUDGED)


_JUDGED = "what h2d-patch check says of it holds; a later h2d_patch may know more"


def under_ray(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether our variables reach Ray's workers with this vLLM, where Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        return
    with contextlib.suppress(ConfigurationError):  # no vLLM: said elsewhere
        found = advice(environ, Site())
        for one in found:
            yield Finding(WARNING, "Ray", one.why, one.do)
        if not found:
            yield Finding(OK, "Ray", "our variables reach the workers of this vLLM's Ray executors")


def _distributions() -> dict[Path, metadata.Distribution]:
    """By where they are: a place that stands in sys.path twice is one."""
    found: dict[Path, metadata.Distribution] = {}
    for one in metadata.distributions():
        if (one.metadata["Name"] or "").lower().replace("_", "-") == _NAME:
            found.setdefault(Path(str(one.locate_file(""))).resolve(), one)
    return found


def _entry_points(installed: bool) -> Iterator[Finding]:
    points = {point.value for point in metadata.entry_points(group=_GROUP) if point.name == ENTRY_POINT}
    if not points and installed:
        yield Finding(
            PROBLEM,
            "plugin",
            f"its distribution has no entry point {ENTRY_POINT!r} of the group {_GROUP}",
            "install it again, with pip",
        )
    elif points - {_FUNCTION}:
        yield Finding(
            PROBLEM,
            "plugin",
            f"the entry point {ENTRY_POINT!r} leads to {', '.join(sorted(points - {_FUNCTION}))}; expected {_FUNCTION}",
            "uninstall what else calls itself so",
        )
    elif points:
        yield Finding(OK, "plugin", f"h2d_patch {__version__} in {_PACKAGE}; vLLM finds it by its entry point")


def _copies() -> Iterator[Finding]:
    places = [os.path.realpath(os.path.join(entry, "h2d_patch")) for entry in sys.path]
    copies = dict.fromkeys(place for place in places if os.path.isfile(os.path.join(place, "__init__.py")))
    others = [place for place in copies if place != str(_PACKAGE)]
    if others:
        yield Finding(
            WARNING,
            "plugin",
            f"beside {_PACKAGE} there is {', '.join(others)} in sys.path; which one a server imports depends on how "
            "and where it is started",
            "leave one of them, and start the server from another directory",
        )


def _dependencies(one: metadata.Distribution) -> Iterator[Finding]:
    for text in one.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if importlib.util.find_spec(requirement.name.replace("-", "_")) is None:
                do = f"{sys.executable} -m pip install '{requirement}'"
                yield Finding(PROBLEM, "plugin", f"{requirement.name}, which it needs, is not installed", do)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            do = f"{sys.executable} -m pip install '{requirement}'"
            yield Finding(PROBLEM, "plugin", f"{requirement.name} is {version}; expected {requirement.specifier}", do)
