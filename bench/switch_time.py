"""How long `h2d-patch switch` takes to reach every process of a real vLLM server that is serving.

    ~/.cache/h2d-patch/live-0.22.1/bin/python bench/switch_time.py --json bench/results/switch_time.json

Needs vLLM for the CPU (`make environment`), no GPU. API server, engine core and worker are processes of their own, and
clients ask about images all the time. All fixes are switched off, on, off, … by the command that an operator types. A
process has taken a switch when it has written that into its state, which it does after turning its fixes. Seconds of
each process: from the start of the command, Python's own included, and from the writing of the control file. In turn
with a processor left free of the server, as beside a GPU, and with all of them busy (`saturated`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import record
from processors import one_left_free

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from live_env import installed
from live_server import Server, image, serving, text

from h2d_patch.operate import control
from h2d_patch.report.state import read_states

PROCESSORS = ("processor_free", "saturated")
TURNS = 4
PATIENCE_S = 10.0
LOOK_EVERY_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument(
        "--switches", type=int, default=40, metavar="N", help="of each of both, half of them off, half on"
    )
    parser.add_argument("--clients", type=int, default=2, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.switches, options.clients)
    for where in PROCESSORS:
        for name, of in result[where].items():
            print(where, name, {what: f"median {of[what]['median_s']} s, most {of[what]['max_s']} s" for what in of})
    record.write(options.json, result)


def measure(folder: Path, switches: int, clients: int) -> dict[str, Any]:
    python, model, run_dir = Path(sys.executable), folder / "model", folder / "run"
    tiny_model = Path(__file__).resolve().parent.parent / "tools/tiny_model.py"
    subprocess.run([python, tiny_model, model], check=True)
    environ = {"H2D_PATCH": "1", "H2D_PATCH_STRICT": "1", "H2D_PATCH_RUN_DIR": str(run_dir)}
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {where: defaultdict(list) for where in PROCESSORS}
    with (
        serving(python, model, folder / "server.log", environ, progress=print) as server,
        asking(server, clients) as got,
    ):
        time.sleep(2)  # the inspector that looked at the model ends
        for where in itertools.islice(itertools.cycle(PROCESSORS), TURNS * len(PROCESSORS)):
            with one_left_free(server.process.pid) if where == "processor_free" else nullcontext():
                time.sleep(1)
                for on in itertools.islice(itertools.cycle((False, True)), switches // TURNS):
                    for name, *seconds in switched(server, run_dir, on):
                        taken[where][name].append((seconds[0], seconds[1]))
    whole = all(len(times) == switches for of in taken.values() for times in of.values()) and not got["errors"]
    return {
        "complete": whole,
        "release": installed(python),
        "switches": switches,
        "clients": clients,
        "answers": got["answers"],
        "load_average": list(os.getloadavg()),  # over 1, 5 and 15 minutes
        "errors": got["errors"],
        **{where: {name: spreads(times) for name, times in of.items()} for where, of in taken.items()},
    }


def switched(server: Server, run_dir: Path, on: bool) -> Iterator[tuple[str, float, float]]:
    """Of each process: what it is, and the seconds until it had taken a switch of all fixes."""
    started = time.time()
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(server.h2d_patch, "switch", "all", "on" if on else "off")
        taken: dict[str, tuple[str, float]] = {}
        while True:
            live = [state for state in read_states(run_dir) if state.alive]
            for state in live:
                if str(state.path) not in taken and set(state.content["switches"].values()) == {on}:
                    # Written whole, and so last changed when it was written.
                    taken[str(state.path)] = state.content["role"], state.path.stat().st_mtime
            if len(taken) == len(live) or time.time() > started + PATIENCE_S:
                break
            time.sleep(LOOK_EVERY_S)
        done = command.result()
    if done.returncode != 0:
        raise SystemExit(f"h2d-patch switch: {done.stdout}{done.stderr}")
    (name,) = {state.content["server"] for state in live}
    file = control.read(run_dir, name)
    assert file is not None
    for role, at in taken.values():
        yield role, at - started, at - file.switches[-1].at


def spreads(times: list[tuple[float, float]]) -> dict[str, Any]:
    from_command, from_file = zip(*times, strict=True)
    return {"from_command": spread(from_command), "from_file": spread(from_file)}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(seconds), 3),
        "max_s": round(max(seconds), 3),
        "s": [round(one, 3) for one in seconds],
    }


@contextmanager
def asking(server: Server, clients: int) -> Iterator[dict[str, Any]]:
    got: dict[str, Any] = {"answers": 0, "errors": []}
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                server.ask(image(96, 64), text("describe"))
                got["answers"] += 1
            except Exception as error:
                got["errors"].append(str(error)[:200])

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
