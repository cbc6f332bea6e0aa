"""Calibration on a GPU: its time, its memory, and that what it measures are copies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from h2d_patch.copies import Places, calibrate, profile_file
from h2d_patch.copies.profile import DRIVER, Choice
from h2d_patch.copies.profile_file import Measured, key_of, load, save
from h2d_patch.copies.swap import Kernels, kernels_on


@pytest.fixture
def kernels(ring):
    found = kernels_on(0)
    assert isinstance(found, Kernels)
    before = found.profile
    yield found
    found.profile = before


def test_at_start_up_it_ends_in_2_seconds_and_leaves_no_memory_behind(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_file.find, "__defaults__", (tmp_path,))  # nothing is shipped for this device
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    random, reasons = torch.cuda.get_rng_state(), []
    began = time.perf_counter()
    words = calibrate.start_profile(0, Places(None, tmp_path), reasons)
    took = time.perf_counter() - began
    assert took <= calibrate.QUICK_S + 0.1 and words.startswith("calibrated in") and not reasons, (took, words, reasons)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (before, reserved)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert not list(tmp_path.iterdir())


def test_every_path_copies_what_it_is_timed_with(kernels):
    with calibrate.Ground(torch.device("cuda", 0), 64 << 20) as ground:
        verified = calibrate.Verified(ground)
        arms = calibrate.arms_of(ground, calibrate.choices(kernels.paths, calibrate.PROGRAMS))
        for direction in (False, True):
            assert set(verified.right(arms, direction)) == set(arms)
            batch = ground.batch(direction, 8192, 1024)
            assert ground.arrives(batch, ground.driver_batch)
            assert not ground.arrives(batch, lambda batch: None)
            assert ground.seconds(lambda batch=batch: ground.driver_batch(batch)) > 0
        assert not verified.wrong


def test_a_copy_for_each_block_does_the_same_where_there_is_no_batch(kernels):
    with calibrate.Ground(torch.device("cuda", 0), 64 << 20) as ground:
        ground.has_driver_batch = False
        for direction in (False, True):
            assert ground.arrives(ground.batch(direction, 8008, 100), ground.driver_batch)


def test_what_was_measured_is_used_at_the_next_start(kernels, tmp_path):
    with calibrate.Ground(torch.device("cuda", 0), 64 << 20) as ground:
        found = calibrate.calibrate(ground, kernels.paths, 1.0, grid=((8192,), (4, 4096)))
    assert found.complete and not found.wrong
    key = key_of(0)
    save(tmp_path / "profile.json", Measured(key, found.cells, {}))
    assert load(tmp_path / "profile.json").key == key
    reasons: list[str] = []
    assert calibrate.start_profile(0, Places(tmp_path / "profile.json"), reasons).startswith("of ") and not reasons
    assert kernels.profile.choose(False, 8192, 4096) != Choice(DRIVER)


def test_the_key_says_what_this_device_is(ring):
    key = key_of(0)
    assert key.gpu == torch.cuda.get_device_name(0) and key.cuda == torch.version.cuda
    assert key.driver != "unknown" or not Path("/proc/driver/nvidia/version").exists()


def test_under_graph_capture_nothing_is_measured(kernels):
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(calibrate.CannotMeasure, match="captured"), calibrate.Ground(x.device, 64 << 20):
            pass
    graph.replay()
    torch.cuda.synchronize()
    assert x.item() == 1
