"""H2D copies on a GPU: the same bytes, the values of the call, no waiting, no pinned memory."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from h2d_patch import copies
from h2d_patch.copies import h2d, native, staging
from h2d_patch.copies.call import Declined
from h2d_patch.copies.cuda import pinned_range

MIB = 1 << 20


def pageable(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def gapped():
    return torch.empty((3, 65537), dtype=torch.int64)[:, :8192]


def gapped_large():
    return torch.empty((1024, 2, 4096), dtype=torch.float32)[:, 0]


def pinned_gapped():
    return torch.empty((3, 65537), dtype=torch.int64, pin_memory=True)[:, :8192]


def transposed():
    return torch.empty((512, 1024)).t()


def to(source, ledger):
    return copies.to_device.bind(ledger)(source, "cuda")


def to_bf16(source, ledger):
    return copies.to_device.bind(ledger)(source, device="cuda", dtype=torch.bfloat16)


def to_after_waiting(source, ledger):
    return copies.snapshot_to_device.bind(ledger)(source, "cuda")


def copy(source, ledger):
    return copies.copy_h2d.bind(ledger)(torch.zeros(source.shape, dtype=source.dtype, device="cuda"), source)


def copy_into_gaps(source, ledger):
    wide = torch.zeros((*source.shape[:-1], source.shape[-1] + 100), dtype=source.dtype, device="cuda")
    return copies.copy_h2d.bind(ledger)(wide[..., : source.shape[-1]], source)


def copy_converting(source, ledger):
    return copies.copy_h2d.bind(ledger)(torch.zeros(source.shape, dtype=torch.float16, device="cuda"), source)


def cat(source, ledger):
    return copies.cat_to_device.bind(ledger)([source, source, source], "cuda", dim=0)


def nested(source, ledger):
    return copies.nested_to_device.bind(ledger)({"a": [source, (source, 3)]}, "cuda:0")["a"][1][0]


def call(source, ledger):
    return copies.call_pinned.bind(ledger)(lambda x: x.to("cuda", non_blocking=True), source)


CASES = [
    (to, lambda: pageable(100)),
    (to, lambda: pageable(4 * MIB)),
    (to, gapped),
    (to, gapped_large),
    (to, pinned_gapped),
    (to, transposed),
    (to_bf16, lambda: pageable(1000, 1000)),
    (to_bf16, transposed),
    (to_after_waiting, lambda: pageable(4 * MIB)),
    (to_after_waiting, lambda: torch.empty(4 * MIB, pin_memory=True)),
    (to_after_waiting, pinned_gapped),
    (copy, lambda: pageable(MIB)),
    (copy, gapped),
    (copy, transposed),
    (copy_into_gaps, gapped),
    (copy_into_gaps, pinned_gapped),
    (copy_into_gaps, lambda: pageable(64, 64)),
    (copy_converting, lambda: pageable(64, 6400)),
    (cat, lambda: pageable(1000, 300)),
    (cat, gapped),
    (nested, lambda: pageable(1000, 300)),
    (call, lambda: pageable(MIB)),
    (call, gapped),
]


@pytest.mark.parametrize("run, make", CASES)
def test_a_copy_keeps_the_values_of_the_call_and_does_not_wait(ring, ledger, queue_ms, run, make):
    source = make()
    source.fill_(1)
    run(source, ledger)
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        source.fill_(7)
        behind = queue_ms(30)
        began = time.perf_counter()
        result = run(source, ledger)
        times.append(time.perf_counter() - began)
        waited = behind.query()
        source.fill_(9)
        torch.cuda.synchronize()
        assert not waited
        assert bool((result == 7).all())
        del result
    assert ledger.fallbacks == 0, ledger.reasons + ledger.errors
    assert min(times) < 5e-3


@pytest.mark.parametrize("make", [lambda: pageable(5, 7), gapped, transposed, pinned_gapped, pageable])
@pytest.mark.parametrize("kwargs", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.int32}])
def test_the_result_is_in_every_way_what_to_gives(ring, ledger, make, kwargs):
    source = make()
    source.copy_(torch.randn(source.shape) * 100)
    ours = copies.to_device.bind(ledger)(source, "cuda", **kwargs)
    theirs = source.to("cuda", non_blocking=True, **kwargs)
    assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
        theirs.dtype, theirs.shape, theirs.stride(), theirs.device,
    )  # fmt: skip
    assert torch.equal(ours, theirs) and ledger.fallbacks == 0


@pytest.mark.parametrize("dtype", staging.DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(ring, dtype):
    torch.manual_seed(0)
    source = torch.randint(0, 2, (64,)).bool() if dtype is torch.bool else None
    if source is None:
        source = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    arrived = h2d.to_device(source.reshape(8, 8).t(), "cuda")
    assert torch.equal(arrived.cpu().t().contiguous().view(torch.uint8).flatten(), source.view(torch.uint8))


def test_a_source_that_torch_copies_asynchronously_already_is_left_to_it(ring, ledger):
    pinned = torch.ones(512, 256, pin_memory=True)
    device = torch.zeros(512, 300, device="cuda")[:, :256]
    copies.to_device.bind(ledger)(pinned, "cuda")
    copies.to_device.bind(ledger)(pinned.t(), "cuda")
    copies.to_device.bind(ledger)(pinned, "cuda", torch.float16)
    copies.copy_h2d.bind(ledger)(device, pinned)
    assert h2d.to_device(pinned.t(), "cuda") is h2d.ASYNCHRONOUS_ALREADY
    assert type(h2d.to_device(pinned.t(), "cuda", torch.float16)) is torch.Tensor  # torch would copy that on the host
    assert (ledger.calls, ledger.fallbacks) == (4, 0) and bool((device == 1).all())


def test_a_source_on_the_gpu_is_left_alone(ring, ledger):
    source = torch.ones(3, device="cuda")
    assert copies.to_device.bind(ledger)(source, "cuda") is source
    assert copies.to_device.bind(ledger)(source, "cpu").is_cpu
    assert (ledger.calls, ledger.fallbacks) == (2, 0)


def test_start_allocates_exactly_what_was_asked_for_and_only_once(started, ring):
    assert started.reasons == [] and started.kernels
    assert started.ring_bytes == 64 * MIB
    start, end, _ = pinned_range(ring.memory.data_ptr())
    assert end - start == 64 * MIB and end == ring.memory.data_ptr() + ring.memory.numel()
    assert ring.memory.data_ptr() - start == 64 * MIB // 8, "the rest is the lane of small copies"
    assert ring.memory.is_pinned()
    assert copies.start("cuda", 2 * MIB) is started is copies.start(torch.device("cuda", 0), 1)


def test_a_warm_copy_pins_no_memory(ring, ledger):
    def counters():
        stats = torch.cuda.host_memory_stats()
        return {name: value for name, value in stats.items() if "time" not in name}

    sources = [torch.ones(n) for n in (1, 1000, MIB)]
    before = counters()
    for source in sources * 20:
        for run in (to, to_bf16, copy, cat, nested, call):
            run(source, ledger)
    torch.cuda.synchronize()
    assert counters() == before and ledger.calls and ledger.fallbacks == 0, ledger.reasons


def test_a_full_ring_leaves_the_copy_to_the_original_which_is_counted_and_right(small_ring, ledger, queue_ms):
    sources = [torch.full((20 << 10,), i, dtype=torch.uint8) for i in range(8)]  # small: pageable too, they do not wait
    behind = queue_ms(50)
    results = [copies.to_device.bind(ledger)(source, "cuda") for source in sources]
    full_in_time = not behind.query()
    for source in sources:
        source.fill_(99)
    torch.cuda.synchronize()
    assert [int(result.max()) for result in results] == [int(result.min()) for result in results] == list(range(8))
    assert full_in_time and ledger.reasons == ["staging is full"] * 5
    to(torch.ones(10), ledger)
    assert ledger.fallbacks == 5
    to(torch.ones(MIB), ledger)
    assert ledger.reasons[-1] == "larger than the staging region"


@pytest.mark.parametrize("staging", ["small_ring", "small_lane"])
def test_four_threads_on_two_streams_never_see_each_others_bytes(request, ledger, staging):
    request.getfixturevalue(staging)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong, ledgers = [], [type(ledger)() for _ in range(4)]

    def run(mark):
        bound = copies.to_device.bind(ledgers[mark])
        with torch.cuda.stream(streams[mark % 2]):
            kept = []
            for i in range(500):
                source = torch.full((1 + (i * 977 + mark * 131) % 1_500,), 4 * i + mark)
                kept.append((4 * i + mark, bound(source, "cuda")))
                source.fill_(-1)
                if len(kept) == 50:
                    wrong.extend(value for value, result in kept if not bool((result == value).all()))
                    kept.clear()
            wrong.extend(value for value, result in kept if not bool((result == value).all()))

    threads = [threading.Thread(target=run, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(each.calls for each in ledgers) == 2000
    assert not any(each.errors for each in ledgers)
    assert sum(each.fallbacks for each in ledgers) < 1900  # most of it went through the ring


def test_a_lane_whose_segments_all_wait_leaves_it_to_the_ring(small_lane, ledger, queue_ms):
    """12 copies of 6 KiB: 8 segments take one each, the ring the rest; and all of them wait."""
    bound, sources = copies.to_device.bind(ledger), [torch.full((6 << 10,), i, dtype=torch.uint8) for i in range(12)]
    behind = queue_ms(50)
    answers = [
        small_lane.send(torch.empty_like(s, device="cuda").data_ptr(), s.nbytes, s.data_ptr(), s.nbytes, s.nbytes, 1)
        for s in sources[:9]
    ]
    assert answers == [0] * 8 + [native.NOT_HERE]
    results = [bound(source, "cuda") for source in sources]
    waited = behind.query()
    for source in sources:
        source.fill_(99)
    torch.cuda.synchronize()
    assert not waited and ledger.fallbacks == 2, "ten pieces of the ring, and then the original, which does not wait"
    assert [int(result.max()) for result in results] == [int(result.min()) for result in results] == list(range(12))
    assert small_lane.send(results[0].data_ptr(), 6144, sources[0].data_ptr(), 6144, 6144, 1) == 0


def test_a_copy_is_on_the_side_stream_that_is_current(ring, ledger, queue_ms):
    side = torch.cuda.Stream()
    source = torch.full((1000,), 7)
    behind = queue_ms(30)  # on the default stream
    with torch.cuda.stream(side):
        result = to(source, ledger)
        side.synchronize()
        assert not behind.query()
        assert bool((result.to("cpu") == 7).all())
    torch.cuda.synchronize()
    assert ledger.fallbacks == 0


def test_under_graph_capture_nothing_is_touched_and_the_capture_stays_good(ring, ledger):
    x, source = torch.zeros(4, device="cuda"), torch.ones(4)
    used = ring.in_use()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert h2d.to_device(source, "cuda") is staging.CAPTURING
        assert h2d.copy_h2d(x, source) is staging.CAPTURING
        assert h2d.cat_to_device([source], "cuda") is staging.CAPTURING
        assert copies.call_pinned.bind(ledger)(lambda a: a is source, source)
    assert ledger.reasons == ["a CUDA graph is being captured"]
    assert ring.in_use() == used
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1, 1, 1, 1]


def test_a_copy_of_another_thread_does_not_break_a_capture(ring, ledger):
    x = torch.zeros(4, device="cuda")
    target, source = torch.zeros(1000, device="cuda"), torch.ones(1000)
    bound, side = copies.copy_h2d.bind(ledger), torch.cuda.Stream()
    errors, capturing, done = [], threading.Event(), threading.Event()

    def run():
        try:
            with torch.cuda.stream(side):
                bound(target, source)
                capturing.wait(10)
                for _ in range(200):
                    bound(target, source)
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        capturing.set()
        done.wait(10)
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert not errors and not ledger.errors and ledger.fallbacks == 0
    assert x.tolist() == [1, 1, 1, 1]


def test_a_forked_child_has_no_ring_and_the_parent_keeps_its_own(ring, ledger):
    to(torch.ones(100), ledger)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if type(staging.ring_for(torch.device("cuda", 0))) is Declined else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((to(torch.ones(100), ledger) == 1).all()) and ledger.fallbacks == 0


def test_a_device_that_was_not_started_is_a_counted_fallback(ring, ledger, monkeypatch):
    monkeypatch.delitem(staging.process.rings, torch.device("cuda", 0))
    assert bool((to(torch.ones(3), ledger) == 1).all())
    assert "no staging region on cuda:0" in ledger.reasons[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_copy_to_another_device_goes_through_that_devices_ring(ring, ledger):
    try:
        assert copies.start("cuda:1", MIB).reasons == []
        source = torch.full((1000,), 7)
        result = copies.to_device.bind(ledger)(source, "cuda:1")
        source.fill_(9)
        assert result.device.index == 1 and bool((result == 7).all())
        assert ledger.fallbacks == 0 and torch.cuda.current_device() == 0
    finally:
        copies.stop()
        copies.start("cuda:0", 64 * MIB)


def test_host_time_with_nothing_queued_is_shown(ring, ledger, capsys):
    def best(function):
        times = []
        for _ in range(200):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        return sorted(times)[100] * 1e6

    bound, copy_bound = copies.to_device.bind(ledger), copies.copy_h2d.bind(ledger)
    lines = []
    for name, source in (("1 KiB", torch.ones(256)), ("4 MiB", torch.ones(MIB)), ("[3, 2048] gapped", gapped())):
        target = torch.zeros(source.shape, dtype=source.dtype, device="cuda")
        lines.append(
            f"{name}: to_device {best(lambda s=source: bound(s, 'cuda')):.1f} µs"
            f" (.to {best(lambda s=source: s.to('cuda', non_blocking=True)):.1f}),"
            f" copy_h2d {best(lambda s=source, t=target: copy_bound(t, s)):.1f} µs"
            f" (copy_ {best(lambda s=source, t=target: t.copy_(s, non_blocking=True)):.1f})"
        )
    with capsys.disabled():
        print("\nhost time, nothing queued:", *lines, sep="\n  ")
