"""The CPU worker with a device, which `RayWorkerWrapper` asks for before it runs the model."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class RayCpuWorker(CPUWorker):
    def init_device(self):
        super().init_device()
        self.device = torch.device("cpu")
