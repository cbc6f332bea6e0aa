"""Result files of the programs here: `h2d_patch.bench.provenance`, from the checkout that they lie in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from h2d_patch.bench import provenance as _provenance

provenance = _provenance.provenance


def write(path: str, result: dict[str, Any]) -> None:
    """`result`, and where it comes from. Raises OSError."""
    _provenance.write(path, result)
    print(f"wrote {path}", flush=True)
