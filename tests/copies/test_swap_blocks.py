"""Block swaps on the CPU: the choice, the checks, and the kernel itself under Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from h2d_patch import copies
from h2d_patch.copies import forced_staging, swap, swap_kernel

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """As under TRITON_INTERPRET=1, for these tests only: that variable is for the whole process."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))


def swap_case(rows=64, row_bytes=4096, seed=0, step=16, largest=512, count=20, views=2):
    """Host and device tensors (both on the CPU) of `views` strided views each, and a random batch between them."""
    rnd = random.Random(seed)
    torch.manual_seed(seed)

    def side():
        whole = torch.randint(-128, 128, (rows, row_bytes * views), dtype=torch.int8)
        return whole, [whole[:, i * row_bytes : (i + 1) * row_bytes] for i in range(views)]

    (source, source_views), (target, target_views) = side(), side()
    places = [(v, r, o) for v in range(views) for r in range(rows) for o in range(0, row_bytes - largest, 1024)]
    batch = []
    for v, r, o in rnd.sample(places, count):
        nbytes = rnd.randrange(step, largest + 1, step)
        w, q, p = rnd.choice(places)
        read = source_views[w].data_ptr() + q * source.stride(0) + p + step * rnd.randrange(0, 8)
        write = target_views[v].data_ptr() + r * target.stride(0) + o + step * rnd.randrange(0, 8)
        batch.append((read, write, nbytes))
    src, dst, sizes = (torch.tensor(column, dtype=torch.int64) for column in zip(*batch, strict=True))
    return source, source_views, target, target_views, src, dst, sizes


def reference(source, target, src, dst, sizes):
    """The batch, byte by byte."""
    expected = target.clone()
    flat, read = expected.view(-1), source.view(-1)
    for s, d, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        s, d = s - source.data_ptr(), d - target.data_ptr()
        flat[d : d + n] = read[s : s + n]
    return expected


def unused(*args, **kwargs):
    pytest.fail("the original ran")


@pytest.mark.parametrize("step", [16, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_copies_every_block_whole_and_nothing_else(ledger, step, seed):
    source, source_views, target, target_views, src, dst, sizes = swap_case(seed=seed, step=step)
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16) as ring:
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
        assert ring.in_use() == 0
    assert torch.equal(target, expected)
    assert (ledger.calls, ledger.fallbacks) == (1, 0)


@pytest.mark.parametrize("column", ["src", "dst", "sizes", None])
def test_one_number_that_is_no_multiple_of_16_takes_the_path_of_8(ledger, monkeypatch, column):
    widths = []
    monkeypatch.setattr(swap_kernel, "launch", lambda descriptors, width: widths.append(width))
    *_, source_views, _, target_views, src, dst, sizes = swap_case()
    if column:
        {"src": src, "dst": dst, "sizes": sizes}[column][7] -= 8
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
    assert widths == [8 if column else 16]


def test_blocks_larger_than_a_chunk_are_copied_chunk_by_chunk(ledger):
    source, source_views, target, target_views, src, dst, sizes = swap_case(
        rows=32, row_bytes=40 << 10, largest=20 << 10, count=16, step=8, views=1
    )
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
    assert torch.equal(target, expected) and ledger.fallbacks == 0


def test_from_the_gpu_it_takes_more_blocks_and_works_alike(ledger):
    source, source_views, target, target_views, src, dst, sizes = swap_case(count=128, largest=64)
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, True, source_views, target_views)
    assert torch.equal(target, expected) and ledger.fallbacks == 0


@pytest.mark.parametrize("gpu_to_cpu", [False, True])
def test_where_the_driver_is_as_fast_it_runs_and_that_is_no_fallback(ledger, gpu_to_cpu):
    *_, source_views, _, target_views, src, dst, sizes = swap_case(count=15)
    ran = []
    bound = copies.swap_blocks.bind(ledger)
    with forced_staging(1 << 16):
        result = bound(
            lambda *a, **k: ran.append((a, k)) or "theirs", src, dst, sizes, gpu_to_cpu, source_views, target_views,
            is_src_access_order_any=True,
        )  # fmt: skip
    assert result == "theirs" and ledger.fallbacks == 0
    assert ran[0][0][0] is src and ran[0][1] == {"is_src_access_order_any": True}


@pytest.mark.parametrize(
    "gpu_to_cpu, largest, blocks, kernel",
    [
        (False, 8 << 10, 16, True), (False, 8 << 10, 15, False), (False, 32 << 10, 64, False),
        (False, 32 << 10, 1024, True), (False, 128 << 10, 4096, False),
        (True, 8 << 10, 127, False), (True, 8 << 10, 128, True), (True, 128 << 10, 4096, False),
    ],
)  # fmt: skip
def test_the_choice_follows_the_measured_table(gpu_to_cpu, largest, blocks, kernel):
    assert swap.pays(gpu_to_cpu, largest, blocks) is kernel


def change(column, index, value):
    def apply(src, dst, sizes):
        batch = {"src": src, "dst": dst, "sizes": sizes}
        batch[column][index] = value
        return tuple(batch.values())

    return apply


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (change("sizes", 3, 0), "not positive"),
        (change("sizes", 3, -8), "not positive"),
        (change("src", 3, -(2**63)), "negative"),
        (change("dst", 0, 2**63 - 16), "outside"),
        (change("src", 0, 4096), "outside"),
        (change("sizes", 5, 12), "multiples of 8"),
        (lambda s, d, n: (s.to(torch.int32), d, n), "descriptors"),
        (lambda s, d, n: (s[:-1], d, n), "descriptors"),
        (lambda s, d, n: (s.repeat_interleave(2)[::2], d, n), "descriptors"),
        (lambda s, d, n: (s.tolist(), d, n), "descriptors"),
    ],
)
def test_a_batch_that_is_not_safe_goes_to_the_original_and_is_counted(ledger, spoil, reason):
    _, source_views, target, target_views, src, dst, sizes = swap_case()
    before, ran = target.clone(), []
    src, dst, sizes = spoil(src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(
            lambda *batch: ran.append(batch), src, dst, sizes, False, source_views, target_views
        )
    assert len(ran) == 1 and ran[0][0] is src and torch.equal(target, before)
    assert ledger.fallbacks == 1 and reason in ledger.reasons[0], ledger.reasons


def test_an_empty_batch_goes_to_the_original(ledger):
    none = torch.empty(0, dtype=torch.int64)
    with forced_staging(1 << 16):
        assert copies.swap_blocks.bind(ledger)(lambda *a: "theirs", none, none, none, False, [], []) == "theirs"


def test_without_room_for_descriptors_the_original_runs(ledger):
    *_, source_views, _, target_views, src, dst, sizes = swap_case(count=20)
    with forced_staging(256):
        copies.swap_blocks.bind(ledger)(lambda *a: None, src, dst, sizes, False, source_views, target_views)
    assert ledger.reasons == ["larger than the staging region"]


def test_without_a_kernel_the_original_runs_and_the_reason_is_given(ledger, monkeypatch):
    *_, source_views, _, target_views, src, dst, sizes = swap_case(count=20)
    monkeypatch.setattr(swap_kernel, "interpreted", lambda: False)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(lambda *a: None, src, dst, sizes, False, source_views, target_views)
    assert ledger.reasons == ["no swap kernel: compiled kernels do not run on the CPU"]


def test_the_descriptors_may_be_overwritten_at_once(ledger):
    source, source_views, target, target_views, src, dst, sizes = swap_case()
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
    for descriptor in (src, dst, sizes):
        descriptor.zero_()
    assert torch.equal(target, expected)
