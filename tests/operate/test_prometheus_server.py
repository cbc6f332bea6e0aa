"""A real Prometheus scrapes the exporter, beside processes that come and go. `prometheus` on the PATH, or $PROMETHEUS."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_server import Server
from test_dashboard import all_expressions

from h2d_patch.operate.exporter import LOOPBACK, Exporter

BINARY = shutil.which(os.environ.get("PROMETHEUS", "prometheus"))
pytestmark = pytest.mark.skipif(BINARY is None, reason="no prometheus here")

CALLING = """
from h2d_patch.plugin import register
register()
import threading, time, torch, our_model
model = our_model.Model()
def call():
    while True:
        model.forward(torch.ones(3))
        time.sleep(0.01)
threading.Thread(target=call, daemon=True).start()
_ = 0
"""
MOST_EACH = 110  # calls a second
# Were these taken for new ones within the 5 s of a rate, it would be far above what three processes can do.
ENOUGH = 2500
CONFIGURATION = """
global: {{ scrape_interval: 1s }}
scrape_configs:
  - job_name: h2d_patch
    static_configs: [{{ targets: ["{target}"] }}]
"""


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://{LOOPBACK}:{port}/api/v1/"

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Raises OSError, also for an expression that it refuses."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}query?{query}", timeout=20) as answer:
            content = json.loads(answer.read())
        assert content["status"] == "success"
        found: list[dict[str, Any]] = content["data"]["result"]
        return found

    def number(self, expression: str) -> float:
        (only,) = self.ask(expression)
        return float(only["value"][1])

    def wait_for(self, expression: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.ask(expression):
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"never true: {expression}")


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[Prometheus]:
    (server.path / "run").mkdir(mode=0o700, exist_ok=True)
    exporter = Exporter(server.path / "run", LOOPBACK, 0)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(target=f"{LOOPBACK}:{exporter.server_port}"))
    arguments = [f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path}/data"]
    arguments += [f"--web.listen-address={LOOPBACK}:{port}", "--query.lookback-delta=3s"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(BINARY), *arguments], stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(30)
        exporter.shutdown()
        exporter.server_close()


def test_it_is_scraped_and_the_rate_has_no_fall_and_no_peak_when_processes_die(
    server: Server, prometheus: Prometheus
) -> None:
    with server.running(H2D_PATCH_SERVER="chat") as first:
        first(CALLING)
        with server.running(H2D_PATCH_SERVER="chat") as second:
            second(CALLING)
            prometheus.wait_for(f"sum(h2d_patch_calls_total) > {2 * ENOUGH}")
            for expression in all_expressions():
                prometheus.ask(expression)
            assert prometheus.number("sum(h2d_patch_processes)") == 2
            assert prometheus.number('count(h2d_patch_verdict_info{fix="our-model",verdict="active"})') == 2
            each = prometheus.number("max(rate(h2d_patch_calls_total[5s]))")
            assert 0 < each <= MOST_EACH
            took = prometheus.number("histogram_quantile(0.5, sum by (le) (rate(h2d_patch_host_seconds_bucket[5s])))")
            assert 0 < took < 0.01
            os.kill(second.pid, 9)
        prometheus.wait_for("sum(h2d_patch_processes) == 1")
        assert server.status("status", "--clean").returncode == 0
        prometheus.wait_for("count(h2d_patch_calls_total) == 1")
        with server.running(H2D_PATCH_SERVER="chat") as third:
            third(CALLING)
            prometheus.wait_for("sum(h2d_patch_processes) == 2")
            time.sleep(10)
            highest = prometheus.number("max_over_time(sum(rate(h2d_patch_calls_total[5s]))[2m:1s])")
            lowest = prometheus.number("min_over_time(sum(rate(h2d_patch_calls_total[5s]))[10s:1s])")
            assert highest < 3 * MOST_EACH and lowest > 0
            assert prometheus.number("h2d_patch_states_unreadable") == 0
