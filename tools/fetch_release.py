"""Fetch the sources of vLLM releases into the cache that the tests marked `releases` read.

    python tools/fetch_release.py 0.22.1 0.33.0 ...

Downloads each release's wheel and keeps its *.py and *.dist-info under ~/.cache/h2d-patch/sources/vllm-RELEASE
(H2D_PATCH_SOURCES names another folder). What is there already is left alone. A release that its authors have yanked is
fetched too, and marked. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

# In the folder of a release that had been yanked when it was fetched: what pip said of it.
_YANKED = "yanked.txt"


class FetchFailed(Exception):
    """Which release could not be had, and what pip said."""


def cache() -> Path:
    """The folder with one folder for each release."""
    chosen = os.environ.get("H2D_PATCH_SOURCES")
    return Path(chosen) if chosen else Path.home() / ".cache/h2d-patch/sources"


def fetch(release: str, distribution: str = "vllm") -> Path:
    """The folder that holds that release's package, downloaded if it is not there. Raises FetchFailed."""
    wanted = cache() / f"{distribution}-{release}"
    if wanted.is_dir():
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wanted.parent, prefix=f".{distribution}-{release}-") as scratch:
        wheel, said = download(release, Path(scratch), distribution)
        half = Path(scratch) / "half"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(half, [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n])
        if "yanked version" in said:
            (half / _YANKED).write_text(said, encoding="utf-8")
        try:
            half.rename(wanted)
        except OSError:
            if not wanted.is_dir():  # else another process was quicker
                raise
    return wanted


def is_yanked(folder: Path) -> bool:
    """Whether the release that was fetched into `folder` had been yanked by then."""
    return (folder / _YANKED).exists()


def download(release: str, folder: Path, distribution: str = "vllm") -> tuple[Path, str]:
    """The wheel of that release, for whatever Python it was built (nothing of it is run), and what pip warned of."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["-d", str(folder), f"{distribution}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise FetchFailed(f"{distribution} {release}: pip exited {done.returncode} and said: {said[:400]}")
    return wheels[0], done.stderr


def main(releases: Sequence[str]) -> int:
    if not releases:
        print(__doc__, file=sys.stderr)
        return 2
    failed = False
    for release in releases:
        started = time.monotonic()
        try:
            where = fetch(release)
        except (FetchFailed, OSError) as problem:
            print(f"fetch_release: {problem}", file=sys.stderr, flush=True)
            failed = True
        else:
            print(f"vLLM {release} in {where} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
