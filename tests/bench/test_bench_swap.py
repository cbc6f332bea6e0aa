"""`h2d-patch calibrate` and `h2d-patch bench swap`, with the CPU in the device's place and Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from h2d_patch.bench import heat_map, swap, swap_results  # noqa: E402
from h2d_patch.cli import main  # noqa: E402
from h2d_patch.copies import calibrate  # noqa: E402
from h2d_patch.copies.profile import BULK, DRIVER, TRITON, Choice  # noqa: E402
from h2d_patch.copies.profile_file import Cell, load  # noqa: E402

ON_CPU = ["--device", "cpu"]


def run(*arguments, interpret=True, **environ):
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "H2D_PATCH_PROFILE")}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-m", "h2d_patch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env | environ)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "swap.json"
    done = run("bench", "swap", *ON_CPU, "--quick", "--seconds", "2", "--json", str(path))
    return SimpleNamespace(path=path, status=done.returncode, out=done.stdout, err=done.stderr)


def test_every_arm_is_measured_in_every_cell(measured):
    assert measured.status == 0, measured.err
    result = json.loads(measured.path.read_text())
    assert {"commit", "machine", "versions", "time", "command", "key"} <= set(result)
    assert result["complete"] is True and result["problems"] == []
    assert len(result["rows"]) == 2 * 2 * 3  # directions, sizes, counts
    for row in result["rows"]:
        arms = {"driver batch", "driver", "triton 2", "triton 3", "chosen"}
        assert set(row["arms"]) == (arms if row["gpu_to_cpu"] else arms | {"upstream 12"})
        assert all(len(arm["us"]) >= 4 and arm["gbps"] >= 0 for arm in row["arms"].values())
        assert set(row["held"]) == (set(row["arms"]) if row["blocks"] >= 1024 else set())
        assert row["chosen"] in ("driver", "triton 2", "triton 3")
    assert set(result["one_copy"]) == {"CPU to GPU", "GPU to CPU"}
    assert {(row["gpu_to_cpu"], row["mixed"]) for row in result["host_time"]} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    for row in result["matmul"]["rows"]:
        assert set(row["arms"]) == {"alone", "driver batch", "triton 16", "chosen"} == set(row["saturated"]["arms"])
    assert result["profile"].startswith("calibrated in this run") and result["calibration"]


def test_a_result_is_shown_again_without_torch(measured):
    code = "import sys; sys.modules['torch'] = None; from h2d_patch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "swap", "--from", str(measured.path)]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert set(measured.out.splitlines()) == set(shown.stdout.splitlines())


def test_a_picture_is_drawn(measured, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "swap", "--from", str(measured.path), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_interrupted_says_so(measured, tmp_path, capsys):
    result = json.loads(measured.path.read_text()) | {"complete": False}
    (tmp_path / "cut.json").write_text(json.dumps(result))
    assert main(["bench", "swap", "--from", str(tmp_path / "cut.json")]) == 1
    assert "ended early, after 12 rows" in capsys.readouterr().err


def on_cpu_interpreted(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    from h2d_patch.copies import swap_kernel

    monkeypatch.setattr(swap_kernel, "copy_blocks", InterpretedFunction(swap_kernel._copy_blocks))
    monkeypatch.setattr(swap, "_upstream", lambda: None)
    monkeypatch.setattr(swap, "_MATMUL_ROUNDS", 1)


def test_what_was_measured_before_an_interruption_is_written(monkeypatch, tmp_path, capsys):
    on_cpu_interpreted(monkeypatch)
    measure, number = swap._Run.measure, iter(range(100))

    def interrupted(self, row, until):
        if next(number) == 3:
            raise KeyboardInterrupt
        measure(self, row, until)

    monkeypatch.setattr(swap._Run, "measure", interrupted)
    monkeypatch.setattr(swap._Run, "host_times", lambda self: None)
    monkeypatch.setattr(swap._Run, "beside_multiplications", lambda self: None)
    path = tmp_path / "swap.json"
    assert main(["bench", "swap", *ON_CPU, "--quick", "--seconds", "1", "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert (result["complete"], len(result["rows"])) == (False, 3)
    assert "ended early, after 3 rows" in capsys.readouterr().err


def test_a_part_that_fails_is_said_and_the_rest_measured(monkeypatch, tmp_path, capsys):
    on_cpu_interpreted(monkeypatch)

    def fail(self):
        raise RuntimeError("no memory")

    monkeypatch.setattr(swap._Run, "host_times", fail)
    monkeypatch.setattr(swap._Run, "beside_multiplications", lambda self: None)
    path = tmp_path / "swap.json"
    assert main(["bench", "swap", *ON_CPU, "--quick", "--seconds", "1", "--json", str(path)]) == 1
    assert "host time: RuntimeError: no memory" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["rows"]) == 12


def test_an_arm_that_copies_wrongly_is_left_out_and_exit_status_1(monkeypatch, tmp_path, capsys):
    on_cpu_interpreted(monkeypatch)
    arrives = calibrate.Ground.arrives
    monkeypatch.setattr(
        calibrate.Ground,
        "arrives",
        lambda self, batch, copy: (
            getattr(copy, "keywords", {}).get("choice") != Choice(TRITON, 3) and arrives(self, batch, copy)
        ),
    )
    monkeypatch.setattr(swap._Run, "host_times", lambda self: None)
    monkeypatch.setattr(swap._Run, "beside_multiplications", lambda self: None)
    path = tmp_path / "swap.json"
    assert main(["bench", "swap", *ON_CPU, "--quick", "--seconds", "1", "--json", str(path)]) == 1
    assert "triton 3, CPU to GPU: copied wrongly" in capsys.readouterr().err
    assert all("triton 3" not in row["arms"] for row in json.loads(path.read_text())["rows"])


@pytest.mark.parametrize("command", [["bench", "swap"], ["calibrate"]])
def test_without_a_gpu_one_line_says_so(command):
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    done = run(*command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "finds no GPU here" in done.stderr


@pytest.mark.parametrize("command", [["bench", "swap"], ["calibrate"]])
def test_on_the_cpu_without_the_interpreter_a_line_says_what_was_expected(command):
    done = run(*command, *ON_CPU, interpret=False)
    assert done.returncode == 1 and "TRITON_INTERPRET=1" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["bench", "swap"], ["calibrate"]])
@pytest.mark.parametrize("device", ["cuda:99", "meta", "no such"])
def test_a_device_that_is_not_there_is_named(command, device, capsys):
    assert main([*command, "--device", device]) == 2
    assert device in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--quick"], ["--seconds", "3"], ["--device", "cpu"], ["--json", "x"]])
def test_what_only_a_measurement_takes_is_refused_beside_a_result(measured, capsys, option):
    assert main(["bench", "swap", "--from", str(measured.path), *option]) == 2
    assert f"both --from and {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "1.5", "3601", "ten"])
def test_seconds_that_make_no_sense_are_wrong_usage(seconds, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "swap", "--seconds", seconds])
    assert stopped.value.code == 2 and "expected whole seconds" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_a_profile_that_can_be_no_file_is_wrong_usage(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", option, "."])
    assert stopped.value.code == 2 and "expected a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no JSON", "Expecting value"),
        ("[]", "it has no rows"),
        ('{"rows": []}', "it has no complete"),
        ('{"rows": [1], "profile": "", "driver_batch": "", "one_copy": {}, "host_time": [], "matmul": {"rows": []},'
         ' "problems": [], "complete": true}', "its rows are of another form"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_named(content, words, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["bench", "swap", "--from", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and words in said


def test_calibrate_stores_a_profile_and_shows_it(tmp_path):
    out, result = tmp_path / "made" / "profile.json", tmp_path / "result.json"
    done = run("calibrate", *ON_CPU, "--quick", "--out", str(out), "--json", str(result))
    assert done.returncode == 0, done.stderr
    assert f"stored in {out}" in done.stdout and "CPU to GPU" in done.stdout
    measured = load(out)
    assert measured.key.gpu == "CPU" and measured.about["quick"] is True and measured.cells
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == len(measured.cells) and all(arm["us"] for arm in rows[0]["arms"].values())


def test_what_was_measured_on_the_cpu_is_stored_only_where_that_was_said(tmp_path):
    done = run("calibrate", *ON_CPU, "--quick", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and "not stored" in done.stdout and not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_stored_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    on_cpu_interpreted(monkeypatch)
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert main(["calibrate", *ON_CPU, "--out", str(tmp_path / "file" / "profile.json")]) == 2
    assert "expected a file to write" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert main(["calibrate", *ON_CPU, "--out", str(tmp_path / "profile.json")]) == 2
    assert "profile.json: Permission denied; expected a file to write" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_links_in_a_circle_are_said_before_anything_is_measured(option, tmp_path, monkeypatch, capsys):
    on_cpu_interpreted(monkeypatch)
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("measured"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["calibrate", *ON_CPU, option, str(tmp_path / "loop")]) == 2
    assert "loop: Too many levels of symbolic links" in capsys.readouterr().err and (tmp_path / "loop").is_symlink()


def test_a_profile_takes_the_place_of_no_pipe_or_device(tmp_path, monkeypatch, capsys):
    on_cpu_interpreted(monkeypatch)
    os.mkfifo(tmp_path / "pipe")
    assert main(["calibrate", *ON_CPU, "--out", str(tmp_path / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().err and (tmp_path / "pipe").is_fifo()


def test_what_was_measured_is_stored_though_nobody_reads_what_is_said_of_it(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    out = tmp_path / "profile.json"
    command = [sys.executable, "-m", "h2d_patch", "calibrate", *ON_CPU, "--quick", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as started:
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 1 and load(out).cells


def test_the_rows_may_go_down_a_pipe():
    done = run("calibrate", *ON_CPU, "--quick", "--json", "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert json.JSONDecoder().raw_decode(done.stdout)[0]["rows"]


def test_an_interruption_of_any_command_is_a_line(monkeypatch, capsys):
    from h2d_patch import cli

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_device_with_kernels", interrupted)
    assert main(["bench", "swap"]) == 1 and main(["calibrate"]) == 1
    assert capsys.readouterr().err == "h2d-patch: interrupted\n" * 2


def test_the_heat_map_names_choice_and_speed():
    cells = [
        Cell(False, 8192, 64, {Choice(DRIVER): 5.0, Choice(BULK, 8): 9.0}),
        Cell(False, 1 << 20, 64, {Choice(DRIVER): 50.0, Choice(BULK, 8): 50.0}),
    ]
    text = "\n".join(heat_map.lines(cells))
    assert "b8   9.0" in text and "  d  50.0█" in text and "8 KiB" in text and "1 MiB" in text
    assert "GPU to CPU" not in text


def test_the_order_of_the_arms_is_that_of_the_measurement(measured):
    arms = swap_results.arms_of(json.loads(measured.path.read_text()))
    assert arms[0] == "driver batch" and "chosen" in arms


@pytest.mark.parametrize("words", [64, 1024])
def test_the_kernel_with_upstream_s_settings_compiles_for_a_gpu(words):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from h2d_patch.bench import upstream_swap

    if type(upstream_swap._kernel).__name__ == "InterpretedFunction":
        pytest.skip("TRITON_INTERPRET is set")
    signature = {"reads": "*i64", "writes": "*i64", "lengths": "*i64", "blocks": "i32", "WORDS": "constexpr"}
    source = ASTSource(fn=upstream_swap._kernel, signature=signature, constexprs={"WORDS": words})
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
