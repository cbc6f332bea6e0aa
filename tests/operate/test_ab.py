"""`h2d-patch ab` against a process with a fix in it: what it finds, and that the fix is as it was, however it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_server import Running, Server

FIX = "our-model"

# Serves the metrics of a server, and requests that take `seconds[on]`; `calls` only every so often.
SERVING = """
import sys, threading, time
import prometheus_client, torch
from h2d_patch.plugin import register
register()
import our_model
from h2d_patch import process

registry = prometheus_client.CollectorRegistry()
success = prometheus_client.Counter("vllm:request_success", "x", registry=registry)
tokens = prometheus_client.Counter("vllm:generation_tokens", "x", registry=registry)
bounds = [0.005, 0.01, 0.02, 0.04]
ttft = prometheus_client.Histogram("vllm:time_to_first_token_seconds", "x", registry=registry, buckets=bounds)
itl = prometheus_client.Histogram("vllm:inter_token_latency_seconds", "x", registry=registry, buckets=bounds)
seconds = {True: 0.01, False: 0.01}
model = our_model.Model()
patch = process.current.patches[-2]

def serve():
    while True:
        start = time.perf_counter()
        model.forward(torch.ones(3))
        time.sleep(seconds[patch.site.on])
        ttft.observe(time.perf_counter() - start)
        itl.observe((time.perf_counter() - start) / 2)
        success.inc()
        tokens.inc(3)

threading.Thread(target=serve, daemon=True).start()
http = prometheus_client.start_http_server(0, "127.0.0.1", registry)[0]
port = http.server_port
"""


class Serving:
    """A running server, and what an operator does beside it."""

    def __init__(self, server: Server, running: Running) -> None:
        self.server = server
        self.running = running
        running(SERVING)
        self.url = f"http://127.0.0.1:{running('_ = port')}"

    def takes(self, off: float, on: float) -> None:
        """Seconds of a request in each arm."""
        self.running(f"seconds.update({{False: {off}, True: {on}}})")

    def is_on(self) -> bool:
        return bool(self.running("_ = patch.site.on and not patch.site.timed"))

    def switch(self, word: str) -> None:
        assert self.server.status("switch", FIX, word).returncode == 0

    def command(self, *arguments: str) -> list[str]:
        ours = [sys.executable, "-m", "h2d_patch.cli", "ab", FIX, "--url", self.url, "--settle", "200ms"]
        return [*ours, "--slice", "1s", *arguments]

    def ab(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.server.env, capture_output=True, text=True, timeout=90, check=False
        )

    def begun(self, *arguments: str) -> subprocess.Popen[str]:
        """An A/B in whose first slice we are."""
        process = subprocess.Popen(
            self.command(*arguments), env=self.server.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        deadline = time.monotonic() + 30
        while self.running("_ = (process.current.state()['ab'] or {}).get('on')") is None:
            assert time.monotonic() < deadline and process.poll() is None, process.stdout and process.stdout.read()
            time.sleep(0.05)
        return process

    def eventually_as(self, on: bool, seconds: float = 3.0) -> bool:
        deadline = time.monotonic() + seconds
        while not (there := self.running("_ = [patch.site.timed, patch.site.on]") == [False, on]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return bool(there)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    server = Server(tmp_path_factory.mktemp("serving"))
    with server.running() as running:
        yield Serving(server, running)


@pytest.fixture(autouse=True)
def as_at_first(serving: Serving) -> Iterator[None]:
    serving.takes(0.01, 0.01)
    yield
    serving.switch("on")


def test_a_difference_is_found_in_every_measure_and_written(serving: Serving, tmp_path: Path) -> None:
    serving.takes(off=0.04, on=0.01)
    done = serving.ab("--slices", "8", "--json", str(tmp_path / "ab.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "ab.json").read_text())
    assert found["complete"] and found["restored"] and found["pairs"] >= 3
    for measure, low, high in (("requests_per_s", 2.6, 4.2), ("tokens_per_s", 2.6, 4.2), ("ttft_s", 0.23, 0.4)):
        ratio = found["on_against_off"][measure]
        assert ratio["differs"] and low < ratio["ratio"] < high, (measure, ratio)
    assert "requests/s" in done.stdout and "more with the fix" in done.stdout and "less with the fix" in done.stdout
    arms = found["arms"]
    assert arms["on"]["count"] > 2.6 * arms["off"]["count"] > 100
    assert all(sum(arm["buckets"]) == arm["count"] and arm["seconds"] > 0 for arm in arms.values())
    assert [one["on"] for one in found["measured"]] == [bool(n.bit_count() % 2) for n in range(8)]
    # What the process says of a slice and what the server's metrics say are of the same slice.
    kept = [one for one in found["measured"] if not one["left_out"]]
    for on in (True, False):
        calls, rates = ([one[key] for one in kept if one["on"] is on] for key in ("calls", "requests_per_s"))
        assert sum(calls) == pytest.approx(0.8 * sum(rates), rel=0.2)
    assert serving.is_on()


def test_where_both_arms_are_the_original_no_difference_is_seen(serving: Serving) -> None:
    serving.takes(off=0.01, on=0.002)
    serving.switch("off")
    done = serving.ab("--slices", "10", "--same")
    if "with the fix" in done.stdout:  # as one report in twenty does
        done = serving.ab("--slices", "10", "--same")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no difference seen") == 5 and "with the fix" not in done.stdout, done.stdout
    assert "both arms the original" in done.stdout
    assert serving.eventually_as(False)


@pytest.mark.parametrize("before", ["on", "off"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_the_switch_is_as_it_was_and_the_command_has_ended(
    serving: Serving, before: str, number: signal.Signals, tmp_path: Path
) -> None:
    serving.switch(before)
    alive = tmp_path / "alive"
    load = f"import time\nwhile True:\n    open({str(alive)!r}, 'w').close()\n    time.sleep(0.05)"
    process = serving.begun("--", sys.executable, "-c", load)
    time.sleep(1.2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "It ended early: interrupted" in output
    assert serving.is_on() is (before == "on")
    time.sleep(0.3)
    assert time.time() - alive.stat().st_mtime > 0.2


def test_a_command_s_failure_is_reported_and_ends_the_a_b(serving: Serving) -> None:
    done = serving.ab("--", sys.executable, "-c", "import time, sys; time.sleep(3); sys.exit(7)")
    assert done.returncode == 1 and "exited with 7" in done.stdout, done.stdout + done.stderr
    assert "No answer: too few pairs" in done.stdout and "COMMAND must" not in done.stdout
    assert serving.is_on()


def test_a_command_that_cannot_be_run_is_said(serving: Serving) -> None:
    done = serving.ab("--", "/no/such/load")
    assert done.returncode == 2 and "/no/such/load: No such file or directory" in done.stderr
    assert serving.is_on()


def test_the_a_b_lasts_as_long_as_its_command(serving: Serving, tmp_path: Path) -> None:
    report = tmp_path / "ab.json"
    done = serving.ab("--json", str(report), "--", sys.executable, "-c", "import time; time.sleep(10)")
    found = json.loads(report.read_text())
    assert done.returncode == 0 and found["exit_status"] == 0, done.stdout + done.stderr
    assert 6 <= len(found["measured"]) <= 10


def test_an_a_b_whose_measurer_is_killed_ends_by_itself(serving: Serving) -> None:
    process = serving.begun("--slices", "100")
    process.kill()
    process.wait()
    assert serving.eventually_as(True, seconds=8)
    done = serving.ab("--slices", "6")  # what it left does not stand in the way
    assert "6 slices" in done.stdout, done.stdout + done.stderr


def test_an_a_b_that_ended_while_its_measurer_stood_still_is_not_measured_on(serving: Serving) -> None:
    process = serving.begun("--slices", "100")
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.5)
    assert serving.eventually_as(True)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "its end was not put off in time" in output, output
    assert serving.is_on()


def test_where_the_run_directory_can_no_longer_be_used_what_was_measured_is_kept(
    serving: Serving, tmp_path: Path
) -> None:
    report, run_dir = tmp_path / "ab.json", Path(serving.server.env["H2D_PATCH_RUN_DIR"])
    process = serving.begun("--slices", "100", "--json", str(report))
    time.sleep(2.5)
    try:
        run_dir.chmod(0o777)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 1 and "can be written by others" in output, output
        found = json.loads(report.read_text())
        assert len(found["measured"]) >= 2 and not found["restored"]
        assert serving.eventually_as(True, seconds=8)
    finally:
        run_dir.chmod(0o700)


def test_a_switch_by_hand_ends_the_a_b_and_is_what_stays(serving: Serving) -> None:
    process = serving.begun("--slices", "100")
    serving.switch("off")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "switched by hand" in output
    assert not serving.is_on() and serving.running("_ = process.current.state()['ab']") is None


def test_a_second_a_b_is_refused_and_disturbs_nothing(serving: Serving) -> None:
    process = serving.begun("--slices", "100")
    done = serving.ab("--slices", "6")
    assert done.returncode == 2 and "an A/B of our-model runs there already" in done.stderr
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert serving.is_on()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ab", "no-such-fix"), "server .* has no fix 'no-such-fix'; expected one of: our-model"),
        (("ab", FIX, "--server", "other"), "no live server other"),
        (("ab", FIX, "--url", "http://127.0.0.1:1"), "did not answer"),
        (("ab", FIX, "--url", "127.0.0.1:1"), "expected an address as in http://127.0.0.1:8000"),
        (("ab", FIX, "--slice", "100ms"), "expected 1 to 3600 s"),
        (("ab", FIX, "--slice", "2s", "--settle", "3s"), "expected less than a slice"),
        (("ab", FIX, "--slice", "soon"), "expected a time, as 30s or 2m"),
        (("ab", FIX, "--slices", "4"), "^h2d-patch: ab --slices 4; expected 6 or more: an interval needs 3 pairs.*\n$"),
        (("ab", FIX, "--slices", "3", "--", "true"), "ab --slices 4; expected 6 or more"),
    ],
)
def test_wrong_usage_is_said_and_changes_nothing(serving: Serving, arguments: tuple[str, ...], says: str) -> None:
    done = serving.server.status(*arguments)
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr
    assert serving.is_on()


def test_without_metrics_host_times_are_compared(serving: Serving) -> None:
    command = [sys.executable, "-m", "h2d_patch.cli", "ab", FIX, "--slice", "1s", "--slices", "8"]
    done = subprocess.run(command, env=serving.server.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "only host times are measured" in done.stdout, done.stdout + done.stderr
    assert "host time a call" in done.stdout and "requests/s" not in done.stdout
    said, *slices = done.stderr.splitlines()
    assert said.startswith("h2d-patch: ab: only host times are measured") and slices[0].startswith("slice 0 ")


def test_a_fix_that_no_process_has_loaded_is_refused_before_the_first_slice(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running() as running:
        running("from h2d_patch.plugin import register\nregister()\nimport time\ntime.sleep(1.5)")
        done = server.status("ab", FIX, "--slice", "1s", "--slices", "6")
        assert done.returncode == 2 and not done.stdout, done.stdout
        (line,) = done.stderr.splitlines()
        assert f"{FIX} is loaded in no process of server" in line and "none has imported our_model, which" in line
        running("import our_model")
        assert "A/B of" in server.status("ab", FIX, "--slice", "1s", "--slices", "6").stdout


def test_a_command_that_is_too_short_is_said_to_be_so(serving: Serving) -> None:
    done = serving.ab("--", sys.executable, "-c", "import time; time.sleep(4)")
    assert done.returncode == 1, done.stdout
    assert re.search(r"too few pairs of slices, [01] of 3\. COMMAND must last 6 slices, 8 s, or", done.stdout), (
        done.stdout
    )


def test_the_environment_s_a_b_alternates_until_someone_switches_by_hand(serving: Serving, tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running(H2D_PATCH_AB=f"{FIX}:1s:100ms") as running:
        running("from h2d_patch.plugin import register\nregister()\nimport our_model\nfrom h2d_patch import process")
        deadline = time.monotonic() + 20
        while len(running.state()["ab"]["slices"]) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        state = running.state()["ab"]
        done = [one for one in state["slices"] if not one["left_out"]]
        assert {one["on"] for one in done} == {True, False} and state["start"] == 0
        assert server.status("switch", FIX, "off").returncode == 0
        assert running.state()["ab"] is None
        assert running("_ = process.current.patches[-2].site.on") is False


def test_a_fix_that_fails_meanwhile_ends_the_a_b(serving: Serving, tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running() as running:
        one = Serving(server, running)
        process = one.begun("--slices", "100")
        running("patch.site.failed(ValueError('ours'))")
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 1 and "our-model has failed in process" in output
        assert running("_ = patch.site.on") is False
