"""Many processes of one server, without Ray: several API servers and engines, all of them seen and switched."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from harness import IMAGE_FIXES, QUESTIONS, SERVE, Answers, Live, answers
from test_server import ALL, eventually, ran, status, workers

pytestmark = pytest.mark.live

MANY = ("--api-server-count", "2", "--data-parallel-size", "2")
# `vllm serve` itself, its two API servers and what shares requests among two engines with a worker each.
ROLES = {"api-server": 3, "coordinator": 1, "engine-core": 2, "worker": 2}


def test_two_api_servers_and_two_engines_are_one_server(live: Live, reference: Answers) -> None:
    alias = live.folder / "alias" / f"vllm-{live.release}+cpu.dist-info"  # `vllm serve` looks for that distribution
    alias.mkdir(parents=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {live.release}+cpu\n")
    environ = {**ALL, "PYTHONPATH": str(alias.parent)}
    with live.server("many", environ, MANY, program=SERVE) as server:
        assert answers(server) == reference
        for _ in range(8):  # some to either engine
            assert server.ask(*QUESTIONS["image"], tokens=2) == reference["image"][:2]
        assert eventually(lambda: all(set(IMAGE_FIXES) <= ran(worker) for worker in workers(server)))
        shown = [process for process in status(server)["processes"] if process["alive"]]
        assert Counter(process["role"] for process in shown) == ROLES
        assert len({process["server"] for process in shown}) == 1
        assert sorted(p["data_parallel_rank"] for p in shown if p["role"] == "worker") == [0, 1]
        assert "worker 0 of data-parallel rank 1" in server.h2d_patch("status").stdout

        done = server.h2d_patch("switch", "all", "off", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(json.loads(done.stdout)["answers"]) == len(shown)
        assert all(
            set(process["switches"].values()) == {False} for process in status(server)["processes"] if process["alive"]
        )
        assert server.h2d_patch("switch", "all", "on").returncode == 0
        assert answers(server) == reference
