"""`h2d-patch`: what would be patched, what is, and whether the fixes do what the originals do.

Exit status: 0 all well, 1 something was refused, failed or fell short, 2 wrong usage or a bad file or setting.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .manifest import Manifest, load
from .patching.recognise import Verdict
from .report import status
from .report.check import Site, check
from .report.state import clean, read_states
from .settings import ConfigurationError, Settings

BAD = ("refused", "failed")


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that is no text must not end a command
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        # Whatever the command, a bad setting or manifest is said: the server that reads them would do without us.
        settings = Settings.from_environ()
        manifest = load(settings.manifest)
        settings.selection.fixes(manifest.defaults)
        result: int = options.run(options, settings, manifest)
        return result
    except ConfigurationError as error:
        print(f"h2d-patch: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0") and not options.site:
        notes.append("VLLM_USE_V2_MODEL_RUNNER is set: targets of Model Runner V1 do not run in such a server.")
    if options.json:
        targets = [
            {"fix": row.fix, "function": row.function, "verdict": row.verdict.value, "reason": row.reason}
            for row in found
        ]
        _print_json({"vllm": release, "targets": targets, "notes": notes})
    else:
        print(f"vLLM {release or 'of unknown version'} in {site.vllm.parent}")
        rows = [[row.fix, status.short(row.function), row.verdict.value, row.reason] for row in found]
        print(status.table(["fix", "function", "verdict", "reason"], rows))
        print(*notes, sep="\n", end="\n" if notes else "")
    return 1 if any(row.verdict is Verdict.REFUSED for row in found) else 0


def _status(options: argparse.Namespace, settings: Settings, manifest: Manifest) -> int:
    states = list(read_states(settings.run_dir))
    if options.clean:
        clean(settings.run_dir, states)
        states = [state for state in states if state.alive]
    patched = any(state.alive and "error" not in state.content for state in states)
    notes = [] if patched else status.why_nothing(os.environ)
    if options.json:
        _print_json(status.as_json(states, notes))
    else:
        print(status.as_text(states, settings.run_dir, notes, options.all))
    live = [state.content for state in states if state.alive]
    bad = any(target["verdict"] in BAD for content in live for target in content.get("targets", []))
    return 1 if bad or any("error" in content for content in live) else 0


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
        notes += copies.start(device, settings.pinned_bytes).reasons
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
    added.add_argument("--site", type=Path, metavar="DIR", help="a directory with vllm/ in it: an unpacked wheel")
    added = command("status", _status, "which fixes are active in every process, and how often each ran")
    added.add_argument("--all", action="store_true", help="every target, and the tables of processes that have ended")
    added.add_argument("--clean", action="store_true", help="remove what processes that are gone have left")
    added = command("selftest", _selftest, "compare every fix's copies with the originals, on random inputs")
    added.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to run (default: cpu)")
    return parser


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
