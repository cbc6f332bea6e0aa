"""Which host memory a kernel may touch, with a pretended driver."""

from __future__ import annotations

import gc

import numpy as np
import torch

from h2d_patch.copies.ranges import Checked, Ranges, Swappable


class PretendedDriver:
    def __init__(self, *registered):
        self.registered = list(registered)
        self.asked = 0
        self.shift = lambda start: 0

    def __call__(self, address):
        self.asked += 1
        for start, end in self.registered:
            if start <= address < end:
                return start, end, self.shift(start)
        return "host memory is not pinned"


def region(rows=8, row_bytes=96):
    whole = torch.zeros(rows, row_bytes, dtype=torch.int8)
    return whole, whole.data_ptr()


GPU = [torch.zeros(4, 8, dtype=torch.int8)]  # stands in for tensors of a device


def test_ranges_that_touch_are_one():
    ranges = Ranges([(20, 30, 0), (0, 10, 0), (10, 20, 0), (40, 50, 0), (41, 45, 0), (50, 60, 8), (60, 70, 8)])
    assert ranges.merged == [(0, 30, 0), (40, 50, 0), (50, 70, 8)]


def test_a_block_must_lie_in_one_range_whole():
    ranges = Ranges([(0, 30, 0), (40, 50, 0)])
    starts, lengths = np.array([0, 29, 30, 40, 39, 45, 60, 2**63 - 1]), np.array([30, 1, 1, 10, 2, 6, 1, 5])
    assert ranges.hold(starts, lengths).tolist() == [True, True, False, True, False, False, False, False]
    assert not Ranges().hold(starts, 1).any()
    assert Ranges([(0, 30, 0)]).hold_all(np.array([0, 5]), np.array([3, 25]))
    assert not Ranges([(0, 30, 0)]).hold_all(np.array([0, 5]), np.array([3, 26]))
    assert not Ranges([(0, 30, 0)]).hold_all(np.array([0, 2**63 - 1]), np.array([3, 5]))


def test_a_region_registered_in_chunks_is_walked_chunk_by_chunk():
    whole, base = region()
    driver = PretendedDriver((base, base + 100), (base + 100, base + 500), (base + 500, base + 768))
    found = Checked().swappable([whole[:, 16:32]], GPU, driver)
    assert isinstance(found, Swappable) and found.host.merged == [(base, base + 768, 0)]
    assert driver.asked == 4  # the row across the second border once more


def test_each_registration_is_shifted_to_where_the_device_sees_it():
    whole, base = region()
    driver = PretendedDriver((base, base + 384), (base + 384, base + 768))
    driver.shift = lambda start: 1 << 40 if start == base else -(1 << 30)
    found = Checked().swappable([whole], GPU, driver)
    starts = base + np.array([96, 383, 384, 700])
    assert (found.host.shifted(starts) - starts).tolist() == [1 << 40, 1 << 40, -(1 << 30), -(1 << 30)]
    assert not found.host.hold_all(starts, np.full(4, 2))  # no block lies across two of them


def test_a_region_that_is_pinned_in_part_is_refused_wherever_the_hole_is():
    whole, base = region()
    for hole in range(0, 768, 32):
        driver = PretendedDriver((base, base + hole), (base + hole + 1, base + 768))
        found = Checked().swappable([whole], GPU, driver)
        assert found == "host memory is not pinned"


def test_only_the_rows_need_be_pinned_not_what_lies_between_them():
    whole, base = region()
    slots = [(base + 96 * i + 32, base + 96 * i + 64) for i in range(8)]
    driver = PretendedDriver(*slots)
    found = Checked().swappable([whole[:, 32:48], whole[:, 48:64]], GPU, driver)
    assert isinstance(found, Swappable) and found.host.merged == [(*slot, 0) for slot in slots]
    assert driver.asked == 8  # what the first view found is not asked again for the second
    assert Checked().swappable([whole[:, 32:65]], GPU, driver) == "host memory is not pinned"


def test_what_was_good_is_remembered_until_a_tensor_dies_and_what_was_bad_is_asked_again():
    whole, base = region()
    driver, checked = PretendedDriver(), Checked()
    assert isinstance(checked.swappable([whole], GPU, driver), str)
    driver.registered.append((base, base + 768))
    assert isinstance(checked.swappable([whole], GPU, driver), Swappable)
    asked = driver.asked
    assert isinstance(checked.swappable([whole], GPU, driver), Swappable)
    assert driver.asked == asked and len(checked) == 1
    del whole
    gc.collect()
    assert len(checked) == 0


def test_sequences_that_come_and_go_are_not_taken_for_others():
    checked = Checked()
    first, second = region()[0], region()[0]
    driver = PretendedDriver(*((t.data_ptr(), t.data_ptr() + t.numel()) for t in (first, second)))
    for _ in range(200):
        for whole in (first, second):
            found = checked.swappable([whole], list(GPU), driver)
            assert found.host.merged == [(whole.data_ptr(), whole.data_ptr() + whole.numel(), 0)]
    assert driver.asked == 2 and len(checked) == 2 and len(checked._by_sequences) <= 64


def test_tensors_that_are_not_rows_of_bytes_are_refused():
    whole, base = region()
    driver = PretendedDriver((base, base + 768))
    for wrong in (whole.t(), whole[0], whole[:, ::2]):
        assert Checked().swappable([wrong], GPU, driver) == "host tensors are not rows of bytes"
    assert isinstance(Checked().swappable([whole], [], driver), str)
