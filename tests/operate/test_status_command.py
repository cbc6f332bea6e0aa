"""What a probe can rely on: the exit status of `status`, whatever is wrong in the shell that it is typed in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_states import put, state, target

from h2d_patch.cli import main

OPERATE = Path(__file__).resolve().parents[2] / "docs/operate.md"
WELL = state(target())
ENDED = state(target(), start_time=1)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("H2D_PATCH_RUN_DIR", str(directory))
    return directory


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([WELL], 0),
        ([WELL, ENDED], 0),
        ([state(target("pending"), target("upstream"))], 0),
        ([], 1),
        ([ENDED], 1),
        ([state(error="h2d_patch: nothing is patched")], 1),
        ([WELL, state(error="h2d_patch: nothing is patched")], 1),
        ([state(target(), control="control-chat.json: damaged")], 1),
        ([state(target("refused"))], 1),
        ([state(target("failed"))], 1),
        ([WELL, {"schema": 1}], 2),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"], ["--prometheus"]])
def test_the_exit_status_says_whether_anything_is_patched_and_well(
    run_dir: Path, states: list[dict[str, Any]], expected: int, form: list[str]
) -> None:
    put(run_dir, *states)
    assert main(["status", *form]) == expected


def test_after_the_last_process_nothing_is_patched(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(run_dir, ENDED)
    assert main(["status", "--clean", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["removed"] == [str(run_dir / "state-x-0.json")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("H2D_PATCH", "misspelt"),
        ("H2D_PATCH_MANIFEST", "/nowhere.toml"),
        ("H2D_PATCH_SERVER", "a/b"),
        ("H2D_PATCH_PINNED_MB", "lots"),
        ("H2D_PATCH_AB", "misspelt:30s"),
    ],
)
def test_what_is_wrong_in_the_shell_keeps_nobody_from_looking(
    run_dir: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run_dir, WELL)
    monkeypatch.setenv(name, value)
    assert main(["status"]) == 0
    said = capsys.readouterr()
    assert str(os.getpid()) in said.out and said.err == ""


def test_the_help_and_the_document_say_what_each_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    text = OPERATE.read_text(encoding="utf-8")
    table = text[text.index("The exit status of `status`") : text.index("So 0 is what")]
    rows = [line for line in table.splitlines() if line.startswith(("| 0 ", "| 1 ", "| 2 "))]
    assert len(rows) == 3
    for word in ("refused", "failed", "control file", "lives"):
        assert word in said and word in rows[1]
    assert (
        said.index("0 a process with our fixes lives") < said.index("1 a fix was refused") < said.index("2 wrong usage")
    )


def test_switch_says_which_words_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["switch", "all"])
    assert "required: {on,off}" in capsys.readouterr().err
