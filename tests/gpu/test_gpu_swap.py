"""Block swaps on a GPU: pinned memory of every kind, both directions, against a copy byte by byte."""

from __future__ import annotations

import mmap
import random
import time

import pytest
import torch

pytest.importorskip("triton")

from h2d_patch import copies
from h2d_patch.copies import swap
from h2d_patch.copies.cuda import pinned_range
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice, Profile

MIB = 1 << 20
ROWS, ROW, VIEWS = 512, 16 << 10, 2  # a region of 16 MiB, two views of it


def unused(*args, **kwargs):
    pytest.fail("the original ran")


def always(choice):
    return Profile((1,), (1,), {False: [[choice]], True: [[choice]]})


@pytest.fixture(params=[Choice(BULK, 5), Choice(TRITON, 5)], ids=lambda choice: choice.path)
def path(request, ring, monkeypatch):
    """A kernel that is chosen whatever the batch."""
    kernels = swap.kernels_on(0)
    assert isinstance(kernels, swap.Kernels), kernels
    if request.param.path not in kernels.paths:
        pytest.skip("this GPU has no bulk copies")
    monkeypatch.setattr(kernels, "profile", always(request.param))
    return request.param.path


def views(whole):
    return [whole[:, i * ROW : (i + 1) * ROW] for i in range(VIEWS)]


@pytest.fixture
def gpu(ring):
    whole = torch.zeros(ROWS, ROW * VIEWS, dtype=torch.int8, device="cuda")
    return whole, views(whole)


def torch_pinned():
    return torch.zeros(ROWS, ROW * VIEWS, dtype=torch.int8, pin_memory=True)


class Registered:
    """Ordinary memory with `ranges` (offset, bytes) of it registered, as vLLM does with its offload region."""

    def __init__(self, ranges):
        self.mapped = mmap.mmap(-1, ROWS * ROW * VIEWS)
        self.whole = torch.frombuffer(self.mapped, dtype=torch.int8).view(ROWS, ROW * VIEWS)
        self.addresses = []
        for offset, nbytes in ranges:
            address = self.whole.data_ptr() + offset
            assert int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0
            self.addresses.append(address)

    def __enter__(self):
        return self.whole

    def __exit__(self, *exc):
        torch.cuda.synchronize()
        for address in self.addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


class Pinned:
    def __enter__(self):
        return torch_pinned()

    def __exit__(self, *exc):
        torch.cuda.synchronize()


def in_chunks():
    return Registered([(offset, 4 * MIB) for offset in range(0, 16 * MIB, 4 * MIB)])


def in_slots():
    """Only the second view's slot of each row, and the first's: each a registration of its own."""
    return Registered([(row * ROW * VIEWS + view * ROW, ROW) for row in range(ROWS) for view in range(VIEWS)])


def batch(source_views, target_views, count, largest, step, seed=0):
    """A random batch of blocks that do not overlap where they are written."""
    rnd = random.Random(seed)
    slots = [(v, r, o) for v in range(VIEWS) for r in range(ROWS) for o in range(0, ROW - largest + 1, largest)]
    rows, shift = [], step % 16  # with sizes that are multiples of 8 only, such addresses too
    for (v, r, o), (w, q, p) in zip(rnd.sample(slots, count), rnd.sample(slots, count), strict=True):
        rows.append(
            (
                source_views[w].data_ptr() + q * source_views[w].stride(0) + p + shift,
                target_views[v].data_ptr() + r * target_views[v].stride(0) + o + shift,
                rnd.randrange(step, largest + 1 - shift, step),
            )
        )
    return tuple(torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))


def reference(source, target, src, dst, sizes):
    expected, read = target.cpu().flatten().clone(), source.cpu().flatten()
    for s, d, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        s, d = s - source.data_ptr(), d - target.data_ptr()
        expected[d : d + n] = read[s : s + n]
    return expected.view(target.shape)


def fill(tensor, seed):
    torch.manual_seed(seed)
    made = torch.randint(-128, 128, tensor.shape, dtype=torch.int8, device="cuda")
    tensor.copy_(made if tensor.is_cuda else made.cpu())  # no copy of CUDA's spans registrations
    torch.cuda.synchronize()


@pytest.mark.parametrize("step", [16, 8, 4, 1, 1024], ids=lambda step: f"sizes-of-{step}")
@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("memory", [Pinned, in_chunks, in_slots])
def test_a_swap_copies_every_block_whole_and_nothing_else(gpu, ledger, path, memory, gpu_to_cpu, step):
    with memory() as host:
        sides = (gpu, (host, views(host))) if gpu_to_cpu else ((host, views(host)), gpu)
        (source, source_views), (target, target_views) = sides
        bound = copies.swap_blocks.bind(ledger)
        for count in (1, 31, 33, 1000):
            fill(source, 1)
            fill(target, 2)
            src, dst, sizes = batch(source_views, target_views, count, 4096, step, seed=count)
            expected = reference(source, target, src, dst, sizes)
            bound(unused, src, dst, sizes, gpu_to_cpu, source_views, target_views)
            for descriptor in (src, dst, sizes):
                descriptor.zero_()  # at once: the kernel has its own
            torch.cuda.synchronize()
            assert torch.equal(target.cpu(), expected)
        assert (ledger.calls, ledger.fallbacks) == (4, 0), ledger.reasons


@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
def test_blocks_of_any_mix_of_sizes_at_any_address(gpu, ledger, path, gpu_to_cpu):
    """Neighbours that touch, empty ones, one far larger than the rest."""
    with Pinned() as host:
        (source, target) = (gpu[0], host) if gpu_to_cpu else (host, gpu[0])
        bound, everything = copies.swap_blocks.bind(ledger), source.numel()
        for seed in range(30):
            rnd = random.Random(seed)
            fill(source, seed)
            fill(target, seed + 1)
            at, rows = rnd.randrange(16), []
            while at < everything * 3 // 4 and len(rows) < 400:
                nbytes = rnd.choice([0, 1, 15, 16, 17, 255, 4096, 8008, 8192, rnd.randrange(30000)])
                nbytes = 5_000_001 if rnd.random() < 0.003 and at < everything // 2 else nbytes
                rows.append((source.data_ptr() + rnd.randrange(everything - nbytes), target.data_ptr() + at, nbytes))
                at += nbytes + rnd.choice([0, 0, 1, 16, 1000])
            rnd.shuffle(rows)
            src, dst, sizes = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))
            expected = reference(source, target, src, dst, sizes)
            bound(unused, src, dst, sizes, gpu_to_cpu, [source], [target])
            torch.cuda.synchronize()
            assert torch.equal(target.cpu(), expected), seed
        assert ledger.fallbacks == 0, ledger.reasons


def test_two_hundred_thousand_blocks(gpu, ledger, path):
    with Pinned() as host:
        fill(host, 1)
        places = torch.randperm(host.numel() // 32)[:200_000] * 32
        src, dst = host.data_ptr() + places, gpu[0].data_ptr() + places.flip(0)
        bound = copies.swap_blocks.bind(ledger)
        bound(unused, src, dst, torch.full_like(src, 32), False, [host], [gpu[0]])
        read, written = host.flatten().view(torch.int64), gpu[0].flatten().cpu().view(torch.int64)
        for word in range(4):
            assert torch.equal(written[places.flip(0) // 8 + word], read[places // 8 + word])
        assert ledger.fallbacks == 0, ledger.reasons


def test_a_swap_does_not_wait_and_is_in_stream_order(gpu, ledger, path, queue_ms):
    whole, gpu_views = gpu
    host = torch_pinned()
    bound, side = copies.swap_blocks.bind(ledger), torch.cuda.Stream()
    src, dst, sizes = batch(gpu_views, views(host), 256, 4096, 4096)
    bound(unused, src, dst, sizes, True, gpu_views, views_of_host := views(host))
    torch.cuda.synchronize()
    host.zero_()
    with torch.cuda.stream(side):
        behind = queue_ms(30)
        whole.fill_(7)
        began = time.perf_counter()
        bound(unused, src, dst, sizes, True, gpu_views, views_of_host)
        took = time.perf_counter() - began
        waited = behind.query()
        whole.fill_(9)
        side.synchronize()
    expected = torch.zeros_like(host).flatten()
    for d, n in zip(dst.tolist(), sizes.tolist(), strict=True):
        expected[d - host.data_ptr() : d - host.data_ptr() + n] = 7
    assert torch.equal(host.flatten(), expected)
    assert not waited and took < 5e-3 and ledger.fallbacks == 0


@pytest.mark.parametrize(
    "ranges, reason",
    [
        ([], "host memory is not pinned"),
        ([(0, 12 * MIB)], "host memory is not pinned"),
        ([(0, 4 * MIB), (8 * MIB, 8 * MIB)], "host memory is not pinned"),
    ],
    ids=["not-at-all", "not-the-end", "not-the-middle"],
)
@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
def test_host_memory_that_is_not_pinned_throughout_never_reaches_the_kernel(
    gpu, ledger, path, ranges, reason, gpu_to_cpu
):
    with Registered(ranges) as host:
        sides = (gpu[1], views(host)) if gpu_to_cpu else (views(host), gpu[1])
        src, dst, sizes = batch(*sides, 200, 4096, 16)
        ran = []
        order = {"is_src_access_order_any": not gpu_to_cpu}
        copies.swap_blocks.bind(ledger)(
            lambda *a, **k: ran.append((a, k)), src, dst, sizes, gpu_to_cpu, *sides, **order
        )
        assert len(ran) == 1 and ran[0][0][0] is src and ran[0][1] == order
        assert ledger.reasons == [reason]


def test_memory_registered_later_is_taken_from_then_on(gpu, ledger, path):
    with Registered([]) as host:
        sides = views(host), gpu[1]
        src, dst, sizes = batch(*sides, 64, 4096, 16)
        bound = copies.swap_blocks.bind(ledger)
        bound(lambda *a: None, src, dst, sizes, False, *sides)
        assert ledger.fallbacks == 1
        assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)) == 0
        try:
            bound(unused, src, dst, sizes, False, *sides)
            torch.cuda.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        assert ledger.fallbacks == 1


@pytest.mark.parametrize("change", [(0, -(2**63)), (0, 2**63 - 16), (1, 4096), (2, -8)])
def test_what_no_kernel_may_touch_goes_to_the_original(gpu, ledger, path, change):
    host = torch_pinned()
    rows = batch(views(host), gpu[1], 64, 4096, 16)
    column, value = change
    rows[column][3] = value
    ran = []
    copies.swap_blocks.bind(ledger)(lambda *a: ran.append(a), *rows, False, views(host), gpu[1])
    torch.cuda.synchronize()
    assert len(ran) == 1 and ledger.fallbacks == 1 and not gpu[0].any()


def test_where_the_driver_is_chosen_the_original_runs_and_that_is_no_fallback(gpu, ledger, path, monkeypatch):
    monkeypatch.setattr(swap.kernels_on(0), "profile", always(Choice(DRIVER)))
    host = torch_pinned()
    ran = []
    rows = batch(views(host), gpu[1], 64, 4096, 16)
    copies.swap_blocks.bind(ledger)(lambda *a: ran.append(a), *rows, False, views(host), gpu[1])
    assert len(ran) == 1 and ledger.fallbacks == 0


def test_the_driver_says_how_far_pinned_memory_reaches(ring):
    pinned = torch.zeros(3 * MIB, dtype=torch.int8, pin_memory=True)
    start, end, _ = pinned_range(pinned.data_ptr() + MIB)
    assert start <= pinned.data_ptr() and end >= pinned.data_ptr() + 3 * MIB
    assert pinned_range(torch.zeros(MIB).data_ptr()) == "host memory is not pinned"
    with Registered([(0, 4 * MIB), (4 * MIB, 4 * MIB)]) as host:
        base = host.data_ptr()
        assert pinned_range(base + 5) == (base, base + 4 * MIB, 0)
        assert pinned_range(base + 4 * MIB) == (base + 4 * MIB, base + 8 * MIB, 0)
        assert pinned_range(base + 8 * MIB) == "host memory is not pinned"
    assert pinned_range(torch.zeros(4, device="cuda").data_ptr()) == "host memory is not pinned"


@pytest.mark.parametrize("path", [Choice(TRITON, 16)], indirect=True)
def test_no_number_of_blocks_compiles_a_kernel_anew(gpu, ledger, path, monkeypatch):
    from h2d_patch.copies.swap_kernel import WIDTHS, copy_blocks

    compiled = len(copy_blocks.device_caches[0][0])
    assert compiled == len(WIDTHS)
    host = torch_pinned()
    sides = views(host), gpu[1]
    bound = copies.swap_blocks.bind(ledger)
    for count in (1, 16, 17, 31, 32, 100, 256, 1001, 4096):
        for step in (16, 8, 4, 1):
            for programs in (1, 7, 16, 64):
                monkeypatch.setattr(swap.kernels_on(0), "profile", always(Choice(TRITON, programs)))
                bound(unused, *batch(*sides, count, 2048, step), False, *sides)
    torch.cuda.synchronize()
    assert len(copy_blocks.device_caches[0][0]) == compiled and ledger.fallbacks == 0


def test_under_graph_capture_the_original_runs(gpu, ledger, path):
    host = torch_pinned()
    sides = views(host), gpu[1]
    src, dst, sizes = batch(*sides, 64, 4096, 16)
    bound, ran, x = copies.swap_blocks.bind(ledger), [], torch.zeros(1, device="cuda")
    bound(unused, src, dst, sizes, False, *sides)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        bound(lambda *a: ran.append(a), src, dst, sizes, False, *sides)
    graph.replay()
    torch.cuda.synchronize()
    assert len(ran) == 1 and ledger.reasons == ["a CUDA graph is being captured"] and x.item() == 1


def test_bandwidth_and_host_time_are_shown(gpu, ledger, path, capsys):
    host = torch_pinned()
    lines = []
    for name, gpu_to_cpu, sides in (("load", False, (views(host), gpu[1])), ("store", True, (gpu[1], views(host)))):
        for size, count in ((4096, 1024), (8192, 1024), (8192, 2048), (16384, 1024)):
            src, dst, sizes = batch(*sides, count, size, size)
            bound, host_times, gpu_times = copies.swap_blocks.bind(ledger), [], []
            for _ in range(20):
                torch.cuda.synchronize()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(2_000_000)
                begin.record()
                began = time.perf_counter()
                bound(unused, src, dst, sizes, gpu_to_cpu, *sides)
                host_times.append((time.perf_counter() - began) * 1e6)
                end.record()
                torch.cuda.synchronize()
                gpu_times.append(begin.elapsed_time(end))
            rate = size * count / sorted(gpu_times)[10] / 1e6
            lines.append(f"{name} {size >> 10} KiB x {count}: {rate:.1f} GB/s, host {sorted(host_times)[10]:.0f} µs")
    with capsys.disabled():
        print(f"\nswap_blocks, {path}:", *lines, sep="\n  ")
    assert ledger.fallbacks == 0
