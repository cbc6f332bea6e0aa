"""Control files: written whole by one at a time, and refused where they could be anyone's."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2d_patch.cli import main
from h2d_patch.operate.control import (
    MOST_BYTES,
    Control,
    Slices,
    clean,
    path_of,
    read,
    remove_left_behind,
    update,
)
from h2d_patch.report.state import SCHEMA, ProcessState, read_states, start_time
from h2d_patch.settings import ConfigurationError, Settings

NAME = "a-server"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


def off(*fixes: str, rank: int | None = None) -> Callable[[Control], Control]:
    return lambda control: control.turned(fixes, False, rank)


def written(directory: Path, **more: Any) -> Path:
    update(directory, NAME, off("kv-swap"))
    path = path_of(directory, NAME)
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return path


def state(directory: Path, pid: int, server: str = NAME, **more: Any) -> None:
    content = {"schema": SCHEMA, "pid": pid, "start_time": start_time(pid), "host": os.uname().nodename}
    content |= {"role": "worker", "server": server, "switches": {}, "targets": [], **more}
    (directory / f"state-x-{pid}.json").write_text(json.dumps(content))


def test_what_was_written_is_read_and_only_this_user_can(directory: Path) -> None:
    assert read(directory, NAME) is None
    ab = Slices("kv-swap", 30.0, 1.5, None, 3)
    assert update(directory, NAME, lambda control: Control(control.server, ab=ab).turned(["other"], False)) is None
    found = read(directory, NAME)
    assert found is not None and found.ab == ab and found.wanted("other", 0) is False
    assert found.wanted("mrope-positions", 0) is None
    assert path_of(directory, NAME).stat().st_mode & 0o777 == 0o600
    content = json.loads(path_of(directory, NAME).read_text())
    assert list(content) == ["schema", "server", "switches", "ab"] and content["schema"] == 1
    assert list(content["switches"][0]) == ["fix", "on", "rank", "at"]
    assert abs(content["switches"][0]["at"] - time.time()) < 60


def test_a_later_switch_wins_and_one_for_all_ends_those_of_single_ranks() -> None:
    control = Control(NAME).turned(["a", "b"], False).turned(["a"], True, rank=1)
    assert [control.wanted("a", rank) for rank in (None, 0, 1)] == [False, False, True]
    control = control.turned(["a"], False, rank=1).turned(["a"], True, rank=0)
    assert [control.wanted("a", rank) for rank in (None, 0, 1)] == [False, True, False]
    control = control.turned(["a"], False)
    assert [control.wanted("a", rank) for rank in (None, 0, 1)] == [False, False, False]
    assert control.wanted("b", None) is False
    assert len(control.switches) == 2


WRONG = {
    "a link": lambda path: (path.rename(path.with_suffix(".old")), path.symlink_to(path.with_suffix(".old"))),
    "writable by others": lambda path: path.chmod(0o620),
    "not a file": lambda path: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "half written": lambda path: path.write_text(path.read_text()[:30]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "huge": lambda path: path.write_text(" " * (MOST_BYTES + 1)),
    "in a directory that others may write": lambda path: path.parent.chmod(0o777),
}
SAYS = {
    "a link": "is a symbolic link; expected a file of this user's",
    "writable by others": "can be written by others (mode 0620); expected 0600",
    "not a file": "is not a regular file",
    "a directory": "is not a regular file",
    "a list": "schema: found 'list'; expected 1",
    "huge": f"is larger than {MOST_BYTES} bytes",
    "in a directory that others may write": "can be written by others (mode 0777); expected 0700",
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_no_control_file_of_ours_is_refused_with_the_reason(directory: Path, how: str) -> None:
    path = written(directory)
    WRONG[how](path)
    with pytest.raises(ConfigurationError) as error:
        read(directory, NAME)
    assert str(path if path.parent.stat().st_mode & 0o022 == 0 else directory) in str(error.value)
    assert SAYS.get(how, "; expected a control file, written by h2d-patch") in str(error.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_belongs_to_another_user_is_refused(directory: Path, what: str) -> None:
    path = written(directory)
    os.chown(path if what == "file" else directory, 12345, -1)
    with pytest.raises(ConfigurationError, match="belongs to user id 12345; expected 0, the user who runs this"):
        read(directory, NAME)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"schema": 2}, "schema: found 2; expected 1"),
        ({"server": "another"}, "server: found 'another'; expected 'a-server'"),
        ({"switches": None}, "switches: found None; expected a list"),
        ({"switches": [7]}, "switches[0]: found 7; expected an object of fix, on, rank, at"),
        ({"switches": [{"fix": "a", "on": True, "rank": None}]}, "expected an object of fix, on, rank, at"),
        ({"switches": [{"fix": "a", "on": 1, "rank": 0, "at": 1}]}, "switches[0].on: found 1; expected bool"),
        ({"switches": [{"fix": "a", "on": True, "rank": True, "at": 1}]}, "switches[0].rank: found True; expected int"),
        ({"ab": {"fix": "a"}}, "ab: found {'fix': 'a'}; expected an object of fix, slice_s, start, stop, settle_s"),
        (
            {"ab": {"fix": "a", "slice_s": "30", "start": 1, "stop": None, "settle_s": 1, "same": False}},
            "ab.slice_s: found '30'; expected float or int",
        ),
        *(
            (
                {"ab": {"fix": "a", "slice_s": 30, "settle_s": 1, "same": False, "start": 1, "stop": None, **more}},
                "expected unix times",
            )
            for more in ({"start": 10**400}, {"stop": 10**400}, {"start": -1e18}, {"start": float("nan")})
        ),
    ],
)
def test_content_of_another_shape_is_refused_and_the_key_named(
    directory: Path, more: dict[str, Any], says: str
) -> None:
    path = written(directory, **more)
    with pytest.raises(ConfigurationError) as error:
        read(directory, NAME)
    assert str(error.value).startswith(f"{path}: ") and says in str(error.value)


@pytest.mark.parametrize("how", ["a link", "writable by others", "half written", "not a file"])
def test_a_writer_replaces_what_no_process_could_read_and_says_so(directory: Path, how: str) -> None:
    path = written(directory)
    WRONG[how](path)
    behind = path.with_suffix(".old")
    before = behind.read_text() if behind.exists() else None
    replaced = update(directory, NAME, off("mrope-positions"))
    assert replaced and str(path) in replaced
    found = read(directory, NAME)
    assert found is not None and found.wanted("mrope-positions", None) is False
    assert before is None or behind.read_text() == before


def process(rank: int | None, alive: bool = True, server: str = NAME, **switches: bool) -> ProcessState:
    return ProcessState(Path("state"), {"server": server, "rank": rank, "switches": switches}, alive)


@pytest.mark.parametrize(
    ("processes", "off"),
    [
        ([process(None, a=True), process(0, a=True)], {}),
        ([process(None, a=False), process(0, a=False), process(1, a=False)], {None, 0, 1, 7}),
        ([process(None, a=True), process(0, a=True), process(1, a=False)], {1}),
        ([process(None, a=False), process(0, a=True), process(1, a=False)], {None, 1, 7}),
        ([process(0, a=False), process(1, a=False)], {None, 0, 1, 7}),
        ([process(0, a=False), process(1, a=True)], {0}),
        ([process(None, a=False), process(None, a=True)], {None, 0, 1, 7}),
        ([process(None, a=True), process(None, alive=False, a=False), process(None, server="b", a=False)], {}),
    ],
)
def test_what_processes_have_taken_is_what_a_new_file_says(processes: list[ProcessState], off: set[int | None]) -> None:
    control = Control.as_taken(NAME, processes)
    assert {rank for rank in (None, 0, 1, 7) if control.wanted("a", rank) is False} == set(off)


def test_a_writer_replaces_a_damaged_file_by_what_the_processes_have(directory: Path) -> None:
    state(directory, os.getpid(), switches={"kv-swap": False, "vision-rope": True})
    written(directory).write_text("{")
    assert update(directory, NAME, off("mrope-positions"))
    found = read(directory, NAME)
    assert found is not None
    fixes = ("kv-swap", "mrope-positions", "vision-rope")
    assert [found.wanted(fix, None) for fix in fixes] == [False, False, None]


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 65, "ü", "a b"])
def test_a_server_s_name_must_do_for_a_file_s(directory: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="expected letters, digits"):
        update(directory, name, off("a"))
    if name.strip():
        with pytest.raises(ConfigurationError, match="H2D_PATCH_SERVER="):
            Settings.from_environ({"H2D_PATCH_SERVER": name + "/"})


def _many(directory: Path, number: int, times: int) -> None:
    for on in itertools.islice(itertools.cycle((False, True)), times):
        update(directory, NAME, functools.partial(Control.turned, fixes=[f"fix-{number}"], on=on))


def test_of_many_writers_at_once_none_undoes_another_s(directory: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=_many, args=(directory, n, 150)) for n in range(4)]
    for writer in writers:
        writer.start()
    whole = 0
    while any(writer.is_alive() for writer in writers):
        whole += read(directory, NAME) is not None
    for writer in writers:
        writer.join()
    found = read(directory, NAME)
    assert found is not None and whole > 0
    assert sorted((one.fix, one.on) for one in found.switches) == [(f"fix-{number}", True) for number in range(4)]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file_and_no_lock(directory: Path) -> None:
    update(directory, NAME, off("before"))
    for _ in range(15):
        writer = multiprocessing.get_context("fork").Process(target=_many, args=(directory, 0, 1_000_000))
        writer.start()
        time.sleep(0.03)
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        found = read(directory, NAME)
        assert found is not None and found.wanted("before", None) is False
    start = time.monotonic()
    assert update(directory, NAME, off("after")) is None
    assert time.monotonic() - start < 1


FULL = """
import resource, sys
from pathlib import Path
from h2d_patch.operate.control import update
from h2d_patch.settings import ConfigurationError
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    update(Path(sys.argv[1]), "a-server", lambda control: control.turned(["b"], False))
except ConfigurationError as error:
    print(error)
"""


def test_where_nothing_can_be_written_that_is_said_and_the_file_stays(directory: Path) -> None:
    path = written(directory)
    before = path.read_text()
    done = subprocess.run([sys.executable, "-c", FULL, str(directory)], capture_output=True, text=True, check=False)
    assert f"{path}: File too large; expected a run directory that can be written" in done.stdout, done.stderr
    assert path.read_text() == before
    assert {found.name for found in directory.iterdir()} == {path.name, "control.lock"}
    with pytest.raises(ConfigurationError, match="No such file or directory; expected a run directory"):
        update(directory / "gone", NAME, off("a"))


def _read_and_write(directory: Path, told: Any) -> None:
    if os.getuid() == 0:  # whom no mode keeps from writing
        os.chown(directory, 12345, -1)
        os.chown(path_of(directory, NAME), 12345, -1)
        os.setuid(12345)
    found = read(directory, NAME)
    try:
        update(directory, NAME, off("b"))
    except ConfigurationError as error:
        told.send((found, str(error)))


def test_a_read_only_run_directory_is_read_and_the_writer_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = written(directory)
        (directory / "control.lock").unlink()
        directory.chmod(0o500)
        here, there = multiprocessing.Pipe()
        writer = multiprocessing.get_context("fork").Process(target=_read_and_write, args=(directory, there))
        writer.start()
        writer.join()
        assert here.poll(), writer.exitcode
        found, error = here.recv()
        directory.chmod(0o700)
    assert found.wanted("kv-swap", None) is False
    assert error == f"{path}: Permission denied; expected a run directory that can be written"


def test_a_lock_that_another_holds_is_waited_for_and_then_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    from h2d_patch.operate import control

    written(directory)
    monkeypatch.setattr(control, "LOCK_PATIENCE_S", 0.1)
    with open(directory / "control.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=r"control.lock: held by another process for 0.1 s"):
            update(directory, NAME, off("a"))


def test_files_of_servers_that_are_gone_are_cleaned_and_those_of_live_ones_stay(directory: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state(directory, gone.pid, "gone")  # while it lives
    gone.communicate()
    state(directory, os.getpid())
    for name in (NAME, "gone", "never-seen"):
        update(directory, name, off("a"))
    gone_too = [path_of(directory, name) for name in ("gone", "never-seen")]
    assert clean(directory, list(read_states(directory))) == gone_too
    assert [path.name for path in directory.glob("control-*")] == [f"control-{NAME}.json"]


def test_what_cannot_be_cleaned_away_is_one_clear_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "control-gone.json").mkdir()
    monkeypatch.setenv("H2D_PATCH_RUN_DIR", str(directory))
    assert main(["status", "--clean"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("h2d-patch: status --clean: ") and "control-gone.json" in said and said.count("\n") == 1


def test_what_an_earlier_server_of_that_name_left_is_removed_and_a_live_one_s_is_not(directory: Path) -> None:
    state(directory, os.getpid())
    update(directory, NAME, off("a"))
    remove_left_behind(directory, NAME)
    assert read(directory, NAME) is not None
    state(directory, os.getpid(), start_time=1)
    (directory / "state-of-another-version.json").write_text('{"schema": 1}')
    remove_left_behind(directory, NAME)
    assert read(directory, NAME) is None
