"""Calls for a device are made on that device, whichever is current."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import native  # noqa: E402
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
    link._memcpy, link._memcpy_rows = (lambda *args: runtime.copy() and 0), (lambda *args: runtime.copy_rows() and 0)
    link._current_device = lambda: current[-1]
    link._current_stream_captures = lambda: runtime.captures() and False
    link._current_stream = lambda index: 0
    return link, runtime


CALLS = [("copy", (1, 2, 3)), ("copy_rows", (1, 2, 3, 4, 5)), ("record", (7,)), ("is_capturing", ()), ("idle", ())]


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


def test_whether_the_current_stream_captures_is_asked_of_the_link_s_own_device(linked):
    link, runtime = linked
    link.captures()
    assert runtime.on == [("is_capturing", 1)]
    link._index = 0
    link.captures()
    assert runtime.on[1:] == [("captures", 0)]


@pytest.mark.parametrize("stream", [0, 0xBEEF])
@pytest.mark.parametrize(("rows", "dst_pitch", "name"), [(1, 4, "copy"), (3, 4, "copy"), (3, 8, "copy_rows")])
def test_without_the_compiled_copies_python_sends_the_same(linked, monkeypatch, stream, rows, dst_pitch, name):
    monkeypatch.setattr(native, "loaded", None)
    link, runtime = linked
    source, at = torch.arange(24, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    link.send(1, dst_pitch, source.data_ptr(), 8, 4, rows, at.data_ptr(), stream)
    assert runtime.on == [(name, 0 if stream else 1)]
    assert torch.equal(at[: 4 * rows].view(rows, 4), source.view(3, 8)[:rows, :4])


def test_the_compiled_copies_are_not_for_the_default_stream_of_another_device(linked, monkeypatch, library, submitted):
    monkeypatch.setattr(native, "loaded", library)
    link, runtime = linked
    source, at = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    link.send(1, 4, source.data_ptr(), 4, 4, 1, at.data_ptr(), 0)
    assert runtime.on == [("copy", 1)] and not submitted
    link.send(1, 4, source.data_ptr(), 4, 4, 1, at.data_ptr(), 7)
    assert [call[0] for call in submitted] == ["1d"] and len(runtime.on) == 1
    link._index = 0
    link.send(1, 4, source.data_ptr(), 4, 4, 1, at.data_ptr(), 0)
    assert len(submitted) == 2
