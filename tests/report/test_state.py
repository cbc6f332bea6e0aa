"""State files: written whole, read whole, cleaned of what is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from h2d_patch.report.state import SCHEMA, StateWriter, clean, read_states, start_time


def state(pid: int, **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "pid": pid,
        "start_time": start_time(pid),
        "host": os.uname().nodename,
        "role": "worker",
        "server": "a-server",
        "switches": {},
        "targets": [],
        **more,
    }


def test_a_state_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    writer = StateWriter(tmp_path / "run", lambda: state(os.getpid(), rank=3))
    writer.write()
    (found,) = read_states(tmp_path / "run")
    assert found.alive and found.content["rank"] == 3
    assert [path.suffix for path in (tmp_path / "run").iterdir()] == [".json"]


def test_a_file_that_someone_removed_is_written_again(tmp_path: Path) -> None:
    writer = StateWriter(tmp_path / "run", lambda: state(os.getpid()))
    writer.write()
    next((tmp_path / "run").iterdir()).unlink()
    writer.write()
    assert len(list(read_states(tmp_path / "run"))) == 1


def test_a_reused_pid_does_not_bring_a_process_back_to_life(tmp_path: Path) -> None:
    content = {**state(os.getpid()), "start_time": 1}
    (tmp_path / "state-x-1.json").write_text(json.dumps(content))
    (found,) = read_states(tmp_path)
    assert not found.alive


def test_a_process_of_another_host_lives_as_long_as_it_dates_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state-x-1.json"
    path.write_text(json.dumps(state(1, host="another", start_time=1)))
    assert [found.alive for found in read_states(tmp_path)] == [True]
    os.utime(path, (time.time() - 299, time.time() - 299))
    assert [found.alive for found in read_states(tmp_path)] == [True]
    os.utime(path, (time.time() - 301, time.time() - 301))
    assert [found.alive for found in read_states(tmp_path)] == [False]
    clean(tmp_path, list(read_states(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_does_not_change_is_dated_anew_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("h2d_patch.report.state.time.monotonic", lambda: clock)
    writer = StateWriter(tmp_path / "run", lambda: state(os.getpid()))
    writer.write()
    (path,) = (tmp_path / "run").iterdir()
    before = path.stat()
    os.utime(path, (1, 1))
    clock += 29
    writer.write()
    assert path.stat().st_mtime == 1
    clock += 2
    writer.write()
    assert path.stat().st_mtime > time.time() - 60 and path.stat().st_ino == before.st_ino
    os.utime(path, (1, 1))
    writer.write()
    assert path.stat().st_mtime == 1


def test_cleaning_removes_the_dead_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = state(gone.pid)  # while it lives
    gone.communicate()
    (tmp_path / "state-x-1.json").write_text(json.dumps(dead))
    (tmp_path / "state-x-2.json").write_text(json.dumps(state(os.getpid())))
    (tmp_path / ".old.tmp").touch()
    os.utime(tmp_path / ".old.tmp", (1, 1))
    (tmp_path / ".being-written.tmp").touch()
    removed = clean(tmp_path, list(read_states(tmp_path)))
    assert [path.name for path in removed] == ["state-x-1.json", ".old.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".being-written.tmp", "state-x-2.json"]


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_directory_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o500)
    writer = StateWriter(tmp_path / "run", lambda: state(os.getpid()))
    writer.write()
    writer.write()
    assert len([record for record in caplog.records if "no state is written" in record.message]) == 1
