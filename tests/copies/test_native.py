"""The compiled copies: right bytes from any number of threads, and nothing lost where they cannot be had."""

from __future__ import annotations

import os
import random
import shutil
import threading

import pytest

torch = pytest.importorskip("torch")

from h2d_patch.copies import native  # noqa: E402


def bytes_of(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


@pytest.mark.parametrize("helpers", [0, 1, 3, 100])
@pytest.mark.parametrize(
    "rows, width, pitch", [(1, 3 << 20, 3 << 20), (3, 700_001, 800_000), (5000, 301, 512), (1, 1, 9)]
)
def test_rows_become_dense_and_nothing_else_is_written(library, helpers, rows, width, pitch):
    source = bytes_of(rows * pitch)
    target = torch.zeros(rows * width + 128, dtype=torch.uint8)
    library.copy(target.data_ptr() + 64, source.data_ptr(), pitch, width, rows, helpers)
    assert torch.equal(target[64:-64].view(rows, width), source.view(rows, pitch)[:, :width])
    assert not target[:64].any() and not target[-64:].any()


def test_threads_that_copy_at_the_same_time_get_what_is_theirs(library):
    wrong = []

    def run(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(60):
            rows, width = numbers.choice([(1, 1 << 20), (3, 500_000), (40, 40_000), (1, 100)])
            pitch = width + numbers.randrange(100)
            source = torch.full((rows * pitch,), seed, dtype=torch.uint8)
            target = torch.zeros(rows * width, dtype=torch.uint8)
            library.copy(target.data_ptr(), source.data_ptr(), pitch, width, rows, 3)
            source.fill_(99)
            if not bool((target == seed).all()):
                wrong.append((seed, rows, width))

    runners = [threading.Thread(target=run, args=(seed,)) for seed in range(1, 5)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not wrong


def test_what_follows_the_snapshot_is_told_where_it_lies(library, submitted):
    source = bytes_of(3 * 100)
    at = torch.zeros(3 * 40, dtype=torch.uint8)
    assert library.send(0x1000, 64, source.data_ptr(), 100, 40, 3, at.data_ptr(), 0x77, 0) == 0
    assert library.send(0x2000, 40, source.data_ptr(), 100, 40, 3, at.data_ptr(), 0x77, 0) == 0
    assert library.send(0x3000, 9, source.data_ptr(), 9, 7, 1, at.data_ptr(), 0x77, 0) == 0
    assert submitted == [
        ("2d", 0x1000, 64, at.data_ptr(), 40, 40, 3, 1, 0x77),
        ("1d", 0x2000, at.data_ptr(), 120, 1, 0x77),
        ("1d", 0x3000, at.data_ptr(), 7, 1, 0x77),
    ]
    assert torch.equal(at[7:].view(-1)[:33], source.view(3, 100)[0, 7:40])


def test_the_error_of_the_submission_comes_back(library, submitted):
    submitted.append("fail")
    source, at = bytes_of(8), torch.zeros(8, dtype=torch.uint8)
    assert library.send(0x1000, 8, source.data_ptr(), 8, 8, 1, at.data_ptr(), 0, 0) == 17


def test_a_forked_child_has_none_of_it_and_the_parent_keeps_its_own(library, monkeypatch):
    monkeypatch.setattr(native, "loaded", library)
    child = os.fork()
    if child == 0:
        os._exit(0 if native.loaded is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    source, target = bytes_of(4 << 20), torch.zeros(4 << 20, dtype=torch.uint8)
    native.loaded.copy(target.data_ptr(), source.data_ptr(), 4 << 20, 4 << 20, 1, 3)
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("/nowhere/cc", "No such file"),
        ("false", "false failed with 1: it says nothing"),
        ("sh -c 'echo why >&2; exit 3'", "sh failed with 3: why"),
    ],
)
def test_without_a_compiler_that_works_the_error_says_why(monkeypatch, compiler, words):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises((OSError, RuntimeError), match=words):
        native.Native(0, 0)


def test_without_any_compiler_the_error_names_those_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C compiler"):
        native.Native(0, 0)


def test_nothing_stays_on_disk(monkeypatch, tmp_path, library):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    native.Native(0, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 64), ("400000 100000", 4), ("50000 100000", 1), ("12800000 100000", 64), ("nonsense", 64)],
)
def test_a_container_s_quota_bounds_the_threads(monkeypatch, tmp_path, quota, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(native.Path, "read_text", lambda self: quota)
    assert native.usable_cpus() == cpus


def test_it_compiles_without_warnings(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    import subprocess

    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=gnu11"]
    subprocess.run([compiler, *native._FLAGS, *flags, "-o", str(tmp_path / "n.so"), str(native.SOURCE)], check=True)


def test_small_copies_wake_nobody(library):
    assert library.helpers_for(native.PARALLEL_BYTES - 1) == 0
    assert 0 < library.helpers_for(1 << 20) <= library.helpers
    assert library.helpers_for(1 << 30) == library.helpers
