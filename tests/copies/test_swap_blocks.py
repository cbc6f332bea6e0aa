"""Block swaps on the CPU: the choice, the checks, and the kernel itself under Triton's interpreter."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from h2d_patch import copies
from h2d_patch.copies import forced_staging, native, swap, swap_kernel
from h2d_patch.copies.profile import DRIVER, TRITON, Choice, Profile
from h2d_patch.copies.ranges import Ranges, Swappable

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """As under TRITON_INTERPRET=1, for these tests only: that variable is for the whole process."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def describes(request, library, monkeypatch):
    """By what the descriptors are made."""
    monkeypatch.setattr(native, "loaded", library if request.param == "compiled" else None)


@pytest.fixture
def chosen(monkeypatch):
    """Have the profile choose this, or what a function of direction, all bytes and blocks says."""

    class Chosen:
        def __init__(self, choice):
            self._choice = choice

        def choose_of(self, *asked):
            return self._choice(*asked) if callable(self._choice) else self._choice

    return lambda choice: monkeypatch.setattr(swap._ON_CPU, "profile", Chosen(choice))


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


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
@pytest.mark.parametrize("step", [16, 8, 4, 1])
def test_the_kernel_copies_every_block_whole_and_nothing_else(ledger, chosen, step, programs):
    chosen(Choice(TRITON, programs))
    seed = programs
    source, source_views, target, target_views, src, dst, sizes = swap_case(seed=seed, step=step)
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16) as ring:
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
        assert ring.in_use() == 0
    assert torch.equal(target, expected)
    assert (ledger.calls, ledger.fallbacks) == (1, 0)
    assert ledger.taken == [(f"triton {programs}", int(sizes.sum()))]


@pytest.mark.parametrize("column", ["src", "dst", "sizes", None])
@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_one_odd_number_decides_the_width(ledger, monkeypatch, column, by):
    widths = []
    monkeypatch.setattr(swap_kernel, "launch", lambda *arguments: widths.append(arguments[-1]))
    *_, source_views, _, target_views, src, dst, sizes = swap_case()
    if column:
        {"src": src, "dst": dst, "sizes": sizes}[column][7] -= by
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
    assert widths == [{1: 1, 2: 1}.get(by, by) if column else 16]


@pytest.mark.parametrize("gpu_to_cpu", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_sizes_alignments_and_neighbours_is_copied_byte_for_byte(gpu_to_cpu, data):
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    size = st.integers(0, 60) | st.sampled_from([0, 1, 512, 1000, 3000 // unit])
    rows = data.draw(st.lists(st.tuples(size, st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=12))
    programs = data.draw(st.integers(1, 9))
    source = torch.randint(-128, 128, (1, 1 << 17), dtype=torch.int8)
    target = torch.randint(-128, 128, (1, 1 << 17), dtype=torch.int8)
    batch, at = [], 0
    for number, gap, start in rows:
        at += gap * unit
        batch.append((source.data_ptr() + start * unit, target.data_ptr() + at, number * unit))
        at += number * unit
    batch = data.draw(st.permutations(batch))
    src, dst, sizes = (torch.tensor(column, dtype=torch.int64) for column in zip(*batch, strict=True))
    expected = reference(source, target, src, dst, sizes)
    whole = Swappable(*(Ranges([(t.data_ptr(), t.data_ptr() + t.numel(), 0)]) for t in (source, target)), None)
    whole = Swappable(whole.device, whole.host, None) if gpu_to_cpu else whole
    with forced_staging(1 << 16):
        declined = swap.swap_arrays(
            src.numpy(), dst.numpy(), sizes.numpy(), gpu_to_cpu, lambda ring: whole, Choice(TRITON, programs)
        )
    assert (declined is None) == bool(sizes.sum())
    assert torch.equal(target, expected)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50).filter(any), st.integers(1, 20))
def test_shares_are_even_by_bytes_and_leave_nothing_out(lengths, programs):
    lengths = np.array(lengths, dtype=np.int64)
    cuts = swap._cuts(lengths, programs)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    at = [int(starts[block] + offset) for block, offset in cuts]
    assert at[0] == 0 and at[-1] == lengths.sum() and tuple(cuts[-1]) == (len(lengths), 0)
    assert at == sorted(at) and len(cuts) == programs + 1
    assert max(np.diff(at)) <= -(-lengths.sum() // programs) + 1024 + 16
    assert all(block == len(lengths) or offset < max(lengths[block], 1) for block, offset in cuts)
    assert not any(offset % 16 for _, offset in cuts)


def test_equal_sizes_are_shared_out_like_any_others():
    for size in (1, 16, 100, 8008, 1 << 20):
        for blocks in (1, 7, 4096):
            lengths = np.full(blocks, size, dtype=np.int64)
            differ = np.append(lengths, 0)
            assert np.array_equal(swap._cuts(lengths, 8)[:-1], swap._cuts(differ, 8)[:-1]) or size < 1024


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_compiled_describes_and_refuses_as_numpy_does(library, data):
    ranges, at = [], 1000
    for _ in range(data.draw(st.integers(1, 4))):
        at += data.draw(st.sampled_from([0, 1, 500]))
        end = at + data.draw(st.integers(1, 3000))
        ranges.append((at, end, data.draw(st.sampled_from([0, 0, 1 << 40, -(1 << 30)]))))
        at = end
    may = Swappable(Ranges(ranges), Ranges([(1 << 30, (1 << 30) + 5000, 0)]), None)
    absurd = st.sampled_from([-1, -(2**63), 2**63 - 1, 0])
    blocks = data.draw(
        st.lists(
            st.tuples(
                st.integers(900, at + 10) | absurd, st.integers(1 << 30, (1 << 30) + 4000) | absurd,
                st.integers(0, 300) | absurd,
            ),
            min_size=1, max_size=20,
        )
        | st.lists(
            st.sampled_from(ranges).flatmap(
                lambda r: st.tuples(st.integers(r[0], r[1]), st.integers(1 << 30, (1 << 30) + 4000)).map(
                    lambda pair: (*pair, min(r[1] - pair[0], 77))
                )
            ),
            min_size=1, max_size=20,
        )
    )  # fmt: skip
    columns = np.array(blocks, dtype=np.int64).T.copy()
    gpu_to_cpu = data.draw(st.booleans())
    if gpu_to_cpu:
        columns[[0, 1]] = columns[[1, 0]]
    total, programs = library.total(columns[2].ctypes.data, len(blocks)), data.draw(st.integers(1, 9))
    assert total == int(columns[2].sum())
    if total <= 0:
        return
    rows = tuple(row.ctypes.data for row in columns)
    numbers = 3 * len(blocks) + 2 * (programs + 1)
    theirs, ours = np.zeros(numbers, dtype=np.int64), np.zeros(numbers + 1, dtype=np.int64)
    declined = swap._describe(rows, len(blocks), gpu_to_cpu, may, programs, theirs.ctypes.data)
    code = library.swap(*rows, len(blocks), total, gpu_to_cpu, may.address, programs, ours.ctypes.data, 0, 0)
    assert code == {None: 0, swap._NUMBERS: native.NEGATIVE, swap._OUTSIDE: native.OUTSIDE}[declined]
    if code == 0:
        copied = np.concatenate((np.tile(columns[2] > 0, 3), np.ones(2 * (programs + 1), dtype=bool)))
        assert np.array_equal(ours[:-1][copied], theirs[copied]) and ours[-1] == 0


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("absurd", [2**63 - 1, 2**62, 2**63 - 4096])
def test_numbers_whose_sum_wraps_around_are_outside(library, column, absurd):
    columns = np.array([[1 << 20] * 8, [1 << 30] * 8, [64] * 8], dtype=np.int64)
    columns[column, 5] = absurd
    columns[2, 6] = absurd if column < 2 else 64
    columns[column, 6] = absurd
    for ranges in ([(1 << 20, 1 << 21, 0)], [(1 << 20, 1 << 21, 0), (1 << 22, 1 << 23, 8)]):
        may = Swappable(Ranges(ranges), Ranges([(1 << 30, 1 << 31, 0)]), None)
        out = np.zeros(3 * 8 + 6, dtype=np.int64)
        rows = (row.ctypes.data for row in columns)
        assert library.swap(*rows, 8, 512, 0, may.address, 2, out.ctypes.data, 0, 0) == native.OUTSIDE


@pytest.mark.parametrize("gpu_to_cpu", [False, True])
def test_where_the_device_sees_host_memory_elsewhere_the_kernel_is_told_so(monkeypatch, gpu_to_cpu):
    launched = []
    monkeypatch.setattr(swap_kernel, "launch", lambda *arguments: launched.append(arguments[0].clone()))
    shift = 1 << 40
    host, device = Ranges([(1 << 20, 1 << 21, shift)]), Ranges([(1 << 30, 1 << 31, 0)])
    on_host, on_device = np.array([1 << 20, 1500 << 10]), np.array([1 << 30, 1 << 30 | 4096])
    reads, writes = (on_device, on_host) if gpu_to_cpu else (on_host, on_device)
    with forced_staging(1 << 16):
        swap.swap_arrays(reads, writes, np.array([64, 64]), gpu_to_cpu, lambda ring: Swappable(host, device, None))
    (found,) = launched
    assert (found[:2].numpy() - reads).tolist() == [0 if gpu_to_cpu else shift] * 2
    assert (found[2:4].numpy() - writes).tolist() == [shift if gpu_to_cpu else 0] * 2


def test_blocks_larger_than_a_chunk_are_copied_chunk_by_chunk(ledger):
    source, source_views, target, target_views, src, dst, sizes = swap_case(
        rows=32, row_bytes=40 << 10, largest=20 << 10, count=16, step=8, views=1
    )
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, False, source_views, target_views)
    assert torch.equal(target, expected) and ledger.fallbacks == 0


def test_from_the_gpu_it_works_alike(ledger):
    source, source_views, target, target_views, src, dst, sizes = swap_case(count=128, largest=64)
    expected = reference(source, target, src, dst, sizes)
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, src, dst, sizes, True, source_views, target_views)
    assert torch.equal(target, expected) and ledger.fallbacks == 0


@pytest.mark.parametrize("gpu_to_cpu", [False, True])
def test_where_the_driver_is_as_fast_it_runs_and_that_is_no_fallback(ledger, chosen, gpu_to_cpu):
    asked = []
    chosen(lambda *question: asked.append(question) or Choice(DRIVER))
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
    assert asked == [(gpu_to_cpu, int(sizes.sum()), 15)]


def test_an_argument_that_no_known_release_gives_leaves_the_call_to_the_original(ledger):
    *_, source_views, _, target_views, src, dst, sizes = swap_case()
    ran = []
    bound = copies.swap_blocks.bind(ledger)
    with forced_staging(1 << 16):
        bound(lambda *a, **k: ran.append(k), src, dst, sizes, False, source_views, target_views, compress=True)
    assert ran == [{"compress": True}] and ledger.reasons == ["an argument that no known release gives"]


def test_the_choice_is_that_of_the_nearest_measured_cell():
    def cells(name):
        return [[Choice(f"{name}{size}x{count}") for count in (1, 100)] for size in (1000, 4000, 16000)]

    profile = Profile((1000, 4000, 16000), (1, 100), {False: cells("load"), True: cells("store")})
    found = [profile.choose(False, nbytes, 1).path for nbytes in (1, 1999, 2001, 7999, 8001, 1e9)]
    assert found == ["load1000x1", "load1000x1", "load4000x1", "load4000x1", "load16000x1", "load16000x1"]
    assert [profile.choose(True, 1, n).path for n in (1, 9, 11, 10**6)] == ["store1000x1"] * 2 + ["store1000x100"] * 2
    for _ in range(2):  # the second time from memory
        found = [profile.choose_of(to_cpu, 8001 * 9, 9).path for to_cpu in (False, True)]
        assert found == ["load16000x1", "store16000x1"]


def test_what_was_chosen_is_remembered_up_to_a_bound():
    one = Choice("one")
    profile = Profile((1,), (1,), {False: [[one]], True: [[one]]})
    for blocks in range(1, 3000):
        assert profile.choose_of(False, 8192, blocks) is one
    assert len(profile._remembered) <= 1024


def change(column, index, value):
    def apply(src, dst, sizes):
        batch = {"src": src, "dst": dst, "sizes": sizes}
        batch[column][index] = value
        return tuple(batch.values())

    return apply


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (change("sizes", 3, -8), "negative"),
        (change("sizes", slice(None), -8), "negative"),
        (change("src", 3, -(2**63)), "negative"),
        (change("dst", 0, 2**63 - 16), "outside"),
        (change("src", 0, 4096), "outside"),
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


def test_without_device_memory_for_descriptors_the_original_runs_and_the_next_batch_is_ours_again(ledger, monkeypatch):
    source, source_views, target, target_views, src, dst, sizes = swap_case(count=20)
    expected = reference(source, target, src, dst, sizes)

    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    bound = copies.swap_blocks.bind(ledger)
    with forced_staging(1 << 16) as ring:
        with monkeypatch.context() as patched:
            patched.setattr(swap.torch, "empty", full)
            assert bound(lambda *a: "theirs", src, dst, sizes, False, source_views, target_views) == "theirs"
        assert ledger.reasons == ["no memory on the device for descriptors"] and ring.in_use() == 0
        bound(unused, src, dst, sizes, False, source_views, target_views)
    assert torch.equal(target, expected)


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


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_what_cannot_be_loaded_or_compiled_is_said_and_the_rest_serves(monkeypatch, bulk, compiles):
    """As where a driver refuses the PTX, and where Triton cannot write its cache."""
    from contextlib import nullcontext

    from h2d_patch.copies import swap_bulk

    def loaded(index):
        if not bulk:
            raise OSError(218, "cuModuleLoadData: CUDA_ERROR_INVALID_PTX")
        return types.SimpleNamespace(warps=4)

    def tried(copy, shares, width=16):
        if shares == 2 and not compiles:
            raise PermissionError(13, "Permission denied", "/triton-cache")

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(swap_bulk, "supported", lambda index: True)
    monkeypatch.setattr(swap_bulk, "Bulk", loaded)
    monkeypatch.setattr(swap, "_interpreted", lambda: False)
    monkeypatch.setattr(swap, "_try", tried)
    monkeypatch.setattr(swap, "_kernels", {})
    reasons = swap.start_kernels(7)
    found = swap.kernels_on(7)
    assert ("no bulk copies: OSError: [Errno 218] cuModuleLoadData: CUDA_ERROR_INVALID_PTX" in reasons) is not bulk
    assert any("no kernel of Triton's: PermissionError" in reason for reason in reasons) is not compiles
    if bulk or compiles:
        assert found.paths == ["driver", *(["bulk"] if bulk else []), *(["triton"] if compiles else [])]
        assert found.profile.choose(False, 8192, 4096).path == ("bulk" if bulk else "triton")
    else:
        assert found == "; ".join(reasons)
    assert swap.start_kernels(7) == [], "once"
