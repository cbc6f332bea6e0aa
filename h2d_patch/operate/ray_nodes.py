"""`status --ray` and `switch --ray`: the same command on every host of a Ray cluster, by a short task on each.

Nothing goes through the engine, nor through a port of ours: whoever can start a task in the cluster runs code there
anyway. The task takes no CPU or GPU from Ray's books and runs as the user of Ray's processes, who is the workers'.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.state import read_states
from ..settings import ConfigurationError, run_dir
from .ray_forms import make_absolute

PATIENCE_S = 60.0  # a host on which Ray has to start a process first takes a few seconds
_COMMAND_S = 30.0


@dataclass(frozen=True)
class Answer:
    """What the command said on one host. `exit` is None where it did not run, or `status` found nobody alive: `error`
    says why, if not for want of a process that it is for."""

    host: str
    address: str
    exit: int | None
    output: str
    error: str


def everywhere(arguments: Sequence[str], only: Mapping[str, Any] | None = None) -> list[Answer]:
    """Runs `h2d-patch ARGUMENTS` on every live host of the cluster that RAY_ADDRESS names, or that this host is in.

    With `only`, on those where the state of a live process has these keys and values. Raises ConfigurationError where
    there is no Ray or no cluster.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise ConfigurationError(
            f"--ray: {error}; expected Ray, which vLLM's environment has where it is used"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Ray will do otherwise one day
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"--ray: {said}; expected a running cluster, on this host or in RAY_ADDRESS") from None
    try:
        environ = {name: value for name, value in os.environ.items() if name == "H2D_PATCH_RUN_DIR"}
        make_absolute(environ)
        task = ray.remote(num_cpus=0, max_retries=0)(here)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        started = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                list(arguments), environ, None if only is None else dict(only)
            )
            for node in nodes
        ]
        return list(_gathered(ray, nodes, started))
    finally:
        ray.shutdown()


def _gathered(ray: Any, nodes: Sequence[Mapping[str, Any]], started: Sequence[Any]) -> Iterator[Answer]:
    deadline = time.monotonic() + PATIENCE_S
    for node, reference in zip(nodes, started, strict=True):
        name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        try:
            host, code, output, error = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
            yield Answer(host, address, code, output, error)
        except Exception as failure:  # of the host, of Ray, or of an h2d_patch that is not there
            said = str(failure).strip().splitlines() or [type(failure).__name__]
            yield Answer(name, address, None, "", f"did not answer: {said[-1]}")


def here(
    arguments: list[str], environ: dict[str, str], only: dict[str, Any] | None
) -> tuple[str, int | None, str, str]:
    """What Ray runs on a host: the name of the host, and the command's exit status, output and errors."""
    host, env = socket.gethostname(), {**os.environ, **environ}
    states = [state for state in read_states(run_dir(env), []) if state.alive]
    if only is not None and not any(only.items() <= state.content.items() for state in states):
        return host, None, "", ""
    command = [sys.executable, "-m", "h2d_patch", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    nobody = only is None and not states and done.returncode == 1
    return host, None if nobody else done.returncode, done.stdout, done.stderr


def as_text(answers: Sequence[Answer]) -> str:
    """What each host said, under its name."""
    parts = []
    for one in answers:
        said = "\n".join(filter(None, (one.output.rstrip("\n"), one.error.rstrip("\n"))))
        if one.exit is not None or said:
            parts.append(f"== {one.host} ({one.address})\n{said}")
    return "\n\n".join(parts) or "There is no process on any host that this is for."


def as_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """`hosts`, each with what the command printed there as `result`."""
    hosts = []
    for one in answers:
        try:
            result = json.loads(one.output)
        except ValueError:
            result = None
        hosts.append({"host": one.host, "address": one.address, "exit": one.exit, "result": result, "error": one.error})
    return {"hosts": hosts}


def exit_status(answers: Sequence[Answer]) -> int:
    """The worst of any host; 1 where one did not answer or none had anything to do."""
    ran = [one.exit for one in answers if one.exit is not None]
    return max([*ran, *(1 for one in answers if one.exit is None and one.error)], default=1)
