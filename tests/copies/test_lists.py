"""Tensors made of lists against the expressions they stand in for, through the staging path over ordinary memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2d_patch import copies
from h2d_patch.copies import forced_staging, lists

CPU = torch.device("cpu")
NUMBERS = st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.floats(width=32), st.booleans())


def same(ours, theirs):
    assert type(ours) is type(theirs) is torch.Tensor
    assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
        theirs.dtype, theirs.shape, theirs.stride(), theirs.device,
    )  # fmt: skip
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


@st.composite
def nested(draw):
    """Numbers in lists and tuples of up to three levels, or one number."""
    value = draw(NUMBERS)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from([list, tuple]))
        value = kind([value] * draw(st.integers(1, 4)))
    return value


@settings(max_examples=300, deadline=None)
@given(nested(), st.sampled_from([None, torch.int64, torch.float32, torch.bool, torch.float64, torch.bfloat16]))
def test_tensor_to_device_gives_the_bytes_and_dtype_of_tensor(data, dtype):
    kwargs = {} if dtype is None else {"dtype": dtype}
    try:
        theirs = torch.tensor(data, device=CPU, **kwargs)
    except (RuntimeError, ValueError, OverflowError):  # NaN as a whole number
        return
    with forced_staging(1 << 12) as ring:
        same(lists.tensor_to_device(data, device=CPU, **kwargs), theirs)
        assert ring._reserved


@pytest.mark.parametrize(
    "data",
    [
        [np.int32(3), np.int32(5)],
        [torch.tensor(3), torch.tensor(5)],
        [np.int64(3), 2.5],
        [torch.tensor(1.5), 2],
        [1, 2.5],
        [[1, True], [2.0, 0]],
    ],
    ids=repr,
)
def test_what_else_may_stand_in_a_list_gives_the_same_dtype(ledger, data):
    with forced_staging(1 << 12):
        same(copies.tensor_to_device.bind(ledger)(data, device="cpu"), torch.tensor(data))
    assert ledger.fallbacks == 0 and not ledger.errors


def test_the_default_device_and_dtype_are_those_of_tensor(ledger):
    made = copies.tensor_to_device.bind(ledger)
    with forced_staging(1 << 12), torch.device("meta"):
        assert made([1, 2], device=CPU).tolist() == [1, 2]
        assert made([1, 2]).is_meta  # no device is named: the original's own choice
    torch.set_default_dtype(torch.float64)
    try:
        with forced_staging(1 << 12):
            assert made([1.5], device=CPU).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert ledger.fallbacks == 0


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_other_data_and_arguments_are_left_to_the_original_and_counted(ledger):
    made = copies.tensor_to_device.bind(ledger)
    with forced_staging(1 << 12) as ring:
        same(made(torch.arange(3), device="cpu"), torch.arange(3))
        same(made(np.arange(3), device="cpu"), torch.arange(3))
        same(made(range(3), device="cpu"), torch.arange(3))
        assert made([1.0], device="cpu", requires_grad=True).requires_grad
        same(made([1.0], device="cpu", pin_memory=False), torch.ones(1))
        assert not ring._reserved
    assert ledger.reasons == [lists.NOT_A_LIST.reason] * 3 + [lists.OTHER_ARGUMENTS.reason] * 2 and not ledger.errors


def test_what_is_not_for_the_gpu_or_empty_is_left_alone_uncounted(ledger):
    made = copies.tensor_to_device.bind(ledger)
    same(made([1, 2], device="cpu", dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    same(made([1, 2]), torch.tensor([1, 2]))
    assert made([1, 2], device="meta").is_meta
    with forced_staging(1 << 12):
        same(made([], device="cpu"), torch.tensor([]))
        same(made([[], []], device=CPU, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32))
    assert ledger.calls == 5 and ledger.fallbacks == 0 and {path for path, _ in ledger.taken} == {"original"}


@pytest.mark.parametrize(
    ("data", "kwargs"),
    [
        ([[1, 2], [3]], {}),
        (["a"], {}),
        ([1 << 80], {}),
        ([1], {"dtype": "int32"}),
        ([1], {"device": "no such device"}),
        ([1], {"unheard": 1}),
        ([float("nan")], {"dtype": torch.int32}),
    ],
)
def test_the_callers_mistake_raises_what_tensor_raises(ledger, data, kwargs):
    kwargs = {"device": "cpu", **kwargs}
    with pytest.raises(Exception) as theirs:
        torch.tensor(data, **kwargs)
    with forced_staging(1 << 12), pytest.raises(type(theirs.value)) as ours:
        copies.tensor_to_device.bind(ledger)(data, **kwargs)
    assert str(ours.value) == str(theirs.value) and ours.value.__context__ is None
    assert not ledger.errors


def test_full_and_too_small_staging_a_capture_and_no_ring_leave_it_to_the_original(ledger, make_ring, held, force):
    made = copies.tensor_to_device.bind(ledger)
    ring = force(make_ring(1024))
    whole = list(range(128))
    assert made(whole, device=CPU).tolist() == made(whole, device=CPU).tolist() == whole
    assert made(list(range(1000)), device=CPU).tolist() == list(range(1000))
    held.in_capture = True
    assert made([1], device=CPU).tolist() == [1]
    assert ledger.reasons == ["staging is full", "larger than the staging region", "a CUDA graph is being captured"]
    ring.retire("a test")
    held.in_capture = False
    made([1], device=CPU)
    assert "out of use" in ledger.reasons[-1] and not ledger.errors
    answer = lists.tensor_to_device([1], device="cuda:0" if not torch.cuda.is_available() else "cuda:7")
    assert "no staging region" in answer.reason and answer.counted


def test_an_error_of_ours_is_followed_by_the_original(ledger, make_ring, held, force):
    force(make_ring(1024))
    held.fail_to_record = RuntimeError("lost")
    assert copies.tensor_to_device.bind(ledger)([5, 7], device=CPU).tolist() == [5, 7]
    assert ledger.errors == [held.fail_to_record]


def test_the_values_are_those_of_the_call_and_the_result_is_not_the_ring_s():
    with forced_staging(1 << 12) as ring:
        data, rows = [7] * 10, [[(7, 7)], [(7, 7), (7, 7)]]
        results = [
            copies.tensor_to_device(data, device=CPU),
            *copies.rows_to_device(rows, 2, dtype=torch.int32, device=CPU),
        ]
        data[:] = [9] * 10
        rows[1][1] = (9, 9)
        ring.memory.fill_(0)
    assert all((result == 7).all() for result in results)


class RuntimeLane:
    """A lane over the compiled copies, which arrive when the runtime is told."""

    def __init__(self, library):
        self.memory = torch.zeros(1 << 15, dtype=torch.uint8)
        self.number = library.open_lane(self.memory.data_ptr(), 1 << 15, range(100, 108))
        self.library, self.most, self.index = library, 1 << 12, 3
        self.pinned, self.current_device = (lambda address: False), (lambda: 3)

    def send(self, *copy):
        return self.library.send(self.number, *copy, 1, 0)


def test_the_tensor_on_the_host_may_go_before_the_copy_arrives(ledger, library, runtime, monkeypatch):
    lane, made = RuntimeLane(library), copies.tensor_to_device.bind(ledger)
    with forced_staging(1 << 12) as ring:
        monkeypatch.setattr(ring, "lane", lane)
        results = [made([i] * 64, device=CPU) for i in range(1, 21)]
    assert not ring._reserved and len(runtime.submitted) == 20
    in_its_place = [torch.full((64,), -1) for _ in range(100)]
    runtime.run()
    del in_its_place
    library.close_lane(lane.number)
    assert [result.tolist() for result in results] == [[i] * 64 for i in range(1, 21)]
    assert ledger.taken == [("staging", 512)] * 20


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-9, 99), st.integers(-9, 99)), max_size=4), min_size=1, max_size=5))
def test_rows_to_device_gives_the_rows_in_one_copy_and_padded_rows_what_a_nested_tensor_pads(rows):
    with forced_staging(1 << 12) as ring:
        ours = copies.rows_to_device(rows, 2, dtype=torch.int32, device=CPU)
        assert ring._reserved == bool(sum(map(len, rows)))
        theirs = copies.rows_to_device.original(rows, 2, dtype=torch.int32, device=CPU)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
        if all(rows):
            same(lists.padded_rows(ours), copies.padded_rows.original(theirs))


ROWS = [[(1, 2)], [(3, 4), (5, 6)]]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[1, 2], [3, 4]], torch.int32),
        ([[(1, 2, 3, 4)], [(5, 6)]], torch.int32),
        ([np.array([(1, 2)]), [(3, 4)]], torch.int32),
        ([[(1, 2)], [[1.5, 2.5]]], None),
        ([], torch.int32),
        (iter([[(1, 2)]]), torch.int32),
    ],
)
def test_rows_of_another_form_are_left_to_the_original(ledger, rows, dtype):
    rows, again = (rows, rows) if isinstance(rows, list) else ([*rows], iter([[(1, 2)]]))
    with forced_staging(1 << 12) as ring:
        ours = copies.rows_to_device.bind(ledger)(again, 2, dtype=dtype, device=CPU)
        theirs = copies.rows_to_device.original(rows, 2, dtype=dtype, device=CPU)
        assert not ring._reserved and len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
    assert not ledger.errors and ledger.fallbacks == (rows != [])


def test_rows_with_other_arguments_or_none_are_left_to_the_original(ledger):
    made = copies.rows_to_device.bind(ledger)
    assert [row.dtype for row in made([[(1, 2)], [(1.5, 2)]], 2)] == [torch.int64, torch.float32]
    with forced_staging(1 << 12):
        assert made([[(1.0, 2)]], 2, dtype=torch.float32, device=CPU, requires_grad=True)[0].requires_grad
    assert ledger.reasons == [lists.OTHER_ARGUMENTS.reason] and not ledger.errors


def test_padded_rows_of_another_form_are_left_to_the_original(ledger):
    padded = copies.padded_rows.bind(ledger)
    ones = torch.ones(1, 2)
    with forced_staging(1 << 12):
        for rows in (
            [ones, torch.ones(2, 2, requires_grad=True)],
            [ones, torch.ones(0, 2)],
            [torch.ones(3), torch.ones(2)],
            [ones, torch.ones(2, 3)],
            [ones.as_subclass(Marked)],
            [[1.0], [2.0]],
        ):
            same(torch.Tensor(padded(rows)).detach(), copies.padded_rows.original(rows).detach())
        with pytest.raises((RuntimeError, TypeError)):
            padded(3)
    assert ledger.fallbacks == 7 == ledger.calls and not ledger.errors
    same(padded([ones, torch.ones(2, 2)]), torch.tensor([[[1.0, 1], [0, 0]], [[1, 1], [1, 1]]]))
    assert ledger.fallbacks == 7, "no device: not ours"


def test_a_switch_that_is_flipped_between_the_two_changes_nothing(ledger):
    """Each of the two is put in on its own: either may run beside the original of the other."""
    kwargs = {"dtype": torch.int32, "device": CPU}
    expected = copies.padded_rows.original(copies.rows_to_device.original(ROWS, 2, **kwargs))
    with forced_staging(1 << 12):
        same(copies.padded_rows.original(copies.rows_to_device.bind(ledger)(ROWS, 2, **kwargs)), expected)
        same(copies.padded_rows.bind(ledger)(copies.rows_to_device.original(ROWS, 2, **kwargs)), expected)
    assert ledger.calls == 2 and not ledger.fallbacks


class Marked(torch.Tensor):
    pass
