"""Fixtures that several test modules share."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_server import Server

MakeModule = Callable[..., types.ModuleType]


@pytest.fixture
def make_module(tmp_path: Path) -> Iterator[MakeModule]:
    """Imports source text as a module from a file of its own (pytest rewrites the assertions of test modules)."""
    made: list[str] = []

    def make(source: str, name: str = "release_module") -> types.ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    pytest.importorskip("torch")
    return Server(tmp_path)


class MemoryLedger:
    """What a copy function writes of its calls, kept for a test to read."""

    def __init__(self) -> None:
        self.calls = 0
        self.fallbacks = 0
        self.reasons: list[str] = []
        self.errors: list[BaseException] = []
        self.taken: list[tuple[str, int]] = []

    def took(self, path: str, nbytes: int) -> None:
        self.taken.append((path, nbytes))

    def declined(self, reason: str) -> None:
        self.fallbacks += 1
        self.reasons.append(reason)

    def failed(self, error: BaseException) -> None:
        self.fallbacks += 1
        self.errors.append(error)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()
