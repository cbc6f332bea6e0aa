"""Copies within host memory give the same bytes however they are made."""

from __future__ import annotations

import os
import time

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import snapshot  # noqa: E402
from h2d_patch.copies.staging import CpuLink, Ring  # noqa: E402


def ring(nbytes: int) -> Ring:
    return Ring(torch.empty(nbytes, dtype=torch.uint8), CpuLink(), torch.device("cpu"))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 63, (1 << 20) + 1, (8 << 20) - 1, 8 << 20, (9 << 20) + 17, 13 << 20])
def test_every_byte_arrives_and_none_beside_it(monkeypatch, threads, nbytes):
    source = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 128, dtype=torch.uint8)
    ours = snapshot._Threads()
    ours.number = threads
    ours.start()
    monkeypatch.setattr(snapshot, "_threads", ours)
    snapshot.copy_bytes(target.data_ptr() + 64, source.data_ptr() + 64, nbytes)
    assert torch.equal(target[64 : 64 + nbytes], source[64 : 64 + nbytes])
    assert not target[:64].any() and not target[64 + nbytes :].any()
    if ours.pool is not None:
        assert len(ours.pool._threads) == threads - 1, "all of them were there before the copy"
        ours.pool.shutdown()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12),
        torch.arange(3 * 4097).view(3, 4097)[:, :1000],
        torch.arange(200 * 9).view(200, 9)[:, :5],
        torch.arange(60).view(3, 20)[:, ::2],
        torch.arange(60).view(3, 20).t()[:, 1:],
        torch.arange(60).view(3, 4, 5)[:, 1:, :2],
        torch.arange(3 * 8).view(3, 8)[:1, :3],
        torch.tensor(5),
    ],
)
def test_a_snapshot_has_the_source_s_values_in_the_layout_that_was_asked_for(source):
    piece = ring(1 << 20).reserve(source.nbytes + 64)
    strides = source.contiguous().stride()
    snapshot.snapshot(source, piece, strides, 64)
    assert torch.equal(piece.view(source.dtype, source.shape, strides, 64), source)


def test_a_forked_child_copies_with_threads_of_its_own():
    snapshot.start_threads()
    source, target = torch.ones(8 << 20, dtype=torch.uint8), torch.zeros(8 << 20, dtype=torch.uint8)
    child = os.fork()
    if child == 0:
        snapshot.copy_bytes(target.data_ptr(), source.data_ptr(), 8 << 20)
        os._exit(0 if bytes(target[-4:].tolist()) == b"\1\1\1\1" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_written_after_a_copy_that_raised(monkeypatch):
    class Slow:
        """A pool whose second share takes its time, and which then refuses the third."""

        def __init__(self, pool):
            self._pool, self._taken = pool, 0

        def submit(self, function, *args):
            self._taken += 1
            if self._taken == 2:
                raise RuntimeError("no more threads")
            return self._pool.submit(lambda: (time.sleep(0.2), function(*args)))

    ours = snapshot._Threads()
    ours.number = 3
    ours.start()
    pool = ours.pool
    ours.pool = Slow(pool)
    monkeypatch.setattr(snapshot, "_threads", ours)
    source, target = torch.ones(9 << 20, dtype=torch.uint8), torch.zeros(9 << 20, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="no more threads"):
        snapshot.copy_bytes(target.data_ptr(), source.data_ptr(), 9 << 20)
    before = target.clone()
    time.sleep(0.4)
    assert torch.equal(target, before)
    pool.shutdown()


def test_before_device_start_up_and_in_a_forked_child_one_thread_copies(monkeypatch):
    ours = snapshot._Threads()
    ours.number = 4
    monkeypatch.setattr(snapshot, "_threads", ours)
    source, target = torch.ones(9 << 20, dtype=torch.uint8), torch.zeros(9 << 20, dtype=torch.uint8)
    snapshot.copy_bytes(target.data_ptr(), source.data_ptr(), 9 << 20)
    assert ours.pool is None and torch.equal(source, target)
