"""`check` of what is not an official wheel unpacked: forks, compiled modules, archives, editable checkouts, patches."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from h2d_patch.cli import main
from h2d_patch.manifest import load
from h2d_patch.report.check import Checked, Site, check

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from fetch_release import fetch  # noqa: E402

pytestmark = pytest.mark.releases

RELEASE = "0.22.1"
INPUTS = "vllm/multimodal/inputs.py"
ROPE = "vllm/model_executor/models/qwen3_vl.py"
NESTED = "vllm.multimodal.inputs:_nested_tensors_h2d"
ROT_POS_EMB = "vllm.model_executor.models.qwen3_vl:Qwen3_VisionTransformer.rot_pos_emb"


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Two of the modules of a release, and no file that tells its version, in a folder to be altered."""
    folder = tmp_path / "fork"
    for name in ("vllm/__init__.py", INPUTS, ROPE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fetch(RELEASE) / name, folder / name)
    return folder


def distribution(folder: Path, name: str, version: str, files: bool = True, url: str | None = None) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n" if files else "")
    if url:
        (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))


def rows(folder: Path) -> dict[str, Checked]:
    return {row.function: row for row in check(load(), Site(folder))}


def alter(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_fork_s_distribution_tells_its_version_and_is_named(fork: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    distribution(fork, "vllm-fork", "0.22.1+ours")
    assert Site(fork).release() == "0.22.1+ours"
    assert main(["check", "--site", str(fork)]) == 0
    assert "(the distribution vllm-fork)" in capsys.readouterr().out
    assert {row.verdict.value for row in rows(fork).values()} <= {"applies", "absent"}


def test_another_distribution_that_only_begins_so_is_not_what_provides_the_package(fork: Path) -> None:
    distribution(fork, "vllm-router", "7.0", files=False)
    assert Site(fork).release() is None
    distribution(fork, "vllm-x", "0.22.1")
    assert Site(fork).release() == "0.22.1"


@pytest.mark.parametrize(
    ("version", "says"),
    [("99.0", "vLLM 99.0 is new"), ("0.22.1+vendor", ""), ("0.22.2.dev7+g1", "is none of the releases known here")],
)
def test_a_release_that_nobody_has_looked_at_is_said_to_be_so(fork: Path, capsys, version: str, says: str) -> None:  # type: ignore[no-untyped-def]
    distribution(fork, "vllm", version)
    assert main(["check", "--site", str(fork), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [says in note for note in notes] == [True] * bool(says)


def test_a_patched_function_is_said_to_differ_and_is_judged_by_its_source(fork: Path) -> None:
    distribution(fork, "vllm", RELEASE)
    alter(fork / ROPE, "    def rot_pos_emb(", "    # A vendor's comment.\n    def rot_pos_emb(")
    assert not rows(fork)[ROT_POS_EMB].reason
    alter(
        fork / ROPE,
        "        max_grid_size = max(max(h",
        "        logger.debug(grid_thw)\n        max_grid_size = max(max(h",
    )
    row = rows(fork)[ROT_POS_EMB]
    assert (row.verdict.value, row.reason) == ("applies", f"its source differs from the release's own, vLLM {RELEASE}")
    alter(fork / INPUTS, "x.to(device=device, non_blocking=True)", "x.to(device=device, non_blocking=False)")
    row = rows(fork)[NESTED]
    assert row.verdict.value == "refused" and row.reason.startswith("its source differs from the release's own")


def test_a_function_that_a_fork_has_taken_out_or_put_in_is_said_to_differ(fork: Path) -> None:
    distribution(fork, "vllm", RELEASE)
    alter(fork / INPUTS, "def _nested_tensors_h2d", "def _nested_tensors_to")
    row = rows(fork)[NESTED]
    assert row.verdict.value == "absent"
    assert row.reason.startswith(f"differs from the release's own: vLLM {RELEASE} has this function; ")
    path = fork / "vllm/model_executor/models/transformers/multimodal.py"
    path.parent.mkdir()
    path.write_text("class MultiModalMixin:\n    def _get_image_features(self):\n        pass\n")
    (row,) = [row for row in check(load(), Site(fork)) if "_get_image_features" in row.function]
    assert row.verdict.value == "absent"
    assert row.reason.startswith(f"differs from the release's own: vLLM {RELEASE} has no such function; ")


def _pyc(path: Path) -> None:
    py_compile.compile(str(path), str(path.with_suffix(".pyc")))
    path.unlink()


def _extension(path: Path) -> None:
    path.with_suffix(".cpython-312-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")


@pytest.mark.parametrize("compiled", [_pyc, _extension])
def test_a_module_without_source_or_that_is_not_what_runs_is_refused(
    fork: Path,
    compiled: Callable[[Path], None],
    capsys,  # type: ignore[no-untyped-def]
) -> None:
    distribution(fork, "vllm", RELEASE)
    compiled(fork / INPUTS)
    row = rows(fork)[NESTED]
    assert row.verdict.value == "refused" and "is compiled" in row.reason and str(fork) in row.reason
    assert rows(fork)[ROT_POS_EMB].verdict.value == "applies"
    assert main(["check", "--site", str(fork)]) == 1
    capsys.readouterr()


def test_all_of_it_compiled_is_all_refused(fork: Path) -> None:
    distribution(fork, "vllm", RELEASE)
    for path in list(fork.rglob("*.py")):
        _pyc(path)
    assert Site(fork).release() == RELEASE
    there = [row for row in check(load(), Site(fork)) if "inputs:" in row.function or "qwen3_vl:" in row.function]
    assert len(there) >= 2 and all(row.verdict.value == "refused" for row in there)


def test_a_module_that_is_not_there_is_absent(fork: Path) -> None:
    (fork / INPUTS).unlink()
    row = rows(fork)[NESTED]
    assert (row.verdict.value, row.reason) == ("absent", "there is no module vllm.multimodal.inputs here")


def installed(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`check` of what an interpreter finds with `path` before all else."""
    env = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    code = "import sys; from h2d_patch.cli import main; sys.exit(main(['check', '--json']))"
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=env, cwd=path.parent, capture_output=True, text=True, check=False
    )


def test_vllm_in_an_archive_is_refused(fork: Path) -> None:
    distribution(fork, "vllm", RELEASE)
    archive = fork.parent / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for path in fork.rglob("*"):
            opened.write(path, path.relative_to(fork))
    done = installed(archive)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["vllm"] == RELEASE
    by_function = {row["function"]: row for row in found["targets"]}
    row = by_function[NESTED]
    assert row["verdict"] == "refused" and "is in an archive" in row["reason"]
    assert {row["verdict"] for row in found["targets"]} == {"refused", "absent"}


def test_an_archive_or_an_empty_folder_as_the_site_is_one_clear_line(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as opened:
        opened.writestr("vllm/__init__.py", "")
    for place in (tmp_path / "vllm.whl", tmp_path):
        assert main(["check", "--site", str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"no vLLM in {place}" in line


@pytest.mark.parametrize("source", ["", "src"])
def test_an_editable_checkout_is_found_from_where_it_is_installed(fork: Path, tmp_path: Path, source: str) -> None:
    checkout = tmp_path / "a checkout"
    shutil.copytree(fork, checkout / source)
    site = tmp_path / "site-packages"
    distribution(site, "vllm", "0.22.1.dev3+g1", files=False, url=checkout.as_uri())
    assert Site(site).vllm == checkout / source / "vllm"
    assert Site(site).release() == "0.22.1.dev3+g1"
    assert rows(site)[ROT_POS_EMB].verdict.value == "applies"


def test_an_editable_checkout_is_found_in_its_environment(fork: Path, tmp_path: Path) -> None:
    """As setuptools installs one: a finder that knows the folder, started by a .pth file."""
    site = tmp_path / "site-packages"
    distribution(site, "vllm", "0.22.1.dev3+g1", files=False, url=fork.as_uri())
    (site / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'vllm':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(fork / 'vllm/__init__.py')!r},\n"
        f"                submodule_search_locations=[{str(fork / 'vllm')!r}])\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    found = json.loads(installed(site).stdout)
    assert found["vllm"] == "0.22.1.dev3+g1"
    by_function = {row["function"]: row["verdict"] for row in found["targets"]}
    assert by_function[NESTED] == "applies"


@pytest.mark.parametrize(
    "said", ["", "null", "[]", '{"url": 3, "dir_info": {"editable": true}}', '{"dir_info": {}}', "{"]
)
def test_a_damaged_record_of_where_it_came_from_is_no_checkout(fork: Path, tmp_path: Path, said: str) -> None:
    distribution(fork, "vllm", RELEASE)
    (fork / f"vllm-{RELEASE}.dist-info/direct_url.json").write_text(said)
    assert Site(fork).release() == RELEASE
    (fork / "vllm").rename(tmp_path / "elsewhere")
    assert main(["check", "--site", str(fork)]) == 2
