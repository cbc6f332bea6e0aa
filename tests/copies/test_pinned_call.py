"""Calls whose CPU tensors come out of the ring."""

from __future__ import annotations

import pytest
import torch

from h2d_patch import copies
from h2d_patch.copies import forced_staging


def in_ring(tensor, ring):
    start = ring.memory.data_ptr()
    return start <= tensor.data_ptr() < start + ring.capacity


def test_pageable_tensors_are_replaced_by_dense_copies_and_everything_else_is_passed_on(ledger):
    gapped = torch.arange(20).reshape(4, 5)[:, :3]
    transposed = torch.arange(6.0).reshape(2, 3).t()
    rest = [object(), "text", 3, None, torch.empty(0), torch.ones(1).expand(5), torch.ones(2, requires_grad=True)]
    with forced_staging(1 << 14) as ring:

        def plan(a, b, *others, key, seq_lens, flag):
            assert in_ring(a, ring) and in_ring(b, ring) and in_ring(key, ring)
            assert torch.equal(a, gapped) and torch.equal(b, transposed) and torch.equal(key, lens)
            assert a.is_contiguous() and b.stride() == transposed.stride()
            assert all(ours is theirs for ours, theirs in zip(others, rest, strict=True))
            assert seq_lens is lens and flag is True
            return "planned"

        lens = torch.arange(7, dtype=torch.int32)
        bound = copies.call_pinned.bind(ledger)
        assert bound(plan, gapped, transposed, *rest, key=lens, seq_lens=lens, flag=True) == "planned"
        assert ring.in_use() == 0
    assert (ledger.calls, ledger.fallbacks) == (1, 0)


def test_lists_and_tuples_are_looked_into_one_level_deep(ledger):
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(4)
    with forced_staging(1 << 14) as ring:

        def plan(first, second, third):
            assert type(first) is list and type(second) is tuple
            assert in_ring(first[0], ring) and first[1] == 1 and in_ring(second[0], ring)
            assert third[0][0] is c

        copies.call_pinned.bind(ledger)(plan, [a, 1], (b,), [[c]])
    assert ledger.fallbacks == 0


def test_one_tensor_given_twice_stays_one():
    a = torch.ones(2)
    with forced_staging(1 << 12):
        assert copies.call_pinned(lambda x, y: x is y, a, y=a)


def test_a_keyword_called_function_reaches_the_function():
    assert copies.call_pinned(lambda **kwargs: kwargs, function=1, self=2) == {"function": 1, "self": 2}


def test_the_functions_own_exception_passes_untouched_and_it_is_not_called_again(ledger, make_ring, held, force):
    ring, ran, theirs = force(make_ring(1024)), [], ValueError("theirs")

    def plan(x):
        ran.append(x)
        raise theirs

    with pytest.raises(ValueError) as raised:
        copies.call_pinned.bind(ledger)(plan, torch.ones(3))
    assert raised.value is theirs and theirs.__context__ is None and len(ran) == 1
    assert ledger.fallbacks == 0
    assert len(held.recorded) == 1 and ring.in_use()  # it may have submitted a copy before it raised


def test_without_room_the_function_gets_its_own_arguments_and_nothing_stays_reserved(ledger, make_ring, force):
    ring, a, b = force(make_ring(1024)), torch.ones(200), torch.ones(200)
    got = copies.call_pinned.bind(ledger)(lambda *args: args, a, b)
    assert got[0] is a and got[1] is b
    assert ledger.reasons == ["larger than the staging region"] and ring.in_use() == 0


def test_a_failure_to_stage_calls_the_function_once_with_its_own_arguments(ledger, make_ring, force, monkeypatch):
    ring, ran, ours = force(make_ring(1024)), [], RuntimeError("ours")

    def broken(*args, **kwargs):
        raise ours

    monkeypatch.setattr("h2d_patch.copies.pinned_call.snapshot", broken)
    a = torch.ones(3)
    assert copies.call_pinned.bind(ledger)(lambda x: ran.append(x) or "planned", a) == "planned"
    assert len(ran) == 1 and ran[0] is a
    assert ledger.errors == [ours] and ring.in_use() == 0


def test_a_failure_behind_the_call_keeps_its_result_and_closes_the_ring(ledger, make_ring, held, force):
    force(make_ring(1024))
    held.fail_to_record = RuntimeError("lost")
    bound, ran = copies.call_pinned.bind(ledger), []
    assert bound(lambda x: ran.append(x) or "planned", torch.ones(3)) == "planned"
    assert len(ran) == 1 and ledger.errors == [held.fail_to_record]
    assert bound(lambda x: "planned", torch.ones(3)) == "planned"
    assert "out of use" in ledger.reasons[0]


def test_nothing_to_stage_is_not_counted(ledger, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    bound = copies.call_pinned.bind(ledger)
    assert bound(lambda x: x, 1) == 1
    assert bound(torch.numel, torch.ones(3)) == 3  # no GPU in use
    with forced_staging(1 << 12):
        assert bound(lambda x, seq_lens: 2, 1, seq_lens=torch.ones(3)) == 2
    assert (ledger.calls, ledger.fallbacks) == (3, 0)


def test_seq_lens_is_not_even_staged(ledger, make_ring, held, force):
    force(make_ring(1024))
    copies.call_pinned.bind(ledger)(lambda seq_lens: None, seq_lens=torch.ones(3))
    assert not held.recorded and not held._made


def test_under_graph_capture_the_function_gets_its_own_arguments(ledger, make_ring, held, force):
    force(make_ring(1024))
    held.in_capture = True
    a = torch.ones(3)
    assert copies.call_pinned.bind(ledger)(lambda x: x is a, a)
    assert ledger.reasons == ["a CUDA graph is being captured"]
