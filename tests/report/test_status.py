"""What `status` shows of each process and server, and whom it names when nothing is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_states import state, target

from h2d_patch.report.state import ProcessState
from h2d_patch.report.status import as_json, as_text, why_nothing


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
    arms = {"off": {"count": 10, "seconds": 1e-3}, "on": {"count": 0, "seconds": 0.0}}
    ab = {"fix": "kv-swap", "slice_s": 30.0, "on": False, "ended": None, "left_out": {"late": 2}, "arms": arms}
    content = {"pid": 7, "role": "worker", "server": "web", "targets": [], "ab": ab}
    text = as_text([ProcessState(tmp_path, content, alive=True)], tmp_path, [], everything=False)
    said = "slices of 30 s, now off; off 10 calls, 100.0 µs each; on 0 calls; 2 left out: late"
    assert f"A/B of kv-swap, {said}" in text


def test_the_device_profile_is_shown_beside_what_went_wrong(tmp_path: Path) -> None:
    device = {"name": "cuda:0", "profile": "calibrated in 1.4 s", "notes": ["profile p.json: damaged"]}
    state = ProcessState(
        tmp_path, {"pid": 7, "role": "worker", "server": "s", "targets": [], "device": device}, alive=True
    )
    text = as_text([state], tmp_path, [], everything=False)
    assert "device profile: calibrated in 1.4 s" in text and "profile p.json: damaged" in text
    assert as_json([state], [])["processes"][0]["device"] == device


SELECTED = ("multimodal-h2d", "vision-h2d", "kv-swap", "mla-context")


def targets(calls: int = 0, **verdicts: str) -> list[dict[str, Any]]:
    """Two functions of vision-h2d, one of each other fix; active or, as `verdicts` say, something else."""
    said = {"kv_swap": "pending", "mla_context": "absent", **verdicts}
    found = []
    for fix in ("multimodal-h2d", "vision-h2d", "vision-h2d", "kv-swap", "mla-context"):
        verdict, _, reason = said.get(fix.replace("-", "_"), "active").partition(": ")
        function = f"vllm.x:Y.{fix.replace('-', '_')}"
        number = calls if verdict == "active" else 0
        found.append(target(verdict, fix=fix, function=function, reason=reason, calls=number))
    return found


def shown(*contents: dict[str, Any], everything: bool = False) -> str:
    whole = [{**content, "switches": dict.fromkeys(SELECTED, True)} for content in contents]
    return as_text([ProcessState(Path("x"), content, alive=True) for content in whole], Path("x"), [], everything)


def test_what_is_in_a_process_that_calls_nothing_is_a_line_and_the_worker_has_its_table() -> None:
    there = [state(*targets(), pid=1, role="api-server"), state(*targets(7), pid=2)]
    api, worker, *_ = shown(*there).split("\n\n")
    assert api.splitlines()[1] == "  active, not called here: multimodal-h2d, vision-h2d in 2 functions"
    assert "Y." not in api
    assert worker.count(" active ") == 3 and "not called here" not in worker
    assert shown(*there, everything=True).count(" active ") == 6
    (quiet,) = shown(state(*targets())).split("\n\n")[:1]
    assert quiet.count(" active ") == 3, "a worker that has called nothing yet"


@pytest.mark.parametrize(
    "more",
    [{"calls": 3}, {"fallbacks": 1}],
)
def test_a_process_that_calls_something_has_its_table(more: dict[str, int]) -> None:
    first, *others = targets()
    text = shown(state({**first, **more}, *others, role="engine-core"))
    assert text.count(" active ") == 3 and "not called here" not in text


def test_what_went_wrong_keeps_its_row_and_what_is_off_its_reason() -> None:
    bad = targets(multimodal_h2d="refused: another package has wrapped it", kv_swap="failed: self-test: x")
    text = shown(state(*bad, role="api-server"))
    assert "Y.multimodal_h2d" in text and "another package has wrapped it" in text
    assert "Y.kv_swap" in text and "self-test: x" in text and "Y.vision_h2d" not in text
    text = shown(state(*targets(vision_h2d="off: switched off"), role="api-server"))
    assert "  active, not called here: multimodal-h2d\n  off (switched off), not called here: vision-h2d in 2" in text
    text = shown(state(*targets(multimodal_h2d="absent: does not apply: this worker runs V2"), role="api-server"))
    assert "Y.multimodal_h2d" in text


def test_a_selected_fix_that_is_in_no_process_is_said_once_a_server() -> None:
    there = [
        state(*targets(), pid=1, role="api-server"),
        state(*targets(7), pid=2),
        state(*targets(), pid=3, server="b"),
    ]
    a, b = shown(*there).split("\n\n")[3:]
    absent = "  mla-context: absent, this release does not need it"
    assert a.splitlines() == [
        "in no process of server here-1-1:",
        "  kv-swap: pending, its modules are not loaded",
        absent,
    ]
    assert b.splitlines()[0] == "in no process of server b:"
    assert "in no process" not in shown(*there, everything=True)
    loaded = state(*targets(kv_swap="active"), pid=3)
    assert "kv-swap: pending" not in shown(*there[:2], loaded)
    own = targets(mla_context="absent: there is no module acme_vision here")
    assert "mla-context: absent, there is no module acme_vision here" in shown(state(*own))
