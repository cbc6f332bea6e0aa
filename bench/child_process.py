"""A process of a benchmark's that may die: its events as it tells them, its output in a file, its end as a group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def teller(path: str) -> Callable[..., None]:
    """In the child: writes a line of JSON to `path` for each event."""

    def tell(event: str, **content: Any) -> None:
        with open(path, "a") as file:
            file.write(json.dumps({"event": event, **content}) + "\n")

    return tell


def events(command: list[str], env: dict[str, str], folder: Path, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Starts `command --events FILE`; yields what it tells, and last an event `exit`: status, errors, last lines.

    After `timeout_s` the process and all that it started are ended.
    """
    number = len(os.listdir(folder))
    told, log = folder / f"{number}.events", folder / f"{number}.log"
    told.touch()
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--events", str(told)], env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + timeout_s
        at = 0
        try:
            ended = False
            while not ended and time.monotonic() < deadline:
                ended = process.poll() is not None
                *complete, _ = told.read_bytes()[at:].split(b"\n")
                for row in complete:
                    at += len(row) + 1
                    yield json.loads(row)
                if not ended:
                    time.sleep(0.2)
        finally:
            end(process, patience_s=15 if process.poll() is not None else 0)
    status = process.returncode if ended else f"ended after {timeout_s:g} s"
    lines = [line[-400:] for line in log.read_text(errors="replace").splitlines()]
    places = [at for at, line in enumerate(lines) if "Error" in line][:8] if status != 0 else []
    errors = [line for at in places for line in lines[at : at + 3]]  # some say what is wrong in the lines after it
    yield {"event": "exit", "status": status, "errors": errors, "last_lines": lines[-25:]}


def end(process: subprocess.Popen[Any], patience_s: float) -> None:
    """The process and what it started, by their group."""
    deadline = time.monotonic() + patience_s
    while patience_s and time.monotonic() < deadline and _alive(process.pid):
        time.sleep(0.2)  # workers that are about to end by themselves
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _alive(process.pid):
            break
        os.killpg(process.pid, number)
        for _ in range(25):
            process.poll()
            if not _alive(process.pid):
                break
            time.sleep(0.2)
    process.wait(15)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
