"""Device profiles as files: what was measured on which device, and whether it may be used on this one."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from h2d_patch import owned
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice, Profile, default

SCHEMA: Final = 1
SHIPPED: Final = Path(__file__).with_name("profiles")
# A choice that is slower than the fastest of its cell by no more than this is as good.
WITHIN: Final = 0.03
UNKNOWN: Final = "unknown"
_KERNELS: Final = ("swap_bulk.ptx", "swap_bulk.py", "swap_kernel.py")
_GENERATIONS: Final = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_MOST_PROGRAMS: Final = 1024
# Of a file: a calibration makes one of 57 KB, with 17 sizes and 8 numbers of blocks.
_MOST_BYTES: Final = 4 << 20
_MOST_EACH: Final = 32


class Unusable(Exception):
    """A profile that may not be used here; the text names the file and the key, what was expected and what found."""


@dataclass(frozen=True)
class Key:
    """What a profile holds for. `kernels`: a hash of what the kernels are made from."""

    gpu: str
    link: str
    driver: str
    cuda: str
    triton: str
    kernels: str


# What a profile that is shipped must have in common with the device: what a server is built from, it cannot know.
_SHIPPED_FOR: Final = ("gpu", "link", "kernels")


@dataclass(frozen=True)
class Cell:
    """GB/s of each choice for `blocks` blocks of `nbytes`."""

    gpu_to_cpu: bool
    nbytes: int
    blocks: int
    gbps: dict[Choice, float]

    def best(self) -> Choice:
        """The fewest SMs within `WITHIN` of the fastest; the driver's batch takes none."""
        enough = (1 - WITHIN) * max(self.gbps.values())
        good = [choice for choice, rate in self.gbps.items() if rate >= enough]
        return min(good, key=lambda choice: (choice.programs, -self.gbps[choice]))

    def as_dict(self) -> dict[str, Any]:
        """As a profile file has it."""
        return {
            "gpu_to_cpu": self.gpu_to_cpu,
            "bytes": self.nbytes,
            "blocks": self.blocks,
            "gbps": {str(choice): rounded(rate) for choice, rate in self.gbps.items()},
        }


def rounded(gbps: float) -> float:
    """To four digits, of however little: small cells are compared like large ones."""
    return float(f"{gbps:.4g}")


@dataclass(frozen=True)
class Measured:
    """All that was measured on a device. `about`: when and how, for people."""

    key: Key
    cells: Sequence[Cell]
    about: Mapping[str, Any]

    def profile(self, paths: Sequence[str]) -> Profile:
        """The choices among `paths`, which this process has. A cell that was not measured has that of its nearest."""
        cells = []
        for cell in self.cells:
            gbps = {choice: rate for choice, rate in cell.gbps.items() if choice.path in paths}
            if gbps:
                cells.append(Cell(cell.gpu_to_cpu, cell.nbytes, cell.blocks, gbps))
        known = default(paths)
        if not cells:
            return known
        sizes = sorted({cell.nbytes for cell in cells})
        counts = sorted({cell.blocks for cell in cells})
        choices: dict[bool, list[list[Choice]]] = {}
        for direction in (False, True):
            found = {(cell.nbytes, cell.blocks): cell.best() for cell in cells if cell.gpu_to_cpu is direction}
            choices[direction] = [
                [_nearest(found, size, count) or known.choose(direction, size, count) for count in counts]
                for size in sizes
            ]
        return Profile(sizes, counts, choices)


def _nearest(found: Mapping[tuple[int, int], Choice], size: int, count: int) -> Choice | None:
    """A cell of another size is as far away as one of a number of blocks that differs twice as much."""
    if (size, count) in found:
        return found[size, count]

    def distance(cell: tuple[int, int]) -> tuple[float, int]:
        return 2 * abs(math.log2(cell[0] / size)) + abs(math.log2(cell[1] / count)), cell[0]

    return found[min(found, key=distance)] if found else None


# --- the device ---


def key_of(index: int) -> Key:
    """Of CUDA device `index`, in this environment."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Key(
        gpu=properties.name,
        link=link_of(properties),
        driver=driver_version(),
        cuda=torch.version.cuda or "none",
        triton=_triton_version(),
        kernels=kernels_hash(),
    )


def link_of(properties: Any, devices: Path = Path("/sys/bus/pci/devices")) -> str:
    """The PCIe link of a device, as in `PCIe 5 x16`."""
    try:
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        device = (devices / name).resolve(strict=True)
        width = _read(device / "current_link_width")
        # Not the current speed, which an idle GPU lowers: what the slower end of the link can do.
        ends = [_read(end / "max_link_speed").split()[0] for end in (device, device.parent) if _has_link(end)]
        generation = min(_GENERATIONS[speed] for speed in ends)
    except (AttributeError, OSError, ValueError, KeyError, IndexError):
        return UNKNOWN
    return f"PCIe {generation} x{width}" if width.isdigit() and 0 < int(width) <= 32 else UNKNOWN


def _has_link(end: Path) -> bool:
    return (end / "max_link_speed").exists()


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of the kernel's driver, as in `580.159.04`."""
    try:
        found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(errors="replace"), re.M)
    except OSError:
        return UNKNOWN
    return found[1] if found else UNKNOWN


def kernels_hash() -> str:
    """Changes with the kernels and with how they are launched."""
    found = hashlib.sha256()
    for name in _KERNELS:
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:16]


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


# --- the files ---


def file_name(gpu: str) -> str:
    """Of the profile of a GPU called so."""
    return f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-') or 'gpu'}.json"


def save(path: Path, measured: Measured) -> None:
    """Written whole or not at all. Raises OSError."""
    path = followed(path)
    _make(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)  # a container's user may be another than the one who measured
            file.write(as_text(measured))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _make(directory: Path) -> None:
    """With its parents, none of which the group can write whatever the umask: from there, no profile would be read."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o755, exist_ok=True)


def followed(path: Path) -> Path:
    """Where the links of `path` lead: a file put there leaves them links. Raises OSError also for what a file must not
    take the place of, such as /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return path


def as_text(measured: Measured) -> str:
    """A line for each cell."""
    head = json.dumps({"schema": SCHEMA, "key": asdict(measured.key), "about": dict(measured.about)}, indent=1)
    cells = ",\n".join(f"  {json.dumps(cell.as_dict())}" for cell in measured.cells)
    return f'{head[:-2]},\n "cells": [\n{cells}\n ]\n}}\n'


def load(path: Path, shipped: bool = False) -> Measured:
    """Read while a server starts, so from a regular file that nobody else can write.

    `shipped`: part of the package, and trusted like its code, whoever may write where that is installed.
    Raises Unusable, and FileNotFoundError.
    """
    try:
        raw = path.read_bytes() if shipped else owned.read(path, _MOST_BYTES, root=True, follow=True)
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise
    except owned.NotOurs as refusal:
        raise Unusable(f"profile {path} {refusal}") from None
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise Unusable(f"profile {path}: {words}; expected a file of h2d-patch calibrate") from None
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"profile {path} is damaged or half written: {error}") from None
    found = content.get("schema") if isinstance(content, dict) else type(content).__name__
    if type(found) is not int or found != SCHEMA:
        raise Unusable(f"profile {path}: schema: expected {SCHEMA}, found {found!r}")
    return Measured(_key(path, content.get("key")), _cells(path, content.get("cells")), _dict(content.get("about")))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _key(path: Path, found: Any) -> Key:
    names = [field.name for field in fields(Key)]
    for name in names:
        value = found.get(name) if isinstance(found, dict) else None
        if type(value) is not str:
            raise Unusable(f"profile {path}: key.{name}: expected a text, found {_shown(value)}")
    return Key(**{name: found[name] for name in names})


def _cells(path: Path, found: Any) -> list[Cell]:
    if not isinstance(found, list) or not found:
        raise Unusable(f"profile {path}: cells: expected a list of cells, found {_shown(found)}")
    cells: list[Cell] = []
    seen = set()
    for number, cell in enumerate(found):
        where = f"profile {path}: cells[{number}]"
        if not isinstance(cell, dict) or type(cell.get("gpu_to_cpu")) is not bool:
            raise Unusable(f"{where}.gpu_to_cpu: expected true or false, found {_shown(cell)}")
        for name in ("bytes", "blocks"):
            value = cell.get(name)
            if type(value) is not int or not 0 < value < 1 << 40:
                raise Unusable(f"{where}.{name}: expected a positive whole number, found {_shown(value)}")
        at = (cell["gpu_to_cpu"], cell["bytes"], cell["blocks"])
        if at in seen:
            raise Unusable(f"{where}: expected each cell once, found another of the same direction, bytes and blocks")
        seen.add(at)
        cells.append(Cell(*at, _gbps(where, cell.get("gbps"))))
    for name, number in (("bytes", len({cell.nbytes for cell in cells})), ("blocks", len({c.blocks for c in cells}))):
        if number > _MOST_EACH:
            raise Unusable(f"profile {path}: cells: expected at most {_MOST_EACH} different {name}, found {number}")
    return cells


def _gbps(where: str, found: Any) -> dict[Choice, float]:
    if not isinstance(found, dict) or not found:
        raise Unusable(f"{where}.gbps: expected GB/s by path, found {_shown(found)}")
    gbps = {}
    for name, rate in found.items():
        choice = parse_choice(name)
        if choice is None:
            raise Unusable(f"{where}.gbps: expected '{DRIVER}', '{BULK} N' or '{TRITON} N', found {_shown(name)}")
        if type(rate) not in (int, float) or not 0 < rate < 1e6:
            raise Unusable(f"{where}.gbps[{name!r}]: expected a positive number, found {_shown(rate)}")
        gbps[choice] = float(rate)
    return gbps


def parse_choice(name: str) -> Choice | None:
    """What `str(choice)` says, back."""
    if name == DRIVER:
        return Choice(DRIVER)
    path, _, programs = name.partition(" ")
    if path not in (BULK, TRITON) or not re.fullmatch("[1-9][0-9]{0,3}", programs) or int(programs) > _MOST_PROGRAMS:
        return None
    return Choice(path, int(programs))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def usable(path: Path, key: Key, shipped: bool = False) -> Measured:
    """The profile in `path`, if its key is `key`, or `shipped` for such a one. Raises Unusable, FileNotFoundError."""
    measured = load(path, shipped)
    for name in _SHIPPED_FOR if shipped else [field.name for field in fields(Key)]:
        found, expected = getattr(measured.key, name), getattr(key, name)
        if found != expected:
            raise Unusable(f"profile {path}: {name}: expected {expected!r}, as on this device, found {_shown(found)}")
    return measured


@dataclass(frozen=True)
class Places:
    """Where profiles are looked for: one that the operator named, and the directory of this user's."""

    named: Path | None = None
    directory: Path | None = None

    def stored(self, gpu: str) -> Path | None:
        """Where that of a GPU called so is stored."""
        return self.named or (self.directory / file_name(gpu) if self.directory else None)


def find(key: Key, places: Places, shipped: Path = SHIPPED) -> tuple[Measured | None, str, list[str]]:
    """The profile for a device, which one it is in words, and why those that were tried before it are not used."""
    reasons: list[str] = []
    path = places.stored(key.gpu)
    if path is not None:
        try:
            return usable(path, key), f"of {path}", reasons
        except FileNotFoundError:
            if places.named:
                reasons.append(f"profile {path}: there is no such file; expected the one that H2D_PATCH_PROFILE names")
        except Unusable as error:
            reasons.append(f"{error}; not used (h2d-patch calibrate measures this device)")
        except OSError as error:
            reasons.append(f"profile {path}: {error.strerror}; not used")
    for path in sorted(shipped.glob("*.json")):
        try:
            return usable(path, key, shipped=True), f"shipped for {key.gpu}, {key.link}", reasons
        except (Unusable, OSError):  # another device's
            continue
    return None, "", reasons
