"""The ring: who gets which bytes, and when they may be handed out again."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch

from h2d_patch.copies import forced_staging, staging
from h2d_patch.copies.call import Declined


def submit(ring, nbytes):
    piece = ring.reserve(nbytes)
    if type(piece) is not Declined:
        with piece:
            piece.submitted = True
    return piece


def test_pieces_are_aligned_and_do_not_overlap(make_ring):
    ring = make_ring(4096)
    pieces = [ring.reserve(n) for n in (1, 256, 257)]
    assert [p.offset for p in pieces] == [0, 256, 512]
    assert ring.reserve(4096 - 1024).offset == 1024


def test_a_view_of_a_piece_lies_where_its_address_says(held):
    memory = torch.zeros(4096, dtype=torch.uint8)
    ring = staging.Ring(memory[1024:], held, torch.device("cpu"))
    ring.reserve(256)
    piece = ring.reserve(256)
    view = piece.view(torch.int64, (2, 3), (3, 1), skip=8)
    assert view.data_ptr() == piece.address + 8 == memory.data_ptr() + 1024 + 256 + 8


def test_a_piece_may_be_as_large_as_the_region_and_no_larger(make_ring):
    ring = make_ring(1024)
    assert ring.reserve(1025) is staging.TOO_LARGE
    assert ring.reserve(1024).offset == 0


def test_a_region_that_is_no_multiple_of_the_alignment_keeps_it(make_ring, held):
    ring = make_ring(1000)
    for _ in range(20):
        piece = submit(ring, 300)
        assert piece.offset % 256 == 0 and piece.offset + 300 <= 1000
        held.passed.add(piece.event)


def test_a_piece_with_an_unfinished_event_is_never_handed_out_again(make_ring, held):
    ring = make_ring(1024)
    first, second = submit(ring, 512), submit(ring, 512)
    assert ring.reserve(1) is staging.FULL
    held.passed.add(second.event)  # out of order: the first is still being read, and the ring gives back in order
    assert ring.reserve(1) is staging.FULL
    held.passed.add(first.event)
    assert ring.reserve(1024).offset == 0


def test_an_open_piece_is_never_handed_out_again(make_ring, held):
    ring = make_ring(512)
    piece = ring.reserve(512)
    piece.submitted = True
    held.passed.add(piece.event)
    assert ring.reserve(1) is staging.FULL
    with piece:
        pass
    assert ring.reserve(1) is staging.FULL  # now recorded anew
    held.passed.add(piece.event)
    assert ring.reserve(1).offset == 0


def test_a_piece_from_which_nothing_was_submitted_is_free_at_once(make_ring):
    ring = make_ring(512)
    with pytest.raises(ZeroDivisionError), ring.reserve(512):
        raise ZeroDivisionError
    assert ring.reserve(512).offset == 0


def test_the_ring_goes_around_and_skips_an_end_that_is_too_small(make_ring, held):
    ring = make_ring(1024)
    first, second = submit(ring, 512), submit(ring, 256)
    assert ring.reserve(512) is staging.FULL  # 256 at the end, nothing in front
    held.passed.add(first.event)
    third = submit(ring, 512)
    assert third.offset == 0
    assert ring.reserve(1) is staging.FULL
    held.passed.update((second.event, third.event))
    assert ring.in_use() == 0


def test_when_an_event_cannot_be_recorded_the_ring_hands_out_nothing_more(make_ring, held):
    ring = make_ring(1024)
    held.fail_to_record = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        submit(ring, 256)
    held.fail_to_record = None
    refusal = ring.reserve(1)
    assert type(refusal) is Declined and "lost" in refusal.reason and refusal.counted


def test_nothing_is_reserved_under_graph_capture(make_ring, held):
    ring = make_ring(1024)
    held.in_capture = True
    assert ring.reserve(1) is staging.CAPTURING
    assert ring.in_use() == 0


def test_events_are_used_again(make_ring, held):
    ring = make_ring(1024)
    for _ in range(100):
        held.passed.add(submit(ring, 256).event)
    assert held._made <= 4


def test_finished_pieces_do_not_pile_up(make_ring, held):
    ring = make_ring(1 << 20)
    held.passed = Everything()
    for _ in range(3000):
        submit(ring, 1)
    assert len(ring._pieces) <= 256 + 32
    assert held._made <= 4


class Everything(set):
    def __contains__(self, event):
        return True


def test_small_pieces_share_an_event_and_are_in_use_until_it_passes(make_ring, held):
    ring = make_ring(16 << 10)
    pieces = [submit(ring, 256) for _ in range(4)]  # 1 KiB, a sixteenth of the ring
    assert len(held.recorded) == 1 and len({piece.event for piece in pieces}) == 1
    rest = ring.reserve((16 << 10) - 1024)
    assert rest.offset == 1024 and ring.reserve(1) is staging.FULL
    held.passed.add(pieces[0].event)
    assert [ring.reserve(256).offset for _ in range(4)] == [0, 256, 512, 768]


def test_pieces_without_an_event_get_one_when_the_ring_is_full(make_ring, held):
    ring = make_ring(16 << 10)
    small = submit(ring, 256)
    large = ring.reserve((16 << 10) - 256)
    assert small.event is None and ring.reserve(1) is staging.FULL
    assert held.recorded == [small.event]
    held.passed.add(small.event)
    assert ring.reserve(256).offset == 0 and large.offset == 256


def test_no_event_is_recorded_into_a_graph_that_another_thread_captures(make_ring, held, monkeypatch):
    ring = make_ring(16 << 10)
    submit(ring, 256)
    ring.reserve((16 << 10) - 256)
    monkeypatch.setattr(held, "stream", lambda: 7)
    monkeypatch.setattr(held, "is_capturing", lambda stream: stream == 0)  # where the small piece went
    assert ring.reserve(1) is staging.FULL
    assert not held.recorded


def test_each_stream_has_events_of_its_own(make_ring, held, monkeypatch):
    ring = make_ring(16 << 10)
    streams = iter([1, 2, 1, 2, 1, 2, 1, 2])
    monkeypatch.setattr(held, "stream", lambda: next(streams))
    pieces = [submit(ring, 256) for _ in range(8)]
    assert len(held.recorded) == 2
    assert len({pieces[i].event for i in (0, 2, 4, 6)}) == len({pieces[i].event for i in (1, 3, 5, 7)}) == 1
    assert pieces[0].event != pieces[1].event


@pytest.mark.parametrize("seed", range(5))
def test_threads_never_see_each_others_bytes(make_ring, held, seed):
    ring = make_ring(8192)
    held.stream = threading.get_ident
    wrong, full = [], []

    def hammer(mark):
        rnd = random.Random(seed * 100 + mark)
        mine = []
        for _ in range(300):
            nbytes = rnd.randint(512, 3000)  # from a sixteenth of the ring on, a piece has an event of its own
            piece = ring.reserve(nbytes)
            if type(piece) is Declined:
                full.append(piece)
            else:
                with piece:
                    view = piece.view(torch.uint8, (nbytes,), (1,))
                    view.fill_(mark)
                    piece.submitted = True
                mine.append((piece, view))
            while mine and (len(mine) > 2 or type(piece) is Declined):
                done, view = mine.pop(0)
                if not bool((view == mark).all()):  # as the device would read it, just before the event passes
                    wrong.append(mark)
                held.passed.add(done.event)
        for done, view in mine:
            if not bool((view == mark).all()):
                wrong.append(mark)
            held.passed.add(done.event)

    threads = [threading.Thread(target=hammer, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert full, "the test never filled the ring"
    assert ring.in_use() == 0


def test_forced_staging_is_for_this_thread_only_and_ends():
    cpu = torch.device("cpu")
    seen = []
    with forced_staging(1024) as ring:
        assert staging.ring_for(cpu) is ring
        thread = threading.Thread(target=lambda: seen.append(staging.ring_for(cpu)))
        thread.start()
        thread.join()
        with forced_staging(2048) as inner:
            assert staging.ring_for(cpu) is inner
        assert staging.ring_for(cpu) is ring
    assert seen == [staging.NOT_TO_CUDA] and staging.ring_for(cpu) is staging.NOT_TO_CUDA


def test_a_device_that_was_not_started_is_a_counted_decline_that_says_so():
    refusal = staging.ring_for(torch.device("cuda", 3))
    assert type(refusal) is Declined and refusal.counted and "cuda:3" in refusal.reason


def test_a_forked_child_has_no_ring_and_the_parent_keeps_its_own(make_ring):
    ring = make_ring(1024)
    ours, staging.process = staging.process, staging._Process()
    staging.process.rings[torch.device("cuda", 0)] = ring
    child = os.fork()
    if child == 0:
        status = 5
        try:
            import gc

            gone = type(staging.ring_for(torch.device("cuda", 0))) is Declined and not staging.process.rings
            gc.collect()
            status = 0 if gone else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.device("cuda", 0) in staging.process.rings
    staging.process = ours


def test_a_ring_of_ordinary_memory_takes_pieces_of_any_size_one_behind_the_other():
    ring = staging.Ring(torch.empty(16 << 10, dtype=torch.uint8), staging.CpuLink(), torch.device("cpu"))
    for nbytes in (100, 1024, 300, 5000, 1, 16 << 10) * 20:
        assert type(submit(ring, nbytes)) is staging.Piece
    assert ring.in_use() == 0
