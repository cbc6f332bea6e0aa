"""Tensors made of lists on a GPU: the same as the original's, the values of the call, no waiting, no pinned memory."""

from __future__ import annotations

import time

import pytest
import torch

from h2d_patch import copies
from h2d_patch.copies import lists, staging

INT32 = {"dtype": torch.int32, "device": "cuda"}


def of_a_list(data, ledger):
    return copies.tensor_to_device.bind(ledger)(data, **INT32)


def of_a_nested_list(data, ledger):
    return copies.tensor_to_device.bind(ledger)([data, data], device=torch.device("cuda"))


def of_a_number(data, ledger):
    return copies.tensor_to_device.bind(ledger)(data[0], **INT32)


def of_rows(data, ledger):
    pairs = list(zip(data, data, strict=True))
    rows = copies.rows_to_device.bind(ledger)([pairs[:1], pairs], 2, **INT32)
    return copies.padded_rows.bind(ledger)(rows)[1]


CASES = [(run, length) for run in (of_a_list, of_a_nested_list, of_a_number, of_rows) for length in (1, 300)]


@pytest.mark.parametrize("run, length", [*CASES, (of_a_list, 300_000)])
def test_what_is_made_of_a_list_has_the_values_of_the_call_and_does_not_wait(ring, ledger, queue_ms, run, length):
    data = [1] * length
    run(data, ledger)
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        data[:] = [7] * length
        behind = queue_ms(60)
        began = time.perf_counter()
        result = run(data, ledger)
        times.append(time.perf_counter() - began)
        waited = behind.query()
        data[:] = [9] * length
        torch.cuda.synchronize()
        assert not waited
        assert bool((result == 7).all())
    assert ledger.fallbacks == 0, ledger.reasons + ledger.errors
    assert min(times) < (5e-3 if length <= 300 else 3e-2), "a list of 300 000 numbers takes the CPU some ms to read"


def test_the_original_does_wait(queue_ms):
    """What there is to gain; where it no longer does, the fix has no reason to be."""
    torch.tensor([1, 2], **INT32)
    behind = queue_ms(30)
    torch.tensor([1, 2], **INT32)
    assert behind.query()


@pytest.mark.parametrize("layout", [{}, {"layout": torch.jagged}], ids=["strided", "jagged"])
def test_padded_rows_are_the_same_and_do_not_wait_as_those_of_a_jagged_tensor_do(ring, ledger, queue_ms, layout):
    rows = copies.rows_to_device.bind(ledger)([[(1, 2)], [(3, 4), (5, 6)]], 2, **INT32)
    expected = copies.padded_rows.original(rows, **layout)
    behind = queue_ms(30)
    copies.padded_rows.original(rows, **layout)
    assert behind.query() or not layout
    torch.cuda.synchronize()
    behind = queue_ms(30)
    ours = copies.padded_rows.bind(ledger)(rows, **layout)
    assert not behind.query()
    assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
        expected.dtype, expected.shape, expected.stride(), expected.device,
    )  # fmt: skip
    assert torch.equal(ours, expected) and ledger.fallbacks == 0


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.float32, torch.bool, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("data", [3, [0, 5], [[1.5, 2], [0, 4]], [True, False], [[[1]], [[0]]], []], ids=repr)
def test_the_result_is_in_every_way_what_tensor_gives(ring, ledger, data, dtype):
    ours = copies.tensor_to_device.bind(ledger)(data, dtype=dtype, device="cuda")
    theirs = torch.tensor(data, dtype=dtype, device="cuda")
    assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
        theirs.dtype, theirs.shape, theirs.stride(), theirs.device,
    )  # fmt: skip
    assert torch.equal(ours, theirs) and ledger.fallbacks == 0


def test_a_default_device_changes_nothing(ring, ledger):
    with torch.device("cuda"):
        assert copies.tensor_to_device.bind(ledger)([1, 2], device="cuda").tolist() == [1, 2]
        assert copies.tensor_to_device.bind(ledger)([1, 2]).is_cuda  # the original: no device is named
    assert [path for path, _ in ledger.taken] == ["staging", "original"] and not ledger.errors


def test_a_warm_call_pins_no_memory(ring, ledger):
    def counters():
        return {name: value for name, value in torch.cuda.host_memory_stats().items() if "time" not in name}

    before = counters()
    for run, length in CASES * 20:
        run([1] * length, ledger)
    torch.cuda.synchronize()
    assert counters() == before and ledger.fallbacks == 0, ledger.reasons


def test_under_graph_capture_it_declines(ring):
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    used = ring.in_use()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert lists.tensor_to_device([1, 2], **INT32) is staging.CAPTURING
        assert lists.rows_to_device([[(1, 2)]], 2, **INT32) is staging.CAPTURING
    assert ring.in_use() == used
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1, 1, 1, 1]
