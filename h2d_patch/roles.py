"""What a process is to vLLM: API server, engine core, worker, the inspector of a model class, or a coordinator."""

from __future__ import annotations

import multiprocessing
import sys

API_SERVER = "api-server"
ENGINE_CORE = "engine-core"
WORKER = "worker"
INSPECTOR = "inspector"
COORDINATOR = "coordinator"

_INSPECTOR_MODULE = "vllm.model_executor.models.registry"
# The program that Ray runs in each process for its actors; its title, `ray::Class.method`, names the actor's class.
_RAY_PROGRAM = "ray/_private/workers/default_worker.py"
_COMMAND_LINE = "/proc/self/cmdline"


def role() -> str:
    """The role that this process's name gives away; a process in which a device comes up is a worker whatever its name.

    vLLM names its processes alike in every release from 0.8.5 on: `EngineCore`, `EngineCore_<n>` or `EngineCore_DP<n>`,
    `VllmWorker-<rank>`, of the V0 engine `VllmWorkerProcess`, and `VLLM_DP_Coordinator`, which has no model and tells
    API servers how busy the engines are; it inspects a model class by running the registry's module as a program.
    Before, and in the V0 engine's own process, a worker is known by its device alone. Under Ray the classes of its
    actors are `RayWorkerWrapper` and `RayWorkerProc`, and `EngineCoreActor`, some with `DP` or `DPMoE` in front.
    """
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) == _INSPECTOR_MODULE:
        return INSPECTOR
    if (getattr(main, "__file__", None) or "").endswith(_RAY_PROGRAM):
        name = _ray_actor()
        return WORKER if name.startswith("RayWorker") else ENGINE_CORE if "EngineCore" in name else API_SERVER
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        return ENGINE_CORE
    if name.startswith("VllmWorker"):
        return WORKER
    if name == "VLLM_DP_Coordinator":
        return COORDINATOR
    return API_SERVER


def _ray_actor() -> str:
    """The class of the actor that this process is for, as Ray's title gives it."""
    try:
        with open(_COMMAND_LINE, encoding="utf-8", errors="replace") as file:
            title = file.read()
    except OSError:
        return ""
    return title.removeprefix("ray::").partition(".")[0] if title.startswith("ray::") else ""
