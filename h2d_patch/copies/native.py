"""`native.c`, compiled at device start-up: snapshots by several threads, and small copies in one call.

Why C: threads of Python's hand each other the GIL, and took 200 µs for 4 MiB where these take 110 (one: 360 to
580); torch's would have to be told how many for each copy, and spin for milliseconds after it. The compiler is the one
that Triton needs on every server; without one, Python copies with one thread. Nothing is left on disk: each process
compiles for itself.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("native.c")
COMPILERS: Final = ("cc", "gcc", "clang")  # after $CC
_CGROUP: Final = Path("/sys/fs/cgroup")
_MODULE: Final = "h2d_patch_native"
_FLAGS: Final = ("-x", "c", "-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S: Final = 30.0
_MOST_HELPERS: Final = 7
_BYTES_A_HELPER: Final = 256 << 10
PARALLEL_BYTES: Final = 1 << 20  # below, waking threads takes as long as it saves


# What `send` (the first two) and `swap` answer beside 0 and CUDA's error codes.
NOT_HERE: Final = -1
CAPTURING: Final = -2
NEGATIVE: Final = -3
OUTSIDE: Final = -4

SEGMENTS: Final = 8  # of a lane
RUNTIME: Final = (  # what the library calls, in its order
    "cudaMemcpyAsync",
    "cudaMemcpy2DAsync",
    "cudaStreamIsCapturing",
    "cudaThreadExchangeStreamCaptureMode",
    "cudaStreamQuery",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaGetLastError",
    "cudaPointerGetAttributes",
)


class Native:
    """The loaded library. Raises OSError or RuntimeError where it cannot be had.

    `runtime`: the functions of the CUDA runtime, `RUNTIME`, by their addresses. `sharing`: how many processes like this
    one there may be on this machine; together they use half of its CPUs, their own threads included: the rest is the
    engine's.
    """

    def __init__(self, runtime: Sequence[int], sharing: int = 1) -> None:
        assert len(runtime) == len(RUNTIME)
        library, module = _compiled()
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.h2d_start.argtypes = [number, address]
        library.h2d_open_lane.argtypes = [address, size, address]
        library.h2d_close_lane.argtypes = [number]
        library.h2d_copy.argtypes = [address, address, size, size, size, number]
        library.h2d_copy.restype = None
        library.h2d_send.argtypes = [number, address, size, address, size, size, size, address, number]
        library.h2d_pinned.argtypes = [address]
        library.h2d_gather.argtypes = [address, address, address, size, number]
        library.h2d_gather.restype = None
        library.h2d_total.argtypes = [address, size]
        library.h2d_total.restype = ctypes.c_int64
        signed = ctypes.c_int64
        library.h2d_swap.argtypes = [
            address, address, address, signed, signed, number, address, signed, address, address, address
        ]  # fmt: skip
        self.total: Callable[[int, int], int] = library.h2d_total  # of int64 numbers at an address
        self.swap: Callable[..., int] = library.h2d_swap  # the arguments of h2d_swap in native.c
        self._library = library
        # (dst, src, pitch, width, rows, helpers)
        self.copy: Callable[[int, int, int, int, int, int], None] = library.h2d_copy
        # (lane, dst, dst_pitch, src, src_pitch, width, rows, stream, helpers) → an answer
        self.send: Callable[[int, int, int, int, int, int, int, int, int], int] = library.h2d_send
        self.pinned: Callable[[int], int] = library.h2d_pinned  # whether there is pinned memory at an address
        if module is not None:
            self.send, self.pinned, self.swap, self.total = module.send, module.pinned, module.swap, module.total
        wanted = max(0, min(_MOST_HELPERS, usable_cpus() // (2 * sharing) - 1))
        self.helpers: Final[int] = library.h2d_start(wanted, (address * len(runtime))(*runtime))

    def gather(self, dst: int, parts: Sequence[int], sizes: Sequence[int]) -> None:
        """`sizes[i]` bytes, more than none, from each of `parts`, one behind the other to `dst`."""
        number = len(parts)
        ends = (ctypes.c_size_t * number)(*accumulate(sizes))
        self._library.h2d_gather(dst, (ctypes.c_void_p * number)(*parts), ends, number, self.helpers_for(ends[-1]))

    def open_lane(self, at: int, nbytes: int, events: Sequence[int]) -> int | None:
        """The number of a lane over `nbytes` of pinned memory `at`; None if they are too few or the lanes too many."""
        assert len(events) == SEGMENTS
        number = int(self._library.h2d_open_lane(at, nbytes, (ctypes.c_void_p * SEGMENTS)(*events)))
        return None if number == NOT_HERE else number

    def close_lane(self, number: int) -> None:
        self._library.h2d_close_lane(number)

    def helpers_for(self, nbytes: int) -> int:
        """How many threads beside the calling one shall copy `nbytes`."""
        return min(self.helpers, nbytes // _BYTES_A_HELPER) if nbytes >= PARALLEL_BYTES else 0


def usable_cpus() -> int:
    """How many CPUs' time this process may use: of its affinity, and of its container's quota, the less."""
    number = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroup v2, v1
        try:
            words = " ".join((_CGROUP / file).read_text() for file in files).split()
            quota, period = map(int, words)
        except (OSError, ValueError):  # not that version, or "max"
            continue
        if quota > 0 and period > 0:  # -1: none
            number = min(number, quota // period)
    return max(1, number)


def _compiled() -> tuple[ctypes.CDLL, types.ModuleType | None]:
    """The library, and the same as a module where Python's headers are there."""
    commands = [shlex.split(os.environ.get("CC", ""))] + [[path] for path in map(shutil.which, COMPILERS) if path]
    commands = [command for command in commands if command]
    if not commands:
        raise RuntimeError("no C compiler ($CC, cc, gcc or clang)")
    headers = _headers()
    failure: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="h2d_patch-") as folder:
        path = os.path.join(folder, f"{_MODULE}.so")
        for command in commands:
            for flags in ([["-DH2D_PYTHON", f"-I{headers}"]] if headers is not None else []) + [[]]:
                try:
                    _compile(command, flags, path)
                    return ctypes.CDLL(path), _module(path) if flags else None
                except (OSError, RuntimeError, ImportError) as error:  # headers of another Python, say
                    failure = failure or error
        assert failure is not None
        raise failure


def _headers() -> str | None:
    """The folder of Python.h. Debian's default scheme names one that does not exist."""
    named = (sysconfig.get_config_var("INCLUDEPY"), sysconfig.get_path("include", "posix_prefix"))
    return next((str(folder) for folder in named if folder and os.path.exists(os.path.join(folder, "Python.h"))), None)


def _module(path: str) -> types.ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(command: Sequence[str], flags: Sequence[str], path: str) -> None:
    """Raises OSError or RuntimeError."""
    _run([*command, *_FLAGS, *flags, "-o", path, str(SOURCE)])
    # In a process of its own first: what is no whole library, or one with a sanitizer, ends the process that loads it.
    _run([sys.executable, "-I", "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", path])


def _run(command: Sequence[str]) -> None:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=_COMPILE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            raise RuntimeError(f"{command[0]} took more than {_COMPILE_S:.0f} s") from None
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        telling = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it says nothing")
        words = "".join(character if character.isprintable() else " " for character in telling).strip()[:200]
        raise RuntimeError(f"{command[0]} failed with {process.returncode}: {words}")


loaded: Native | None = None


def start(runtime: Sequence[int], sharing: int = 1) -> None:
    """Once a process; raises like `Native`. Its threads stay until the process ends."""
    global loaded
    if loaded is None:
        loaded = Native(runtime, sharing)


def _renew() -> None:
    """A forked child has the library and none of its threads, and no ring that would need it."""
    global loaded
    loaded = None


os.register_at_fork(after_in_child=_renew)
