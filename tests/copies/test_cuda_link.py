"""Calls for a device are made on that device, whichever is current."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies.cuda import CudaLink  # noqa: E402


class Runtime:
    """Notes which device was current at each call."""

    def __init__(self, current: list[int]) -> None:
        self._current = current
        self.on: list[tuple[str, int]] = []

    def __getattr__(self, name: str):
        def call(*args: object) -> int:
            self.on.append((name, self._current[-1]))
            return 1

        return call


@pytest.fixture
def linked(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device(index: int):
        current.append(index)
        yield
        current.pop()

    runtime = Runtime(current)
    monkeypatch.setattr(torch.cuda, "device", device)
    link = CudaLink.__new__(CudaLink)
    link._index, link._runtime = 1, runtime
    link._current_device = lambda: current[-1]
    return link, runtime


CALLS = [("copy", (1, 2, 3)), ("copy_rows", (1, 2, 3, 4, 5)), ("record", (7,)), ("is_capturing", ())]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_the_default_stream_is_that_of_the_link_s_own_device(linked, name, args):
    link, runtime = linked
    getattr(link, name)(*args, 0)
    assert runtime.on == [(name, 1)]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_a_stream_of_its_own_needs_no_other_device(linked, name, args):
    link, runtime = linked
    getattr(link, name)(*args, 0xBEEF)
    assert runtime.on == [(name, 0)]
