"""Swaps that come as tensors and block numbers, or as addresses with a stream of their own, byte by byte on the CPU."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from h2d_patch import copies
from h2d_patch.copies import forced_staging, swap, swap_forms, swap_kernel
from h2d_patch.copies.call import Declined
from h2d_patch.copies.profile import DRIVER, default

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
BLOCKS, BYTES = 12, 64
SHIFT = 1 << 40  # from host addresses to those of the device


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """As under TRITON_INTERPRET=1, for these tests only: that variable is for the whole process."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))


@pytest.fixture
def driver_pays(monkeypatch):
    """Have the profile leave everything to the driver."""
    monkeypatch.setattr(swap._ON_CPU, "profile", default([DRIVER]))


def unused(*args, **kwargs):
    pytest.fail("the original ran")


def raw(tensor):
    """The bytes of a tensor's memory, from its address on."""
    nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())


def plainly(src, dst, *size_and_mapping):
    """What vLLM's `ops.swap_blocks` does, by addresses."""
    *size, mapping = size_and_mapping
    nbytes = size[0] if size else src.element_size() * src.stride(0)
    read, write = raw(src), raw(dst)
    for i, j in mapping.tolist():
        write[j * nbytes : (j + 1) * nbytes] = read[i * nbytes : (i + 1) * nbytes]


def filled(*shape, dtype=torch.int8):
    return torch.randint(-128, 128, shape, dtype=torch.int8).view(dtype)


def pairs(*blocks, total=BLOCKS):
    torch.manual_seed(1)
    return torch.stack([torch.randperm(total)[: blocks[0] if blocks else 8] for _ in range(2)], dim=1)


def layers(halved, padded=False):
    """Sources and destinations: int8 `[blocks, bytes]` or two halves of that, with a gap behind each block."""

    def side():
        shape = (BLOCKS, BYTES + (16 if padded else 0))
        tensors = [filled(2, *shape) if flag else filled(*shape) for flag in halved]
        return [tensor[..., :BYTES] for tensor in tensors]

    torch.manual_seed(0)
    return side(), side()


def expected(dst, run):
    """What `run`, with copies of `dst` in its place, leaves in them."""
    copied = [t.new_empty(0).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride()) for t in dst]
    run(copied)
    return copied


def same(found, wanted):
    """Whether all memory is, gaps too."""
    return all(bytes(raw(one)) == bytes(raw(other)) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("halved", [[False, False], [True, True], [True, False, True]], ids=str)
def test_keys_and_values_and_whole_tensors_go_in_one_batch(ledger, monkeypatch, halved, padded):
    src, dst = layers(halved, padded)
    mapping = pairs()
    wanted = expected(dst, lambda to: copies.swap_tensors.original(plainly, src, to, mapping, halved=halved))
    launched = []
    launch = swap_kernel.launch
    monkeypatch.setattr(swap_kernel, "launch", lambda *a: (launched.append(a[1]), launch(*a)))
    with forced_staging(1 << 16):
        assert copies.swap_tensors.bind(ledger)(unused, src, dst, mapping, halved=halved) is None
    assert same(dst, wanted) and ledger.fallbacks == 0
    assert launched == [8 * (len(halved) + sum(halved))]


def test_the_block_s_size_may_be_less_or_more_than_a_row(ledger):
    """Sizes differ from tensor to tensor, and a row of the host side may hold several blocks."""
    torch.manual_seed(0)
    src, dst = [filled(6, 128), filled(12, 32), filled(12, 5)], [filled(12, 64), filled(6, 64), filled(12, 5)]
    sizes, mapping = [64, 32, 5], pairs()
    wanted = expected(dst, lambda to: copies.swap_tensors.original(plainly, src, to, mapping, sizes=sizes))
    with forced_staging(1 << 16):
        copies.swap_tensors.bind(ledger)(unused, src, dst, mapping, sizes=sizes)
    assert same(dst, wanted) and ledger.fallbacks == 0


def test_tensors_of_other_dtypes_dimensions_and_offsets_are_taken_by_their_bytes(ledger):
    torch.manual_seed(0)
    src = [filled(BLOCKS + 1, 4, 32).view(torch.float16)[1:].permute(0, 2, 1)]
    dst = [filled(BLOCKS, 128).view(torch.float16)]
    mapping = pairs(12)
    wanted = expected(dst, lambda to: plainly(src[0], to[0], mapping))
    with forced_staging(1 << 16), torch.inference_mode():
        # With the tensors of another layer, as few blocks are left to the original.
        others = [filled(BLOCKS, 64)], [filled(BLOCKS, 64)]
        bound = copies.swap_tensors.bind(ledger)
        bound(unused, src + others[0], dst + others[1], mapping, halved=[False, False])
    assert same(dst, wanted) and ledger.fallbacks == 0


def change(**new):
    return lambda operands: {**operands, **new}


WRONG = {
    "int32 numbers": (lambda o: {**o, "mapping": o["mapping"].int()}, "mapping"),
    "three columns": (lambda o: {**o, "mapping": o["mapping"].repeat(1, 2)[:, :3]}, "mapping"),
    "a flat mapping": (lambda o: {**o, "mapping": o["mapping"].flatten()}, "mapping"),
    "another number of flags": (change(halved=[False]), "not pairs"),
    "no halves": (change(halved=[True, False]), "not pairs"),
    "an array": (lambda o: {**o, "mapping": o["mapping"].numpy()}, "mapping"),
    "a negative number": (lambda o: {**o, "mapping": o["mapping"] - 12}, "block number"),
    "an absurd number": (lambda o: {**o, "mapping": o["mapping"] + 2**60}, "block number"),
    "a source that is too short": (lambda o: {**o, "src": [filled(3, BYTES) for _ in o["src"]]}, "outside"),
    "one place twice": (lambda o: {**o, "mapping": o["mapping"] // 2}, "one place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_safe_is_left_to_the_loop_which_runs_as_it_was(ledger, name):
    spoil, reason = WRONG[name]
    src, dst = layers([False, False])
    operands = spoil({"src": src, "dst": dst, "mapping": pairs(), "halved": [False, False]})
    ran = []
    with forced_staging(1 << 16):
        copies.swap_tensors.bind(ledger)(
            lambda *call: ran.append(call),
            operands["src"],
            operands["dst"],
            operands["mapping"],
            halved=operands["halved"],
        )
    wanted = []
    copies.swap_tensors.original(
        lambda *call: wanted.append(call), *list(operands.values())[:3], halved=operands["halved"]
    )
    assert [tuple(map(id, call[2:])) for call in ran] == [tuple(map(id, call[2:])) for call in wanted] and ran
    assert ledger.fallbacks == 1 and reason in ledger.reasons[0] and not ledger.errors


def test_what_the_driver_does_as_fast_is_left_to_the_loop_and_that_is_no_fallback(ledger, driver_pays):
    src, dst = layers([False])
    for mapping in (pairs(0), pairs(2)):
        ran = []
        with forced_staging(1 << 16):
            copies.swap_tensors.bind(ledger)(lambda *call, to=ran: to.append(call), src, dst, mapping, sizes=[BYTES])
        assert len(ran) == 1 and ran[0][0] is src[0] and ran[0][2] == BYTES
    assert ledger.fallbacks == 0


def test_without_a_started_device_the_loop_runs(ledger):
    src, dst = layers([True])
    ran = []
    copies.swap_tensors.bind(ledger)(lambda *call: ran.append(call), src, dst, pairs(), halved=[True])
    assert [call[0].data_ptr() for call in ran] == [src[0][0].data_ptr(), src[0][1].data_ptr()]
    assert ledger.fallbacks == 0


def test_an_error_of_the_original_reaches_the_caller(ledger, driver_pays):
    src, dst = layers([False])

    def fails(*call):
        raise RuntimeError("theirs")

    with forced_staging(1 << 16), pytest.raises(RuntimeError, match="theirs"):
        copies.swap_tensors.bind(ledger)(fails, src, dst, pairs(2), sizes=[BYTES])
    assert not ledger.errors


def test_where_tensors_lie_is_found_once_and_forgotten_with_them(ledger):
    swap_forms._layouts._found.clear()
    src, dst = layers([False, True])
    with forced_staging(1 << 16):
        for _ in range(2):
            copies.swap_tensors.bind(ledger)(unused, src, dst, pairs(), halved=[False, True])
        assert len(swap_forms._layouts) == 1
        copies.swap_tensors.bind(ledger)(plainly, src[:1], dst[:1], pairs(), sizes=[32])
    assert len(swap_forms._layouts) == 2
    del src, dst
    gc.collect()
    assert len(swap_forms._layouts) == 0


# -- addresses --------------------------------------------------------------------------------------------------------


class Driver:
    """`swap_forms`'s driver: ranges of pinned host memory and of device memory."""

    def __init__(self, monkeypatch, host=(), device=(), index=0):
        self.asked = 0
        self.host, self.device, self.index = list(host), list(device), index
        monkeypatch.setattr(swap_forms, "pinned_range", self.pinned_range)
        monkeypatch.setattr(swap_forms, "device_range", self.device_range)

    def _find(self, ranges, address):
        self.asked += 1
        return next((pair for pair in ranges if pair[0] <= address < pair[1]), None)

    def pinned_range(self, address):
        found = self._find(self.host, address)
        return (*found, SHIFT) if found else "host memory is not pinned"

    def device_range(self, address):
        found = self._find(self.device, address)
        return (*found, self.index) if found else "not an address in device memory"


def array(*values):
    return np.array(values, dtype=np.uint64)


def batch(layers=2, blocks=8):
    """Memory of two sides and the addresses of `blocks` blocks in each layer, as `copy_blocks` works them out."""
    torch.manual_seed(0)
    source, target = ([filled(BLOCKS, BYTES) for _ in range(layers)] for _ in range(2))
    ids = pairs(blocks).numpy().astype(np.uint64)
    bases = [array(*(t.data_ptr() for t in side)) for side in (source, target)]
    src, dst = ((base[:, None] + ids[None, :, i] * np.uint64(BYTES)).ravel() for i, base in enumerate(bases))
    params = SimpleNamespace(src_bases=bases[0], dst_bases=bases[1], stream_handle=77)
    return source, target, params, dst, src, np.repeat(array(BYTES), len(src))


def driver_batch(dst, src, sizes, count, *rest):
    columns = ((ctypes.c_uint64 * count).from_address(at) for at in (dst, src, sizes))
    for to, at, nbytes in zip(*columns, strict=True):
        ctypes.memmove(to, at, nbytes)
    return 0


def test_a_batch_of_addresses_is_copied_byte_by_byte_and_no_error_is_returned(ledger):
    _, target, params, *columns = batch()
    before = [t.clone() for t in target]
    with forced_staging(1 << 16):
        assert copies.swap_addresses.bind(ledger)(unused, params, *columns, 16, 1, 2, 1, 3) == 0
    found = [t.clone() for t in target]
    for one, other in zip(target, before, strict=True):
        one.copy_(other)
    assert copies.swap_addresses.original(driver_batch, params, *columns, 16, 1, 2, 1, 3) == 0
    assert same(found, target) and not same(found, before) and ledger.fallbacks == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda columns, count: ([columns[0].astype(np.float64), *columns[1:]], count),
        lambda columns, count: ([columns[0][::2], *columns[1:]], count),
        lambda columns, count: ([columns[0].repeat(2)[::2], *columns[1:]], count),
        lambda columns, count: (columns, count - 1),
    ],
    ids=["another dtype", "another length", "not dense", "fewer than there are"],
)
def test_arrays_of_another_form_go_to_the_driver_with_its_own_arguments(ledger, spoil):
    *_, params, dst, src, sizes = batch()
    columns, count = spoil([dst, src, sizes], 16)
    ran = []
    with forced_staging(1 << 16):
        bound = copies.swap_addresses.bind(ledger)
        assert bound(lambda *a: ran.append(a) or 7, params, *columns, count, 1, 2, 1, 3) == 7
    assert ran == [(*(column.ctypes.data for column in columns), count, 1, 2, 1, 3, 77)]
    assert ledger.fallbacks == 1 and "uint64 arrays" in ledger.reasons[0]


def test_what_the_driver_does_as_fast_is_left_to_it_and_that_is_no_fallback(ledger, driver_pays):
    *_, params, dst, src, sizes = batch(layers=3, blocks=1)
    with forced_staging(1 << 16):
        assert copies.swap_addresses.bind(ledger)(lambda *a: 6, params, dst, src, sizes, 3, 1, 2, 1, 3) == 6
    assert ledger.fallbacks == 0


def test_rocm_is_left_to_the_original(ledger, monkeypatch):
    *_, params, dst, src, sizes = batch()
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with forced_staging(1 << 16):
        assert copies.swap_addresses.bind(ledger)(lambda *a: 5, params, dst, src, sizes, 16, 1, 2, 0, 3) == 5
    assert ledger.fallbacks == 0


@pytest.fixture
def on_device(monkeypatch):
    """`swap_addresses` as on CUDA device 0 up to the swap itself; returns what reaches that, and on which stream."""
    ring = SimpleNamespace(is_pinned=True, device=torch.device("cuda", 0))
    reached, current = [], []

    class Current:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *exc):
            current.pop()

    def swap_arrays(reads, writes, lengths, gpu_to_cpu, touchable):
        reached.append((gpu_to_cpu, touchable(ring), current[-1]))
        return Declined("as few") if len(reads) < 16 else None

    monkeypatch.setattr(swap_forms, "current_ring", lambda: ring)
    monkeypatch.setattr(swap_forms, "swap_arrays", swap_arrays)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    swap_forms._directions._found.clear()
    return reached


def ranges(*arrays):
    return [(int(base), int(base) + BLOCKS * BYTES) for bases in arrays for base in bases]


@pytest.mark.parametrize("gpu_to_cpu", [False, True], ids=["load", "store"])
def test_the_driver_tells_the_direction_once_and_the_params_stream_orders_the_copy(
    ledger, monkeypatch, on_device, gpu_to_cpu
):
    *_, params, dst, src, sizes = batch()
    sides = ranges(params.src_bases), ranges(params.dst_bases)
    host, device = sides[::-1] if gpu_to_cpu else sides
    driver = Driver(monkeypatch, host, device)
    bound = copies.swap_addresses.bind(ledger)
    for _ in range(3):
        assert bound(unused, params, dst, src, sizes, 16, 1, 2, 1, 3) == 0
    assert driver.asked == 5  # the first address twice
    for direction, swappable, stream in on_device:
        assert direction is gpu_to_cpu and stream == (77, torch.device("cuda", 0)) and swappable.index == 0
        assert swappable.host.merged == [(*each, SHIFT) for each in sorted(host)]
        assert swappable.device.merged == [(*each, 0) for each in sorted(device)]
    assert len(swap_forms._directions) == 1
    del params
    gc.collect()
    assert len(swap_forms._directions) == 0


def test_what_the_driver_does_not_know_is_declined_and_asked_again(ledger, monkeypatch, on_device):
    *_, params, dst, src, sizes = batch()
    driver = Driver(monkeypatch, ranges(params.src_bases)[:1], ranges(params.dst_bases))
    bound = copies.swap_addresses.bind(ledger)
    assert bound(lambda *a: 9, params, dst, src, sizes, 16, 1, 2, 1, 3) == 9
    assert ledger.reasons == ["host memory is not pinned"] and not on_device
    driver.host = ranges(params.src_bases)
    assert bound(unused, params, dst, src, sizes, 16, 1, 2, 1, 3) == 0 and len(on_device) == 1


# -- the canonical layout ---------------------------------------------------------------------------------------------


def test_fragments_of_pages_are_copied_by_their_own_sizes(ledger):
    """From 0.28 on a page may be scattered over the host's page in fragments: the batch says how long each one is."""
    torch.manual_seed(0)
    pages, host = filled(BLOCKS, 96), filled(BLOCKS, 256)
    offsets, sizes = ((0, 0, 32), (32, 128, 48), (80, 64, 16)), []
    src, dst = [], []
    for page, chunk in pairs().tolist():
        for local, canonical, nbytes in offsets:
            src.append(host.data_ptr() + chunk * 256 + canonical)
            dst.append(pages.data_ptr() + page * 96 + local)
            sizes.append(nbytes)
    wanted = pages.clone()
    for to, at, nbytes in zip(dst, src, sizes, strict=True):
        at, to = at - host.data_ptr(), to - pages.data_ptr()
        wanted.view(-1)[to : to + nbytes] = host.view(-1)[at : at + nbytes]
    columns = (torch.tensor(column, dtype=torch.int64) for column in (src, dst, sizes))
    with forced_staging(1 << 16):
        copies.swap_blocks.bind(ledger)(unused, *columns, False, [host], [pages])
    assert torch.equal(pages, wanted) and ledger.fallbacks == 0
