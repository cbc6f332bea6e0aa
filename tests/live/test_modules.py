"""Every target of a real release is put in, self-tested and taken out again, without a server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from harness import EVERY_FIX, Live
from live_server import environment

pytestmark = pytest.mark.live

SCRIPT = """
import importlib, json, os, sys
import vllm
from h2d_patch.manifest import load
from h2d_patch.patching.locate import locate

def members():
    found = {}
    for _, target in load().targets():
        module = sys.modules.get(target.module)
        located = locate(module, target.qualname) if module else None
        if located:
            found[target.function] = (located.found, located.function, located.function.__code__)
    return found

not_importable = {}
for name in {target.module for _, target in load().targets()}:
    try:
        importlib.import_module(name)
    except Exception as error:
        not_importable[name] = f"{type(error).__name__}: {error}"
before = members()
replaced = "vllm.multimodal.inputs:_nested_tensors_h2d"
inputs = sys.modules["vllm.multimodal.inputs"]
bound_elsewhere = type(sys)("bound_elsewhere")
sys.modules["bound_elsewhere"] = bound_elsewhere
if replaced in before:
    bound_elsewhere.h2d = inputs._nested_tensors_h2d
from h2d_patch.plugin import register
register()
from h2d_patch import process
state = process.current.state()
active = any(t["function"] == replaced and t["verdict"] == "active" for t in state["targets"])
rebound = not active or before[replaced][0] is not bound_elsewhere.h2d is inputs._nested_tensors_h2d
process.current.undo()
after = members()
same = {name: all(a is b for a, b in zip(before[name], after[name])) for name in before}
import torch
put_back = not active or before[replaced][0] is bound_elsewhere.h2d is inputs._nested_tensors_h2d
cuda = torch.cuda.is_initialized()
print(json.dumps({"state": state, "same": same, "rebound": rebound, "put_back": put_back, "cuda": cuda,
                  "not_importable": not_importable}))
"""


def run(live: Live, arguments: Sequence[str], **environ: str) -> dict[str, Any]:
    """The JSON that a program of the live environment prints."""
    env = environment({"H2D_PATCH_RUN_DIR": str(live.run_dir("modules")), **environ})
    done = subprocess.run([live.python, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


@pytest.fixture(scope="module")
def outcome(live: Live) -> dict[str, Any]:
    return run(live, ["-c", SCRIPT], H2D_PATCH=EVERY_FIX)


def test_what_check_says_applies_is_active_and_all_else_has_the_same_verdict(
    live: Live, outcome: dict[str, Any]
) -> None:
    static = run(live, ["-m", "h2d_patch.cli", "check", "--json"])["targets"]
    running = outcome["state"]["targets"]
    for one, other in zip(static, running, strict=True):
        if other["verdict"] == "pending":
            assert other["function"].split(":")[0] in outcome["not_importable"], other
        else:
            assert one["verdict"] == {"active": "applies"}.get(other["verdict"], other["verdict"]), (one, other)
    assert any(target["verdict"] == "active" for target in running)


def test_each_self_test_took_under_100_ms(outcome: dict[str, Any]) -> None:
    took = [target["selftest_ms"] for target in outcome["state"]["targets"] if target["verdict"] == "active"]
    assert all(0 < ms < 100 for ms in took), took


def test_undo_restores_every_attribute_code_and_re_bound_name(outcome: dict[str, Any]) -> None:
    assert outcome["rebound"] and outcome["put_back"]
    assert outcome["same"] and all(outcome["same"].values()), outcome["same"]


def test_nothing_of_it_initialises_cuda(outcome: dict[str, Any]) -> None:
    assert outcome["cuda"] is False
