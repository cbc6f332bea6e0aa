"""What `doctor` says of the machine: driver, memory, compiler, device profile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from looked_for import found

from h2d_patch import settings
from h2d_patch.operate.doctor import machine, profiles, servers
from h2d_patch.operate.doctor.finding import OK, PROBLEM, WARNING


def probe(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


GPU = '{"cuda": 13000, "devices": [{"name": "NVIDIA H200", "bus": "0000:19:00.0"}]}'


@pytest.mark.parametrize(
    ("script", "level", "says"),
    [
        (f"print('{GPU}')", OK, "CUDA 13.0, 1 × NVIDIA H200"),
        (
            'print(\'{"cuda": 13000, "devices": []}\')',
            PROBLEM,
            "the driver shows no GPU .CUDA_VISIBLE_DEVICES is set here",
        ),
        ("import time; time.sleep(60)", WARNING, "no NVIDIA driver answers .no answer within 1 s"),
        ("import os; os.abort()", WARNING, "the probe ended with status -6: nothing said"),
        ("print('{}')", WARNING, "the probe ended with status 0"),
        ("raise OSError('CUDA_ERROR_NO_DEVICE')", WARNING, "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_the_driver_is_asked_in_a_process_of_its_own(script: str, level: str, says: str) -> None:
    devices: list[machine.Device] = []
    began = time.monotonic()
    seconds = 1 if "sleep" in script else 30
    findings = list(machine.driver({**os.environ, "CUDA_VISIBLE_DEVICES": ""}, devices, probe(script), seconds))
    found(findings, level, says)
    assert time.monotonic() - began < 15 and bool(devices) is (level == OK)


def test_an_answer_without_devices_is_said_also_under_python_o() -> None:
    script = """
import sys
from h2d_patch.operate.doctor import machine
print([finding.found for finding in machine.driver({}, [], (sys.executable, "-c", "print([])"))])
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-O", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "the probe ended with status 0: nothing said" in done.stdout, done.stderr


def test_a_driver_that_does_not_come_up_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    text = 'print(\'{"error": "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}\')'
    found(
        list(machine.driver({}, [], probe(text))),
        PROBLEM,
        "has driver 580.1, but CUDA does not come up: cuInit: CUDA_ERR",
    )


def proc(tmp_path: Path, available: int = 1 << 40, locked: str = "unlimited", cgroup: str = "") -> Path:
    (tmp_path / "7").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available >> 10} kB\n")
    (tmp_path / "7/limits").write_text(
        f"Limit  Soft Limit\nMax locked memory         {locked}       unlimited     bytes\n"
    )
    (tmp_path / "self/cgroup").write_text(cgroup)
    return tmp_path


def test_memory_that_cannot_be_locked_matters_where_a_worker_has_none(tmp_path: Path) -> None:
    place = proc(tmp_path, locked="65536")
    found(list(machine.memory(256 << 20, [7], 1, True, place)), WARNING, "at most 64 KiB may be locked in process 7")
    assert {one.level for one in machine.memory(256 << 20, [7], 1, False, place)} == {OK}


def test_memory_that_is_short_is_said_for_all_workers(tmp_path: Path) -> None:
    place = proc(tmp_path, available=1 << 30)
    found(
        list(machine.memory(256 << 20, [], 8, False, place)),
        WARNING,
        "1024 MiB are left on this machine; the workers pin 2048 MiB",
    )
    assert not [one for one in machine.memory(256 << 20, [], 2, False, place) if one.level != OK]


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/pod/vllm", "pod", "memory.max", "memory.current"),
        ("9:memory:/pod/vllm", "memory/pod", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_limit_of_the_control_group_or_of_its_parent_counts(
    tmp_path: Path, line: str, folder: str, limit: str, used: str
) -> None:
    place = proc(tmp_path / "proc", cgroup=f"{line}\n")
    root = tmp_path / "cgroup"
    (root / folder / "vllm").mkdir(parents=True)
    (root / folder / "vllm" / limit).write_text("max\n")
    (root / folder / limit).write_text(f"{4 << 30}\n")
    (root / folder / used).write_text(f"{3 << 30}\n")
    assert machine._cgroup_room(place, root) == (1 << 30, "under the control group's memory limit")


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (only,) = machine.compiler({"CC": "/nowhere/cc -O2"})
    assert only.level == WARNING and "no C compiler" in only.found


def test_a_stale_profile_is_said_and_what_is_used_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from h2d_patch.copies.profile import DRIVER, Choice
    from h2d_patch.copies.profile_file import Cell, Measured, save

    device = machine.Device("A GPU of tomorrow", "0000:19:00.0")
    monkeypatch.setattr(profiles, "driver_version", lambda: "580.1")
    key = profiles.key_of(device)
    assert key.driver == "580.1" and key.gpu == device.name and len(key.kernels) == 16
    directory = tmp_path / "profiles"
    asked = settings.Settings(settings.Selection.parse("1"), profile_dir=directory)
    run = servers.Running()
    found(
        list(profiles.profiles(asked, [device], run)),
        WARNING,
        "none for A GPU of tomorrow: kv-swap measures it at each start",
    )
    save(directory / "a-gpu-of-tomorrow.json", Measured(key, [Cell(True, 4096, 1, {Choice(DRIVER): 1.0})], {}))
    found(
        list(profiles.profiles(asked, [device, device], run)), OK, "for A GPU of tomorrow: of .*/a-gpu-of-tomorrow.json"
    )
    monkeypatch.setattr(profiles, "driver_version", lambda: "590.2")
    found(
        list(profiles.profiles(asked, [device], run)),
        WARNING,
        "driver: expected '590.2', as on this device, found '580.1'",
    )


def test_the_key_has_the_versions_that_a_worker_would_find() -> None:
    torch, triton = pytest.importorskip("torch"), pytest.importorskip("triton")
    key = profiles.key_of(machine.Device("x", "0000:19:00.0"))
    assert (key.cuda, key.triton) == (torch.version.cuda or "none", triton.__version__)
