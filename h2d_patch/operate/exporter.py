"""`h2d-patch export`: an HTTP server that Prometheus scrapes. Reads state files only; runs beside the servers."""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ..settings import ConfigurationError
from . import prometheus

LOOPBACK = "127.0.0.1"
_MOST_AT_ONCE = 32
_CLIENT_S = 10.0
_PAGE = b"h2d_patch: /metrics is for Prometheus.\n"


class Exporter(ThreadingHTTPServer):
    """Answers GET /metrics with what is in `directory` then. Raises OSError where `host` and `port` cannot be had."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, directory: Path, host: str, port: int) -> None:
        self.directory = directory
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__((host, port), _Scrape)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{shown}:{port}/metrics"

    def process_request(self, request: Any, client_address: Any) -> None:
        """A client too many is turned away: threads are bounded, however many hold on to a connection."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or said nothing in time, is its own affair."""

    def server_bind(self) -> None:
        """Without http.server's question to the name service for a name of ours."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Scrape(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server_version = "h2d-patch"
    sys_version = ""
    server: Exporter

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            try:
                body = prometheus.scrape(self.server.directory).encode()
            except Exception as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
                return
            self._answer(body, prometheus.CONTENT_TYPE)
        elif path == "/":
            self._answer(_PAGE, "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


def run(directory: Path, host: str, port: int, say: Callable[[str], None]) -> int:
    """Serves until SIGTERM or SIGINT. Raises ConfigurationError where `host` and `port` cannot be had."""
    try:
        server = Exporter(directory, host, port)
    except (OSError, UnicodeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"export --host {host} --port {port}: {why}; expected an address of this machine and a free port"
        ) from None
    stop: SimpleQueue[int] = SimpleQueue()  # an Event's lock may be held by whom the signal interrupts
    before = {number: signal.signal(number, lambda one, _: stop.put(one)) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=server.serve_forever, name="h2d_patch-export", daemon=True)
    thread.start()
    try:
        say(server.url)
        while thread.is_alive():
            with contextlib.suppress(Empty):
                stop.get(timeout=1.0)
                return 0
        print("h2d-patch: export: the server thread has ended", file=sys.stderr)
        return 1
    finally:
        server.shutdown()
        server.server_close()
        for number, handler in before.items():
            signal.signal(number, handler)
