"""A vLLM plugin for the live tests, inert unless its variables are set.

H2D_PROBE_START_METHOD=fork: vLLM on the CPU always spawns; this lets it fork, as it does on a GPU.
"""

import os


def register() -> None:
    method = os.environ.get("H2D_PROBE_START_METHOD")
    if method:
        let_start_method(method)


def let_start_method(method: str) -> None:
    """Put VLLM_WORKER_MULTIPROC_METHOD back after the CPU platform has forced it to spawn."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
