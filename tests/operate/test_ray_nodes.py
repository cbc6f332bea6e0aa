"""`status --ray` and `switch --ray`, as far as they go without a cluster; tests/live/test_ray.py has one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from model_server import Server

from h2d_patch import cli
from h2d_patch.operate import ray_nodes
from h2d_patch.operate.ray_nodes import Answer

WELL = Answer("one", "10.0.0.1", 0, '{"processes": []}\n', "")
NOBODY = Answer("head", "10.0.0.2", None, "", "")
SILENT = Answer("two", "10.0.0.3", None, "", "did not answer: GetTimeoutError")
FAILED = Answer("three", "10.0.0.4", 1, "not taken\n", "")
WRONG = Answer("four", "10.0.0.5", 2, "", "h2d-patch: no such fix\n")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([WELL, WELL], 0),
        ([WELL, NOBODY], 0),
        ([NOBODY], 1),
        ([], 1),
        ([WELL, SILENT], 1),
        ([FAILED, WELL], 1),
        ([FAILED, WRONG, SILENT], 2),
    ],
)
def test_the_worst_host_gives_the_exit_status(answers: list[Answer], expected: int) -> None:
    assert ray_nodes.exit_status(answers) == expected


def test_each_host_is_shown_by_its_name_but_those_with_nothing_to_say() -> None:
    text = ray_nodes.as_text([WELL, NOBODY, SILENT, WRONG])
    assert [line for line in text.splitlines() if line.startswith("==")] == [
        "== one (10.0.0.1)",
        "== two (10.0.0.3)",
        "== four (10.0.0.5)",
    ]
    assert "did not answer: GetTimeoutError" in text and "no such fix" in text
    assert "no process on any host" in ray_nodes.as_text([NOBODY])


def test_json_has_what_each_command_printed() -> None:
    found = ray_nodes.as_json([WELL, SILENT])["hosts"]
    assert [one["result"] for one in found] == [{"processes": []}, None]
    assert [one["exit"] for one in found] == [0, None]


@pytest.mark.parametrize("command", [["status"], ["switch", "all", "off"]])
def test_without_ray_it_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main([*command, "--ray"]) == 2
    assert "expected Ray" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--ray", "--ra", "--r"])
def test_what_runs_elsewhere_does_not_go_further(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def everywhere(arguments: list[str], only: Any) -> list[Answer]:
        asked.append((arguments, only))
        return [WELL]

    monkeypatch.setattr(ray_nodes, "everywhere", everywhere)
    assert cli.main(["status", word, "--json", "--all"]) == 0
    assert cli.main(["switch", "kv-swap", "off", "--ray", "--server", "a", "--rank", "1"]) == 0
    assert cli.main(["switch", "--ray", "kv-swap", "off"]) == 0
    assert asked == [
        (["status", "--json", "--all"], None),
        (["switch", "kv-swap", "off", "--server", "a", "--rank", "1"], {"server": "a", "rank": 1}),
        (["switch", "kv-swap", "off"], {}),
    ]


def test_on_a_host_the_command_runs_where_it_has_a_process(tmp_path: Path) -> None:
    server = Server(tmp_path)
    environ = {"H2D_PATCH_RUN_DIR": server.env["H2D_PATCH_RUN_DIR"], "PYTHONPATH": server.env["PYTHONPATH"]}
    for key in ("H2D_PATCH", "H2D_PATCH_MANIFEST"):
        environ[key] = server.env[key]
    switch = ["switch", "our-model", "off"]
    _, code, output, error = ray_nodes.here(["status"], environ, None)
    assert (code, error) == (None, "") and "No process has written its state" in output
    assert ray_nodes.here(switch, environ, {})[1:] == (None, "", "")
    with server.running() as process:
        process("from h2d_patch.plugin import register\nregister()")
        name = process.state()["server"]
        assert ray_nodes.here(switch, environ, {"server": "another"})[1] is None
        assert ray_nodes.here(switch, environ, {"rank": 0})[1] is None
        _, code, output, error = ray_nodes.here([*switch, "--json"], environ, {"server": name})
        assert (code, error) == (0, "")
        assert json.loads(output)["taken"] is True
        assert process.state()["switches"] == {"our-model": False}
        _, code, output, _ = ray_nodes.here(["status", "--json"], environ, None)
        assert code == 0
        assert [one["pid"] for one in json.loads(output)["processes"]] == [process.pid]
