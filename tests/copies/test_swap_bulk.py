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


@pytest.mark.parametrize("kib, stage, number", [(227, 4096, 13), (163, 4096, 9), (99, 2048, 11)])
def test_stages_fill_the_shared_memory_of_an_sm(kib, stage, number):
    shared = kib * 1024 - swap_bulk._KEPT_BYTES
    assert swap_bulk.stages(shared) == (stage, number)
    assert swap_bulk.WARPS * stage * number + swap_bulk._BEHIND_THE_LAST <= shared
    assert 4 < number <= swap_bulk._MOST_STAGES


def test_numbers_that_both_sides_know_are_the_same():
    source = make_ptx.SOURCE.read_text()
    for name, value in (("WARPS", swap_bulk.WARPS), ("MOST_STAGES", swap_bulk._MOST_STAGES)):
        assert f"constexpr int {name} = {value};" in source
