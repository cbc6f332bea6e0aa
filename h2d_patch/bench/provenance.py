"""What every result file says of where it comes from, and how it is written. Importing this imports no torch."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from h2d_patch import __version__
from h2d_patch.copies.profile_file import followed

ROOT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Commit, machine, versions and time. `H2D_PATCH_COMMIT` names the commit where there is no repository.

    Raises ImportError without torch.
    """
    import torch

    driver = _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    versions = {"python": platform.python_version(), "h2d-patch": __version__}
    for name in ("torch", "triton", "vllm", "wrapt", "flashinfer-python"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": os.environ.get("H2D_PATCH_COMMIT") or _commit() or "unknown",
        "command": [os.path.basename(argument) for argument in sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "driver": driver or None,
            "cuda": torch.version.cuda,
            "cpus": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": versions,
    }


def write(path: str | Path, result: dict[str, Any], about: dict[str, Any] | None = None) -> None:
    """`result` under `about` (the provenance of now if not given), as JSON; lists of numbers take one line each.

    Written whole or not at all. Raises OSError.
    """
    path = Path(path)
    text = as_json({**(provenance() if about is None else about), **result})
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout, whose link leads to a name that can't be opened
        path.write_text(text, encoding="utf-8")
        return
    path = followed(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def as_json(value: Any) -> str:
    def on_one_line(found: re.Match[str]) -> str:
        return "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]"

    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n\s+([^\[\]{}\"]+?)\n\s+\]", on_one_line, text) + "\n"


def _commit() -> str:
    # Installed into an environment that lies in some other repository, that one's commit would be a wrong answer.
    top = _asked("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != ROOT:
        return ""
    return _asked("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")


def _asked(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
