"""A process is what vLLM named it."""

from __future__ import annotations

import multiprocessing
import sys
import types
from pathlib import Path

import pytest

from h2d_patch.roles import role


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MainProcess", "api-server"),
        ("ApiServer_1", "api-server"),
        ("EngineCore", "engine-core"),
        ("EngineCore_DP3", "engine-core"),
        ("VllmWorker-1", "worker"),
        ("VLLM_DP_Coordinator", "coordinator"),
    ],
)
def test_the_name_gives_the_role(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    assert role() == expected


def test_the_program_that_inspects_model_classes_is_the_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name="vllm.model_executor.models.registry")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert role() == "inspector"


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("ray::RayWorkerWrapper.execute_method", "worker"),
        ("ray::RayWorkerProc.run", "worker"),
        ("ray::EngineCoreActor.run", "engine-core"),
        ("ray::DPMoEEngineCoreActor.__init__", "engine-core"),
        ("ray::DPEngineCoreActor", "engine-core"),
        ("ray::ServeReplica:app:LLMServer.handle_request", "api-server"),
        ("python", "api-server"),
    ],
)
def test_ray_s_title_names_the_actor(
    monkeypatch: pytest.MonkeyPatch, title: str, expected: str, tmp_path: Path
) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = "/usr/lib/python3/site-packages/ray/_private/workers/default_worker.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    (tmp_path / "cmdline").write_text(title + " " * 30)
    monkeypatch.setattr("h2d_patch.roles._COMMAND_LINE", str(tmp_path / "cmdline"))
    assert role() == expected
