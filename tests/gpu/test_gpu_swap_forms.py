"""Swaps of tensors by block numbers, and of addresses on a stream of their own, on a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from h2d_patch import copies
from h2d_patch.copies import swap_forms
from h2d_patch.copies.cuda import device_range

BLOCKS, BYTES, LAYERS, PICKED = 512, 8192, 4, 128


def unused(*args, **kwargs):
    pytest.fail("the original ran")


def sides(gpu_to_cpu, shape=(BLOCKS, BYTES)):
    """Random bytes in `LAYERS` tensors on one side, zeros on the other."""
    torch.manual_seed(0)
    host = [torch.zeros(shape, dtype=torch.int8, pin_memory=True) for _ in range(LAYERS)]
    device = [torch.zeros(shape, dtype=torch.int8, device="cuda") for _ in range(LAYERS)]
    src, dst = (device, host) if gpu_to_cpu else (host, device)
    for tensor in src:
        tensor.copy_(torch.randint(-128, 128, shape, dtype=torch.int8))
    torch.cuda.synchronize()
    return src, dst


def numbers():
    return torch.stack([torch.randperm(BLOCKS)[:PICKED] for _ in range(2)], dim=1)


def expected(src, dst, mapping):
    wanted = [tensor.cpu().clone() for tensor in dst]
    for read, write in zip(src, wanted, strict=True):
        write[mapping[:, 1]] = read.cpu()[mapping[:, 0]]
    return wanted


def same(dst, wanted):
    torch.cuda.synchronize()
    return all(torch.equal(found.cpu(), each) for found, each in zip(dst, wanted, strict=True))


@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("has_halves", [False, True], ids=["whole", "halves"])
def test_all_tensors_go_in_one_batch_without_a_wait(ring, ledger, queue_ms, gpu_to_cpu, has_halves):
    src, dst = sides(gpu_to_cpu, (2, BLOCKS, BYTES) if has_halves else (BLOCKS, BYTES))
    mapping = numbers()
    parts = [[t for tensor in side for t in (tensor if has_halves else [tensor])] for side in (src, dst)]
    wanted = expected(*parts, mapping)
    bound = copies.swap_tensors.bind(ledger)
    bound(unused, src, dst, mapping, halved=[has_halves] * LAYERS)
    assert same(parts[1], wanted)
    for tensor in dst:
        tensor.zero_()
    torch.cuda.synchronize()
    behind = queue_ms(30)
    began = time.perf_counter()
    bound(unused, *parts, mapping, sizes=[BYTES] * len(parts[0]))
    took = time.perf_counter() - began
    mapping.zero_()
    assert not behind.query() and took < 5e-3
    assert same(parts[1], wanted) and ledger.fallbacks == 0, ledger.reasons


def test_memory_that_is_not_pinned_is_left_to_the_loop(ring, ledger):
    _, dst = sides(False)
    src, ran = [torch.zeros(BLOCKS, BYTES, dtype=torch.int8) for _ in range(LAYERS)], []
    copies.swap_tensors.bind(ledger)(lambda *call: ran.append(call), src, dst, numbers(), sizes=[BYTES] * LAYERS)
    assert len(ran) == LAYERS and ledger.reasons == ["host memory is not pinned"]


def as_params(src, dst, stream):
    bases = (np.array([tensor.data_ptr() for tensor in side], dtype=np.uint64) for side in (src, dst))
    return SimpleNamespace(**dict(zip(("src_bases", "dst_bases"), bases, strict=True)), stream_handle=stream)


def as_arrays(params, mapping):
    ids = mapping.numpy().astype(np.uint64).T
    dst, src = (
        (bases[:, None] + ids[column][None, :] * np.uint64(BYTES)).ravel()
        for bases, column in ((params.dst_bases, 1), (params.src_bases, 0))
    )
    return dst, src, np.full(len(src), BYTES, dtype=np.uint64)


@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
def test_addresses_are_copied_in_the_order_of_their_own_stream(ring, ledger, cycles_per_ms, gpu_to_cpu):
    src, dst = sides(gpu_to_cpu)
    mapping, stream = numbers(), torch.cuda.Stream()
    params = as_params(src, dst, stream.cuda_stream)
    wanted = expected(src, dst, mapping)
    bound = copies.swap_addresses.bind(ledger)
    before = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(30 * cycles_per_ms))
        behind = torch.cuda.Event()
        behind.record()
    arrays = as_arrays(params, mapping)
    assert bound(unused, params, *arrays, len(arrays[0]), 1, 2, 1, 3) == 0
    for column in arrays:
        column[:] = 0
    torch.cuda.current_stream().synchronize()
    assert not behind.query() and torch.cuda.current_stream() == before
    stream.synchronize()
    assert same(dst, wanted) and ledger.fallbacks == 0, ledger.reasons
    assert swap_forms._direction_of(ring, params)[0] is gpu_to_cpu


def test_the_driver_says_how_far_device_memory_reaches(ring):
    tensor = torch.zeros(1 << 20, dtype=torch.int8, device="cuda")
    start, end, index = device_range(tensor.data_ptr() + 5)
    assert start <= tensor.data_ptr() and end >= tensor.data_ptr() + (1 << 20) and index == 0
    assert device_range(torch.zeros(4, pin_memory=True).data_ptr()) == "not an address in device memory"
    assert isinstance(device_range(torch.zeros(4).data_ptr()), str)
