"""Fixtures that several test modules of this directory share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, named in an environment without any other variable of ours."""
    for name in list(os.environ):
        if name.startswith(("H2D_PATCH", "VLLM_PLUGINS")):
            monkeypatch.delenv(name)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("H2D_PATCH_RUN_DIR", str(directory))
    return directory
