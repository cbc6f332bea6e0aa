"""What every result file says of where it comes from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, Any]:
    """Commit, machine, versions and time. `H2D_PATCH_COMMIT` names the commit where there is no repository."""
    import torch

    commit = os.environ.get("H2D_PATCH_COMMIT", "")
    if not commit:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    versions = {}
    for name in ("torch", "triton", "vllm", "wrapt", "flashinfer-python"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": commit or "unknown",
        "command": [os.path.basename(argument) for argument in sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cpus": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def write(path: str, result: dict[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**provenance(), **result}, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0] or None
    except OSError:
        return None
