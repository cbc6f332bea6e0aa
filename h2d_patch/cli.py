"""`h2d-patch`: what would be patched, what is, and whether the fixes do what the originals do.

Exit status: 0 all well, 1 something was refused, failed or fell short, 2 wrong usage or a bad file or setting. Of
`status`: 1 also where a control file is refused, or nothing is patched since no process with our fixes lives.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import __version__
from .manifest import Manifest, load
from .operate import control, prometheus, switching
from .patching.recognise import Verdict
from .releases import shipped
from .report import status
from .report.check import Site, as_text, check
from .report.state import clean, read_states
from .settings import ConfigurationError, Settings, duration, run_dir

_REPETITIONS = 60  # of `bench copies`
_RAY = "--ray"


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that is no text must not end a command
            stream.reconfigure(errors="backslashreplace")
    ours, command = _parted(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    options.command = command
    try:
        if getattr(options, "ray", False):
            return _on_every_host(options, ours)
        # Whoever turns something off, or asks what is wrong, is not kept from it by what is wrong elsewhere.
        if options.run in (_switch, _doctor, _status, _export):
            return int(options.run(options))
        # Whatever the other command, a bad setting or manifest is said: the server that reads them would do without us.
        settings = Settings.from_environ()
        manifest = load(settings.manifest)
        settings.selection.fixes(manifest.defaults)
        settings.check_ab(manifest.defaults)
        return int(options.run(options, settings, manifest))
    except ConfigurationError as error:
        print(f"h2d-patch: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("h2d-patch: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the command behind `--` that `ab` runs: argparse would take its options for ours."""
    words = list(arguments)
    if words[:1] != ["ab"] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _list(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    if options.json:
        _print_json(
            {
                "fixes": [
                    {
                        "fix": fix.id,
                        "why": fix.why,
                        "upstream": fix.upstream,
                        "default": fix.default,
                        "targets": [
                            {
                                "function": target.function,
                                "releases": target.span,
                                "fixed_in": target.fixed_in,
                                "note": target.note,
                            }
                            for target in fix.targets
                        ],
                    }
                    for fix in manifest.fixes.values()
                ]
            }
        )
        return 0
    for fix in manifest.fixes.values():
        state = "on by default" if fix.default else "off by default"
        print(f"{fix.id}  ({state}{', ' if fix.upstream else ''}{fix.upstream})")
        print(textwrap.fill(fix.why, 100, initial_indent="    ", subsequent_indent="    "))
        for target in fix.targets:
            fixed = f"fixed upstream in {target.fixed_in}" if target.fixed_in else None
            if not fixed and "<" not in target.span:
                fixed = "not fixed upstream"
            about = "; ".join(filter(None, (f"vLLM {target.span}", fixed, target.supersedes or target.note)))
            print(f"      {target.function}\n          {about}")
    return 0


def _check(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    site = Site(options.site)
    chosen = settings.selection.fixes(manifest.defaults) if settings.selection else None
    found = list(check(manifest, site, chosen))
    release = site.release()
    notes = [] if options.site else status.why_nothing(os.environ, proc=Path(os.devnull))
    if unknown := shipped().about(release):
        notes.append(f"{unknown}.")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0") and not options.site:
        notes.append("VLLM_USE_V2_MODEL_RUNNER is set: targets of Model Runner V1 do not run in such a server.")
    if options.json:
        targets = [
            {"fix": row.fix, "function": row.function, "verdict": row.verdict.value, "reason": row.reason}
            for row in found
        ]
        _print_json({"vllm": release, "targets": targets, "notes": notes})
    else:
        distribution = site.distribution()
        name = distribution.metadata["Name"] if distribution is not None else "vllm"
        by = f" (the distribution {name})" if name != "vllm" else ""
        print(f"vLLM {release or 'of unknown version'} in {site.vllm.parent}{by}")
        print(as_text(found, options.all))
        print(*notes, sep="\n", end="\n" if notes else "")
    return 1 if any(row.verdict is Verdict.REFUSED for row in found) else 0


def _status(options: argparse.Namespace) -> int:
    if options.json and options.prometheus:
        raise ConfigurationError("status: both --json and --prometheus; expected one of them")
    directory = run_dir(os.environ)
    refused: list[str] = []
    removed: list[Path] = []
    try:
        states = list(read_states(directory, refused))
    except ConfigurationError:
        if options.prometheus:  # whoever reads it must not take an empty file for a host without servers
            print(prometheus.scrape(directory), end="")
        raise
    if options.clean:
        try:
            removed = clean(directory, states)
            if not refused:  # whose servers' names nobody knows
                removed += control.clean(directory, states)
        except OSError as error:
            raise ConfigurationError(
                f"status --clean: {error.filename}: {error.strerror}; expected a file that can be removed"
            ) from None
        states = [state for state in states if state.alive]
    patched = any(state.alive and "error" not in state.content for state in states)
    notes = [] if patched else status.why_nothing(os.environ)
    if options.prometheus:
        print(prometheus.exposition(states, len(refused), 0, time.time()), end="")
    elif options.json:
        gone = {"removed": [str(path) for path in removed]} if options.clean else {}
        _print_json({**status.as_json(states, notes), **gone})
    else:
        print(status.as_text(states, directory, notes, options.all))
        print(*(f"removed {_one_line(str(path))}" for path in removed), sep="\n", end="\n" if removed else "")
    for text in refused:
        print(f"h2d-patch: {_one_line(text)}", file=sys.stderr)
    if refused:
        return 2
    live = [state.content for state in states if state.alive]
    bad = any(target["verdict"] in status.BAD for content in live for target in content.get("targets", []))
    return 1 if bad or not patched or any("error" in content or content.get("control") for content in live) else 0


def _switch(options: argparse.Namespace) -> int:
    turned = switching.turn(run_dir(os.environ), options.fix, options.on == "on", options.server, options.rank)
    if options.json:
        _print_json({**asdict(turned), "taken": bool(turned)})
    else:
        print(turned.as_text())
        print(*turned.notes, sep="\n", end="\n" if turned.notes else "")
    return 0 if turned else 1


def _ab(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    from .bench.plot import require_matplotlib
    from .operate import ab, ab_plot, ab_report
    from .operate.slices import SETTLE_SHARE
    from .operate.vllm_metrics import addresses

    settle_s = options.slice * SETTLE_SHARE if options.settle is None else options.settle
    plan = ab.Plan(
        options.fix, options.slice, settle_s, options.slices and options.slices + options.slices % 2, options.server,
        addresses(options.url), options.same, options.command,
    )  # fmt: skip
    if options.plot:
        require_matplotlib()
    with _terminated_like_interrupted():
        outcome = ab.run(
            settings.run_dir,
            plan,
            lambda one: print(ab_report.in_a_line(one), file=sys.stderr),
            lambda text: print(f"h2d-patch: ab: {_one_line(text)}", file=sys.stderr),
        )
    report = ab_report.Report(outcome)
    print(report.as_text())
    if options.json:
        _write_json(options.json, report.as_json())
    if options.plot:
        ab_plot.draw(report, options.plot)
    return 0 if report.complete else 1


def _write_json(path: Path, content: dict[str, Any]) -> None:
    from .bench.provenance import write

    about = {"h2d_patch": __version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    try:
        write(path, content, about)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; expected a file to write") from None


def _export(options: argparse.Namespace) -> int:
    from .operate import exporter

    return exporter.run(run_dir(os.environ), options.host, options.port, lambda url: print(url, flush=True))


def _doctor(options: argparse.Namespace) -> int:
    from .operate import doctor

    seen = doctor.examine()
    result = doctor.exit_status(seen.findings)
    if options.json:
        _print_json(doctor.as_json(seen, os.environ, result))
    else:
        print(doctor.as_text(seen.findings))
    return result


def _on_every_host(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .operate import ray_nodes

    if getattr(options, "prometheus", False):
        raise ConfigurationError("status: both --ray and --prometheus; expected an exporter on each host")
    only = None
    if options.run is _switch:
        asked = {"server": options.server, "rank": options.rank}
        only = {key: value for key, value in asked.items() if value is not None}
    there = [word for word in arguments if len(word) < 3 or not _RAY.startswith(word)]  # argparse takes `--ra` for it
    answers = ray_nodes.everywhere(there, only)
    if options.json:
        _print_json(ray_nodes.as_json(answers))
    else:
        print(ray_nodes.as_text(answers))
    return ray_nodes.exit_status(answers)


def _selftest(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    try:
        import torch
    except ImportError as error:
        raise ConfigurationError(f"selftest: {error}; expected torch, which comes with vLLM") from None
    from . import copies
    from .selftest.compare import SelfTestFailed, run

    device = torch.device(options.device)
    notes: list[str] = []
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError("selftest --device cuda: torch finds no GPU here; expected one, or --device cpu")
        device = torch.device("cuda", torch.cuda.current_device())
        places = copies.Places(settings.profile, settings.profile_dir)
        notes += copies.start(device, settings.pinned_bytes, places).reasons
    rows: list[dict[str, Any]] = []
    for fix, target in manifest.targets():
        result, took, why = "passed", None, ""
        try:
            took = run(target, copies.EXPORTS, device)
            if took is None:
                result, why = "not run", "the manifest gives it no stand-ins"
        except SelfTestFailed as failure:
            result, why = "failed", str(failure)
        rows.append({"fix": fix.id, "function": target.function, "result": result, "ms": took, "reason": why})
    if options.json:
        _print_json({"device": str(device), "targets": rows, "notes": notes})
    else:
        cells = [
            [
                row["fix"],
                status.short(row["function"]),
                row["result"],
                f"{row['ms']:.1f}" if row["ms"] else "",
                row["reason"],
            ]
            for row in rows
        ]
        print(f"on {device}, torch {torch.__version__}")
        print(status.table(["fix", "function", "result", "ms", "reason"], cells))
        print(*notes, sep="\n", end="\n" if notes else "")
    return 1 if notes or any(row["result"] == "failed" for row in rows) else 0


def _bench_copies(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    from .bench import plot, results

    if options.plot:
        plot.require_matplotlib()  # now, not after the measurement
    if options.source:
        measuring = {"--json": options.json, "--quick": options.quick, "--own-stream": options.own_stream}
        measuring |= {"--repetitions": options.repetitions, "--device": options.device}
        given = [name for name, value in measuring.items() if value]
        if given:
            raise ConfigurationError(f"bench copies: both --from and {given[0]}; expected {given[0]} only to measure")
        result = results.load(options.source)
        print(*results.lines(result), sep="\n")
    else:
        measured = _measure_copies(options, settings)
        if measured is None:
            return 1
        result = measured
    if options.plot and result["rows"]:
        plot.draw(result, options.plot)
    problems = results.problems(result)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _measure_copies(options: argparse.Namespace, settings: Settings) -> dict[str, Any] | None:
    """None where the copies cannot run at all, which is said."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"bench copies: {error}; expected torch, which comes with vLLM") from None
    from .bench import copies
    from .bench.device import open_device

    try:
        device = open_device(options.device or "cuda:0", options.own_stream)
    except ValueError as error:
        raise ConfigurationError(f"bench copies --device {error}") from None
    try:
        with _terminated_like_interrupted():
            return copies.run(
                device,
                settings.pinned_bytes,
                options.json,
                options.quick,
                options.repetitions or _REPETITIONS,
                options.own_stream,
            )
    except copies.NoRing as error:
        print(f"h2d-patch: bench copies: no staging region: {_one_line(str(error))}", file=sys.stderr)
    except copies.CannotWrite as error:
        raise ConfigurationError(f"bench copies --json {error}; expected a file to write") from None
    return None


def _calibrate(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    device = _device_with_kernels("calibrate", options)
    from . import copies
    from .bench import calibrate

    places = copies.Places(settings.profile, settings.profile_dir)
    try:
        with _said("calibrate"), _terminated_like_interrupted():
            return calibrate.run(device, settings.pinned_bytes, places, options.out, options.json, options.quick)
    except KeyboardInterrupt:
        print("h2d-patch: calibrate: interrupted; nothing was stored", file=sys.stderr)
    except _CannotRun:
        pass
    return 1


def _bench_swap(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    from .bench import plot, swap_results

    if options.plot:
        plot.require_matplotlib()
    if options.source:
        measuring = {"--json": options.json, "--quick": options.quick, "--seconds": options.seconds}
        given = [name for name, value in {**measuring, "--device": options.device}.items() if value]
        if given:
            raise ConfigurationError(f"bench swap: both --from and {given[0]}; expected {given[0]} only to measure")
        result = swap_results.load(options.source)
        print(*swap_results.lines(result), sep="\n")
    else:
        device = _device_with_kernels("bench swap", options)
        from . import copies
        from .bench import swap

        places = copies.Places(settings.profile, settings.profile_dir)
        try:
            with _said("bench swap"), _terminated_like_interrupted():
                result = swap.run(device, settings.pinned_bytes, places, options.json, options.quick, options.seconds)
        except _CannotRun:
            return 1
    if options.plot and result["rows"]:
        plot.draw_swap(result, options.plot)
    problems = swap_results.problems(result)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _device_with_kernels(command: str, options: argparse.Namespace) -> Any:
    """The torch device. Raises ConfigurationError where there is none."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{command}: {error}; expected torch, which comes with vLLM") from None
    from .bench.device import open_device

    try:
        return open_device(options.device or "cuda:0").device
    except ValueError as error:
        raise ConfigurationError(f"{command} --device {error}") from None


class _CannotRun(Exception):
    """It was said why."""


@contextmanager
def _said(command: str) -> Iterator[None]:
    """What keeps block copies from being measured, in a line. Raises ConfigurationError and _CannotRun."""
    from .bench.copies import CannotWrite, NoRing
    from .copies.calibrate import CannotMeasure

    try:
        yield
    except CannotWrite as error:
        raise ConfigurationError(f"{command}: {error}; expected a file to write") from None
    except NoRing as error:
        words = f"no staging region: {error}"
    except CannotMeasure as error:
        words = str(error)
    else:
        return
    print(f"h2d-patch: {command}: {_one_line(words)}", file=sys.stderr)
    raise _CannotRun


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _file(text: str) -> Path:
    if not text or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a file")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 1 to 10000")
    return int(text)


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a worker's rank, 0 or more")
    return int(text)


def _duration(text: str) -> float:
    seconds = duration(text)
    if seconds is None and (seconds := duration(f"{text}s")) is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a time, as 30s or 2m")
    return seconds


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a port from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole seconds from 1 to 3600")
    return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h2d-patch",
        description="Hotfixes for the host-to-device copies of the installed vLLM.",
        epilog="Exit status: 0 all well; 1 something was refused, failed or fell short; 2 wrong usage or a bad file.",
    )
    parser.add_argument("--version", action="version", version=f"h2d-patch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    command("list", _list, "the fixes, and what each is for")
    added = command("check", _check, "which fixes would apply to this vLLM; reads its sources, imports nothing")
    added.add_argument("--all", action="store_true", help="every target, also the forms for other releases")
    added.add_argument("--site", type=Path, metavar="DIR", help="a directory with vllm/ in it: an unpacked wheel")
    added = shown = command("status", _status, "which fixes are active in every process, and how often each ran")
    added.add_argument("--all", action="store_true", help="every target, and the tables of processes that have ended")
    added.add_argument("--clean", action="store_true", help="remove what processes that are gone have left")
    added.add_argument("--prometheus", action="store_true", help="print metrics, as h2d-patch export serves them")
    added.epilog = (
        "Exit status: 0 a process with our fixes lives, and none of them complains; 1 a fix was refused or failed, a "
        "bad setting keeps them all out, a control file is refused, or nothing is patched since no such process lives; "
        "2 wrong usage, or the run directory or a state in it cannot be read."
    )
    added = command("switch", _switch, "turn a fix on or off in the live processes, without a restart")
    added.add_argument("fix", metavar="FIX", help=f"a fix id, or {switching.ALL}")
    added.add_argument("on", choices=["on", "off"], metavar="{on,off}")
    added.add_argument("--server", metavar="NAME", help="only that server, called as status shows; default: all here")
    added.add_argument("--rank", type=_rank, metavar="N", help="only the workers of that rank")
    for one in (shown, added):
        one.add_argument(_RAY, action="store_true", help="on every host of this host's Ray cluster, or RAY_ADDRESS's")
    text = "compare a fix with the original on a live server, in alternating slices"
    added = commands.add_parser(
        "ab",
        help=text,
        description="Turn a fix on and off in alternating slices in every process of a live server, and compare: host "
        "time of a call, and, from the server's own metrics, requests per second, time to first token and inter-token "
        "latency, each with an interval. Lasts as long as COMMAND, a load for one, if that is given. Afterwards the "
        "fix is as it was.",
        usage="h2d-patch ab [options] FIX [-- COMMAND ...]",
    )
    added.set_defaults(run=_ab)
    added.add_argument("fix", metavar="FIX", help="a fix id")
    added.add_argument(
        "--slices",
        type=_positive,
        metavar="N",
        help="end after so many, 6 at least, and COMMAND with it (default without COMMAND: 20); rounded up to pairs",
    )
    added.add_argument("--slice", type=_duration, default=30.0, metavar="TIME", help="of one slice (default: 30s)")
    added.add_argument("--settle", type=_duration, metavar="TIME", help="left out of each (default: a fifth of it)")
    added.add_argument("--server", metavar="NAME", help="as status shows it, where there are several")
    added.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="of the server, for its metrics (default: http://127.0.0.1:8000); once for each API server of its own",
    )
    added.add_argument("--same", action="store_true", help="both arms the original: what the measurement itself sees")
    added.add_argument("--json", type=_file, metavar="FILE", help="write every slice")
    added.add_argument("--plot", type=_file, metavar="FILE", help="draw the slices; needs matplotlib")
    text = "serve the metrics of the processes here for Prometheus to scrape"
    added = commands.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}, until SIGTERM.")
    added.set_defaults(run=_export)
    added.add_argument(
        "--port", type=_port, required=True, metavar="N", help="0 takes a free one; the address is printed"
    )
    added.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: only this machine)")
    command("doctor", _doctor, "why it is not working: installation, variables, verdicts, driver, memory, profile")
    added = command("selftest", _selftest, "compare every fix's copies with the originals, on random inputs")
    added.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to run (default: cpu)")
    text = "measure how blocks are best copied between CPU and GPU here, and store that for kv-swap"
    added = commands.add_parser(
        "calibrate",
        help=text,
        description="Measure how blocks are best copied between CPU and GPU, by direction, size and number, and store "
        "the device profile that kv-swap chooses by. Takes a minute on a GPU that nothing else uses. Stored where "
        "H2D_PATCH_PROFILE says, else in ~/.cache/h2d-patch/profiles.",
    )
    added.set_defaults(run=_calibrate)
    added.add_argument("--out", type=_file, metavar="FILE", help="store the profile there")
    added.add_argument("--json", type=_file, metavar="FILE", help="write every repetition")
    added.add_argument("--quick", action="store_true", help="in 2 s, as a server without a profile does at its start")
    added.add_argument("--device", help="(default: cuda:0)")
    text = "what copies cost on this machine: the original, upstream's fix and ours, in turn"
    benches = commands.add_parser("bench", help=text, description=text).add_subparsers(required=True, metavar="WHAT")
    added = benches.add_parser(
        "copies",
        help="host time of copies to the device, by size, form and queued GPU work",
        description="Host time of copies to the device until the call returns, by size, form and queued GPU work; "
        "whether the destination holds the values at the moment of the call; pinned memory allocated. Takes three "
        "minutes on a GPU that nothing else uses. H2D_PATCH_PINNED_MB bounds the staging region.",
    )
    added.set_defaults(run=_bench_copies)
    added.add_argument("--json", type=_file, metavar="FILE", help="write every repetition; also if interrupted")
    added.add_argument("--plot", type=_file, metavar="FILE", help="draw a picture; needs matplotlib")
    added.add_argument("--from", dest="source", type=_file, metavar="FILE", help="show a result, measure nothing")
    added.add_argument("--quick", action="store_true", help="a few sizes of each form")
    added.add_argument(
        "--repetitions",
        type=_positive,
        metavar="N",
        help=f"idle and up to 1 MiB, the rest in proportion (default: {_REPETITIONS})",
    )
    added.add_argument("--device", help="(default: cuda:0); on cpu all runs, and its numbers mean nothing")
    added.add_argument(
        "--own-stream",
        action="store_true",
        help="copy on a stream of its own, as a vLLM worker with NCCL does, not on the default stream",
    )
    added = benches.add_parser(
        "swap",
        help="GB/s of scattered blocks between CPU and GPU, by direction, size, number and path",
        description="GB/s of scattered blocks between CPU and GPU: the driver's batch, upstream's kernel settings, "
        "ours by each path, and what the device profile chooses, in turn; host time of a call; what swaps cost "
        "multiplications that run beside them. Takes three minutes on a GPU that nothing else uses, a quarter of it "
        "to calibrate where no profile is stored or shipped.",
    )
    added.set_defaults(run=_bench_swap)
    added.add_argument("--json", type=_file, metavar="FILE", help="write every repetition; also if interrupted")
    added.add_argument("--plot", type=_file, metavar="FILE", help="draw a picture; needs matplotlib")
    added.add_argument("--from", dest="source", type=_file, metavar="FILE", help="show a result, measure nothing")
    added.add_argument("--quick", action="store_true", help="a few sizes and numbers of blocks")
    added.add_argument("--seconds", type=_seconds, metavar="N", help="of all of it; scales the repetitions")
    added.add_argument("--device", help="(default: cuda:0); on cpu with TRITON_INTERPRET=1, and numbers mean nothing")
    return parser


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
