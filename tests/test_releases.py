"""The table of releases: what it says of one, and that it is the one which the manifest and the sources make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from h2d_patch import releases
from h2d_patch.manifest import load
from h2d_patch.patching.recognise import Verdict
from h2d_patch.releases import FILE, Release, Releases, named, parse, shipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import releases as tool  # noqa: E402

# Those that other tests read, too.
FETCHED = ["0.11.0", "0.14.1", "0.19.1", "0.20.2", "0.22.1", "0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.33.0"]
A, U, N, R = Verdict.APPLIES, Verdict.UPSTREAM, Verdict.ABSENT, Verdict.REFUSED
STALE = "the table is not what patches.toml makes of the releases; `make releases` makes it anew"


def made(*rows: tuple[str, str | None, Verdict], name: str = "fix m:f") -> Releases:
    return Releases({Version(v): Release({"m:f": source}, {name: verdict}) for v, source, verdict in rows})


TABLE = made(("0.8.0", None, N), ("0.9.0", "aa", A), ("0.10.0", "bb", U))


def test_the_table_has_every_target_and_no_official_release_is_refused() -> None:
    names = [name for name, _ in named(load().targets())]
    functions = {target.function for _, target in named(load().targets())}
    table = shipped()
    assert not table.problem and len(table.known) >= 50
    for version, release in table.known.items():
        assert list(release.verdicts) == names and set(release.sources) == functions, STALE
        assert R not in release.verdicts.values(), version


def test_the_table_and_the_page_are_as_the_tool_writes_them() -> None:
    assert tool.dump(shipped()) == FILE.read_text(encoding="utf-8"), STALE
    assert tool.page(load(), shipped()) == tool.PAGE.read_text(encoding="utf-8"), STALE


@pytest.mark.releases
@pytest.mark.parametrize("release", FETCHED)
def test_the_table_says_what_the_release_s_own_source_does(release: str) -> None:
    looked = tool.look_at(release)
    assert not looked.problem and looked.seconds < tool.MOST_S
    assert tool.table(load(), [looked]).known[Version(release)] == shipped().known[Version(release)], STALE


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("0.9.0", ""),
        ("0.9.0+cpu", ""),
        ("0.11.0", "vLLM 0.11.0 is new (later than 0.10.0, the last known here): judged by its sources alone"),
        ("0.10.1.dev3+g5", "vLLM 0.10.1.dev3+g5 is new"),
        ("0.9.1", "vLLM 0.9.1 is none of the releases known here (0.8.0 to 0.10.0): judged by its sources alone"),
        ("0.9.0rc1", "is none of the releases"),
        ("0.7.3", "is none of the releases"),
        ("dev", "cannot be told (found 'dev')"),
        (None, "cannot be told"),
    ],
)
def test_what_is_said_of_a_release(release: str | None, says: str) -> None:
    assert says in TABLE.about(release) and bool(says) == bool(TABLE.about(release))


@pytest.mark.parametrize(
    ("release", "source", "says"),
    [
        ("0.9.0", "aa", ""),
        ("0.9.0+vendor", "aa", ""),
        ("0.9.0+vendor", "cc", "its source differs from the release's own, vLLM 0.9.0"),
        ("0.9.0", None, "differs from the release's own: vLLM 0.9.0 has this function"),
        ("0.8.0", "aa", "differs from the release's own: vLLM 0.8.0 has no such function"),
        ("0.8.0", None, ""),
        ("0.9.1", "cc", ""),
        (None, "cc", ""),
    ],
)
def test_a_function_is_compared_with_the_release_s_own(release: str | None, source: str | None, says: str) -> None:
    assert TABLE.difference("m:f", source, Version(release) if release else None) == says
    assert not TABLE.difference("a_user_s:own", source, Version(release) if release else None)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 2}', '{"schema": 1, "sources": {}}', "\xff"])
def test_a_damaged_table_is_said_and_decides_nothing(tmp_path: Path, monkeypatch, text: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "releases.json"
    path.write_text(text, encoding="latin-1")
    monkeypatch.setattr(releases, "FILE", path)
    table = shipped.__wrapped__()
    assert "releases.json cannot be read" in table.about("0.22.1") and "\n" not in table.about("0.22.1")
    assert not table.difference("m:f", "cc", Version("0.22.1"))


def test_the_table_is_the_same_when_written_and_read_again() -> None:
    table = made(("0.9.0", "aa", A), ("0.10.0", "bb", U), ("0.8.0", None, N), ("0.11.0", "aa", R))
    again = parse(tool.dump(table))
    assert again.known == table.known and list(again.known) == sorted(table.known)
    longer = made(
        *[(str(v), r.sources["m:f"], r.verdicts["fix m:f"]) for v, r in again.known.items()], ("0.12.0", "bb", U)
    )
    before, after = (tool.dump(each).splitlines() for each in (again, longer))
    assert len(after) == len(before) + 1, "a new release is a new line"
    assert len(set(after) - set(before)) == 2, "and a comma behind the last"


def test_what_changed_since_the_table_before_is_said() -> None:
    assert tool.changes(Releases(), TABLE) == ["there was none"]
    assert tool.changes(TABLE, TABLE) == []
    after = made(("0.9.0", "aa", N), ("0.10.0", "cc", U), ("0.11.0", "cc", R))
    assert tool.changes(TABLE, after) == [
        "release gone: 0.8.0",
        "new release 0.11.0: 1 refused",
        "  fix m:f: upstream in 0.10.0, refused here",
        "fix m:f: applies → absent in 0.9.0",
        "m:f: another source than before in 0.10.0",
    ]
    renamed = made(("0.9.0", "aa", A), name="other m:f")
    assert tool.changes(TABLE, renamed)[:2] == ["target gone: fix m:f", "target new: other m:f"]


def test_runs_of_releases_are_written_as_spans() -> None:
    versions = [Version(text) for text in ("0.8.0", "0.8.1", "0.9.0", "0.10.0")]
    assert tool.spans(versions, versions) == "0.8.0–0.10.0"
    assert tool.spans([versions[0], versions[1], versions[3]], versions) == "0.8.0–0.8.1, 0.10.0"
    assert tool.spans([], versions) == ""


def test_final_releases_of_the_index_are_looked_at_from_0_8_0_on(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    said = "vllm (0.11.0)\nAvailable versions: 0.11.0, 0.11.0rc1, 0.10.1.1, 0.8.5.post1, 0.8.0, 0.7.3\n"
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    assert tool.on_the_index() == ["0.8.0", "0.8.5.post1", "0.10.1.1", "0.11.0"]
    said = "nothing of the kind"
    with pytest.raises(tool.FetchFailed, match="the package index"):
        tool.on_the_index()


def test_a_yanked_release_and_one_that_cannot_be_had_are_told_apart(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("H2D_PATCH_SOURCES", str(tmp_path))
    assert "not in" in tool.look_at("0.99.0", offline=True).problem
    (tmp_path / "vllm-0.98.0").mkdir()
    (tmp_path / "vllm-0.98.0/yanked.txt").write_text("a yanked version")
    assert tool.look_at("0.98.0", offline=True).yanked


def test_nothing_is_written_where_a_release_cannot_be_had(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("H2D_PATCH_SOURCES", str(tmp_path))
    monkeypatch.setattr(tool, "FILE", tmp_path / "releases.json")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "releases.md")
    (tmp_path / "releases.json").write_text(before := tool.dump(TABLE))
    assert tool.main(["--offline", "--jobs", "1"]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert (tmp_path / "releases.json").read_text() == before and not (tmp_path / "releases.md").exists()


def test_the_table_is_small() -> None:
    assert FILE.stat().st_size < 64 << 10
    assert json.loads(FILE.read_text())["schema"] == releases.SCHEMA
