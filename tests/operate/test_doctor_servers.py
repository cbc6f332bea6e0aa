"""What `doctor` says of the run directory, of running servers, and of the fixes in them or by the sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looked_for import NOWHERE, examined, found
from made_states import ab, put, state, target
from model_server import MANIFEST, Server

from h2d_patch import __version__
from h2d_patch.manifest import Manifest, load
from h2d_patch.operate.doctor import servers
from h2d_patch.operate.doctor.environment import Asked
from h2d_patch.operate.doctor.finding import OK, PROBLEM, WARNING, Finding


def serving(proc: Path, pid: int, **environ: str) -> None:
    """Makes a process of `vllm serve` with this environment, as /proc shows one."""
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(b"vllm\0serve\0m\0")
    (proc / str(pid) / "environ").write_bytes("".join(f"{key}={value}\0" for key, value in environ.items()).encode())


def eventually(ask: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


# --- the run directory ---


def test_a_run_directory_that_cannot_be_used_is_said_and_what_mends_it(run_dir: Path) -> None:
    run_dir.chmod(0o777)
    said = found(examined(), PROBLEM, "can be written by others")
    assert said.bad_input and f"chmod 700 {run_dir} mends it" in said.do
    run_dir.chmod(0o700)
    link = run_dir.with_name("link")
    link.symlink_to(run_dir)
    said = found(examined(H2D_PATCH_RUN_DIR=str(link)), PROBLEM, "is a symbolic link")
    assert said.bad_input and "; remove it, or name another" in said.do
    found(examined(H2D_PATCH_RUN_DIR=str(run_dir / "none")), OK, "is not there; the first server")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a directory away")
def test_nobody_is_told_to_remove_what_is_another_user_s(run_dir: Path) -> None:
    os.chown(run_dir, 4711, -1)
    said = found(examined(), PROBLEM, "belongs to user id 4711")
    assert "run doctor as its owner" in said.do and "remove" not in said.do and "chmod" not in said.do


def test_a_server_whose_run_directory_is_refused_is_seen_and_mended_as_doctor_says(server: Server) -> None:
    run_dir = server.path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    (server.path / "vllm").write_text(
        "from h2d_patch.plugin import register\nregister()\nimport time\ntime.sleep(100)\n"
    )

    def findings() -> list[Finding]:
        done = server.status("doctor", "--json", H2D_PATCH="", H2D_PATCH_MANIFEST="")
        return [Finding(**one) for one in json.loads(done.stdout)["findings"]]

    with subprocess.Popen([sys.executable, str(server.path / "vllm"), "serve"], env=server.env) as process:
        try:
            before = findings()
            found(before, OK, "H2D_PATCH is not set here; the running servers have their own environment")
            said = found(
                before, WARNING, f"process {process.pid} .vllm serve. .*no state of it can be read: .*mode 0777"
            )
            assert said.do == found(before, PROBLEM, f"run directory {run_dir} can be written").do.partition("; ")[2]
            assert not [one for one in before if "nothing runs" in one.found]
            subprocess.run(said.do.partition(" mends")[0], shell=True, check=True)
            assert eventually(lambda: bool(server.states()))
            after = findings()
            found(after, OK, f"{run_dir}: 1 live process$")
            assert not [one for one in after if one.about == "servers" and f"process {process.pid}" in one.found]
        finally:
            process.kill()


def test_damaged_states_do_not_hide_the_others(run_dir: Path) -> None:
    put(run_dir, state(target(calls=7)), {"schema": 1})
    (run_dir / "state-x-half.json").write_text('{"schema": 2, "pid"')
    (run_dir / "state-x-link.json").symlink_to(run_dir / "state-x-0.json")
    findings = examined()
    found(findings, PROBLEM, "state-x-half.json: .*expected a state file")
    found(findings, PROBLEM, "state-x-link.json is a symbolic link")
    assert "restart" in found(findings, PROBLEM, r"state-x-1.json: schema: found 1; expected 2").do
    found(findings, OK, "kv-swap: active, called 7 times, 0 left to the original")
    found(findings, OK, "H2D_PATCH is not set here; the running servers have their own environment")


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_run_directory_without_permission_to_write_is_said(run_dir: Path) -> None:
    run_dir.chmod(0o500)
    found(examined(), PROBLEM, "cannot be written")


def test_a_full_file_system_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result((*tuple(real(path))[:4], 0, *tuple(real(path))[5:]))
    )
    found(examined(), PROBLEM, "the file system of .* is full")


CONTENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "refused": (state(target("refused", reason="no source")), PROBLEM, r"kv-swap refused in x:Y.z: no source \(worker 0, process"),
    "failed": (state(target("failed", reason="self-test: differs")), PROBLEM, "kv-swap failed in x:Y.z: self-test: differs"),
    "kept off": (state(target("off", reason="off for pooling models")), WARNING, "kv-swap is off: off for pooling models"),
    "switched off": (state(target("off", reason="switched off")), WARNING, "kv-swap is off: switched off"),
    "off in an A/B": (state(target("off", reason="switched off"), ab=ab("kv-swap")), OK, "kv-swap is off in this slice of an A/B"),
    "switched off after an A/B": (state(target("off", reason="switched off"), ab=ab("kv-swap", ended="it is over")), WARNING, "kv-swap is off: switched off"),
    "active": (state(target(calls=5, fallbacks=1)), OK, "kv-swap: active, called 5 times, 1 left to the original"),
    "never called": (state(target()), OK, "kv-swap: active, not called so far"),
    "mostly falls back": (state(target(calls=200, fallbacks=150, fallback_reasons={"staging is full": 150})), WARNING, "150 of 200 calls were left to the original: 150 × staging is full"),
    "not needed": (state(target("upstream")), OK, r"kv-swap: not in \(upstream 1\)"),
    "not loaded": (state(target("pending", function="vllm.v1.kv_offload.cpu.gpu_worker:S.t"), target("absent", function="vllm.v1.kv_offload.worker.cpu_gpu:S.t")), OK, r"kv-swap: not loaded by any process so far \(no KV connector that offloads\)"),
    "not loaded, of many models": (state(*(target("pending", fix="vision-h2d", function=f"vllm.models.m{number}:M.f") for number in (1, 1, 2, 3, 4))), OK, r"vision-h2d: not loaded by any process so far \(its modules: m1, m2, m3 and 1 more\)"),
    "loaded and not needed": (state(target("pending"), target("upstream", function="vllm.x:Y.other")), OK, r"kv-swap: not in \(pending 1, upstream 1\)"),
    "of a module that is not there": (state(target("absent", fix="mine", function="acme_vision:V.f", reason="there is no module acme_vision here")), WARNING, r"mine: not in \(there is no module acme_vision here\)"),
    "does not apply": (state(target("absent", reason="does not apply: runs another runner")), OK, "not in .does not apply: runs another"),
    "nothing is patched": (state(error="h2d_patch: nothing is patched: H2D_PATCH: unknown fix"), PROBLEM, "nothing is patched: H2D_PATCH: unknown fix"),
    "another version": (state(target(), h2d_patch="0.0.9"), WARNING, f"runs h2d_patch 0.0.9, this is {__version__}"),
    "a control file refused": (state(target(), control="x is a symbolic link"), PROBLEM, "refuses its control file: x is a symbolic link"),
    "no staging": (state(target(), device={"staging_bytes": 0, "notes": ["no staging region: out of memory"]}), PROBLEM, "has no staging region"),
    "a note": (state(target(), device={"staging_bytes": 1, "notes": ["no swap kernel: x"]}), WARNING, "no swap kernel: x"),
    "a profile that was measured": (state(target(), device={"profile": "calibrated in 1.4 s"}), WARNING, "in use: calibrated in 1.4 s"),
    "a profile of a file": (state(target(), device={"profile": "of /x.json"}), OK, "in use: of /x.json"),
    "no worker": (state(target(), role="engine-core", rank=None, started=time.time() - 1000), WARNING, "no worker of the server here-1-1 has written its state"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTENTS)
def test_what_the_processes_say_of_themselves(run_dir: Path, what: str) -> None:
    content, level, says = CONTENTS[what]
    put(run_dir, content)
    findings = examined()
    found(findings, level, says)
    if level == OK:
        assert not [one for one in findings if one.about in ("fixes", "processes") and one.level != OK]


def test_a_verdict_of_many_processes_is_said_once(run_dir: Path) -> None:
    children = [subprocess.Popen(["sleep", "100"]) for _ in range(5)]
    try:
        put(run_dir, *(state(target("failed", reason="x"), pid=child.pid, rank=n) for n, child in enumerate(children)))
        matching = [one for one in examined() if "kv-swap failed" in one.found]
        assert len(matching) == 1 and matching[0].found.endswith("and 2 more)")
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_what_is_not_selected_or_gone_is_no_finding(run_dir: Path) -> None:
    gone = subprocess.Popen(["sleep", "100"])
    content = state(target("failed", reason="long ago"), pid=gone.pid)
    gone.kill()
    gone.wait()
    put(run_dir, content, state(target("off", reason="not selected by H2D_PATCH")))
    findings = examined()
    assert not [one for one in findings if "kv-swap" in one.found]
    found(findings, OK, "1 live process, 1 of processes that are gone")


def test_a_server_that_should_be_patched_and_is_not_seen_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "elsewhere/state-x-4194302.json").write_text("{}")
    for pid, directory in ((4194300, "/nowhere"), (4194301, ""), (4194302, tmp_path / "elsewhere")):
        serving(tmp_path, pid, H2D_PATCH="1", H2D_PATCH_RUN_DIR=str(directory))
    findings = list(servers.processes(servers.Running(tmp_path / "run", proc=tmp_path)))
    found(findings, WARNING, "process 4194300 .*no state in its run directory, /nowhere")
    found(findings, WARNING, f"process 4194301 .*no state in its run directory, .*/h2d_patch-{os.getuid()}")
    assert len(findings) == 2


# --- the environment is the server's ---


@pytest.mark.parametrize("shell", [{}, {"H2D_PATCH": "0"}, {"VLLM_PLUGINS": "lora"}], ids=str)
def test_where_a_server_runs_its_environment_counts_and_not_the_shell_s(run_dir: Path, shell: dict[str, str]) -> None:
    proc = run_dir.with_name("proc")
    serving(proc, 4194300, H2D_PATCH="1")
    serving(proc, 4194301, H2D_PATCH="1", VLLM_PLUGINS="lora")
    findings = examined(proc, **shell)
    of_the_shell = [one for one in findings if one.about == "variables"]
    assert {one.level for one in of_the_shell} == {OK}
    for name in shell or {"H2D_PATCH": ""}:
        found(of_the_shell, OK, f"{name}.*; the running servers have their own environment")
    (left_out,) = (one for one in findings if one.level == PROBLEM and one.about == "servers")
    assert "Process 4194301 (vllm serve): VLLM_PLUGINS='lora' leaves h2d_patch out" in left_out.found


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [("H2D_PATCH", "our-modle", "unknown fix 'our-modle'"), ("H2D_PATCH_MANIFEST", "broken.toml", "broken.toml")],
)
def test_what_a_server_cannot_use_is_bad_input_of_it_and_not_of_the_shell(
    server: Server, variable: str, value: str, says: str
) -> None:
    (server.path / "broken.toml").write_text("manifest = ")
    value = str(server.path / value) if value.endswith(".toml") else value
    with server.running(**{variable: value}) as running:
        running("from h2d_patch.plugin import register\nregister()")
        done = server.status("doctor", "--json", H2D_PATCH="", H2D_PATCH_MANIFEST="")
    assert done.returncode == 2
    findings = [Finding(**one) for one in json.loads(done.stdout)["findings"]]
    assert found(findings, PROBLEM, f"nothing is patched: .*{says}").bad_input
    assert [one.about for one in findings if one.bad_input] == ["processes"]
    found(findings, OK, "H2D_PATCH is not set here; the running servers have their own environment")
    assert not [one for one in findings if "nothing runs" in one.found]


# --- by the sources ---


@pytest.fixture
def another_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A vLLM without any function that is patched; the manifest has a fix for a module of the user's own besides."""
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    (tmp_path / "ours.toml").write_text(MANIFEST.replace("our_model:", "acme_vision:"))
    return load(tmp_path / "ours.toml")


def test_a_module_of_one_s_own_that_is_not_there_is_said(another_vllm: Manifest) -> None:
    asked = Asked(manifest=another_vllm, selected=frozenset(["our-model", "kv-swap", "flashinfer-plan"]))
    findings = list(servers.fixes(servers.Running(proc=NOWHERE), asked))
    said = found(
        findings, WARNING, r"^our-model: there is no module acme_vision here \(nothing runs; by its sources\)$"
    )
    assert "PYTHONPATH" in said.do
    for fix in ("kv-swap", "flashinfer-plan"):
        found(findings, OK, rf"^{fix}: this release needs none of it \(nothing runs; by its sources\)$")


def test_why_the_sources_are_asked_is_said(run_dir: Path, another_vllm: Manifest) -> None:
    def said() -> str:
        run = servers.Running(proc=run_dir.with_name("proc"))
        list(servers.run_directory(run_dir, run))
        (only,) = servers.fixes(run, Asked(manifest=another_vllm, selected=frozenset(["kv-swap"])))
        return only.found.partition(" (")[2]

    assert said() == "nothing runs; by its sources)"
    serving(run_dir.with_name("proc"), 4194300, H2D_PATCH="1", H2D_PATCH_RUN_DIR=str(run_dir))
    assert said() == "no running server has its state here; by its sources)"
    put(run_dir, state(error="h2d_patch: nothing is patched: x"))
    assert said() == "no running process has a fix in; by its sources)"
    (run_dir / "state-x-half.json").write_text("{")
    assert said() == "no state can be read; by its sources)"
    (run_dir / "state-x-half.json").unlink()
    run_dir.chmod(0o777)
    assert said() == "no state can be read; by its sources)"


# --- a real process ---


def test_a_real_process_is_seen_as_it_is(server: Server) -> None:
    with server.running() as running:
        running(
            "from h2d_patch.plugin import register\nregister()\nimport torch, our_model\n_ = our_model.Model().forward(torch.ones(3)).tolist()"
        )
        assert eventually(lambda: any(one["calls"] for state in server.states() for one in state["targets"]))
        said = json.loads(server.status("doctor", "--json").stdout)["findings"]
    findings = [Finding(**one) for one in said]
    found(findings, OK, "our-model: active, called once, 0 left to the original")
    assert not [one for one in findings if one.level != OK and one.about in ("fixes", "processes", "run directory")]
