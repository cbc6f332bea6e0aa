"""A server with a worker on each of two hosts, under Ray; the second host is pretended on this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import IMAGE_FIXES, QUESTIONS, Answers, Live, Server, answers
from ray_cluster import OTHER_HOST, RAY, Cluster, two_hosts
from test_server import ALL, eventually, ran, workers

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(RAY is None, reason="H2D_RAY names no Ray; `make live-ray` installs one and runs these tests"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip, for a second network"),
]

TENSORS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")


@pytest.fixture(scope="module")
def run_dir(live: Live) -> Path:
    return live.run_dir("ray-hosts")


@pytest.fixture(scope="module")
def cluster(live: Live, run_dir: Path) -> Iterator[Cluster]:
    with two_hosts(live, run_dir) as cluster:
        yield cluster


@pytest.mark.parametrize("v2", ["0", "1"], ids=["RayDistributedExecutor", "RayExecutorV2"])
def test_a_worker_on_another_host_has_the_fixes_and_takes_switches(
    v2: str, live: Live, cluster: Cluster, run_dir: Path, reference: Answers
) -> None:
    own = {
        **ALL,
        **cluster.environ,
        "H2D_PATCH_RUN_DIR": str(run_dir),
        "H2D_PATCH_SERVER": f"hosts-{v2}",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": v2,
    }
    with live.server(f"ray-hosts-{v2}", own, TENSORS) as server:
        assert answers(server) == reference
        assert [worker["rank"] for worker in workers(server) if worker["alive"]] == [0]  # what this host knows
        assert [worker["rank"] for worker in workers_of(OTHER_HOST, server)] == [1]
        assert eventually(lambda: set(IMAGE_FIXES) <= ran(workers_of(OTHER_HOST, server)[0]))
        for word in ("off", "on"):
            done = server.h2d_patch("switch", "all", word, "--ray", "--server", f"hosts-{v2}")
            assert done.returncode == 0, done.stdout + done.stderr
            both = [*(w for w in workers(server) if w["alive"]), *workers_of(OTHER_HOST, server)]
            assert [set(worker["switches"].values()) for worker in both] == [{word == "on"}] * 2
        assert server.ask(*QUESTIONS["image"]) == reference["image"]


def workers_of(host: str, server: Server) -> list[dict[str, Any]]:
    """The live workers on a host, as `status --ray` has them."""
    hosts = json.loads(server.h2d_patch("status", "--ray", "--json").stdout)["hosts"]
    (found,) = (one["result"]["processes"] for one in hosts if one["host"] == host)
    return [process for process in found if process["role"] == "worker" and process["alive"]]
