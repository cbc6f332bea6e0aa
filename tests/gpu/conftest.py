"""A started device, and queued work."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

RING_BYTES = 64 << 20


def pytest_collection_modifyitems(items):
    here = __file__.rpartition("/")[0]
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def started():
    from h2d_patch import copies

    report = copies.start("cuda:0", RING_BYTES)
    yield report
    copies.stop()


@pytest.fixture
def ring(started):
    from h2d_patch.copies.staging import process

    torch.cuda.synchronize()
    return process.rings[torch.device("cuda", 0)]


@pytest.fixture
def small_ring(ring, monkeypatch):
    """A ring of 64 KiB in the place of the device's own."""
    from h2d_patch.copies.cuda import CudaLink, Runtime
    from h2d_patch.copies.staging import Ring, process

    memory = torch.empty(64 << 10, dtype=torch.uint8, pin_memory=True)
    small = Ring(memory, CudaLink(0, Runtime()), torch.device("cuda", 0))
    monkeypatch.setitem(process.rings, torch.device("cuda", 0), small)
    yield small
    torch.cuda.synchronize()


@pytest.fixture
def small_lane(ring, monkeypatch):
    """The same with half of it a lane, in segments of 8 KiB."""
    from h2d_patch.copies import native
    from h2d_patch.copies.cuda import CudaLink, Runtime
    from h2d_patch.copies.lane import Lane
    from h2d_patch.copies.staging import Ring, process

    if native.loaded is None:
        pytest.skip("no compiled copies")
    memory, runtime, device = (
        torch.empty(128 << 10, dtype=torch.uint8, pin_memory=True),
        Runtime(),
        torch.device("cuda", 0),
    )
    link = CudaLink(0, runtime)
    lane = Lane(native.loaded, link, runtime, 0, memory.data_ptr(), 64 << 10)
    monkeypatch.setitem(process.rings, device, Ring(memory[64 << 10 :], link, device, lane))
    yield lane
    torch.cuda.synchronize()
    lane.close()


@pytest.fixture(scope="session")
def cycles_per_ms():
    """What `torch.cuda._sleep` needs for a millisecond."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100_000_000 / ((time.perf_counter() - began) * 1e3)


@pytest.fixture
def queue_ms(cycles_per_ms):
    """Queue that much work on the current stream; returns an event behind it."""

    def queue(ms: float):
        torch.cuda._sleep(int(ms * cycles_per_ms))
        behind = torch.cuda.Event()
        behind.record()
        return behind

    return queue
