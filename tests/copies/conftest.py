"""A ring whose events pass when the test says so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies.staging import CpuLink, Ring  # noqa: E402  (needs torch)


class HeldEvents(CpuLink):
    """Copies in host memory, with events that pass only when told."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.recorded: list[int] = []
        self.in_capture = False
        self.fail_to_record: Exception | None = None
        self._made = 0

    def is_capturing(self, stream: int) -> bool:
        return self.in_capture

    def new(self) -> int:
        self._made += 1
        return self._made

    def record(self, event: int, stream: int) -> None:
        if self.fail_to_record is not None:
            raise self.fail_to_record
        self.passed.discard(event)
        self.recorded.append(event)

    def finished(self, event: int) -> bool:
        return event in self.passed


@pytest.fixture
def held() -> HeldEvents:
    return HeldEvents()


@pytest.fixture
def make_ring(held: HeldEvents):
    def make(nbytes: int) -> Ring:
        return Ring(torch.empty(nbytes, dtype=torch.uint8), held, torch.device("cpu"))

    return make


@pytest.fixture
def force(monkeypatch):
    """Send this thread's copies to the CPU through a given ring."""
    from h2d_patch.copies import staging

    def use(ring: Ring) -> Ring:
        monkeypatch.setattr(staging._thread, "forced", ring)
        return ring

    return use
