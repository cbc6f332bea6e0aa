"""`h2d-patch bench copies`, with the CPU in the device's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from h2d_patch import copies  # noqa: E402
from h2d_patch.bench import cases  # noqa: E402
from h2d_patch.bench import copies as measuring  # noqa: E402
from h2d_patch.cli import main  # noqa: E402

ON_CPU = ["bench", "copies", "--device", "cpu", "--quick", "--repetitions"]
WITHOUT = "import sys; sys.modules[{!r}] = None; from h2d_patch.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "copies.json"
    done = subprocess.run(
        [sys.executable, "-m", "h2d_patch", *ON_CPU, "7", "--json", str(path)], capture_output=True, text=True
    )
    return SimpleNamespace(path=path, status=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture
def few_cases(monkeypatch):
    """Measure these, and little else."""

    def use(*chosen):
        monkeypatch.setattr(measuring, "all_cases", lambda quick: iter(chosen))
        monkeypatch.setattr(measuring, "_ROW_COPIES", 2)
        monkeypatch.setattr(measuring, "_OTHER_BYTES", 1 << 20)

    return use


def without(module, *arguments):
    return subprocess.run([sys.executable, "-c", WITHOUT.format(module), *arguments], capture_output=True, text=True)


def test_every_form_is_measured_at_every_depth_and_ours_keeps_the_snapshot(measured):
    assert measured.status == 0, measured.err
    result = json.loads(measured.path.read_text())
    assert {"commit", "machine", "versions", "time", "command"} <= set(result)
    assert result["complete"] is True
    kinds = {"pageable", "gapped", "transposed", "transposed gapped", "converted", "mrope", "nested", "cat"}
    assert {row["kind"] for row in result["rows"] if not row["asynchronous"]} == kinds
    assert len({row["case"] for row in result["rows"]}) == len(result["rows"])
    for row in result["rows"]:
        small = row["bytes"] <= 1 << 20
        for ms, number in {"0": 7 if small else 4, "2": 3 if small else 2, "20": 2 if small else 1}.items():
            assert set(row["queued"][ms]) == {"original", "upstream", "ours"}
            assert all(len(arm["us"]) == number for arm in row["queued"][ms].values()), row["case"]
            ours = row["queued"][ms]["ours"]
            assert ours["snapshot_kept"] and ours["fallbacks"] == 0 and ours["calls"] >= number
    assert [len(rounds) for rounds in result["in_a_row"]["rounds"].values()] == [3, 3, 3]
    assert all(len(one["us"]) == 200 for one in result["in_a_row"]["rounds"]["ours"])
    assert result["other_stream_busy"]["rows"]


def test_a_list_of_repetitions_takes_one_line(measured):
    assert '"us": [' in measured.path.read_text()
    assert all(line.count("[") == line.count("]") for line in measured.path.read_text().splitlines() if '"us"' in line)


def test_a_result_is_shown_again_as_it_was_shown_and_without_torch(measured):
    shown = without("torch", "bench", "copies", "--from", str(measured.path))
    assert (shown.returncode, shown.stdout) == (0, measured.out)
    assert "M-RoPE [3, :2048]" in shown.stdout


def test_a_picture_is_drawn(measured, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "copies", "--from", str(measured.path), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured(tmp_path):
    done = without("matplotlib", *ON_CPU, "1", "--plot", str(tmp_path / "p.png"))
    assert done.returncode == 2 and "pip install matplotlib" in done.stderr and not done.stdout


def test_without_torch_one_line_says_so():
    done = without("torch", "bench", "copies")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "torch" in done.stderr


@pytest.mark.parametrize("device", ["cuda:99", "meta", "no such"])
def test_a_device_that_is_not_there_is_named(device, capsys):
    assert main(["bench", "copies", "--device", device]) == 2
    assert device in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"rows": [{"queued": {"0": {"ours": {}}}}]}'])
def test_a_file_that_is_no_result_is_named(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["bench", "copies", "--from", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, few_cases, capsys):
    few_cases(cases.Case("never", "pageable", 1, lambda device, ours: pytest.fail("measured")))
    (tmp_path / "file").write_text("")
    assert main([*ON_CPU, "1", "--json", str(tmp_path / "file" / "copies.json")]) == 2
    assert "expected a file to write" in capsys.readouterr().err


def test_a_lost_snapshot_is_exit_status_1(few_cases, monkeypatch, capsys):
    few_cases(cases.pageable(4096))
    # On the CPU the original hands back the live source itself.
    monkeypatch.setattr(copies.to_device, "bind", lambda ledger: lambda source, *args: source.to(*args))
    assert main([*ON_CPU, "1"]) == 1
    assert "pageable 4 KiB, 20 ms queued: ours lost the snapshot" in capsys.readouterr().err


def test_a_copy_that_changes_one_element_is_exit_status_1(few_cases, monkeypatch, capsys):
    few_cases(cases.pageable(4096))

    def bind(ledger):
        def changed(source, *args):
            result = source.to(*args, copy=True)
            result[-1] += 1
            return result

        return changed

    monkeypatch.setattr(copies.to_device, "bind", bind)
    assert main([*ON_CPU, "1"]) == 1
    assert "ours lost the snapshot" in capsys.readouterr().err


def test_a_fallback_is_exit_status_1(few_cases, monkeypatch, capsys):
    few_cases(cases.pageable(4 << 20))
    monkeypatch.setenv("H2D_PATCH_PINNED_MB", "1")
    assert main([*ON_CPU, "1"]) == 1
    assert "ours fell back 1 times: larger than the staging region" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_measured_before_it_ended_early_is_written(error, few_cases, tmp_path, capsys):
    def end(device, ours):
        raise error

    few_cases(cases.pageable(4096), cases.Case("the end", "pageable", 1, end))
    path = tmp_path / "copies.json"
    if error is KeyboardInterrupt:
        assert main([*ON_CPU, "1", "--json", str(path)]) == 1
        assert "ended early, after 1 cases" in capsys.readouterr().err
    else:
        with pytest.raises(error):
            main([*ON_CPU, "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert (result["complete"], [row["case"] for row in result["rows"]]) == (False, ["pageable 4 KiB"])
    assert [path.name] == [left.name for left in tmp_path.iterdir()]


def test_no_staging_region_is_exit_status_1_with_the_reason(monkeypatch, capsys):
    def none(*args):
        raise measuring.NoRing("out of memory")

    monkeypatch.setattr(measuring, "_open_ring", none)
    assert main([*ON_CPU, "1"]) == 1
    assert "no staging region: out of memory" in capsys.readouterr().err


def test_the_99th_percentile_is_a_measured_value():
    def summary(number):
        return measuring._summary([SimpleNamespace(us=float(n), kept=True, pinned=1) for n in range(1, number + 1)])

    assert [summary(number)["p99_us"] for number in (9, 60, 100, 200)] == [9, 60, 99, 198]
    assert summary(9)["pinned_allocations"] == 9


def test_one_thread_and_the_collector_are_as_they_were_afterwards(few_cases):
    import gc

    few_cases(cases.pageable(4096))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        main([*ON_CPU, "1"])
        assert (torch.get_num_threads(), gc.isenabled()) == (2, True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("version", [0, 5, 126, 127, 130])
def test_sources_differ_everywhere_from_one_version_to_the_next_and_the_device_follows(version):
    from h2d_patch.bench.device import Cpu

    sources = cases.Sources([torch.empty(40, 30)[:, :20].t(), torch.empty(7, dtype=torch.int64)], Cpu())
    for _ in range(version):
        sources.overwrite()
        sources.follow()
    before = [tensor.clone() for tensor in sources.host]
    assert all(map(torch.equal, before, sources.on_device))
    sources.overwrite()
    assert all(bool((old != new).all()) for old, new in zip(before, sources.host, strict=True))
    assert all(map(torch.equal, before, sources.on_device))


def test_a_commit_is_only_named_from_the_repository_that_the_package_lies_in(monkeypatch, tmp_path):
    from h2d_patch.bench import provenance

    monkeypatch.delenv("H2D_PATCH_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(provenance, "ROOT", Path(tmp_path / "site-packages"))
    assert provenance.provenance()["commit"] == "unknown"
    monkeypatch.setenv("H2D_PATCH_COMMIT", "abc")
    assert provenance.provenance()["commit"] == "abc"


def test_a_termination_ends_a_measurement_as_an_interruption_does():
    import os
    import signal

    from h2d_patch.cli import _terminated_like_interrupted

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), _terminated_like_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "option", [["--quick"], ["--repetitions", "3"], ["--device", "cpu"], ["--own-stream"], ["--json", "x"]]
)
def test_what_only_a_measurement_takes_is_refused_beside_a_result(measured, capsys, option):
    assert main(["bench", "copies", "--from", str(measured.path), *option]) == 2
    assert f"both --from and {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot", "--from"])
@pytest.mark.parametrize("where", ["", "."])
def test_a_name_that_can_be_no_file_is_wrong_usage(capsys, option, where):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "copies", option, where])
    assert stopped.value.code == 2 and "expected a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "it has no rows"),
        ("[]", "it has no rows"),
        ('{"rows": 1}', "it has no rows"),
        ('{"rows": [1]}', "its rows are of another form"),
        ('{"rows": [{"case": "a", "queued": {"0": {"original": {}}}}]}', "a, 0 ms queued, has no original"),
    ],
)
def test_a_file_of_another_kind_says_what_is_wrong_with_it(tmp_path, capsys, content, words):
    (tmp_path / "other.json").write_text(content)
    assert main(["bench", "copies", "--from", str(tmp_path / "other.json")]) == 2
    assert words in capsys.readouterr().err


def test_a_result_is_written_where_it_was_said_and_nowhere_else(tmp_path):
    from h2d_patch.bench.provenance import write

    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("old")
    link.symlink_to(kept)
    write(link, {"new": 1}, {})
    assert link.is_symlink() and json.loads(kept.read_text()) == {"new": 1}
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "no/such/folder.json", {}, {})
    device = Path("/dev/null")
    before = device.stat().st_ino
    write(device, {"new": 1}, {})
    assert device.stat().st_ino == before and device.is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "link.json"]
