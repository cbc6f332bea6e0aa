"""A real vLLM with the fixes in, on the GPU: the same tokens switched on and off, and other tokens where a copy is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
from PIL import Image
import torch
from vllm import LLM, SamplingParams

llm = LLM(
    model=sys.argv[1], max_model_len=2048, max_num_seqs=1,  # one at a time: batches, and so their rounding, are alike
    enforce_eager=True, dtype="bfloat16",
    limit_mm_per_prompt={"image": 2, "video": 0}, enable_prefix_caching=False, mm_processor_cache_gb=0,
    gpu_memory_utilization=0.3, async_scheduling=sys.argv[2] == "async",
)
from h2d_patch import process

def picture(width, height, shade):
    image = Image.new("RGB", (width, height))
    image.putdata([((x * 7 + shade) % 256, (y * 5) % 256, (x * y) % 256) for y in range(height) for x in range(width)])
    return image

slot = "<|vision_start|><|image_pad|><|vision_end|>"
prompts = [
    {"prompt": slot + "describe the picture", "multi_modal_data": {"image": picture(96 + 32 * n, 64 + 32 * n, 40 * n)}}
    for n in range(5)
]
prompts.append({"prompt": slot + slot + "in detail", "multi_modal_data": {"image": [picture(64, 96, 1), picture(128, 96, 9)]}})
prompts.append({"prompt": "the quick brown fox"})
sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

def tokens():
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]

def turn(on):
    for switch in process.current.switches.values():
        switch.turn(on)

result = {"arms": []}
for on in (False, True, False, True):
    turn(on)
    result["arms"].append(tokens())
result["state"] = process.current.state()
result["corrupted"] = {}
for patch in process.current.patches:
    for name in ("to_device", "cat_to_device", "copy_h2d"):
        bound = getattr(patch.site, name, None)
        if bound is None or not patch.site.calls:
            continue
        def corrupt(*args, bound=bound, **kwargs):
            moved = bound(*args, **kwargs)  # backwards: wrong, but every index stays in range
            return moved.copy_(moved.flip(tuple(range(moved.dim())))) if isinstance(moved, torch.Tensor) else moved
        patch.site.bind(name, corrupt)
        result["corrupted"][patch.fix.id] = tokens()
        patch.site.bind(name, bound)
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module", params=["async"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM here")
    folder = tmp_path_factory.mktemp("vllm")
    subprocess.run([sys.executable, str(ROOT / "tools/tiny_model.py"), str(folder / "model")], check=True, timeout=300)
    env = {
        **os.environ,
        "H2D_PATCH": "1",
        "H2D_PATCH_STRICT": "1",
        "H2D_PATCH_RUN_DIR": str(folder / "run"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", SCRIPT, str(folder / "model"), request.param]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT"))
    return result


def test_tokens_are_the_same_with_all_fixes_on_and_off(outcome: dict[str, Any]) -> None:
    first, *others = outcome["arms"]
    assert all(other == first for other in others)
    assert len({tuple(tokens) for tokens in first}) > 3


def test_each_copy_went_through_staging_and_none_fell_back(outcome: dict[str, Any]) -> None:
    ran = {target["fix"]: target for target in outcome["state"]["targets"] if target["calls"]}
    assert {"vision-rope", "mrope-positions"} <= set(ran)
    assert all(target["verdict"] == "active" and target["fallbacks"] == 0 for target in ran.values()), ran
    assert outcome["state"]["role"] == "worker"
    assert outcome["state"]["device"]["staging_bytes"] == 256 << 20
    assert outcome["state"]["device"]["selftest_s"] < 1.0


def test_a_wrong_copy_gives_other_tokens(outcome: dict[str, Any]) -> None:
    assert {"vision-rope", "mrope-positions"} <= set(outcome["corrupted"])
    assert all(tokens != outcome["arms"][0] for tokens in outcome["corrupted"].values())
