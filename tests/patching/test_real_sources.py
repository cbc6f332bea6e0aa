"""What is compiled for one function alone is what the whole module's compilation makes of it, on real modules."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2d_patch.patching.rewrite import ModuleSource, Refused

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fetch_release import fetch

pytestmark = pytest.mark.releases

MODULES = [
    ("0.8.0", "vllm/v1/worker/gpu_model_runner.py"),
    ("0.8.0", "vllm/model_executor/models/qwen2_5_vl.py"),
    ("0.9.0.1", "vllm/multimodal/inputs.py"),
    ("0.11.2", "vllm/multimodal/utils.py"),
    ("0.11.2", "vllm/model_executor/models/qwen3_vl.py"),
    ("0.11.0", "vllm/v1/kv_offload/worker/cpu_gpu.py"),
    ("0.14.1", "vllm/v1/kv_offload/worker/cpu_gpu.py"),
    ("0.19.1", "vllm/v1/kv_offload/worker/cpu_gpu.py"),
    ("0.19.1", "vllm/v1/simple_kv_offload/cuda_mem_ops.py"),
    ("0.22.1", "vllm/v1/worker/gpu_model_runner.py"),
    ("0.22.1", "vllm/multimodal/inputs.py"),
    ("0.22.1", "vllm/model_executor/models/qwen2_5_vl.py"),
    ("0.22.1", "vllm/model_executor/models/qwen3_vl.py"),
    ("0.22.1", "vllm/v1/attention/backends/flashinfer.py"),
    ("0.22.1", "vllm/v1/kv_offload/cpu/gpu_worker.py"),
    ("0.33.0", "vllm/v1/worker/gpu_model_runner.py"),
    ("0.33.0", "vllm/v1/kv_offload/cpu/gpu_worker.py"),
    ("0.33.0", "vllm/v1/simple_kv_offload/cuda_mem_ops.py"),
]


def functions(code: types.CodeType, scope: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """(qualified name, code) of every function below, named without `co_qualname`, which 3.10 lacks."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & 1:
                yield scope + constant.co_name, constant
                yield from functions(constant, f"{scope}{constant.co_name}.<locals>.")
            else:
                yield from functions(constant, f"{scope}{constant.co_name}.")


@pytest.mark.parametrize(("release", "name"), MODULES)
def test_every_function_of_a_real_module_is_recognised_as_its_own_source(release: str, name: str) -> None:
    path = fetch(release) / name
    data = path.read_bytes()
    source = ModuleSource(data, str(path))
    whole = compile(data, str(path), "exec", dont_inherit=True)
    tried = 0
    for qualname, code in functions(whole):
        if "<lambda>" in qualname or "comp>" in qualname or "<genexpr>" in qualname or not source.named(qualname):
            continue
        try:
            source.definition_of(qualname, code)
        except Refused:
            pytest.fail(f"{qualname} in {path}")
        tried += 1
    assert tried > 3
