"""The compiled copies: right bytes from any number of threads, and nothing lost where they cannot be had."""

from __future__ import annotations

import ctypes
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


@pytest.mark.parametrize("helpers", [0, 3])
@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], [5_000_001, 1, 63, 700_000], [1 << 20] * 5, [100] * 3000])
def test_parts_lie_one_behind_the_other(library, monkeypatch, sizes, helpers):
    monkeypatch.setattr(type(library), "helpers_for", lambda self, nbytes: helpers)
    parts = [bytes_of(size) for size in sizes]
    target = torch.zeros(sum(sizes) + 128, dtype=torch.uint8)
    library.gather(target.data_ptr() + 64, [part.data_ptr() for part in parts], sizes)
    assert torch.equal(target[64:-64], torch.cat(parts))
    assert not target[:64].any() and not target[-64:].any()


@pytest.mark.parametrize("skip", [0, 1, 15, 16])
@pytest.mark.parametrize("nbytes", [(32 << 10) - 1, 32 << 10, (32 << 10) + 1, (64 << 10) + 63])
def test_any_alignment_past_the_caches(library, nbytes, skip):
    source, target = bytes_of(nbytes + 3), torch.zeros(nbytes + 64, dtype=torch.uint8)
    library.copy(target.data_ptr() + skip, source.data_ptr() + 3, nbytes, nbytes, 1, 0)
    assert torch.equal(target[skip : skip + nbytes], source[3:])
    assert not target[:skip].any() and not target[skip + nbytes :].any()


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


class Lane:
    """Sends through a lane of 8 segments of 1 KiB; `at` says where in the lane the last one went."""

    def __init__(self, library, runtime):
        self.memory = torch.zeros(8 << 10, dtype=torch.uint8)
        self.library, self.runtime = library, runtime
        self.number = library.open_lane(self.memory.data_ptr(), 8 << 10, range(100, 108))

    def send(self, nbytes, stream=1, *, value=1, helpers=0):
        source = torch.full((nbytes,), value, dtype=torch.uint8)
        target = torch.zeros(nbytes, dtype=torch.uint8)
        answer = self.library.send(
            self.number, target.data_ptr(), nbytes, source.data_ptr(), nbytes, nbytes, 1, stream, helpers
        )
        source.fill_(255)
        self.last = target
        return answer

    def at(self):
        return self.runtime.submitted[-1][3] - self.memory.data_ptr()


@pytest.fixture
def lane(library, runtime):
    opened = Lane(library, runtime)
    yield opened
    library.close_lane(opened.number)


def test_a_lane_sends_what_the_source_held_at_the_call(lane, runtime):
    assert lane.send(300, value=7) == 0
    assert runtime.submitted and not lane.last.any()
    runtime.run()
    assert bool((lane.last == 7).all())


def test_rows_go_from_one_pitch_to_another(lane, runtime, library):
    source = torch.arange(3 * 100, dtype=torch.uint8)
    target = torch.zeros(3 * 64, dtype=torch.uint8)
    rows = source.view(3, 100)[:, :40].clone()
    assert library.send(lane.number, target.data_ptr(), 64, source.data_ptr(), 100, 40, 3, 1, 0) == 0
    source.fill_(0)
    runtime.run()
    assert torch.equal(target.view(3, 64)[:, :40], rows) and not target.view(3, 64)[:, 40:].any()
    source.copy_(torch.arange(3 * 100, dtype=torch.uint8))
    dense = torch.zeros(120, dtype=torch.uint8)
    assert library.send(lane.number, dense.data_ptr(), 40, source.data_ptr(), 100, 40, 3, 1, 0) == 0
    assert runtime.submitted[-1][0] == "1d"
    runtime.run()
    assert torch.equal(dense.view(3, 40), rows)


def test_a_segment_is_used_again_only_behind_its_event_or_on_an_idle_stream(lane, runtime):
    places = []
    for _ in range(32):  # 8 segments of 4 copies, all of which wait
        assert lane.send(200) == 0
        places.append(lane.at())
    assert len(set(places)) == 32 and all(place % 256 == 0 for place in places)
    assert lane.send(200) == native.NOT_HERE
    assert [event for event, _ in runtime.recorded] == list(range(100, 108))
    runtime.passed.add(103)
    assert lane.send(200) == 0 and lane.at() == 3 << 10
    assert [lane.send(200) for _ in range(4)] == [0, 0, 0, native.NOT_HERE]
    runtime.passed.add(107)
    assert lane.send(200) == 0 and lane.at() == 7 << 10


def test_on_an_idle_stream_the_lane_starts_again(lane, runtime):
    for _ in range(6):
        assert lane.send(200) == 0
    assert lane.at() == (1 << 10) + 256
    runtime.idle.add(1)
    for place in (512, 768, 0, 256):
        assert lane.send(200) == 0 and lane.at() == (1 << 10) + place
    assert runtime.recorded == [(100, 1)], "only what was full while the stream was not idle"


def test_segments_of_streams_that_are_used_no_more_come_back(lane, runtime):
    for stream in range(1, 9):
        assert lane.send(200, stream) == 0
    runtime.capturing.add(3)
    assert lane.send(200, 9) == native.NOT_HERE
    assert sorted(runtime.recorded) == [(100 + i, i + 1) for i in range(8) if i != 2], "no event goes into a graph"
    assert lane.send(200, 9) == native.NOT_HERE
    runtime.passed.update(range(100, 108))
    assert lane.send(200, 9) == 0


def test_each_stream_has_segments_of_its_own(lane, runtime):
    assert [lane.send(200, 1), lane.send(200, 2), lane.send(200, 1)] == [0, 0, 0]
    assert [copy[3] - lane.memory.data_ptr() for copy in runtime.submitted] == [0, 1024, 256]
    runtime.idle.add(1)
    for _ in range(4):
        lane.send(200, 1)
    assert lane.at() < 1024, "of stream 1 alone"
    for _ in range(4):
        lane.send(200, 2)
    assert runtime.recorded == [(101, 2)], "stream 2 is not idle, its segment is full"


def test_nothing_is_done_for_a_stream_that_captures(lane, runtime):
    runtime.capturing.add(1)
    assert lane.send(200) == native.CAPTURING and not runtime.submitted
    assert lane.send(200, 2) == 0


def test_pinned_memory_is_known(library, runtime):
    runtime.pinned.add(0x7000)
    assert [bool(library.pinned(at)) for at in (0x7000, 0x7008)] == [True, False]
    runtime.fail["attributes"] = 1
    assert not library.pinned(0x7000)


def test_wrong_arguments_are_errors_of_python_s(library):
    for wrong in ((1, 2), ("a",) * 9, (None,) * 9):
        with pytest.raises((TypeError, ctypes.ArgumentError)):
            library.send(*wrong)


def test_what_is_larger_than_a_segment_is_not_for_the_lane(lane, runtime):
    assert lane.send(1024) == 0
    assert lane.send(1025) == native.NOT_HERE and len(runtime.submitted) == 1


def test_the_error_of_the_submission_comes_back(lane, runtime):
    runtime.fail["copy"] = 17
    assert lane.send(100) == 17


def test_a_lane_whose_event_cannot_be_recorded_is_of_no_use_any_more(lane, runtime):
    for _ in range(4):
        lane.send(200)
    runtime.fail["record"] = 719
    assert lane.send(200) == native.NOT_HERE
    runtime.fail.clear()
    runtime.idle.add(1)
    assert lane.send(200) == native.NOT_HERE


def test_a_closed_lane_and_one_too_small_take_nothing(library, runtime):
    assert library.open_lane(0, 8 * 255, range(8)) is None
    closed = Lane(library, runtime)
    library.close_lane(closed.number)
    assert closed.send(100) == native.NOT_HERE


def test_a_lane_that_is_in_use_is_not_waited_for(lane, runtime, monkeypatch):
    inside, go_on, answers = threading.Event(), threading.Event(), []
    submit = type(runtime).cudaMemcpyAsync

    def slow(self, *args):
        inside.set()
        go_on.wait(10)
        return submit(self, *args)

    pointer = ctypes.c_void_p
    callback = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)(
        lambda *args: slow(runtime, *args)
    )
    functions = [ctypes.cast(callback, pointer).value, *runtime.addresses[1:]]
    other = native.Native(functions)  # a library of its own, with lanes of its own
    blocked = Lane(other, runtime)
    first = threading.Thread(target=lambda: answers.append(blocked.send(100)))
    first.start()
    assert inside.wait(10)
    assert blocked.send(100) == native.NOT_HERE
    go_on.set()
    first.join()
    assert answers == [0]


@pytest.mark.parametrize("seed", range(4))
def test_threads_on_streams_never_see_each_others_bytes(library, runtime, seed):
    memory = torch.zeros(8 << 12, dtype=torch.uint8)
    number = library.open_lane(memory.data_ptr(), memory.numel(), range(8))
    wrong, sent = [], [0]

    def run(stream: int) -> None:
        numbers = random.Random(seed * 100 + stream)
        waiting = []
        for _ in range(1500):
            n, value = numbers.randrange(1, 4096), numbers.randrange(1, 255)
            source, target = torch.full((n,), value, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
            if library.send(number, target.data_ptr(), n, source.data_ptr(), n, n, 1, stream, 2) == 0:
                sent[0] += 1
                waiting.append((target, value))
            source.fill_(255)
            if numbers.random() < 0.1:
                with lock:  # the device gets to the end of this stream
                    mine = [copy for copy in runtime.submitted if copy[6] == stream]
                    for copy in mine:
                        runtime.submitted.remove(copy)
                        ctypes.memmove(copy[1], copy[3], copy[4])
                    runtime.passed.update(event for event, of in dict(runtime.recorded).items() if of == stream)
                wrong.extend(v for t, v in waiting if not bool((t == v).all()))
                waiting.clear()

    lock = threading.Lock()
    threads = [threading.Thread(target=run, args=(stream,)) for stream in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.close_lane(number)
    assert not wrong and sent[0] > 30


def test_a_forked_child_has_none_of_it_and_the_parent_keeps_its_own(library, monkeypatch):
    monkeypatch.setattr(native, "loaded", library)
    child = os.fork()
    if child == 0:
        os._exit(0 if native.loaded is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    source, target = bytes_of(4 << 20), torch.zeros(4 << 20, dtype=torch.uint8)
    native.loaded.copy(target.data_ptr(), source.data_ptr(), 4 << 20, 4 << 20, 1, 3)
    assert torch.equal(source, target)


@pytest.fixture
def only(monkeypatch):
    """Makes $CC the only compiler there is."""

    def use(compiler: str) -> None:
        monkeypatch.setattr(native, "COMPILERS", ())
        monkeypatch.setenv("CC", compiler)

    return use


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("/nowhere/cc", "No such file"),
        ("false", "false failed with 1: it says nothing"),
        ("sh -c 'echo note >&2; echo the Error >&2; echo mark >&2; exit 3'", "sh failed with 3: the Error"),
        ("sh -c 'sleep 60 & wait'", "sh took more than 1 s"),
        ("true", "python.* failed with 1: .*"),  # it compiles nothing
        (
            'sh -c \'for last in; do :; done; printf \\177ELF >$(echo "$0 $*" | sed "s/.*-o //; s/ .*//")\'',
            "failed with",
        ),
    ],
)
def test_without_a_compiler_that_works_the_error_says_why(monkeypatch, only, compiler, words):
    monkeypatch.setattr(native, "_COMPILE_S", 1.0)
    only(compiler)
    with pytest.raises((OSError, RuntimeError), match=words):
        native.Native([0] * len(native.RUNTIME))


@pytest.mark.parametrize("compiler", ["gcc", "g++", "gcc -std=c89", "gcc -Werror -Wall"])
def test_any_compiler_of_c_will_do(only, compiler):
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no {compiler}")
    only(compiler)
    assert native.Native([0] * len(native.RUNTIME)).helpers >= 0


def test_a_library_that_would_end_the_process_is_not_loaded(only):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    only("gcc -fsanitize=address")
    with pytest.raises(RuntimeError, match="failed with"):
        native.Native([0] * len(native.RUNTIME))


def test_where_the_named_compiler_fails_the_system_s_own_is_used(monkeypatch, library):
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert native.Native([0] * len(native.RUNTIME)).helpers >= 0


def test_without_any_compiler_the_error_names_those_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C compiler"):
        native.Native([0] * len(native.RUNTIME))


def test_headers_that_do_not_fit_are_done_without(monkeypatch, tmp_path, library):
    (tmp_path / "Python.h").write_text("#error of another Python\n")
    monkeypatch.setattr(native, "_headers", lambda: str(tmp_path))
    assert isinstance(native.Native([0] * len(native.RUNTIME)).send, ctypes._CFuncPtr)


def test_nothing_stays_on_disk(monkeypatch, tmp_path, library):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    native.Native([0] * len(native.RUNTIME))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "12800000 100000"}, 64),
        ({"cpu.max": "nonsense"}, 64),
        ({"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_a_container_s_quota_bounds_the_threads(monkeypatch, tmp_path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(native, "_CGROUP", tmp_path)
    assert native.usable_cpus() == cpus


@pytest.mark.parametrize(("cpus", "sharing", "helpers"), [(64, 1, 7), (64, 8, 3), (16, 8, 0), (2, 1, 0), (192, 8, 7)])
def test_workers_that_share_a_machine_share_its_cpus(monkeypatch, library, cpus, sharing, helpers):
    monkeypatch.setattr(native, "usable_cpus", lambda: cpus)
    assert native.Native([0] * len(native.RUNTIME), sharing).helpers == helpers


def test_it_compiles_without_warnings(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    import subprocess

    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=gnu11"]
    subprocess.run([compiler, *native._FLAGS, *flags, "-o", str(tmp_path / "n.so"), str(native.SOURCE)], check=True)


@pytest.mark.parametrize("reads, length, total, answer", [(2**63 - 4096, 64, 512, native.OUTSIDE), (1 << 20, 0, 64, 0)])
def test_no_number_of_a_swap_is_undefined_behaviour(tmp_path, reads, length, total, answer):
    """Where one ends the process, in a library that is compiled so: an absurd address that is shifted, and lengths that
    became zero after they were added up."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no compiler that can tell")
    import subprocess
    import sys

    path = str(tmp_path / "n.so")
    strict = [
        "-fsanitize=undefined",
        "-fsanitize-undefined-trap-on-error",
        "-D__clang__",
    ]  # one version of each function
    subprocess.run([compiler, *native._FLAGS, *strict, "-o", path, str(native.SOURCE)], check=True)
    code = f"""if True:
        import ctypes
        swap = ctypes.CDLL({path!r}).h2d_swap
        swap.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
        swap.argtypes += [ctypes.c_void_p] * 3
        def numbers(*values): return (ctypes.c_int64 * len(values))(*values)
        def at(array): return ctypes.addressof(array)
        host = numbers(1 << 20), numbers(1 << 21), numbers(1 << 40)
        may = numbers(1 << 30, 1 << 31, *map(at, host), 1)
        rows = numbers(*[{reads}] * 8), numbers(*[1 << 30] * 8), numbers(*[{length}] * 8)
        print(swap(*rows, 8, {total}, 0, may, 2, numbers(*[0] * 30), None, None))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{answer}\n"), done.stderr


def test_small_copies_wake_nobody(library):
    assert library.helpers_for(native.PARALLEL_BYTES - 1) == 0
    assert 0 < library.helpers_for(1 << 20) <= library.helpers
    assert library.helpers_for(1 << 30) == library.helpers
