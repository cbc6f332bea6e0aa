"""What the machine gives: driver, GPUs, memory that may be pinned, a compiler. Of CUDA, nothing in this process."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...copies import native
from ...copies.profile_file import UNKNOWN, driver_version
from .finding import OK, PROBLEM, WARNING, Finding

PROBE = Path(__file__).with_name("probe.py")
PROBE_S = 20.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """A GPU as the driver names it; `bus`: its PCI address, as in `0000:19:00.0`."""

    name: str
    bus: str


def driver(
    environ: Mapping[str, str], devices: list[Device], probe: Sequence[str] = (), seconds: float = PROBE_S
) -> Iterator[Finding]:
    """Asks the driver, in a process of its own that is left alone after `seconds`; fills `devices`."""
    if _is_wsl():
        yield Finding(
            WARNING,
            "driver",
            "this is WSL2: vLLM pins no memory here, and the device's address of pinned memory is not the host's",
            "expect little from the fixes: block swaps go to the release's own function, and are counted as fallbacks",
        )
    said = _probe(environ, probe or (sys.executable, "-I", str(PROBE)), seconds)
    if isinstance(said, str):
        kernel = driver_version()
        if kernel == UNKNOWN and not os.path.exists("/dev/dxg"):
            yield Finding(WARNING, "driver", f"no NVIDIA driver answers ({said})", _NO_GPU)
        else:
            yield Finding(PROBLEM, "driver", f"the kernel has driver {kernel}, but CUDA does not come up: {said}", _SEE)
        return
    devices += [Device(str(one["name"]), str(one["bus"])) for one in said["devices"]]
    number = int(said["cuda"])
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    text = (
        f"driver {driver_version()}, CUDA {number // 1000}.{number % 1000 // 10}, {len(devices)} × {names or 'no GPU'}"
    )
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if not devices:
        why = " (CUDA_VISIBLE_DEVICES is set here)" if hidden is not None else ""
        yield Finding(PROBLEM, "driver", f"the driver shows no GPU{why}", _SEE)
    else:
        yield Finding(OK, "driver", text)


_NO_GPU = "where the server has a GPU, run doctor there; without one, the fixes have nothing to copy to"
_SEE = "look at nvidia-smi, and at what the container is given"


def memory(
    pinned_bytes: int, pids: Sequence[int], gpus: int, unpinned: bool, proc: Path = Path("/proc")
) -> Iterator[Finding]:
    """Whether each worker can pin `pinned_bytes`. `pids`: of the live processes; `unpinned`: one of them could not."""
    needed = pinned_bytes * max(gpus, 1)
    each = f"{pinned_bytes // _MIB} MiB for each worker"
    limits = {pid: limit for pid in pids if (limit := _locked_limit(proc, pid)) is not None}
    if not pids:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limits = {os.getpid(): soft} if soft != resource.RLIM_INFINITY else {}
    low = {pid: limit for pid, limit in limits.items() if limit < pinned_bytes}
    if low:
        pid, limit = min(low.items(), key=lambda item: item[1])
        text = f"at most {limit // 1024} KiB may be locked in process {pid} (ulimit -l), and {each} are to be pinned"
        counted = "" if unpinned else "; NVIDIA's driver mostly does not count them"
        yield Finding(WARNING if unpinned else OK, "memory", f"{text}{counted}", _ULIMIT)
    else:
        yield Finding(OK, "memory", f"ulimit -l allows {each}")
    room = [(left, what) for left, what in (_cgroup_room(proc), _available(proc)) if left is not None]
    if room:
        left, what = min(room)
        text = f"{left // _MIB} MiB are left {what}"
        if left < needed and not pids:
            yield Finding(WARNING, "memory", f"{text}; the workers pin {needed // _MIB} MiB", _LESS)
        elif left < 64 * _MIB:
            yield Finding(WARNING, "memory", text, _LESS)
        else:
            yield Finding(OK, "memory", text)
    if (place := _container()) is not None:
        yield Finding(OK, "container", f"this is {place}; status and doctor see the processes of this one only")


_ULIMIT = "--ulimit memlock=-1 (Docker), LimitMEMLOCK=infinity (systemd)"
_LESS = "raise the limit, or set H2D_PATCH_PINNED_MB lower"


def compiler(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A page of C is compiled when a device comes up."""
    chosen = environ.get("CC", "").strip()
    with contextlib.suppress(ValueError, IndexError):
        chosen = shlex.split(chosen)[0]
    for name in filter(None, (chosen, *native.COMPILERS)):
        if path := shutil.which(name):
            yield Finding(OK, "compiler", path)
            return
    yield Finding(
        WARNING,
        "compiler",
        f"no C compiler ($CC, {', '.join(native.COMPILERS)}): copies are snapshotted in Python, by one thread",
        "install gcc or clang where the server runs; Triton needs one as well",
    )


def _probe(environ: Mapping[str, str], command: Sequence[str], seconds: float) -> dict[str, Any] | str:
    """What the probe printed, or why it did not."""
    try:
        process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # one that sleeps in the driver may not hear it; nobody waits for that
        return f"no answer within {seconds:g} s"
    try:
        said = json.loads(out)
        if "error" in said:
            return str(said["error"])
        if not {"devices", "cuda"} <= set(said):
            raise ValueError("an answer without them")
        return dict(said)
    except (ValueError, TypeError):
        last = err.decode(errors="replace").strip().splitlines()
        return f"the probe ended with status {process.returncode}: {last[-1] if last else 'nothing said'}"


def _is_wsl() -> bool:
    try:
        kernel = Path("/proc/sys/kernel/osrelease").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False
    return "microsoft" in kernel.lower()


def _locked_limit(proc: Path, pid: int) -> int | None:
    """Bytes that a process may lock; None for any number, and for a process that we may not look at."""
    try:
        lines = (proc / str(pid) / "limits").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def _available(proc: Path) -> tuple[int | None, str]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10, "on this machine"
    return None, ""


def _cgroup_room(proc: Path, root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, str]:
    """Bytes below the nearest memory limit of this process's control groups, of either version."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    rooms = []
    for directory in _cgroups(proc, root):
        for limit, used in names:
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                most = int((directory / limit).read_text())
                if most < 1 << 60:
                    rooms.append(max(most - int((directory / used).read_text()), 0))
    return (min(rooms), "under the control group's memory limit") if rooms else (None, "")


def _cgroups(proc: Path, root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = root / controllers
            place = base / name.lstrip("/")
            while place.is_relative_to(base):  # a limit may be a parent's
                yield place
                if place == base:
                    break
                place = place.parent


def _container() -> str | None:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "a Kubernetes pod"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "a container"
    return None
