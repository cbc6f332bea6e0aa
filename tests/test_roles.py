"""A process is what vLLM named it."""

from __future__ import annotations

import multiprocessing
import sys
import types

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
