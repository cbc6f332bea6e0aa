"""Ray on this machine, on one host or on two: the second has a network, a name and a run directory of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import Live, environment, free_port

# From its own environment a process of Ray's takes no settings of ours: a worker has those that vLLM copies to it.
OWN = {"H2D_RAY_PLATFORM": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_usage_threshold": "1"}
RAY = os.environ.get("H2D_RAY")
NETWORK, HERE, THERE = "h2d_patch_ray", "10.231.7.1", "10.231.7.2"
OTHER_HOST = "otherhost"
START_S = 60


@dataclass(frozen=True)
class Cluster:
    """`environ` lets a process join it."""

    environ: dict[str, str]
    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def one_host(live: Live, gpus: int = 2, address: str | None = None) -> Iterator[Cluster]:
    """Ray's processes, which believe in that many GPUs."""
    assert RAY
    environ, port = {**OWN, "PYTHONPATH": RAY}, free_port()
    folder = tempfile.mkdtemp(prefix="h2d-ray-")  # a short name: there are sockets in it
    start = ["--head", "--port", str(port), "--temp-dir", folder, "--include-dashboard", "false"]
    if address:
        start += ["--node-ip-address", address]
        environ["VLLM_HOST_IP"] = address
    try:
        with _started(live, "ray", [*start, *_size(gpus)], environ) as process:
            found = re.search(r"Local node IP: ([\w.:]+)", (live.folder / "ray.log").read_text())
            assert found
            yield Cluster({**environ, "RAY_ADDRESS": f"{found[1]}:{port}"}, found[1], process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def two_hosts(live: Live, run_dir: Path) -> Iterator[Cluster]:
    """A GPU on either; needs root. `run_dir` is another directory there."""
    with _network(), one_host(live, 1, HERE) as cluster:
        run_dir.mkdir(mode=0o700)
        own = f"mount --make-rprivate / && mount -t tmpfs -o mode=700 none {run_dir}"
        enter = ["ip", "netns", "exec", NETWORK, "unshare", "--uts", "--mount", "sh", "-c"]
        enter += [f'hostname {OTHER_HOST} && {own} && exec "$@"', "sh"]
        start = ["--address", cluster.environ["RAY_ADDRESS"], "--node-ip-address", THERE, *_size(1)]
        environ = {**cluster.environ, "VLLM_HOST_IP": THERE, "GLOO_SOCKET_IFNAME": f"{NETWORK[:9]}_1"}
        del environ["RAY_ADDRESS"]
        with _started(live, "ray-there", start, environ, enter):
            environ = {**cluster.environ, "GLOO_SOCKET_IFNAME": f"{NETWORK[:9]}_0"}
            yield Cluster(environ, HERE, cluster.process)


def _size(gpus: int) -> list[str]:
    return ["--num-gpus", str(gpus), "--num-cpus", "2", "--object-store-memory", "100000000"]


@contextmanager
def _started(
    live: Live, name: str, arguments: Sequence[str], environ: Mapping[str, str], enter: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    log = live.folder / f"{name}.log"
    command = [*enter, str(live.python), "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=environment(environ), stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _network() -> Iterator[None]:
    """Two ends of a cable, one of them in a network of its own."""
    here, there = (f"{NETWORK[:9]}_{end}" for end in (0, 1))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    ip("netns", "add", NETWORK)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", NETWORK)
        ip("addr", "add", f"{HERE}/24", "dev", here)
        ip("link", "set", here, "up")
        for command in (f"addr add {THERE}/24 dev {there}", f"link set {there} up", "link set lo up"):
            ip("-n", NETWORK, *command.split())
        ip("-n", NETWORK, "route", "add", "default", "via", HERE)
        yield
    finally:
        ip("netns", "delete", NETWORK)
