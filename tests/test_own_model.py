"""The worked example of docs/own-model.md, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs/own-model.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    for language, name in (("python", "acme_vision.py"), ("toml", "acme.toml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.S)
        (tmp_path / name).write_text(text)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    return tmp_path


def run(example: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "H2D_PATCH": "acme-positions",
        "H2D_PATCH_MANIFEST": str(example / "acme.toml"),
        "H2D_PATCH_RUN_DIR": str(example / "run"),
        "PYTHONPATH": f"{example}{os.pathsep}{ROOT}",
    }
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


def test_check_says_that_it_applies_and_the_self_test_passes(example: Path) -> None:
    done = run(example, "-m", "h2d_patch", "check", "--json", "--site", str(example))
    rows = {row["fix"]: row["verdict"] for row in json.loads(done.stdout)["targets"]}
    assert rows["acme-positions"] == "applies", done.stdout + done.stderr
    pytest.importorskip("torch")
    done = run(example, "-m", "h2d_patch", "selftest", "--json")
    rows = {row["fix"]: row["result"] for row in json.loads(done.stdout)["targets"]}
    assert rows["acme-positions"] == "passed", done.stdout + done.stderr


def test_it_is_put_in_when_the_model_is_loaded_and_positions_stay_right(example: Path) -> None:
    pytest.importorskip("torch")
    code = """
import torch
from h2d_patch.plugin import register
register()
from acme_vision import AcmeVision
found = AcmeVision("cpu").positions([(2, 3), (1, 2)])
assert found.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [0, 0], [0, 1]], found
from h2d_patch import process
(target,) = [t for t in process.current.state()["targets"] if t["fix"] == "acme-positions"]
print(target["verdict"], target["calls"])
"""
    done = run(example, "-c", code)
    assert done.stdout.split()[-2:] == ["active", "1"], done.stdout + done.stderr


def test_another_form_of_the_function_is_refused_with_the_reason(example: Path) -> None:
    model = example / "acme_vision.py"
    model.write_text(model.read_text().replace("non_blocking=True", "non_blocking=False"))
    done = run(example, "-m", "h2d_patch", "check", "--json", "--site", str(example))
    (row,) = [row for row in json.loads(done.stdout)["targets"] if row["fix"] == "acme-positions"]
    assert row["verdict"] == "refused" and "occurs 0 times" in row["reason"]
