"""What h2d_ray_platform names, in modules of their own: vLLM asks for the names before these can be imported."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
    device_control_env_var = "H2D_RAY_VISIBLE_DEVICES"  # the CPU platform's own would bind workers to NUMA nodes

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "h2d_ray_worker.RayCpuWorker"
