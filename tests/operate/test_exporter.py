"""The exporter answers whoever scrapes it, on loopback unless told otherwise, and ends when it is told to."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from made_states import put, state, target

from h2d_patch.cli import main
from h2d_patch.operate import exporter
from h2d_patch.operate.exporter import Exporter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    put(directory, state(target(calls=7)))
    return directory


@pytest.fixture
def server(run_dir: Path) -> Iterator[Exporter]:
    server = Exporter(run_dir, exporter.LOOPBACK, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def test_it_serves_what_the_states_say_at_each_scrape(server: Exporter, run_dir: Path) -> None:
    assert "h2d_patch_calls_total{" in get(server.url) and " 7\n" in get(server.url)
    put(run_dir, state(target(calls=8)))
    assert " 8\n" in get(server.url)
    assert "/metrics" in get(server.url.removesuffix("metrics"))


def test_it_serves_nothing_else_and_says_nothing_of_itself(server: Exporter) -> None:
    host, port = server.server_address[:2]
    for method, path, status in (
        ("GET", "/etc/passwd", 404),
        ("GET", "/metrics/../x", 404),
        ("POST", "/metrics", 501),
        ("HEAD", "/metrics?x=1", 200),
    ):
        connection = http.client.HTTPConnection(str(host), int(port), timeout=20)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == status and (method != "HEAD" or not body)
        assert "Python" not in (answer.headers["Server"] or "")
        connection.close()


def test_many_scrapes_at_once_are_all_answered(server: Exporter, run_dir: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(get, [server.url] * 200))
    assert len(set(answers)) == 1 and " 7\n" in answers[0]


def test_a_state_damaged_between_two_scrapes_does_not_break_one(server: Exporter, run_dir: Path) -> None:
    (run_dir / "state-x-1.json").write_text('{"schema":')
    assert "h2d_patch_states_unreadable 1\n" in get(server.url)
    run_dir.chmod(0o777)
    assert "h2d_patch_run_dir_refused 1\n" in get(server.url)
    run_dir.chmod(0o700)
    assert "h2d_patch_calls_total{" in get(server.url)


def test_an_error_of_ours_is_an_error_of_one_scrape(server: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(exporter.prometheus, "scrape", lambda directory: 1 // 0)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(server.url)
    assert " 7\n" in get(server.url)


def test_clients_that_hold_on_are_bounded_and_let_go_of(server: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exporter._Scrape.timeout and exporter._Scrape.timeout <= 30
    monkeypatch.setattr(exporter._Scrape, "timeout", 1.0)
    before = threading.active_count()
    silent = [
        socket.create_connection(server.server_address[:2], timeout=20) for _ in range(exporter._MOST_AT_ONCE + 20)
    ]
    time.sleep(0.5)
    assert threading.active_count() - before <= exporter._MOST_AT_ONCE
    time.sleep(1.5)
    assert " 7\n" in get(server.url)
    for one in silent:
        one.close()


def test_a_client_for_whom_no_thread_is_to_be_had_takes_no_place(
    server: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(socketserver.ThreadingMixIn, "process_request", no_thread)
        for _ in range(exporter._MOST_AT_ONCE):
            with pytest.raises((OSError, http.client.HTTPException)):
                get(server.url)
    assert " 7\n" in get(server.url)


def exporting(run_dir: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "H2D_PATCH_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-m", "h2d_patch", "export", *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_when_told_to_also_with_a_client_on_the_line(
    run_dir: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2D_PATCH", "misspelt")  # the server's, whose metrics say that nothing is in
    monkeypatch.setenv("H2D_PATCH_MANIFEST", "/nowhere.toml")
    process, url = exporting(run_dir, "--port", "0")
    try:
        assert url.startswith("http://127.0.0.1:") and " 7\n" in get(url)
        port = int(url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)):
            process.send_signal(number)
            assert process.wait(10) == 0
        assert process.stderr is not None and process.stderr.read() == ""
        with pytest.raises(OSError):
            get(url)
    finally:
        process.kill()
        process.communicate()


def test_a_signal_that_comes_while_it_waits_for_one_does_not_hold_it_up(run_dir: Path) -> None:
    script = """
    import signal, threading
    from h2d_patch.cli import main
    wait = threading.Condition.wait
    def interrupted(self, timeout=None):
        if timeout == 1.0 and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGTERM)  # with the condition's lock held
        return wait(self, timeout)
    threading.Condition.wait = interrupted
    raise SystemExit(main(["export", "--port", "0"]))
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "H2D_PATCH_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("http://")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_it_listens_on_its_one_address_unless_told_otherwise(run_dir: Path) -> None:
    """127.0.0.2 is this machine as well, and another address."""
    for arguments, reached in (((), False), (("--host", "0.0.0.0"), True)):
        process, url = exporting(run_dir, "--port", "0", *arguments)
        try:
            port = int(url.split(":")[2].split("/")[0])
            if reached:
                assert " 7\n" in get(f"http://127.0.0.2:{port}/metrics")
            else:
                with pytest.raises(urllib.error.URLError, match="refused"):
                    get(f"http://127.0.0.2:{port}/metrics")
        finally:
            process.terminate()
            process.communicate()


def test_an_address_that_cannot_be_had_is_said_in_a_line(
    run_dir: Path, server: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.server_address[1]
    for arguments, says in (
        (("--port", str(port)), "Address already in use"),
        (("--port", "0", "--host", "256.1.1.1"), "--host 256.1.1.1"),
    ):
        assert main(["export", *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["export", "--port", "70000"])
    assert caught.value.code == 2


def test_it_serves_over_ipv6(run_dir: Path) -> None:
    try:
        server = Exporter(run_dir, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    assert server.url.startswith("http://[::1]:") and " 7\n" in get(server.url)
    server.shutdown()
    server.server_close()
