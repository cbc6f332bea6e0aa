"""A process with our plugin in it and a model to patch, as a server has one; a stand-in with a manifest of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

MANIFEST = """
manifest = 1
[patch.our-model]
why = "positions of our own model"
[[patch.our-model.target]]
function = "our_model:Model.forward"
[[patch.our-model.target.rewrite]]
find = "SRC.to(DEV, non_blocking=True)"
put = "to_device(SRC, DEV)"
given = ["SRC = tensor(size(1, 50), 2)", "DEV = device"]
[[patch.our-model.target]]
function = "our_model:gone"
[[patch.our-model.target.rewrite]]
find = "SRC.to(DEV, non_blocking=True)"
put = "to_device(SRC, DEV)"
"""

MODEL = """
import torch

class Model:
    runs = 0

    def forward(self, x, bad=False):
        type(self).runs += 1
        if bad:
            raise ValueError("the model's own")
        return x.to("cpu", non_blocking=True) + 1
"""


class Server:
    """Runs a script in a process with our plugin's environment, a model to patch and a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("H2D_PATCH", "VLLM"))},
            "PYTHONPATH": f"{path}:{ROOT}",
            "H2D_PATCH": "our-model",
            "H2D_PATCH_MANIFEST": str(path / "ours.toml"),
            "H2D_PATCH_RUN_DIR": str(path / "run"),
        }
        (path / "ours.toml").write_text(MANIFEST)
        (path / "our_model.py").write_text(MODEL)
        self.prelude = "import json, os, sys, time, torch\nfrom h2d_patch.plugin import register\n"

    def run(self, script: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        text = self.prelude + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def states(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.path / "run").glob("state-*.json"))]

    def status(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "h2d_patch.cli", *arguments]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=60, check=False)

    def starts(self, *flags: str, prelude: str = "", **env: str) -> Running:
        """A process that goes on running and does what it is told; `prelude` is its first code."""
        command = [sys.executable, *flags, "-c", f"import sys\n{prelude}{_OBEYS}"]
        log = self.path / f"running-{len(list(self.path.glob('running-*')))}.log"
        with open(log, "w") as errors:
            process = subprocess.Popen(
                command,
                env={**self.env, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return Running(process, log)

    @contextmanager
    def running(self, *flags: str, prelude: str = "", **env: str) -> Iterator[Running]:
        running = self.starts(*flags, prelude=prelude, **env)
        try:
            yield running
        finally:
            running.end()


_OBEYS = """
import json
names = {}
for line in sys.stdin:
    exec(json.loads(line), names)
    print(json.dumps(names.pop("_", None)), flush=True)
"""


class Running:
    """A process that runs the code it is given."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.pid = process.pid

    def __call__(self, code: str) -> Any:
        """Runs `code` there; what it leaves in `_`."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def state(self) -> dict[str, Any]:
        """The state that it would write now."""
        found: dict[str, Any] = self("from h2d_patch import process\n_ = process.current.state()")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
