"""Whom `status` names when nothing is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2d_patch.report.status import why_nothing


def process(proc: Path, pid: int, arguments: list[str], **environ: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes("\0".join([*arguments, ""]).encode())
    (proc / str(pid) / "environ").write_bytes("\0".join(f"{k}={v}" for k, v in environ.items()).encode())


@pytest.mark.parametrize(
    "arguments",
    [
        ["/usr/bin/python3", "/opt/vllm/bin/vllm", "serve", "model"],
        ["/opt/vllm/bin/vllm", "serve", "model"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "x"],
    ],
)
def test_a_server_without_us_is_named_with_the_reason(tmp_path: Path, arguments: list[str]) -> None:
    process(tmp_path, 4194300, arguments)
    process(tmp_path, 4194301, arguments, H2D_PATCH="1", VLLM_PLUGINS="other")
    process(tmp_path, 4194302, arguments, H2D_PATCH="1")
    said = sorted(why_nothing({}, tmp_path))
    assert len(said) == 2
    assert "4194300" in said[0] and "H2D_PATCH is not set" in said[0]
    assert "4194301" in said[1] and "VLLM_PLUGINS='other' leaves h2d_patch out" in said[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tail", "-f", "/tmp/vllm.log"],
        ["/opt/vllm/bin/python", "-c", "import vllm"],
        ["python", "-m", "vllm.model_executor.models.registry"],
        ["vim", "vllm"],
        [""],
    ],
)
def test_other_processes_are_left_alone(tmp_path: Path, arguments: list[str]) -> None:
    process(tmp_path, 4194300, arguments)
    assert why_nothing({}, tmp_path) == []


def test_an_a_b_is_shown_with_what_a_call_took_in_each_arm(tmp_path: Path) -> None:
    from h2d_patch.report.state import ProcessState
    from h2d_patch.report.status import as_text

    arms = {"off": {"count": 10, "seconds": 1e-3}, "on": {"count": 0, "seconds": 0.0}}
    ab = {"fix": "kv-swap", "slice_s": 30.0, "on": False, "ended": None, "left_out": {"late": 2}, "arms": arms}
    content = {"pid": 7, "role": "worker", "server": "web", "targets": [], "ab": ab}
    text = as_text([ProcessState(tmp_path, content, alive=True)], tmp_path, [], everything=False)
    said = "slices of 30 s, now off; off 10 calls, 100.0 µs each; on 0 calls; 2 left out: late"
    assert f"A/B of kv-swap, {said}" in text


def test_the_device_profile_is_shown_beside_what_went_wrong(tmp_path: Path) -> None:
    from h2d_patch.report.state import ProcessState
    from h2d_patch.report.status import as_json, as_text

    device = {"name": "cuda:0", "profile": "calibrated in 1.4 s", "notes": ["profile p.json: damaged"]}
    state = ProcessState(
        tmp_path, {"pid": 7, "role": "worker", "server": "s", "targets": [], "device": device}, alive=True
    )
    text = as_text([state], tmp_path, [], everything=False)
    assert "device profile: calibrated in 1.4 s" in text and "profile p.json: damaged" in text
    assert as_json([state], [])["processes"][0]["device"] == device
