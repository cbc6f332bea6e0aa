"""H2D copies against the expressions they stand in for, through the staging path over ordinary memory."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2d_patch import copies
from h2d_patch.copies import forced_staging, h2d, native, staging
from h2d_patch.copies.call import Declined

CPU = torch.device("cpu")
DTYPES = staging.DTYPES


def random_tensor(shape, dtype, seed):
    torch.manual_seed(seed)
    count = 1
    for n in shape:
        count *= n
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,)).to(torch.bool).reshape(shape)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def raw(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs) is torch.Tensor
    assert (ours.shape, ours.dtype, ours.device, ours.stride()) == (
        theirs.shape, theirs.dtype, theirs.device, theirs.stride(),
    )  # fmt: skip
    assert torch.equal(raw(ours), raw(theirs))


@st.composite
def sources(draw, dtypes=DTYPES, max_dims=4):
    """Plain CPU tensors: any shape, dtype, order of dimensions, with gaps or without, zero sizes included."""
    shape = draw(st.lists(st.integers(0, 5), max_size=max_dims))
    tensor = random_tensor([n + draw(st.integers(0, 2)) for n in shape], draw(st.sampled_from(dtypes)), 0)
    for dim, n in enumerate(shape):
        tensor = tensor.narrow(dim, 0, n)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


def fresh_to(source, *args, **kwargs):
    """What `.to` gives on a device that is not the source's own: never the source itself."""
    return source.to(*args, copy=True, **kwargs)


@settings(max_examples=300, deadline=None)
@given(sources())
def test_to_device_gives_the_bytes_and_strides_of_to(source):
    with forced_staging(1 << 16) as ring:
        ours = h2d.to_device(source, CPU)
        assert ring.in_use() == 0
    if not source.nbytes:
        assert ours is h2d.NOTHING_TO_COPY
    else:
        assert_same(ours, fresh_to(source, CPU))


PLAIN = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.uint8, torch.float16]


@settings(max_examples=150, deadline=None)
@given(sources(PLAIN), st.sampled_from(PLAIN), st.integers(0, 4))
def test_to_device_converts_like_to(source, dtype, form):
    args, kwargs = [
        ((CPU, dtype), {}),
        (("cpu", dtype), {}),
        ((), {"device": "cpu", "dtype": dtype}),
        ((CPU,), {"dtype": dtype}),
        ((torch.empty(0, dtype=dtype),), {}),
    ][form]
    with forced_staging(1 << 16):
        ours = h2d.to_device(source, *args, **kwargs)
    if source.nbytes:
        theirs = fresh_to(source, *args, **kwargs)
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(torch.nan_to_num(ours.float()), torch.nan_to_num(theirs.float()))


@settings(max_examples=200, deadline=None)
@given(sources(), st.data())
def test_copy_h2d_writes_what_copy_writes(source, data):
    shape = source.shape
    room = torch.zeros([n + data.draw(st.integers(0, 2)) for n in reversed(shape)], dtype=source.dtype)
    order = tuple(reversed(range(len(shape))))
    ours, theirs = (r.permute(order)[tuple(slice(0, n) for n in shape)] for r in (room.clone(), room.clone()))
    with forced_staging(1 << 16):
        result = h2d.copy_h2d(ours, source)
    if source.nbytes:
        assert result is ours
        theirs.copy_(source)
        assert torch.equal(raw(ours), raw(theirs))


def test_copy_h2d_leaves_what_lies_between_a_gapped_destination_alone(ledger):
    whole = torch.full((3, 10), -1)
    source = torch.arange(12).reshape(3, 4)
    with forced_staging(1 << 12):
        copies.copy_h2d.bind(ledger)(whole[:, 2:6], source)
    assert torch.equal(whole[:, 2:6], source) and (whole[:, 6:] == -1).all() and (whole[:, :2] == -1).all()
    assert (ledger.calls, ledger.fallbacks) == (1, 0)


def test_copy_h2d_pins_only_where_the_original_runs(ledger, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    copy, source, target = copies.copy_h2d.bind(ledger), torch.arange(5), torch.zeros(5, dtype=torch.int64)
    with forced_staging(1 << 16):
        assert copy(target, source, pin=True) is target and torch.equal(target, source)
    assert not pinned
    assert copy(target.zero_(), source, pin=True) is target and torch.equal(target, source)
    assert pinned == [source]


def test_copy_h2d_converts(ledger):
    target = torch.zeros(3, dtype=torch.bfloat16)
    with forced_staging(1 << 12):
        copies.copy_h2d.bind(ledger)(target, torch.tensor([1.0, 2.0, 3.0]))
    assert target.tolist() == [1, 2, 3] and ledger.fallbacks == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.parametrize("gathered", [0, 1 << 30])
def test_cat_to_device_gives_the_bytes_and_strides_of_cat(gathered, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    pieces = []
    for i in range(data.draw(st.integers(1, 4))):
        shape[dim] = data.draw(st.integers(0, 3))
        piece = random_tensor([2 * n for n in shape], dtype, i) if data.draw(st.booleans()) else None
        if piece is None:
            pieces.append(random_tensor(shape, dtype, i))
        else:
            pieces.append(piece[tuple(slice(0, 2 * n, 2) for n in shape)])
    with forced_staging(1 << 16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(h2d, "_GATHERED_BYTES", gathered)
        patch.setattr(h2d, "_GATHERED_TENSOR_BYTES", 0)
        ours = h2d.cat_to_device(pieces, CPU, dim=dim)
    theirs = torch.cat(pieces, dim=dim)
    if theirs.numel():
        assert_same(ours, theirs)
    else:
        assert ours is h2d.NOTHING_TO_COPY


class Marked(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_sources_that_are_not_plain_are_left_to_the_original_and_counted(ledger):
    bound = copies.to_device.bind(ledger)
    odd = [
        torch.ones(3).as_subclass(Marked),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(1).expand(4),
        torch.ones(2, 1, 3).expand(2, 5, 3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # the negative bit
    ]
    if hasattr(torch.Tensor, "has_names"):  # up to torch 2.12
        odd.append(torch.ones(2, 3, names=("a", "b")))
    with forced_staging(1 << 12) as ring:
        for source in odd:
            assert bound(source, "cpu") is source  # what the original returns
        assert ring.in_use() == 0
    assert len(ledger.reasons) == ledger.calls == len(odd) and not ledger.errors


def test_destinations_that_are_not_plain_are_left_to_the_original_and_counted(ledger):
    copy, ones = copies.copy_h2d.bind(ledger), torch.ones(3)
    with forced_staging(1 << 12), torch.no_grad():
        for target in (
            torch.zeros(3).as_subclass(Marked),
            torch.zeros(3, requires_grad=True),
            torch.zeros(3, dtype=torch.complex64).conj(),
        ):
            assert copy(target, ones) is target
            assert target.tolist() == [1, 1, 1]
    assert ledger.fallbacks == ledger.calls == 3 and not ledger.errors


def test_a_broadcast_of_size_one_is_dense(ledger):
    with forced_staging(1 << 12):
        copies.to_device.bind(ledger)(torch.ones(3, 1).as_strided((3, 1), (1, 0)), "cpu")
    assert ledger.fallbacks == 0


def test_what_is_no_tensor_or_not_for_the_gpu_is_left_alone_uncounted(ledger):
    class Batch:
        def to(self, *args, **kwargs):
            return args, kwargs

    to = copies.to_device.bind(ledger)
    assert to(Batch(), "cpu", extra=1) == (("cpu",), {"non_blocking": True, "extra": 1})
    source = torch.ones(3)
    assert to(source, "cpu") is source
    assert to(source, torch.float32) is source
    assert to(source, dtype=torch.float64).dtype == torch.float64
    assert to(torch.ones(3, device="meta"), "meta").device.type == "meta"
    target = torch.zeros(3)
    assert copies.copy_h2d.bind(ledger)(target, source) is target and torch.equal(target, source)
    assert torch.equal(copies.cat_to_device.bind(ledger)([source, source], "cpu"), torch.ones(6))
    with forced_staging(1 << 12):
        assert to(torch.empty(0, 3), "cpu").shape == (0, 3)
    assert ledger.calls == 8 and ledger.fallbacks == 0


@pytest.mark.parametrize(
    "args, kwargs",
    [
        (("cpu",), {"copy": True}),
        (("cpu",), {"memory_format": torch.contiguous_format}),
        (("cpu", torch.float32, False), {}),
        (("cpu",), {"device": "cpu"}),
        (("cpu", torch.float32), {"dtype": torch.float32}),
        (("cpu", 3), {}),
        ((1.5,), {}),
        ((torch.ones(1),), {"dtype": torch.float32}),
    ],
)
def test_other_arguments_of_to_are_left_to_the_original(args, kwargs):
    with forced_staging(1 << 12):
        assert h2d.to_device(torch.ones(2), *args, **kwargs) is h2d.OTHER_ARGUMENTS


@pytest.mark.parametrize("args", [("no such device",), ("cpu", "no dtype"), ((1, 2),)])
def test_the_callers_mistake_raises_what_the_original_raises(ledger, args):
    with pytest.raises(Exception) as theirs:
        torch.ones(2).to(*args, non_blocking=True)
    with forced_staging(1 << 12), pytest.raises(type(theirs.value)) as ours:
        copies.to_device.bind(ledger)(torch.ones(2), *args)
    assert str(ours.value) == str(theirs.value) and ours.value.__context__ is None
    assert not ledger.errors


def test_shapes_that_copy_would_broadcast_or_refuse_are_left_to_it(ledger):
    copy = copies.copy_h2d.bind(ledger)
    with forced_staging(1 << 12):
        assert copy(torch.zeros(2, 3), torch.ones(3)).sum() == 6
        with pytest.raises(RuntimeError):
            copy(torch.zeros(2), torch.ones(3))
    assert ledger.fallbacks == 2 and not ledger.errors


@pytest.mark.parametrize(
    "pieces, dim",
    [
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], 0),
        ([torch.empty(0), torch.ones(2, 3)], 0),
        ([torch.ones(2, 3), torch.ones(2, 3).as_subclass(Marked)], 0),
        ([torch.ones(1, 2, 3, 4)], 0),
    ],
)
@pytest.mark.parametrize("gathered", [0, 1 << 30])
def test_unlike_pieces_are_left_to_cat(ledger, monkeypatch, pieces, dim, gathered):
    monkeypatch.setattr(h2d, "_GATHERED_BYTES", gathered)
    monkeypatch.setattr(h2d, "_GATHERED_TENSOR_BYTES", 0)
    with forced_staging(1 << 12):
        ours = copies.cat_to_device.bind(ledger)(pieces, "cpu", dim=dim)
    theirs = torch.cat(pieces, dim=dim)
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    assert ledger.fallbacks == (type(theirs) is not torch.Tensor), "a subclass goes the original's way"


def test_cat_raises_its_own_exceptions(ledger):
    cat = copies.cat_to_device.bind(ledger)
    with forced_staging(1 << 12):
        for wrong in ([], [torch.ones(2), torch.ones(2, 2)], [1, 2], torch.ones(3)):
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                cat(wrong, "cpu")
        with pytest.raises(IndexError):
            cat([torch.ones(2)], "cpu", dim=1)
    assert not ledger.errors


def test_full_and_too_small_staging_leave_the_copy_to_the_original(ledger, make_ring, held, force):
    to = copies.to_device.bind(ledger)
    ring = force(make_ring(1024))
    source = torch.arange(128)
    to(source, "cpu")
    assert torch.equal(to(source, "cpu"), source)  # full: the event of the first has not passed
    assert torch.equal(to(torch.arange(1000), "cpu"), torch.arange(1000))
    assert ledger.reasons == ["staging is full", "larger than the staging region"]
    held.passed.update(held.recorded)
    to(source, "cpu")
    assert ledger.calls == 4 and ledger.fallbacks == 2 and len(held.recorded) == 8  # a quarter of the ring at a time
    assert ring.in_use() == 1024


@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(lambda made: (h2d.to_device(made, CPU), made), id="dense"),
        pytest.param(lambda made: (h2d.copy_h2d(torch.zeros(8, 96), made.view(8, 96)), made.view(8, 96)), id="copy"),
        pytest.param(lambda made: (h2d.to_device(made.view(8, 96)[:, :80], CPU), made.view(8, 96)[:, :80]), id="gaps"),
        pytest.param(
            lambda made: (h2d.copy_h2d(torch.zeros(8, 100)[:, :96], made.view(8, 96)), made.view(8, 96)),
            id="gaps where it goes",
        ),
        pytest.param(
            lambda made: (
                h2d.copy_h2d(torch.zeros(8, 100)[:, :90], made.view(8, 96)[:, :90]),
                made.view(8, 96)[:, :90],
            ),
            id="gaps in both",
        ),
        pytest.param(lambda made: (h2d.cat_to_device(list(made.view(3, 16, 16)), CPU), made.view(48, 16)), id="cat"),
    ],
)
def test_more_than_a_quarter_of_the_ring_goes_in_pieces_of_at_most_that(make_ring, held, force, monkeypatch, copy):
    monkeypatch.setattr(h2d, "_GATHERED_BYTES", 0)
    monkeypatch.setattr(h2d, "_GATHERED_TENSOR_BYTES", 0)
    ring = force(make_ring(4096))
    sizes = []
    reserve = ring.reserve
    monkeypatch.setattr(ring, "reserve", lambda nbytes: sizes.append(nbytes) or reserve(nbytes))
    made = torch.arange(768, dtype=torch.float32)
    ours, source = copy(made)
    expected = source.clone()
    made.fill_(-1)
    ring.memory.fill_(0)
    assert torch.equal(ours, expected)
    assert len(sizes) >= 3 and max(sizes) <= 1024 and sum(sizes) == source.nbytes
    assert isinstance(copy(made)[0], Declined) and len(sizes) < 12  # no room for all of it: nothing is started


def test_under_graph_capture_nothing_is_touched(ledger, make_ring, held, force):
    ring = force(make_ring(1024))
    held.in_capture = True
    source = torch.ones(3)
    assert copies.to_device.bind(ledger)(source, "cpu") is source
    assert ledger.reasons == ["a CUDA graph is being captured"] and ring.in_use() == 0


def test_an_event_that_cannot_be_recorded_runs_the_original_and_closes_the_ring(ledger, make_ring, held, force):
    force(make_ring(1024))
    held.fail_to_record = RuntimeError("lost")
    to = copies.to_device.bind(ledger)
    source = torch.arange(3)
    assert to(source, "cpu") is source
    assert ledger.errors == [held.fail_to_record]
    assert to(source, "cpu") is source and "out of use" in ledger.reasons[0]


def test_the_result_never_aliases_the_ring_and_keeps_the_values_of_the_call():
    with forced_staging(1 << 12) as ring:
        source = torch.full((10,), 7)
        results = [
            copies.to_device(source, "cpu"),
            copies.snapshot_to_device(source, "cpu"),
            copies.copy_h2d(torch.zeros(10, dtype=torch.int64), source),
            copies.cat_to_device([source], "cpu"),
            copies.nested_to_device([source], "cpu")[0],
        ]
        source.fill_(9)
        ring.memory.fill_(0)
    assert all((result == 7).all() for result in results)


def test_inference_mode_on_either_side_is_fine(ledger):
    to, copy = copies.to_device.bind(ledger), copies.copy_h2d.bind(ledger)
    with torch.inference_mode(), forced_staging(1 << 12):
        inside = torch.arange(5)
        assert to(inside, "cpu").is_inference()
        with torch.inference_mode(False):
            assert not to(torch.arange(5), "cpu").is_inference()
            copy(torch.zeros(5), inside.clone())
    assert not ledger.errors and not ledger.fallbacks


def test_large_copies_are_whole(ledger):
    source = torch.randint(0, 255, (3, 1 << 20), dtype=torch.uint8)
    with forced_staging(16 << 20):
        to = copies.to_device.bind(ledger)
        assert torch.equal(to(source, "cpu"), source)
        assert torch.equal(to(source.t(), "cpu"), source.t())
        assert torch.equal(to(source[:, 1:], "cpu"), source[:, 1:])
    assert ledger.fallbacks == 0


class Names(tuple):
    pass


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.one_of(st.integers(), st.none(), st.text(max_size=2), st.just("TENSOR")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(Names),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_nested_tensors_keep_their_places_and_other_leaves_their_identity(tree):
    def fill(value):
        if isinstance(value, dict):
            return {k: fill(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v) for v in value)
        return torch.arange(5) if value == "TENSOR" else value

    def check(ours, theirs):
        if isinstance(theirs, dict):
            assert type(ours) is dict and list(ours) == list(theirs)
            for key in theirs:
                check(ours[key], theirs[key])
        elif isinstance(theirs, (list, tuple)):
            assert type(ours) is (list if isinstance(theirs, list) else tuple) and len(ours) == len(theirs)
            for pair in zip(ours, theirs, strict=True):
                check(*pair)
        elif isinstance(theirs, torch.Tensor):
            assert_same(ours, theirs)
            assert ours is not theirs
        else:
            assert ours is theirs

    tree = fill(tree)
    with forced_staging(1 << 14):
        check(copies.nested_to_device(tree, "cpu"), tree)
    assert copies.nested_to_device(tree, None) is tree


def test_nested_leaves_fall_back_one_by_one(ledger):
    grad = torch.ones(2, requires_grad=True)
    with forced_staging(1 << 12):
        out = copies.nested_to_device.bind(ledger)({"a": [grad, torch.ones(2)]}, device="cpu")
    assert out["a"][0] is grad and out["a"][1] is not None
    assert (ledger.calls, ledger.fallbacks) == (2, 1)


def test_bytes_of_a_bool_that_are_neither_0_nor_1_arrive_as_they_are(ledger):
    odd = torch.tensor([2, 1, 0, 255], dtype=torch.uint8)
    with copies.forced_staging():
        arrived = copies.to_device.bind(ledger)(odd.view(torch.bool), "cpu")
    assert torch.equal(arrived.view(torch.uint8), odd) and not ledger.errors


@pytest.mark.parametrize(
    ("nbytes", "reason"), [(33 << 20, "larger than the staging region"), (20 << 20, "staging is full")]
)
def test_a_large_copy_is_not_started_where_it_does_not_fit(ledger, make_ring, held, force, nbytes, reason):
    ring = force(make_ring(32 << 20))
    with ring.reserve(16 << 20) as piece:
        piece.submitted = True
    before = ring.in_use()
    source = torch.ones(nbytes, dtype=torch.uint8)
    assert torch.equal(copies.to_device.bind(ledger)(source, "cpu"), source)
    assert ledger.reasons == [reason] and ring.in_use() == before


class FakeLane:
    """Copies at once, or says it cannot."""

    def __init__(self, answer=0):
        self.most, self.answer, self.sent = 1000, answer, []
        self.pinned, self.current_device, self.index = (lambda address: False), (lambda: 3), 3

    def send(self, dst, dst_pitch, src, src_pitch, width, rows):
        assert dst_pitch == src_pitch == width and rows == 1
        if width > self.most:
            return native.NOT_HERE
        if not self.answer:
            ctypes.memmove(dst, src, width)
            self.sent.append(width)
        return self.answer


@pytest.mark.parametrize(
    "source, at_once",
    [
        (torch.arange(10), True),
        (torch.tensor(3.0), True),
        (torch.arange(125), True),
        (torch.arange(126), False),  # too large
        (torch.empty(0), False),
        (torch.arange(20)[::2], False),
        (torch.ones(3, requires_grad=True), False),
        (torch.ones(3).as_subclass(Marked), False),
        (torch.ones(2, 2).to_sparse(), False),
        (torch.complex(torch.ones(3), torch.ones(3)).conj(), False),
        (torch._neg_view(torch.ones(3)), False),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False),
    ],
)
def test_the_usual_small_copy_takes_the_lane_and_no_other_does(monkeypatch, ledger, source, at_once):
    lane = FakeLane()
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", lane)
        for found in (
            copies.to_device.bind(ledger)(source, CPU),
            copies.to_device.bind(ledger)(source, device=CPU),
            copies.nested_to_device.bind(ledger)(source, CPU),
        ):
            assert (
                type(found) is type(source)
                and found.dtype == source.dtype
                and found.requires_grad == source.requires_grad
            )
            assert found.is_sparse or found.is_quantized or torch.equal(found, source)
    assert len(lane.sent) == 3 * at_once and not ledger.errors


def test_where_another_device_is_current_nothing_is_asked_of_it(monkeypatch, ledger):
    lane = FakeLane()
    lane.pinned = lambda address: pytest.fail("the current device is not the lane's")
    lane.index = 4
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", lane)
        assert torch.equal(copies.to_device.bind(ledger)(torch.arange(9), CPU), torch.arange(9))
    assert not ledger.errors and not ledger.fallbacks


@pytest.mark.parametrize("with_lane", [False, True])
def test_tensors_without_memory_of_their_own_are_left_to_the_original(monkeypatch, ledger, with_lane):
    def run(source):
        with forced_staging(1 << 12) as ring:
            monkeypatch.setattr(ring, "lane", FakeLane() if with_lane else None)
            copies.copy_h2d.bind(ledger)(torch.zeros(source.shape), source)
            copies.nested_to_device.bind(ledger)([source], CPU)
            return copies.to_device.bind(ledger)(source, CPU)

    assert torch.equal(torch.func.functionalize(run)(torch.ones(3)), torch.ones(3))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", FakeLane() if with_lane else None)
        assert copies.to_device.bind(ledger)(nested, CPU).is_nested
    assert ledger.reasons and not ledger.errors


def test_a_tensor_in_a_mode_that_makes_tensors_up_is_left_to_the_original(monkeypatch, ledger):
    from torch._subclasses.fake_tensor import FakeTensorMode

    lane = FakeLane()
    with forced_staging(1 << 12) as ring, FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(ring, "lane", lane)
        copies.to_device.bind(ledger)(torch.arange(9), CPU)
    assert not lane.sent and not ledger.errors


def test_a_change_in_place_is_one_for_autograd_and_for_inference_mode(ledger):
    copy = copies.copy_h2d.bind(ledger)
    with forced_staging(1 << 12):
        weight, target = torch.ones(3, requires_grad=True), torch.ones(3)
        loss = (weight * target).sum()
        copy(target, torch.full((3,), 7.0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            made_there = torch.zeros(3)
            copy(made_there, torch.ones(3))
        assert made_there.sum() == 3 and not ledger.fallbacks
        with pytest.raises(RuntimeError, match="[Ii]nference"):
            copy(made_there, torch.ones(3))


def test_a_pinned_source_is_left_to_torch(monkeypatch, ledger):
    lane = FakeLane()
    lane.pinned = lambda address: True
    source = torch.arange(9)
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", lane)
        assert copies.to_device.bind(ledger)(source, CPU) is source
        assert ring._reserved == 0
    assert not lane.sent and not ledger.fallbacks


@settings(max_examples=100, deadline=None)
@given(sources())
def test_snapshot_to_device_gives_the_bytes_and_strides_of_to(source):
    with forced_staging(1 << 16):
        ours = h2d.snapshot_to_device(source, CPU)
    if not source.nbytes:
        assert ours is h2d.NOTHING_TO_COPY
    else:
        assert_same(ours, fresh_to(source, CPU))


@pytest.mark.parametrize("source", [torch.arange(12), torch.arange(12).reshape(3, 4).t(), torch.arange(12)[::2]])
def test_a_copy_that_waits_is_a_snapshot_of_pinned_memory_too(monkeypatch, ledger, source):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    source = source.clone()
    expected = source.clone()
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "is_pinned", True)
        dense = source.is_contiguous() or source.t().is_contiguous()
        assert (h2d.to_device(source, CPU) is h2d.ASYNCHRONOUS_ALREADY) is dense
        ours = copies.snapshot_to_device.bind(ledger)(source, CPU)
        source.fill_(99)
    assert_same(ours, expected)
    assert ledger.calls == 1 and not ledger.fallbacks


def test_a_copy_that_waits_converts_where_the_original_does_and_takes_no_other_arguments(ledger):
    to = copies.snapshot_to_device.bind(ledger)
    with forced_staging(1 << 12):
        assert to(torch.ones(3), "cpu", torch.float64).dtype == torch.float64
        assert to(torch.ones(3), "cpu", non_blocking=True).sum() == 3
        assert to(torch.ones(3, device="meta"), "meta").is_meta
    assert [*map(str, ledger.reasons)] == [h2d.CONVERTED_ON_THE_HOST.reason, h2d.OTHER_ARGUMENTS.reason]


def test_what_the_lane_does_not_take_goes_through_the_ring(monkeypatch, ledger):
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", FakeLane(answer=native.NOT_HERE))
        assert torch.equal(copies.to_device.bind(ledger)(torch.arange(9), CPU), torch.arange(9))
        assert ring.in_use() == 0 and ring._reserved == 1
    assert ledger.fallbacks == 0


def test_a_lane_that_fails_leaves_the_copy_to_the_original(monkeypatch, ledger):
    def fail(*args):
        raise OSError("unwell")

    lane = FakeLane()
    lane.send = fail
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", lane)
        assert torch.equal(copies.to_device.bind(ledger)(torch.arange(9), CPU), torch.arange(9))
    assert [str(error) for error in ledger.errors] == ["unwell"]


@pytest.mark.parametrize(
    ("path", "nbytes", "copy"),
    [
        ("staging", 1024, lambda ledger: copies.to_device.bind(ledger)(torch.zeros(256), CPU)),
        ("staging in parts", 40_000, lambda ledger: copies.to_device.bind(ledger)(torch.zeros(10_000), CPU)),
        ("pitched", 32, lambda ledger: copies.copy_h2d.bind(ledger)(torch.zeros(2, 9)[:, :4], torch.ones(2, 9)[:, :4])),
        ("strided", 2048, lambda ledger: copies.to_device.bind(ledger)(torch.zeros(64, 32)[::2, ::2].t(), CPU)),
        ("converted", 40, lambda ledger: copies.copy_h2d.bind(ledger)(torch.zeros(10).half(), torch.ones(10))),
        ("gathered", 1 << 20, lambda ledger: copies.cat_to_device.bind(ledger)([torch.zeros(1 << 14)] * 16, CPU)),
        ("original", 0, lambda ledger: copies.to_device.bind(ledger)(torch.zeros(0), CPU)),
        ("pinned arguments", 64, lambda ledger: copies.call_pinned.bind(ledger)(lambda *_: None, torch.zeros(16), 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_ledger_says_how_many_bytes_went_which_way(ledger, path, nbytes, copy):
    with forced_staging(1 << 17 if path != "gathered" else 1 << 23):
        copy(ledger)
    assert ledger.taken == [(path, nbytes)] and ledger.fallbacks == 0
