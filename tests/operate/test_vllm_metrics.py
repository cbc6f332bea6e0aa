"""What is read of a server's /metrics, in the names of every release."""

from __future__ import annotations

import importlib.util
import re
import socket
import threading
from pathlib import Path

import pytest

from h2d_patch.operate import vllm_metrics
from h2d_patch.operate.vllm_metrics import Histogram, NoMetrics, Sample, addresses, parse
from h2d_patch.settings import ConfigurationError

prometheus_client = pytest.importorskip("prometheus_client")


def exposition(itl: tuple[str, ...], engines: int = 1) -> str:
    """As a server of that release gives it: 10 requests, 50 tokens, 4 first tokens of 0.1 s, 8 others, an engine."""
    registry = prometheus_client.CollectorRegistry()
    labels = ["model_name", "engine"]

    def histogram(name: str, number: int, seconds: float) -> None:
        made = prometheus_client.Histogram(name, "x", labels, registry=registry, buckets=[0.05, 0.2, 1])
        for engine in range(engines):
            for _ in range(number):
                made.labels("m", engine).observe(seconds)

    success = prometheus_client.Counter("vllm:request_success", "x", [*labels, "finished_reason"], registry=registry)
    tokens = prometheus_client.Counter("vllm:generation_tokens", "x", labels, registry=registry)
    for engine in range(engines):
        success.labels("m", engine, "stop").inc(4)
        success.labels("m", engine, "length").inc(6)
        tokens.labels("m", engine).inc(50)
    histogram("vllm:time_to_first_token_seconds", 4, 0.1)
    for name in itl:
        histogram(name, 8, 0.01)
    histogram("vllm:request_time_per_output_token_seconds", 3, 5.0)  # another one, of whole requests
    return str(prometheus_client.generate_latest(registry).decode())


@pytest.mark.parametrize(
    "itl",
    [
        ("vllm:time_per_output_token_seconds",),
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ("vllm:inter_token_latency_seconds",),
    ],
    ids=["up to 0.10.1", "0.10.2 and on", "without the old name"],
)
@pytest.mark.parametrize("engines", [1, 3])
def test_counters_and_histograms_are_read_by_the_names_of_each_release(itl: tuple[str, ...], engines: int) -> None:
    found = parse(exposition(itl, engines), "u", 7.0)
    assert (found.at, found.requests, found.tokens) == (7.0, 10 * engines, 50 * engines)
    assert found.ttft.count == 4 * engines and found.ttft.mean == pytest.approx(0.1)
    assert found.itl.count == 8 * engines and found.itl.mean == pytest.approx(0.01)
    assert found.ttft.below == {0.05: 0, 0.2: 4 * engines, 1.0: 4 * engines}


def test_the_installed_release_has_these_names() -> None:
    vllm = importlib.util.find_spec("vllm")  # not imported: tests before this one have left hooks for its modules
    if vllm is None or vllm.origin is None:
        pytest.skip("no vLLM here")
    loggers = Path(vllm.origin).with_name("v1") / "metrics/loggers.py"
    names = set(re.findall(r"vllm:[a-z0-9_]+", loggers.read_text(encoding="utf-8")))
    for family in (vllm_metrics.REQUESTS, vllm_metrics.TOKENS, vllm_metrics.TTFT, vllm_metrics.ITL):
        assert names & {*family, *(f"{name}_total" for name in family)}, family


def sample(**more: float) -> Sample:
    numbers = {"at": 10.0, "requests": 100.0, "tokens": 1000.0, **more}
    return Sample(**numbers, ttft=Histogram(4, 1.0, {0.1: 1, 0.5: 4}), itl=Histogram())


def test_what_was_counted_between_two_times_is_their_difference() -> None:
    between = sample(at=14.0, requests=110.0).since(sample())
    assert (between.at, between.requests, between.tokens) == (4.0, 10.0, 0.0)
    assert between.ttft.mean is None and between.ttft.below == {0.1: 0, 0.5: 0}


def test_counters_that_went_back_are_no_measurement() -> None:
    with pytest.raises(NoMetrics, match="it was started again"):
        sample(at=14.0, requests=3.0).since(sample())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# HELP python_info x\npython_info 1\n", "none of vLLM's metrics"),
        ("", "none of vLLM's metrics"),
        ("vllm:request_success_total{x 1\n", "expected metrics in Prometheus's text format"),
        ("vllm:generation_tokens_total many\n", "expected metrics in Prometheus's text format"),
    ],
)
def test_an_answer_that_is_no_server_s_is_said(text: str, says: str) -> None:
    with pytest.raises(NoMetrics, match="http://h/metrics") as error:
        parse(text, "http://h/metrics", 0.0)
    assert says in str(error.value)


def test_an_address_may_leave_the_path_out() -> None:
    urls = ["http://h:8000", "http://h:8000/", "https://h/other/metrics"]
    assert addresses(urls) == ["http://h:8000/metrics", "http://h:8000/metrics", "https://h/other/metrics"]
    for wrong in ("h:8000", "ftp://h", "", "http://", "http://[h"):
        with pytest.raises(ConfigurationError, match="ab --url"):
            addresses([wrong])


def test_api_servers_of_their_own_are_added_up() -> None:
    urls = []
    servers = []
    for requests in (3, 4):
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.Counter("vllm:request_success", "x", registry=registry).inc(requests)
        prometheus_client.Histogram("vllm:time_to_first_token_seconds", "x", registry=registry).observe(requests)
        servers.append(prometheus_client.start_http_server(0, "127.0.0.1", registry)[0])
        urls.append(f"http://127.0.0.1:{servers[-1].server_port}")
    found = vllm_metrics.sample(addresses(urls))
    assert (found.requests, found.ttft.count, found.ttft.mean) == (7, 2, 3.5)
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:generation_tokens_total 5\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nvllm:",
    ],
    ids=["another protocol", "half an answer", "half a chunk"],
)
def test_a_server_that_speaks_something_else_or_ends_within_its_answer_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        with pytest.raises(NoMetrics, match=f"{url} did not answer: "):
            vllm_metrics.sample([url])


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(NoMetrics, match="http://h:x/metrics did not answer: nonnumeric port"):
        vllm_metrics.sample(["http://h:x/metrics"])
    with pytest.raises(NoMetrics, match=r"http://127\.0\.0\.1:1/metrics did not answer: .*refused"):
        vllm_metrics.sample(["http://127.0.0.1:1/metrics"])
