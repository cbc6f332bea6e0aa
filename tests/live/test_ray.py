"""A real vLLM server whose workers are Ray's: variables, status and switches reach them, by each of its executors.

Ray runs without our variables, as an operator's cluster does, so that a worker has those that vLLM copies to it.
`make live-ray` runs these with the Ray that it installs beside vLLM's environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import IMAGE_FIXES, QUESTIONS, Answers, Live, Server, answers
from ray_cluster import RAY, Cluster, one_host
from test_server import ALL, eventually, ran, status, target, workers

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(RAY is None, reason="H2D_RAY names no Ray; `make live-ray` installs one and runs these tests"),
]

TENSORS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
DATA = ("--data-parallel-size", "2", "--data-parallel-backend", "ray")


@pytest.fixture(scope="module")
def cluster(live: Live) -> Iterator[Cluster]:
    with one_host(live) as cluster:
        yield cluster


def servers_of(server: Server) -> set[str]:
    return {process["server"] for process in status(server)["processes"]}


def switched(server: Server, fix: str, on: str, *more: str) -> float:
    """Seconds until every process of the server has taken it."""
    done = server.h2d_patch("switch", fix, on, "--json", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(json.loads(done.stdout)["took_s"])


def ran_so_far(server: Server) -> list[int]:
    """How often each worker has run the fix that is switched."""
    return [target(worker, "mrope-positions")["calls"] for worker in workers(server)]


@pytest.mark.parametrize("v2", ["0", "1"], ids=["RayDistributedExecutor", "RayExecutorV2"])
def test_both_workers_have_the_fixes_and_take_switches(
    v2: str, live: Live, cluster: Cluster, reference: Answers
) -> None:
    environ = {**ALL, **cluster.environ, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": v2, "H2D_PATCH_SERVER": f"ours-{v2}"}
    with live.server(f"ray-{v2}", environ, TENSORS) as server:
        assert "H2D_PATCH" not in environ_of_ray(cluster)
        assert answers(server) == reference
        assert eventually(lambda: [set(IMAGE_FIXES) <= ran(worker) for worker in workers(server)] == [True, True])
        assert [worker["rank"] for worker in workers(server)] == [0, 1]
        shown = [process for process in status(server)["processes"] if process["alive"]]
        assert sorted(p["role"] for p in shown) == ["api-server", "engine-core", "worker", "worker"]
        assert servers_of(server) == {f"ours-{v2}"}

        assert switched(server, "mrope-positions", "off") < 2
        before = ran_so_far(server)
        assert server.ask(*QUESTIONS["image"]) == reference["image"]
        time.sleep(1.5)  # a state is written about once a second
        assert ran_so_far(server) == before
        assert switched(server, "mrope-positions", "on") < 2
        assert server.ask(*QUESTIONS["image"]) == reference["image"]
        assert eventually(lambda: all(one > then for one, then in zip(ran_so_far(server), before, strict=True)))

        through_the_cluster(server, f"ours-{v2}")


def through_the_cluster(server: Server, name: str) -> None:
    """`--ray`: the same commands by a task of Ray's on each host of the cluster; here there is one."""
    done = server.h2d_patch("status", "--ray", "--json")
    assert done.stdout, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]
    assert (done.returncode, host["exit"], host["error"]) == (0, 0, "")
    assert sorted(p["pid"] for p in host["result"]["processes"]) == sorted(
        p["pid"] for p in status(server)["processes"]
    )
    assert server.h2d_patch("switch", "all", "off", "--ray", "--server", name, "--rank", "1").returncode == 0
    assert [set(worker["switches"].values()) for worker in workers(server)] == [{True}, {False}]
    assert server.h2d_patch("switch", "all", "on", "--ray").returncode == 0
    assert [set(worker["switches"].values()) for worker in workers(server)] == [{True}, {True}]
    done = server.h2d_patch("switch", "all", "off", "--ray", "--server", "another")
    assert done.returncode == 1
    assert "no process on any host" in done.stdout


def test_engine_cores_of_data_parallelism_are_ray_s_too(live: Live, cluster: Cluster, reference: Answers) -> None:
    arguments = (*DATA, "--data-parallel-address", cluster.address)
    with live.server("ray-data", {**ALL, **cluster.environ}, arguments) as server:
        assert answers(server) == reference
        shown = [process for process in status(server)["processes"] if process["alive"]]
        roles = sorted(p["role"] for p in shown)
        assert roles == ["api-server", "coordinator", "engine-core", "engine-core", "worker", "worker"]
        assert sorted(p["data_parallel_rank"] for p in shown if p["role"] == "worker") == [0, 1]
        assert len(servers_of(server)) == 1
        assert switched(server, "all", "off") < 2
        assert all(set(p["switches"].values()) == {False} for p in status(server)["processes"] if p["alive"])


def environ_of_ray(cluster: Cluster) -> str:
    return Path(f"/proc/{cluster.process.pid}/environ").read_text()
