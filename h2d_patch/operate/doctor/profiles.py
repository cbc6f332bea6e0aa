"""The device profile that `kv-swap` chooses by: which one a server has, or would have here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ...copies.profile_file import Key, Places, Unusable, driver_version, find, kernels_hash, link_of, load
from ...settings import Settings
from .finding import OK, PROBLEM, WARNING, Finding
from .machine import Device
from .servers import Running

_CALIBRATE = "h2d-patch calibrate measures this device; stop the server first"
_BUS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.\d+")


def profiles(settings: Settings, devices: Sequence[Device], run: Running) -> Iterator[Finding]:
    in_use = dict.fromkeys(str(content["device"]["profile"]) for content in run.live if _profile(content))
    for words in in_use:
        measured = words.startswith(("of ", "shipped"))
        yield Finding(OK if measured else WARNING, "profile", f"in use: {words}", _CALIBRATE)
    if in_use:
        return
    if settings.profile is not None:
        yield from _named(settings.profile)
    for device in dict.fromkeys(devices):
        found, words, reasons = find(key_of(device), Places(settings.profile, settings.profile_dir))
        for reason in reasons:
            yield Finding(WARNING, "profile", reason, _CALIBRATE)
        if found is None:
            text = f"none for {device.name}: kv-swap measures it at each start, in 2 s, with what there was time for"
            yield Finding(WARNING, "profile", text, _CALIBRATE)
        else:
            yield Finding(OK, "profile", f"for {device.name}: {words}")


def key_of(device: Device) -> Key:
    """What a worker on `device` would find, by the files of what is installed: nothing is imported."""
    bus = _BUS.fullmatch(device.bus)
    place = SimpleNamespace()
    if bus is not None:
        domain, number, index = (int(part, 16) for part in bus.groups())
        place = SimpleNamespace(pci_domain_id=domain, pci_bus_id=number, pci_device_id=index)
    return Key(
        gpu=device.name,
        link=link_of(place),
        driver=driver_version(),
        cuda=_said_in("torch", "version.py", r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]") or "none",
        triton=_said_in("triton", "__init__.py", r"^__version__ *= *['\"]([^'\"]+)['\"]") or _version("triton"),
        kernels=kernels_hash(),
    )


def _named(path: Path) -> Iterator[Finding]:
    try:
        load(path)
    except FileNotFoundError:
        yield Finding(
            PROBLEM, "profile", f"{path}: there is no such file", "H2D_PATCH_PROFILE names it", bad_input=True
        )
    except Unusable as error:
        yield Finding(PROBLEM, "profile", f"{error}; not used", "H2D_PATCH_PROFILE names it", bad_input=True)
    except OSError as error:
        yield Finding(PROBLEM, "profile", f"{path}: {error.strerror}", "H2D_PATCH_PROFILE names it", bad_input=True)


def _said_in(package: str, file: str, pattern: str) -> str | None:
    """What a line of a package's file says; the package is not imported."""
    try:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        found = re.search(pattern, (Path(places[0]) / file).read_text(encoding="utf-8"), re.MULTILINE)
    except (ImportError, ValueError, OSError, IndexError):
        return None
    return found[1] if found else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _profile(content: dict[str, object]) -> bool:
    device = content.get("device")
    return isinstance(device, dict) and bool(device.get("profile"))
