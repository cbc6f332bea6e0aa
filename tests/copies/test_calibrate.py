"""Calibration: its budget by a clock that the test moves, and real copies on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from h2d_patch.copies import calibrate, forced_staging, swap, swap_kernel  # noqa: E402
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice  # noqa: E402
from h2d_patch.copies.profile_file import Cell, Key, Measured, Places, file_name, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
KEY = Key("A GPU", "PCIe 5 x16", "1", "2", "3", "4")
CPU = torch.device("cpu")


@pytest.fixture
def interpreter(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))


@dataclass
class Simulated:
    """Copies at made-up speeds, by a clock of its own. `rate`: GB/s and seconds before it begins, of a choice."""

    rates: dict[str, tuple[float, float]]
    nbytes: int = 512 << 20
    now: float = 0.0
    wrong: tuple[str, ...] = ()
    stream: object = "its own"
    asked: list[tuple[bool, int, int, str]] = field(default_factory=list)

    def clock(self):
        return self.now

    def batch(self, gpu_to_cpu, nbytes, blocks):
        self.now += 0.0005
        return SimpleNamespace(gpu_to_cpu=gpu_to_cpu, nbytes=nbytes, blocks=blocks, total=nbytes * blocks)

    def copy(self, batch, choice):
        rate, latency = self.rates[str(choice)]
        self.asked.append((batch.gpu_to_cpu, batch.nbytes, batch.blocks, str(choice)))
        self.last = batch.total / rate / 1e9 + latency * (batch.blocks if choice.path == DRIVER else 1)

    def seconds(self, call, held=False):
        call()
        self.now += self.last
        return self.last

    def arrives(self, batch, copy):
        copy(batch)
        return str(copy.keywords["choice"]) not in self.wrong


H200 = {
    "driver": (50.0, 2.5e-6),
    **{f"bulk {n}": (min(50.0, 12.0 * n), 2e-5) for n in (1, 2, 4, 8, 16)},
    **{f"triton {n}": (min(48.0, 2.0 * n), 2e-5) for n in (16, 32, 64)},
}
PATHS = (DRIVER, BULK, TRITON)


def test_the_quick_one_measures_everything_in_its_time_where_the_device_is_fast():
    ground = Simulated(H200)
    found = calibrate.calibrate(ground, PATHS, 1.7, quick=True, clock=ground.clock)
    assert found.complete and ground.now <= 1.8 and not found.wrong
    profile = Measured(KEY, found.cells, {}).profile(PATHS)
    assert profile.choose(False, 8192, 4096) == Choice(BULK, 8)
    assert profile.choose(True, 8192, 1) == Choice(DRIVER)


@pytest.mark.parametrize("slower", [10, 100, 1000])
def test_the_quick_one_ends_in_its_time_however_slow_the_device_is(slower):
    ground = Simulated({name: (rate / slower, latency * slower) for name, (rate, latency) in H200.items()})
    found = calibrate.calibrate(ground, PATHS, 1.7, quick=True, clock=ground.clock)
    longest = calibrate.QUICK_CELL_BYTES / (H200["driver"][0] / slower) / 1e9 + 4096 * 2.5e-6 * slower
    assert not found.complete and ground.now <= 1.7 + longest
    # What is not measured has the choice of what is, or what holds everywhere.
    assert Measured(KEY, found.cells, {}).profile(PATHS).choose(False, 8192, 4096).path in PATHS


def test_a_full_one_keeps_to_its_time_and_measures_each_cell_at_least_three_times():
    ground = Simulated(H200)
    done = []
    found = calibrate.calibrate(ground, PATHS, 50, clock=ground.clock, progress=lambda n, of: done.append((n, of)))
    assert found.complete and ground.now < 60
    assert all(3 <= len(times) <= 60 for cell in found.times for times in cell.values())
    assert {(cell.nbytes, cell.blocks) for cell in found.cells} == {
        (n, b) for n in calibrate.SIZES for b in calibrate.COUNTS if n * b <= 512 << 20
    }
    assert done[0] == (0, len(found.cells)) and done[-1] == (len(found.cells), len(found.cells))


def test_arms_take_turns_in_an_order_that_changes():
    ground = Simulated(H200)
    calibrate.calibrate(ground, (DRIVER, BULK), 1, grid=((4096,), (16,)), clock=ground.clock)
    names = [name for *_, nbytes, blocks, name in ground.asked if (nbytes, blocks) == (4096, 16)]
    rounds = [tuple(names[i : i + 6]) for i in range(0, len(names), 6)]
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds) and len(set(rounds)) > len(rounds) / 3


def test_an_arm_that_copies_wrongly_is_not_measured_and_is_named():
    ground = Simulated(H200, wrong=("bulk 8",))
    found = calibrate.calibrate(ground, (DRIVER, BULK), 1, grid=((4096,), (16,)), clock=ground.clock)
    assert found.wrong == ["bulk 8, CPU to GPU: copied wrongly", "bulk 8, GPU to CPU: copied wrongly"]
    assert all(Choice(BULK, 8) not in cell.gbps and Choice(BULK, 4) in cell.gbps for cell in found.cells)


def test_real_copies_arrive_in_both_directions(interpreter):
    with forced_staging(1 << 20), calibrate.Ground(CPU, 1 << 20) as ground:
        for direction in (False, True):
            batch = ground.batch(direction, 8008, 20)
            for choice in (Choice(TRITON, 3), Choice(DRIVER)):
                assert ground.arrives(batch, lambda batch, choice=choice: ground.copy(batch, choice))
            assert not ground.arrives(batch, lambda batch: None)
        assert ground.batch(False, 8192, 129) is None


def test_a_real_calibration_on_the_cpu(interpreter, monkeypatch):
    monkeypatch.setattr(calibrate, "PROGRAMS", {TRITON: (2, 3)})
    with forced_staging(1 << 20), calibrate.Ground(CPU, 1 << 20) as ground:
        found = calibrate.calibrate(ground, (DRIVER, TRITON), 0.1, grid=((512, 4096), (1, 4)))
    assert found.complete and not found.wrong and len(found.cells) == 8
    assert {str(choice) for cell in found.cells for choice in cell.gbps} == {"driver", "triton 2", "triton 3"}


def test_what_swap_arrays_declines_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(swap_kernel, "interpreted", lambda: False)
    refused = pytest.raises(calibrate.CannotMeasure, match="do not run on the CPU")
    with forced_staging(1 << 20), calibrate.Ground(CPU, 1 << 20) as ground, refused:
        ground.copy(ground.batch(False, 4096, 4), Choice(TRITON, 2))


def test_torchs_own_random_numbers_are_left_alone():
    before = torch.random.get_rng_state()
    with calibrate.Ground(CPU, 1 << 20):
        pass
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.fixture
def device(monkeypatch):
    """A device with all kernels, none of which runs; its calibration finds `bulk 4` to be the best everywhere."""
    kernels = SimpleNamespace(paths=list(PATHS), profile=None)
    monkeypatch.setattr(calibrate, "kernels_on", lambda index: kernels)
    monkeypatch.setattr(calibrate, "key_of", lambda index: KEY)
    made = []

    class Ground:
        def __init__(self, device, nbytes):
            made.append(device)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *exc: None  # noqa: E731

    monkeypatch.setattr(calibrate, "Ground", Ground)
    kernels.found = calibrate.Calibration([Cell(False, 8192, 64, {Choice(BULK, 4): 1.0})], [], [], True)
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: kernels.found)
    kernels.grounds = made
    return kernels


def test_at_start_up_a_stored_profile_is_used_and_nothing_is_measured(device, tmp_path):
    save(tmp_path / file_name(KEY.gpu), Measured(KEY, [Cell(False, 8192, 64, {Choice(TRITON, 32): 1.0})], {}))
    reasons: list[str] = []
    words = calibrate.start_profile(0, Places(None, tmp_path), reasons)
    assert str(tmp_path) in words and not reasons and not device.grounds
    assert device.profile.choose(False, 8192, 64) == Choice(TRITON, 32)


def test_at_start_up_a_device_without_a_profile_is_measured(device, tmp_path):
    reasons: list[str] = []
    words = calibrate.start_profile(0, Places(None, tmp_path), reasons)
    assert words.startswith("calibrated in ") and words.endswith(" s") and not reasons
    assert device.profile.choose(False, 8192, 64) == Choice(BULK, 4)
    device.found.complete = False
    assert "cut short with 1 cells" in calibrate.start_profile(0, Places(), reasons)


def test_a_stale_profile_is_said_and_the_device_measured(device, tmp_path):
    path = tmp_path / "named.json"
    path.write_text("{")
    reasons: list[str] = []
    assert calibrate.start_profile(0, Places(path), reasons).startswith("calibrated")
    assert len(reasons) == 1 and str(path) in reasons[0] and "half written" in reasons[0]


def test_a_calibration_that_fails_leaves_what_holds_everywhere(device, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("out of memory")

    monkeypatch.setattr(calibrate, "calibrate", fail)
    reasons: list[str] = []
    assert "built in" in calibrate.start_profile(0, Places(), reasons)
    assert reasons == ["no calibration: OSError: out of memory"] and device.profile is None


def test_a_path_that_copies_wrongly_is_not_used_at_all(device):
    device.found.wrong = ["bulk 8, CPU to GPU: copied wrongly"]
    reasons: list[str] = []
    calibrate.start_profile(0, Places(), reasons)
    assert reasons == device.found.wrong
    assert all(device.profile.choose(to_cpu, 8192, n).path != BULK for to_cpu in (False, True) for n in (1, 64, 4096))


def test_a_device_without_kernels_has_no_profile(monkeypatch):
    monkeypatch.setattr(swap, "_kernels", {0: "none"})
    assert calibrate.start_profile(0, Places(), []) == ""
