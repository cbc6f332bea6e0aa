"""Calls for a device are made on that device, whichever is current."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import native  # noqa: E402
from h2d_patch.copies.cuda import CudaLink  # noqa: E402
from h2d_patch.copies.lane import Lane  # noqa: E402


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


def test_whether_the_current_stream_captures_is_asked_of_the_link_s_own_device(linked):
    link, runtime = linked
    link.captures()
    assert runtime.on == [("is_capturing", 1)]
    link._index = 0
    link.captures()
    assert runtime.on[1:] == [("captures", 0)]


@pytest.fixture
def lane(linked, library, monkeypatch):
    link, other = linked
    memory = torch.zeros(8 << 10, dtype=torch.uint8)
    opened = Lane(library, link, other, 1, memory.data_ptr(), 8 << 10)
    assert other.on == [("new_event", 1)] * native.SEGMENTS
    opened.current_device = link._current_device
    opened._current_stream = lambda index: 7
    opened.memory = memory
    yield opened
    opened.close()


def test_a_lane_is_not_for_the_default_stream_of_another_device(lane, runtime):
    source, target = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    send = (target.data_ptr(), 4, source.data_ptr(), 4, 4, 1)
    assert lane.send(*send) == 0
    runtime.run()
    assert torch.equal(target, source)
    lane._current_stream = lambda index: 0
    assert lane.send(*send) == native.NOT_HERE
    lane.index = 0
    assert lane.send(*send) == 0
    assert lane.send(1, 1025, source.data_ptr(), 1025, 1025, 1) == native.NOT_HERE, "larger than a segment"
    lane.close()
    assert lane.send(*send) == native.NOT_HERE


def test_an_error_of_a_lane_s_copy_is_raised(linked, lane, runtime, monkeypatch):
    _, other = linked
    monkeypatch.setattr(
        type(other), "check", lambda self, name, code: (_ for _ in ()).throw(OSError(code, name)), raising=False
    )
    source = torch.arange(4, dtype=torch.uint8)
    runtime.fail["copy"] = 700
    with pytest.raises(OSError, match="700"):
        lane.send(1, 4, source.data_ptr(), 4, 4, 1)


def test_there_are_no_more_lanes_than_the_library_has(linked, library):
    with pytest.raises(RuntimeError, match="no lane of 100 bytes"):
        Lane(library, *linked, 1, 0, 100)
