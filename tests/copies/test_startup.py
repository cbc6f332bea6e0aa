"""Device start-up where there is no device."""

from __future__ import annotations

import pytest
import torch

from h2d_patch import copies


@pytest.mark.parametrize("device", ["cpu", "nonsense", None, torch.device("meta"), object()])
def test_start_never_raises_and_says_why_there_is_no_ring(device):
    report = copies.start(device, 1 << 20)
    assert report.ring_bytes == 0 and not report.kernels and len(report.reasons) == 1
    assert report.seconds >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_start_without_a_gpu_reports_once_and_the_same_again():
    report = copies.start("cuda:0", 1 << 20)
    assert report.ring_bytes == 0 and report.reasons
    copies.stop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="would stop what the GPU tests have started")
def test_stop_before_any_start_does_nothing():
    copies.stop()
