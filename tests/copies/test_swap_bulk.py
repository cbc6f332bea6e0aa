"""The kernel of bulk copies: its PTX is that of its source, and it is launched with what fits the device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from h2d_patch.copies import swap_bulk

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import make_ptx  # noqa: E402


def test_the_ptx_that_is_shipped_was_made_of_the_source_beside_it():
    shipped = make_ptx.TARGET.read_text().splitlines()
    compiler = shipped[0].rpartition(" ")[2]
    assert shipped[0] == make_ptx.first_line(compiler)
    assert f".version {make_ptx.OLDEST}" in shipped and ".target sm_90" in shipped
    assert swap_bulk.PTX == make_ptx.TARGET


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_where_nvcc_is_the_script_makes_the_ptx_again():
    made = make_ptx.make()  # ptxas has taken it
    if make_ptx.compiler() == make_ptx.TARGET.read_text().splitlines()[0].rpartition(" ")[2]:
        assert made == make_ptx.TARGET.read_text()
        command = [sys.executable, TOOLS / "make_ptx.py", "--check"]
        assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    "mean, stage, number",
    [
        (1, 1024, 128), (1024, 1024, 128), (1024.5, 2048, 111), (4096, 4096, 55), (4097, 8192, 27), (1 << 20, 8192, 27)
    ],
)  # fmt: skip
def test_stages_fill_the_shared_memory_of_an_sm(mean, stage, number):
    shared = 227 * 1024 - swap_bulk._KEPT_BYTES
    assert swap_bulk.stages(mean, shared) == (stage, number)
    assert stage * number + swap_bulk._BEHIND_THE_LAST <= shared
    assert swap_bulk.stages(mean, 99 * 1024)[1] >= 12  # a small Blackwell
